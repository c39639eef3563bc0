"""The one thread that owns the models: it loads them, answers the jobs in its slots, and swaps adapters between rounds.

In: jobs, from the HTTP side. Out: each job's events, and observations for the metrics and the trainer. No other thread
uses the assistant.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from adaptive.answering import Answering
from adaptive.assistant import Assistant
from adaptive.control.policy import LengthPolicy
from adaptive.decoding.batch import Batch
from adaptive.decoding.loop import ANSWER_RESERVE
from adaptive.errors import out_of_memory
from adaptive.kept_caches import Tensors
from adaptive.machine import give_memory_back
from adaptive.opened import OpenedPair
from adaptive.printable import printable_line
from adaptive.service.ending import end, failure, line
from adaptive.service.jobs import Answer, Done, Failed, FairQueue, Job, NotReadyError, Piece, question
from adaptive.service.metrics import Metrics
from adaptive.service.slots import Slot, possible_slots, prepare_slots
from adaptive.speculation import Speculation, of_counts, speculation
from adaptive.types import Round

logger = logging.getLogger("adaptive.service")

# Seconds between two checks of the adapter store while there are no requests. Too low: a small file is read often.
# Too high: the first answer after a promotion has to wait for the swap.
POLL_S = 0.25

# Seconds since the last answer after which idle time is used to measure costs. Too low: that happens between two
# questions of a conversation.
QUIET_S = 1.0

# Seconds since the last answer after which caches are written to disk. Too low: a long conversation, of up to a
# gigabyte, is written after each of its answers. Too high: a server that is killed leaves nothing (one that is stopped
# writes the rest).
KEEP_S = 60.0

# Longest wait for the log, in seconds, before the end of an answer is reported. A slow disk must not delay the client;
# the writer continues to try.
FLUSH_S = 5.0

# Seconds between two returns of freed memory to the system. Each takes some 10 ms, between two answers.
TRIM_S = 30.0

State = Literal["loading", "ready", "failed", "stopping"]


class Listener(Protocol):
    """Receives notifications of the engine. The trainer is one: it pauses training and watches live acceptance."""

    def busy(self) -> None:
        """A request has arrived."""

    def idle(self) -> None:
        """No request is waiting or being answered."""

    def answered(self, adapter: str | None, rounds: tuple[Round, ...]) -> None:
        """An answer has ended. ``rounds``: its plain rounds and those of the model's drafts, under this adapter."""


@dataclass(eq=False)
class Work:
    """A job in one slot; a job may have several. Its answer ``index`` is being decoded (``answering``), or waits to be
    logged before it is sent (``answer``; None if it was cancelled). After it comes the job's next unbegun answer."""

    job: Job
    slot: int
    index: int = 0
    answering: Answering | None = None
    began: float = 0.0  # start of this answer, by perf_counter
    last: float = 0.0  # time of its last token
    count: int = 0  # its number of tokens
    answer: Answer | None = None
    handed: int = 0  # the log writer's count of generations, including this one
    until: float = 0.0  # time at which it is sent even if it is not in the log


class EngineThread:
    """Loads the pair and answers jobs until ``close``. Safe to call from any thread."""

    def __init__(
        self,
        open_session: Callable[[], contextlib.AbstractContextManager[OpenedPair]],
        metrics: Metrics,
        queue: int,
        slots: str = "1",
    ) -> None:
        """``open_session`` loads the pair. At most ``queue`` requests wait, and at most ``slots`` are answered at once
        (a number or ``auto``, see ``possible_slots``)."""
        self.state: State = "loading"
        self.failure: BaseException | None = None
        self.session: OpenedPair | None = None
        self.adapter: str | None = None
        self.slots = 1 if slots == "auto" else int(slots)
        self.fewer: str | None = None  # why there are not more slots
        self.works: list[Work] = []  # in the slots; the list is replaced, never changed, so any thread may read it
        self.speculation: Speculation = of_counts((), draft=False)  # of the last answer with a round
        self.queue = FairQueue(queue, metrics.abandoned)
        self._open = open_session
        self._metrics = metrics
        self._listeners: list[Listener] = []
        self._forget = False
        self._wanted = slots
        self._batch: Batch
        self._fetching: tuple[Job, Future[Tensors] | None] | None = None  # the kept cache read for the next job
        # Held while a job is queued or listeners are called, so that ``idle`` is never the last call while a job waits.
        self._telling = threading.Lock()
        self._told_busy = True  # until the models are loaded
        self._trimmed = self._answered = time.monotonic()
        self._finished = threading.Event()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self, when_over: Callable[[], None]) -> None:
        """Begin to load. ``when_over`` is called on the engine thread when the thread ends, also after a failure."""
        self._when_over = when_over
        self._thread.start()

    @property
    def policy(self) -> LengthPolicy | None:
        """The policy that chooses draft lengths; None until the models are loaded."""
        return None if self.session is None else self.session.assistant.policy

    def listen(self, listener: Listener) -> None:
        """Notify ``listener`` from now on."""
        self._listeners.append(listener)

    @property
    def doing(self) -> list[Slot]:
        """The state of each slot."""
        found = [Slot()] * self.slots
        for work in self.works:
            if (answering := work.answering) is not None:
                found[work.slot] = Slot(True, len(answering.question.prompt), work.count, work.began)
        return found

    def submit(self, job: Job) -> None:
        """Queue a job. Raises QueueFullError, or NotReadyError if the engine has been told to stop or has failed."""
        with self._telling:
            if self.state in ("stopping", "failed"):
                raise NotReadyError
            self.queue.put(job, max(0, self.slots - len(self.works)))
            self._told_busy = True
            for listener in self._listeners:
                listener.busy()

    def forget_conversations(self) -> None:
        """Empty the caches of all conversations before the next answer begins."""
        self._forget = True

    def close(self) -> None:
        """Cancel running jobs, refuse waiting ones, release the models, and wait until the thread has ended."""
        if self.state != "failed":
            self.state = "stopping"
        for work in self.works:
            work.job.cancel()
        self._finished.wait()

    def hurry(self) -> None:
        """End without writing caches to disk."""
        if self.session is not None:
            self.session.hurry.set()

    def _run(self) -> None:
        try:
            with self._open() as session:
                self.session = session
                self.adapter = session.assistant.adapter
                self.speculation = speculation(session.assistant)
                self._metrics.uses(self.adapter)
                session.swapper.on_swap = self._swapped
                self._batch = Batch(session.pair.target, session.swapper.between_rounds)
                self.slots, self.fewer = possible_slots(session.assistant, self._wanted)
                prepare_slots(session.assistant, self.slots)
                if self.state == "loading":
                    self.state = "ready"
                    self._tell_idle()
                    logger.info("ready: %s, adapter %s", session.pair.identity.id, self.adapter or "none")
                    if self.fewer is not None:
                        logger.info("%s", self.fewer)
                while self.state == "ready" or self.works:
                    self._turn(session)
                with self._telling:  # a later job is refused
                    while (job := self.queue.take(0)) is not None:
                        job.emit(Failed(503, "the server is shutting down; try again in a moment"))
        except BaseException as error:  # any error here ends the server; the main thread reports it
            with self._telling:
                self.state, self.failure = "failed", error
                left = [work.job for work in self.works]
                while (job := self.queue.take(0)) is not None:
                    left.append(job)
            for job in dict.fromkeys(left):
                with contextlib.suppress(RuntimeError):  # nobody waits any more: the loop is closed
                    job.emit(Failed(503, "the server has failed and is ending; try again in a moment"))
        finally:
            self._finished.set()
            self._when_over()

    def _turn(self, session: OpenedPair) -> None:
        """Start waiting jobs, then advance all running answers by one burst; without any, do idle work."""
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

    def _fill(self, session: OpenedPair) -> None:
        """Start waiting jobs while slots are free. If no job is running, wait up to POLL_S for one."""
        while self.state == "ready" and len(self.works) < self.slots:
            job = self.queue.take(0 if self.works else POLL_S, lambda job: self._may_begin(session.assistant, job))
            if job is None and not len(self.queue):
                self._release(session.assistant)  # its job was cancelled
                job = self._with_more(session.assistant)
            if job is None:
                return
            taken = {work.slot for work in self.works}
            work = Work(job, next(slot for slot in range(self.slots) if slot not in taken))
            self.works = [*self.works, work]
            self._forget_if_asked(session.assistant)
            self._next(session.assistant, work)
            self._release(session.assistant)  # it was read, or is of no use any more

    def _release(self, assistant: Assistant) -> None:
        """Free the memory of a kept cache that was read ahead."""
        self._fetching = None
        assistant.conversations.release()

    def _with_more(self, assistant: Assistant) -> Job | None:
        """A running job with answers not yet begun, for a free slot that no other job needs. Its answers in progress
        must have read their prompt, so that the next one can copy the cache."""
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

    def _may_begin(self, assistant: Assistant, job: Job) -> bool:
        """Whether there is room for a job, and its kept cache was read, for which answers in progress do not wait."""
        if not self._has_room(assistant, job):
            return False
        if not self.works:
            return True
        if self._fetching is None or self._fetching[0] is not job:
            self._fetching = job, assistant.conversations.fetch(job.ask.prompts[0].ids)
        file = self._fetching[1]
        return file is None or file.done()

    def _has_room(self, assistant: Assistant, job: Job) -> bool:
        """Whether there is memory for the caches of a job's longest prompt and the answer tokens reserved at first."""
        longest = max(len(prompt.ids) for prompt in job.ask.prompts)
        return assistant.has_room(longest + min(job.ask.stop.max_new_tokens, ANSWER_RESERVE))

    def _idle(self, session: OpenedPair) -> None:
        """Idle work: swap to a promoted adapter; after QUIET_S measure costs, and after KEEP_S save caches."""
        self._forget_if_asked(session.assistant)
        self._tell_idle()  # a waiting job may have been cancelled
        while not session.swapper.between_rounds():  # the next slice of a swap
            if self._wanted_now():
                return
        quiet = time.monotonic() - self._answered
        if quiet > KEEP_S and session.assistant.conversations.keep(self._wanted_now):
            return
        if quiet > QUIET_S:
            session.upkeep.idle(self._wanted_now)

    def _wanted_now(self) -> bool:
        """Whether idle work must give way."""
        return len(self.queue) > 0 or self._forget or self.state != "ready"

    def _tell_idle(self) -> None:
        """Notify listeners, once, that the engine is idle, unless a job waits."""
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
            cut = job.cancelled and (work.answer is None or job.begun < ask.answers)
            if self.state == "stopping" and cut:
                self._over(work, Failed(503, "the server is shutting down; the answer was cut"))
            else:
                self._over(work, Done())
            return
        if len(self.queue) and any(other.job is job and other is not work for other in self.works):
            self._over(work, Done())  # the job goes on in its other slots, this one is for those who wait
            return
        self._forget_if_asked(assistant)
        work.index, job.begun = job.begun, job.begun + 1
        answering = None
        work.count, work.began = 0, time.perf_counter()  # for ``doing``: to begin may take seconds
        try:
            answering = work.answering = assistant.begin(question(ask, work.index))
            answering.decoding.begin()
        except Exception as error:
            self._batch.could_not_join()
            if answering is not None:
                end(assistant, answering)
            self._failed(assistant, work, error)
            return
        self._batch.join(answering.decoding)
        work.began = work.last = time.perf_counter()

    def _show(self, assistant: Assistant, work: Work, error: Exception | None) -> None:
        """Send the new tokens of an answer; end it if it is complete, failed or cancelled."""
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
        except Exception as problem:
            self._batch.leave(decoding)
            end(assistant, answering)
            self._failed(assistant, work, problem)
            return
        if decoding.finish_reason is None and not job.cancelled:
            return
        self._batch.leave(decoding)
        end(assistant, answering)
        self._told(assistant, work, answering)

    def _failed(self, assistant: Assistant, work: Work, error: Exception) -> None:
        """End a job with an error. If memory has run out, idle conversations give theirs to the next requests."""
        if out_of_memory(error):
            assistant.conversations.free_idle()
        self._over(work, failure(error))

    def _told(self, assistant: Assistant, work: Work, answering: Answering) -> None:
        """Count an ended answer, and send it as soon as it is logged, unless it was cancelled."""
        done, ask = answering.decoding, work.job.ask
        assert done.finish_reason is not None
        how = replace(speculation(assistant, done.rounds), answered=bool(done.output))
        if done.rounds:  # an answer of one token has no rounds
            self.speculation = how
        self._metrics.answered(done.timings, done.rounds, done.finish_reason)
        for adapter, rounds in answering.rounds_by_adapter:
            for listener in self._listeners:
                listener.answered(adapter, rounds)
        client = printable_line(ask.owner[:8] or ask.client) or "client"
        logger.info("%s: %s%s", client, line(done, how), "" if ask.record else "; not recorded, as the client asked")
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
        """Send an answer once it is logged, and continue with its job. While other answers are being decoded, this
        does not block on a slow disk: only this answer is delayed."""
        log = assistant.log
        if work.handed and log is not None:
            if not self._batch.under_way:  # ``flush`` also makes the writer retry after a failure
                log.flush(max(0.0, work.until - time.monotonic()))
            elif not log.settled(work.handed) and time.monotonic() < work.until:
                return
            if not log.settled(work.handed) or not log.state.writable:
                logger.warning("log: %s", log.problem or "slow; the answer will be there later")
        if work.answer is not None:
            work.job.emit(work.answer)
        self._next(assistant, work)

    def _over(self, work: Work, event: Done | Failed) -> None:
        """End a job in one slot, and free the slot. The event is sent when the job has ended in all of its slots. A
        failure in one slot cancels the job in the others."""
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
            give_memory_back()  # else a busy server grows by a tenth within minutes
