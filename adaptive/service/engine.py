"""The one thread that owns the models: it loads them, answers the jobs in its slots, and swaps adapters between rounds.

In: jobs, from the HTTP side. Out: each job's events, and what has been observed, for the metrics and
for the trainer. Nothing else touches the assistant.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from adaptive.answering import Answering
from adaptive.assistant import Assistant
from adaptive.control.policy import LengthPolicy
from adaptive.decoding.batch import Batch
from adaptive.decoding.loop import ANSWER_RESERVE, Decoding
from adaptive.errors import AdaptiveError
from adaptive.machine import give_memory_back
from adaptive.pair import Pair
from adaptive.printable import printable_line
from adaptive.records.stats import count_rounds, in_words
from adaptive.service.jobs import Answer, Done, Failed, FairQueue, Job, Piece, question
from adaptive.service.metrics import Metrics
from adaptive.service.slots import Slot, possible_slots
from adaptive.speculation import Speculation, of_counts, speculation
from adaptive.state import PairState
from adaptive.swapper import Swapper
from adaptive.types import Round
from adaptive.upkeep import Upkeep

logger = logging.getLogger("adaptive.service")

# Seconds between two looks at the adapter store while nothing is asked. Lower reads a small file more
# often, higher leaves the first answer after a promotion to pay for the swap.
POLL_S = 0.25

# Seconds for which nothing was asked before an idle moment is used to measure costs: not between two questions.
QUIET_S = 1.0

# Longest wait for the log before an answer is called done, in seconds. A slow disk must not hold back
# what a person reads; the writer goes on trying.
FLUSH_S = 5.0

# Seconds between two returns of freed memory to the system, some 10 ms each, between two answers.
TRIM_S = 30.0

State = Literal["loading", "ready", "failed", "stopping"]


class Opened(Protocol):
    """An assistant with its pair's state, as the front end opened it."""

    @property
    def assistant(self) -> Assistant: ...

    @property
    def pair(self) -> Pair: ...

    @property
    def state(self) -> PairState: ...

    @property
    def swapper(self) -> Swapper: ...

    @property
    def upkeep(self) -> Upkeep: ...


class Listener(Protocol):
    """Who is told what the engine does: the trainer and the watch over live acceptance."""

    def busy(self) -> None:
        """A request is there: training waits."""

    def idle(self) -> None:
        """Nobody waits for an answer."""

    def answered(self, adapter: str | None, rounds: tuple[Round, ...]) -> None:
        """An answer has ended; ``rounds`` are those of it that this adapter drafted."""


@dataclass(eq=False)
class Work:
    """A job in a slot, or in several. Answer ``index`` of it is being decoded (``answering``), or is to be told when it
    is in the log (``answer``, if anything is to be told); the next one that nobody has begun comes after it."""

    job: Job
    slot: int
    index: int = 0
    answering: Answering | None = None
    began: float = 0.0  # by perf_counter, of this answer
    last: float = 0.0  # when its last token came
    count: int = 0  # its tokens
    answer: Answer | None = None
    handed: int = 0  # generations that the log had been given with it
    until: float = 0.0  # when it is told although it is not in the log


class EngineThread:
    """Loads the pair and answers jobs until ``close``. Safe to call from any thread."""

    def __init__(
        self,
        open_session: Callable[[], contextlib.AbstractContextManager[Opened]],
        metrics: Metrics,
        queue: int,
        slots: str = "1",
    ) -> None:
        """``open_session`` loads the pair; ``queue`` requests may wait. At most ``slots`` are answered at once, or with
        ``auto`` as many as there is memory for."""
        self.state: State = "loading"
        self.failure: BaseException | None = None
        self.session: Opened | None = None
        self.adapter: str | None = None
        self.slots = 1 if slots == "auto" else int(slots)
        self.fewer: str | None = None  # why there are not more slots
        self.works: list[Work] = []  # in the slots; replaced, never changed, so that any thread may read it
        self.speculation: Speculation = of_counts((), draft=False)  # of the last answer that took a round
        self.queue = FairQueue(queue, metrics.abandoned)
        self._open = open_session
        self._metrics = metrics
        self._listeners: list[Listener] = []
        self._forget = False
        self._wanted = slots
        self._batch: Batch
        # Held while a job comes in or listeners are told, so that ``idle`` is never the last word on a job that waits.
        self._telling = threading.Lock()
        self._told_busy = True  # until the models are loaded
        self._trimmed = self._answered = time.monotonic()
        self._finished = threading.Event()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self, when_over: Callable[[], None]) -> None:
        """Begin to load; ``when_over`` is called on the engine thread when it ends, also by failure."""
        self._when_over = when_over
        self._thread.start()

    @property
    def policy(self) -> LengthPolicy | None:
        """What chooses draft lengths; None until the models are loaded."""
        return None if self.session is None else self.session.assistant.policy

    def listen(self, listener: Listener) -> None:
        """Tell ``listener`` from now on what the engine does."""
        self._listeners.append(listener)

    @property
    def doing(self) -> list[Slot]:
        """What each slot does."""
        found = [Slot()] * self.slots
        for work in self.works:
            if (answering := work.answering) is not None:
                tokens = len(answering.question.prompt), work.count
                found[work.slot] = Slot(True, work.job.ask.client, *tokens, work.began)
        return found

    def submit(self, job: Job) -> None:
        """Queue a job. Raises QueueFullError."""
        with self._telling:
            self.queue.put(job, max(0, self.slots - len(self.works)))
            self._told_busy = True
            for listener in self._listeners:
                listener.busy()

    def forget_conversations(self) -> None:
        """Have nothing of earlier conversations in the caches, from before the next answer on."""
        self._forget = True

    def close(self) -> None:
        """Cut what is running, tell those who wait, and release the models."""
        if self.state != "failed":
            self.state = "stopping"
        for work in self.works:
            work.job.cancel()
        self._finished.wait()

    def _run(self) -> None:
        try:
            with self._open() as session:
                self.session = session
                self.adapter = session.assistant.adapter
                self.speculation = speculation(session.assistant)
                session.swapper.on_swap = self._swapped
                self._batch = Batch(session.pair.target, session.swapper.between_rounds)
                self.slots, self.fewer = possible_slots(session.assistant, self._wanted)
                if self.state == "loading":
                    self.state = "ready"
                    self._tell_idle()
                    logger.info("ready: %s, adapter %s", session.pair.identity.id, self.adapter or "none")
                    if self.fewer is not None:
                        logger.info("%s", self.fewer)
                while self.state == "ready" or self.works:
                    self._turn(session)
                while (job := self.queue.take(0)) is not None:
                    job.emit(Failed(503, "the server is shutting down; try again in a moment"))
        except BaseException as error:  # whatever loading raises is the server's end, told by the main thread
            self.state, self.failure = "failed", error
        finally:
            self._finished.set()
            self._when_over()

    def _turn(self, session: Opened) -> None:
        """A burst of what is under way, or one look at the adapter store."""
        self._fill(session)
        if not self.works:
            self._idle(session)
            return
        if self.state != "ready":
            for work in self.works:
                work.job.cancel()
        failed = dict(self._batch.step()) if self._batch.under_way else {}
        for work in list(self.works):
            if work.answering is None:
                self._tell_stored(session.assistant, work)
            else:
                self._show(session.assistant, work, failed.get(work.answering.decoding))

    def _fill(self, session: Opened) -> None:
        """Begin what waits, as far as there are slots for it; wait for a moment where nothing is under way."""
        while self.state == "ready" and len(self.works) < self.slots:
            job = self.queue.take(0 if self.works else POLL_S, lambda job: self._has_room(session.assistant, job))
            if job is None and not len(self.queue):
                job = self._with_more(session.assistant)
            if job is None:
                return
            taken = {work.slot for work in self.works}
            work = Work(job, next(slot for slot in range(self.slots) if slot not in taken))
            self.works = [*self.works, work]
            self._forget_if_asked(session.assistant)
            self._next(session.assistant, work)

    def _with_more(self, assistant: Assistant) -> Job | None:
        """A job under way with answers that nobody has begun, for a slot that nobody waits for: as soon as what it has
        begun has read its prompt, which the others then copy."""
        for work in self.works:
            job = work.job
            if job.cancelled or job.begun == job.ask.answers or not self._has_room(assistant, job):
                continue
            mine = [other.answering for other in self.works if other.job is job]
            if all(answering is None or not answering.decoding.unread for answering in mine):
                return job
        return None

    def _forget_if_asked(self, assistant: Assistant) -> None:
        if self._forget:
            self._forget = False
            assistant.forget()

    def _has_room(self, assistant: Assistant, job: Job) -> bool:
        """Whether there is memory for the caches of a job's longest answer, as far as they are reserved at once."""
        longest = max(len(prompt.ids) for prompt in job.ask.prompts)
        return assistant.has_room(longest + min(job.ask.stop.max_new_tokens, ANSWER_RESERVE))

    def _idle(self, session: Opened) -> None:
        """Nothing is under way."""
        self._forget_if_asked(session.assistant)
        self._tell_idle()  # who was waited for may have gone away before their turn
        session.swapper.use_promoted()
        if time.monotonic() - self._answered > QUIET_S and not session.assistant.conversations.keep():
            session.upkeep.idle(lambda: len(self.queue) > 0 or self.state != "ready")

    def _tell_idle(self) -> None:
        """Nothing is being answered: say so once, where nothing waits either."""
        with self._telling:
            if not self._told_busy or len(self.queue):
                return
            self._told_busy = False
            for listener in self._listeners:
                listener.idle()

    def _swapped(self) -> None:
        assert self.session is not None
        self.adapter = self.session.assistant.adapter
        self._metrics.swapped(self.adapter)
        self.session.upkeep.swapped()

    def _next(self, assistant: Assistant, work: Work) -> None:
        """Begin the next answer of a job, or end the job."""
        job, ask = work.job, work.job.ask
        if job.cancelled or job.begun == ask.answers:
            if self.state == "stopping" and job.cancelled:
                self._over(work, Failed(503, "the server is shutting down; the answer was cut"))
            else:
                self._over(work, Done())
            return
        work.index, job.begun = job.begun, job.begun + 1
        answering = None
        try:
            answering = work.answering = assistant.begin(question(ask, work.index))
            answering.decoding.begin()
        except Exception as error:
            if answering is not None:
                answering.decoding.end()
                assistant.end(answering)
            self._over(work, _failure(error))
            return
        self._batch.join(answering.decoding)
        work.began = work.last = time.perf_counter()
        work.count = 0

    def _show(self, assistant: Assistant, work: Work, error: Exception | None) -> None:
        """Tell what an answer has come to, and end it where that is its end, or nobody waits for it any more."""
        answering, job = work.answering, work.job
        assert answering is not None
        decoding, ask = answering.decoding, job.ask
        try:
            if error is not None:
                raise error
            for step in decoding.show():
                now = time.perf_counter()
                self._metrics.token(now - work.last, first=work.count == 0)
                work.last, work.count = now, work.count + 1
                if ask.stream and ask.supervise:
                    assert decoding.buffer is not None
                    kept = decoding.buffer.take(work.count, work.count - 1)
                    job.emit(Piece(work.index, step.text, step.token, kept, step.from_draft))
                elif ask.stream and step.text:
                    job.emit(Piece(work.index, step.text, drafted=step.from_draft))
                if job.cancelled and step.finish_reason is None:
                    break
        except Exception as failure:
            self._end(assistant, answering)
            self._over(work, _failure(failure))
            return
        if decoding.finish_reason is None and not job.cancelled:
            return
        self._end(assistant, answering)
        self._told(assistant, work, answering)

    def _end(self, assistant: Assistant, answering: Answering) -> None:
        self._batch.leave(answering.decoding)
        answering.decoding.end()
        assistant.end(answering)

    def _told(self, assistant: Assistant, work: Work, answering: Answering) -> None:
        """An answer is over: count it, and tell it as soon as it is in the log; nothing is told of one that was cut."""
        done, ask = answering.decoding, work.job.ask
        assert done.finish_reason is not None
        if done.rounds:  # an answer of one token says nothing
            self.speculation = speculation(assistant, done.rounds)
        self._metrics.answered(done.timings, done.rounds, done.finish_reason)
        for adapter, rounds in answering.rounds_by_adapter:
            for listener in self._listeners:
                listener.answered(adapter, rounds)
        logger.info("%s: %s", printable_line(ask.client) or "client", _line(done, self.speculation))
        work.answering, work.answer = None, None
        if done.finish_reason != "cancelled":
            work.answer = Answer(
                index=work.index,
                text=done.text,
                tokens=tuple(done.output),
                prompt_tokens=len(done.request.prompt),
                finish_reason=done.finish_reason,
                rounds=tuple(done.rounds),
                timings=done.timings,
                supervision=done.supervision,
                adapter=answering.adapter,
                stopped_by=done.stream.stopped_by,
            )
        logged = assistant.log is not None and ask.record
        work.handed = assistant.log.handed if logged and assistant.log is not None else 0
        work.until = time.monotonic() + FLUSH_S
        self._tell_stored(assistant, work)

    def _tell_stored(self, assistant: Assistant, work: Work) -> None:
        """Tell an answer that is in the log, and go on with its job. While others are decoded nobody waits for a slow
        disk but who asked for this one."""
        log = assistant.log
        if work.handed and log is not None:
            if not self._batch.under_way:  # which has a disk that failed tried again
                log.flush(max(0.0, work.until - time.monotonic()))
            elif not log.settled(work.handed) and time.monotonic() < work.until:
                return
            if not log.settled(work.handed) or not log.state.writable:
                logger.warning("log: %s", log.problem or "slow; the answer will be there later")
        if work.answer is not None:
            work.job.emit(work.answer)
        self._next(assistant, work)

    def _over(self, work: Work, event: Done | Failed) -> None:
        """A job has come to its end in a slot, which is free. It is told when it has in all of them; what fails in one
        ends the others."""
        self.works = [other for other in self.works if other is not work]
        self._answered = time.monotonic()
        job = work.job
        if isinstance(event, Failed) and job.failed is None:
            job.failed = event
            job.cancel()
        if all(other.job is not job for other in self.works):
            job.emit(job.failed or event)
        if not self.works:
            self._tell_idle()
        if time.monotonic() - self._trimmed > TRIM_S:
            self._trimmed = time.monotonic()
            give_memory_back()  # or a busy server grows by a tenth in some minutes


def _failure(error: Exception) -> Failed:
    """What is told of a request that came to nothing."""
    if isinstance(error, AdaptiveError):  # a prompt past the context, say
        return Failed(400, str(error))
    logger.error("a request failed", exc_info=error)
    return Failed(500, "the server failed on this request; its log says why")


def _line(done: Decoding, how: Speculation) -> str:
    """One answer in the server's log: no text, only figures."""
    timings = done.timings
    return (
        f"{timings.prompt_n} prompt tokens and {timings.cached_n} cached, {timings.predicted_n} tokens at "
        f"{timings.per_second:.0f}/s, {done.finish_reason}; {how.sentence}; {in_words(count_rounds(done.rounds))}"
    )
