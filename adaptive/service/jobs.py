"""The jobs and events that the HTTP side and the engine thread exchange, and the queue of jobs between them."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from adaptive.answering import Question
from adaptive.grammar import Grammar
from adaptive.records.holders import Asked, Held
from adaptive.types import Message, Round, SamplingParams, StopParams, Supervision, Timings


@dataclass(frozen=True)
class Prompt:
    """Token ids, and the chat or the raw text they came from."""

    ids: list[int]
    messages: tuple[Message, ...]
    text: str


@dataclass(frozen=True)
class Ask:
    """One request: ``n`` answers to each of ``prompts``, decoded one after the other, or at once if slots are free.

    ``client`` identifies the client, for fair queueing; ``owner`` is the digest of the user for the record, empty if
    users are not distinguished. ``supervise`` keeps the target's distribution for logprobs. ``grammar`` constrains the
    answers. ``stream`` requests ``Piece`` events. ``marks`` are special tokens that are part of the text.
    ``forgotten`` as in ``Question``.
    """

    prompts: tuple[Prompt, ...]
    sampling: SamplingParams
    stop: StopParams
    n: int
    client: str
    session: str | None
    record: bool
    supervise: bool
    stream: bool
    owner: str = ""
    grammar: Grammar | None = None
    marks: Mapping[int, str] = field(default_factory=dict)
    forgotten: threading.Event = field(default_factory=threading.Event, compare=False)

    @property
    def answers(self) -> int:
        """The total number of answers."""
        return len(self.prompts) * self.n

    def repeats(self, held: Sequence[Held], session: str | None) -> bool:
        """Whether a prompt holds an answer of these. ``session`` is that of the request, if it is known."""
        asked = [Asked(session or "", prompt.messages, prompt.text) for prompt in self.prompts] if held else []
        return any(one.holds(request) for request in asked for one in held)


def question(ask: Ask, index: int) -> Question:
    """The assistant's request for answer ``index``."""
    prompt = ask.prompts[index // ask.n]
    return Question(
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
        forgotten=ask.forgotten,
    )


def _sampling(ask: Ask, index: int) -> SamplingParams:
    """The sampling of answer ``index``: in a seeded request each answer has its own reproducible seed."""
    sampling = ask.sampling
    if sampling.seed is None or index == 0:
        return sampling
    return replace(sampling, seed=(sampling.seed + index) % 2**63)


@dataclass(frozen=True)
class Piece:
    """New text of answer ``index``, and whether its last token was ``drafted``. If logprobs are requested there is a
    piece for every token, with the target's distribution (1, k) at that position; its text may be empty."""

    index: int
    text: str
    token: int | None = None
    supervision: Supervision | None = None
    drafted: bool = False


@dataclass(frozen=True)
class Answer:
    """Answer ``index``, complete, and logged unless that failed or is off. ``stopped_by``: the stop string that ended
    it, else empty."""

    index: int
    text: str
    tokens: tuple[int, ...]
    prompt_tokens: int
    finish_reason: str
    rounds: tuple[Round, ...]
    timings: Timings
    supervision: Supervision | None
    adapter: str | None
    stopped_by: str = ""


@dataclass(frozen=True)
class Done:
    """All answers of the request have been sent, or it was cancelled."""


@dataclass(frozen=True)
class Failed:
    """The request failed. ``status`` is the HTTP status."""

    status: int
    message: str


Event = Piece | Answer | Done | Failed


def _nothing() -> None:
    """What happens when a job is cancelled that is not in a queue."""


class Job:
    """An ``Ask`` in progress. ``emit`` is called on the engine thread, ``cancel`` on any thread. Only the engine thread
    uses ``begun`` (the number of its answers begun) and ``failed`` (why it failed)."""

    def __init__(self, ask: Ask, emit: Callable[[Event], None]) -> None:
        self.ask = ask
        self.emit = emit
        self.begun = 0
        self.failed: Failed | None = None
        self.when_cancelled = _nothing
        self._cancelled = threading.Event()

    @property
    def cancelled(self) -> bool:
        """Whether the job was cancelled."""
        return self._cancelled.is_set()

    def cancel(self) -> None:
        """End the job's answers before their next token; a waiting job leaves the queue at once."""
        self._cancelled.set()
        self.when_cancelled()


class QueueFullError(Exception):
    """The queue is full."""


class NotReadyError(Exception):
    """The models are still being loaded, or the server is shutting down."""


class FairQueue:
    """A queue in which clients take turns; the jobs of one client keep their order. At most ``limit`` jobs wait.

    A cancelled job leaves at once, so that disconnected clients take no memory; ``abandoned`` is called for each.
    """

    def __init__(self, limit: int, abandoned: Callable[[], None] = lambda: None) -> None:
        self.limit = limit
        self._abandoned = abandoned
        self._changed = threading.Condition()
        self._waiting: OrderedDict[str, deque[Job]] = OrderedDict()  # by client, the next one first

    def __len__(self) -> int:
        with self._changed:
            return sum(len(jobs) for jobs in self._waiting.values())

    def put(self, job: Job, free: int) -> None:
        """Add a job. ``free`` is the number of free slots, whose jobs start at once and do not count. Raises
        QueueFullError if ``limit`` other jobs wait."""
        with self._changed:
            if len(self) >= self.limit + free:
                raise QueueFullError
            self._waiting.setdefault(job.ask.client, deque()).append(job)
            job.when_cancelled = lambda: self._leave(job)
            self._changed.notify()

    def take(self, timeout: float, may: Callable[[Job], bool] = lambda job: True) -> Job | None:
        """Take the next job. None if there is none within ``timeout`` seconds, or if ``may`` is False for it: no other
        job overtakes it."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._waiting, timeout):
                return None
            if not may(next(iter(self._waiting.values()))[0]):
                return None
            client, jobs = self._waiting.popitem(last=False)
            job = jobs.popleft()
            if jobs:
                self._waiting[client] = jobs  # to the end of the queue
            job.when_cancelled = _nothing  # else the job would hold itself, and its prompt stay in memory
            return job

    def _leave(self, job: Job) -> None:
        with self._changed:
            jobs = self._waiting.get(job.ask.client, ())
            if job not in jobs:
                return  # it was taken already
            self._waiting[job.ask.client].remove(job)
            if len(jobs) == 0:
                del self._waiting[job.ask.client]
            job.when_cancelled = _nothing
        self._abandoned()
