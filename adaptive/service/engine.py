"""The one thread that owns the models: it loads them, answers one job at a time, and swaps adapters in between rounds.

In: jobs, from the HTTP side. Out: each job's events, and what has been observed, for the metrics and
for the trainer. Nothing else touches the assistant.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from adaptive.assistant import Assistant
from adaptive.control.policy import LengthPolicy
from adaptive.decoding.loop import Decoding
from adaptive.errors import AdaptiveError
from adaptive.pair import Pair
from adaptive.printable import printable_line
from adaptive.records.stats import count_rounds, in_words
from adaptive.service.jobs import Answer, Ask, Done, Failed, FairQueue, Job, Piece
from adaptive.service.metrics import Metrics
from adaptive.speculation import Speculation, of_counts, speculation
from adaptive.state import PairState
from adaptive.swapper import Swapper
from adaptive.types import Round, SamplingParams
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


@dataclass(frozen=True)
class Slot:
    """What the engine is doing: tokens of the answer under way, 0 of 0 where there is none."""

    busy: bool
    client: str | None
    prompt_tokens: int
    predicted_tokens: int
    began: float | None


class EngineThread:
    """Loads the pair and answers jobs until ``close``. Safe to call from any thread."""

    def __init__(
        self,
        open_session: Callable[[], contextlib.AbstractContextManager[Opened]],
        metrics: Metrics,
        queue: int,
    ) -> None:
        """``open_session`` loads the pair; ``queue`` requests may wait."""
        self.state: State = "loading"
        self.failure: BaseException | None = None
        self.session: Opened | None = None
        self.adapter: str | None = None
        self.slot = Slot(False, None, 0, 0, None)
        self.speculation: Speculation = of_counts((), draft=False)  # of the last answer that took a round
        self.queue = FairQueue(queue, metrics.abandoned)
        self._open = open_session
        self._metrics = metrics
        self._listeners: list[Listener] = []
        self._running: Job | None = None
        self._forget = False
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

    def submit(self, job: Job) -> None:
        """Queue a job. Raises QueueFullError."""
        with self._telling:
            self.queue.put(job, running=self._running is not None)
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
        running = self._running
        if running is not None:
            running.cancel()
        self._finished.wait()

    def _run(self) -> None:
        try:
            with self._open() as session:
                self.session = session
                self.adapter = session.assistant.adapter
                self.speculation = speculation(session.assistant)
                session.swapper.on_swap = self._swapped
                session.assistant.between_rounds = session.swapper.between_rounds
                if self.state == "loading":
                    self.state = "ready"
                    self._tell_idle()
                    logger.info("ready: %s, adapter %s", session.pair.identity.id, self.adapter or "none")
                while self.state == "ready":
                    self._turn(session)
                while (job := self.queue.take(0)) is not None:
                    job.emit(Failed(503, "the server is shutting down; try again in a moment"))
        except BaseException as error:  # whatever loading raises is the server's end, told by the main thread
            self.state, self.failure = "failed", error
        finally:
            self._finished.set()
            self._when_over()

    def _turn(self, session: Opened) -> None:
        """One job, or one look at the adapter store."""
        job = self.queue.take(POLL_S)
        if self._forget:
            self._forget = False
            session.assistant.forget()
        if job is None:
            self._tell_idle()  # who was waited for may have gone away before their turn
            session.swapper.use_promoted()
            if time.monotonic() - self._answered > QUIET_S:
                session.upkeep.idle(lambda: len(self.queue) > 0 or self.state != "ready")
            return
        session.swapper.between_rounds()  # somebody waits: a slice of a swap at most
        self._running = job
        try:
            self._answer_all(session, job)
        except AdaptiveError as error:  # a prompt past the context, say
            job.emit(Failed(400, str(error)))
        except Exception:
            logger.exception("a request failed")
            job.emit(Failed(500, "the server failed on this request; its log says why"))
        finally:
            self._running = None
            self._answered = time.monotonic()
            self.slot = Slot(False, None, 0, 0, None)
            self._tell_idle()
            if time.monotonic() - self._trimmed > TRIM_S:
                self._trimmed = time.monotonic()
                give_memory_back()

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

    def _answer_all(self, session: Opened, job: Job) -> None:
        for index in range(len(job.ask.prompts) * job.ask.n):
            if job.cancelled:
                break
            self._answer(session.assistant, job, index)
        if self.state == "stopping" and job.cancelled:
            job.emit(Failed(503, "the server is shutting down; the answer was cut"))
        else:
            job.emit(Done())

    def _answer(self, assistant: Assistant, job: Job, index: int) -> None:
        """One answer, told when it is in the log; nothing is told of one that was cut."""
        ask, prompt = job.ask, job.ask.prompts[index // job.ask.n]
        steps = assistant.answer(
            prompt.ids,
            prompt.messages,
            prompt.text,
            _sampling(ask, index),
            ask.stop,
            session=ask.session,
            record=ask.record,
            supervise=ask.supervise,
            client=ask.client,
            owner=ask.owner,
            grammar=ask.grammar,
            marks=ask.marks,
        )
        began = last = time.perf_counter()
        count = 0
        with contextlib.closing(steps):  # type: ignore[type-var]
            for step in steps:
                now = time.perf_counter()
                self._metrics.token(now - last, first=count == 0)
                last, count = now, count + 1
                self.slot = Slot(True, ask.client, len(prompt.ids), count, began)
                if ask.stream and ask.supervise:
                    assert assistant.last is not None
                    assert assistant.last.buffer is not None
                    row = assistant.last.buffer.take(count, count - 1)
                    job.emit(Piece(index, step.text, step.token, row, step.from_draft))
                elif ask.stream and step.text:
                    job.emit(Piece(index, step.text, drafted=step.from_draft))
                if job.cancelled and step.finish_reason is None:
                    break
        done = assistant.last
        assert done is not None
        assert done.finish_reason is not None
        if done.rounds:  # an answer of one token says nothing
            self.speculation = speculation(assistant)
        self._metrics.answered(done.timings, done.rounds, done.finish_reason)
        if assistant.log is not None and ask.record and not assistant.log.flush(FLUSH_S):
            logger.warning("log: %s", assistant.log.problem or "slow; the answer will be there later")
        for adapter, rounds in assistant.rounds_by_adapter:
            for listener in self._listeners:
                listener.answered(adapter, rounds)
        logger.info("%s: %s", printable_line(ask.client) or "client", _line(done, self.speculation))
        if done.finish_reason != "cancelled":
            job.emit(
                Answer(
                    index=index,
                    text=done.text,
                    tokens=tuple(done.output),
                    prompt_tokens=len(prompt.ids),
                    finish_reason=done.finish_reason,
                    rounds=tuple(done.rounds),
                    timings=done.timings,
                    supervision=done.supervision,
                    adapter=assistant.drafted_by[0][0],
                    stopped_by=done.stream.stopped_by,
                )
            )


def give_memory_back() -> None:
    """Return to the system what the C library keeps of freed memory.

    Caches of conversations come and go in megabytes, and between what stays, glibc never gives the
    holes back by itself: without this a busy server grows by a tenth in some minutes.
    """
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def _line(done: Decoding, how: Speculation) -> str:
    """One answer in the server's log: no text, only figures."""
    timings = done.timings
    return (
        f"{timings.prompt_n} prompt tokens and {timings.cached_n} cached, {timings.predicted_n} tokens at "
        f"{timings.per_second:.0f}/s, {done.finish_reason}; {how.sentence}; {in_words(count_rounds(done.rounds))}"
    )


def _sampling(ask: Ask, index: int) -> SamplingParams:
    """Every answer of a seeded request has a seed of its own, the same one each time."""
    sampling = ask.sampling
    if sampling.seed is None or index == 0:
        return sampling
    return dataclasses.replace(sampling, seed=(sampling.seed + index) % 2**63)
