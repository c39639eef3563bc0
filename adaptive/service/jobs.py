"""What passes between the HTTP side and the engine thread, and the queue between them."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from adaptive.answering import Question
from adaptive.grammar import Grammar
from adaptive.types import Message, Round, SamplingParams, StopParams, Supervision, Timings


@dataclass(frozen=True)
class Prompt:
    """Token ids, and the chat or the raw text they came from."""

    ids: list[int]
    messages: tuple[Message, ...]
    text: str


@dataclass(frozen=True)
class Ask:
    """One request: ``n`` answers to each of ``prompts``, made one after the other, or at once where slots are free.

    ``client`` is who asks, for fairness; ``owner`` whose the record is, where people are told apart.
    ``supervise`` keeps the target's distribution for logprobs. ``grammar`` is what answers keep to, if anything.
    ``stream`` asks for ``Piece`` events. ``marks`` are special tokens that are part of the text.
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

    @property
    def answers(self) -> int:
        """How many there are to be."""
        return len(self.prompts) * self.n


def question(ask: Ask, index: int) -> Question:
    """Answer ``index`` of a request, as the assistant is asked for it."""
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
    )


def _sampling(ask: Ask, index: int) -> SamplingParams:
    """Every answer of a seeded request has a seed of its own, the same one each time."""
    sampling = ask.sampling
    if sampling.seed is None or index == 0:
        return sampling
    return replace(sampling, seed=(sampling.seed + index) % 2**63)


@dataclass(frozen=True)
class Piece:
    """Text of answer ``index`` that has become certain with a token that was ``drafted`` or not. Where logprobs are
    wanted there is a piece for every token, with the target's distribution (1, k) there; its text may be empty."""

    index: int
    text: str
    token: int | None = None
    supervision: Supervision | None = None
    drafted: bool = False


@dataclass(frozen=True)
class Answer:
    """Answer ``index``, complete and in the log. ``stopped_by`` is the stop string that ended it, if one did."""

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
    """Every answer of the request is there."""


@dataclass(frozen=True)
class Failed:
    """The request came to nothing. ``status`` is that of HTTP."""

    status: int
    message: str


Event = Piece | Answer | Done | Failed


class Job:
    """An ``Ask`` under way. ``emit`` is called on the engine thread, ``cancel`` from any. How many of its answers have
    ``begun``, and why it ``failed``, only the engine thread knows."""

    def __init__(self, ask: Ask, emit: Callable[[Event], None]) -> None:
        self.ask = ask
        self.emit = emit
        self.begun = 0
        self.failed: Failed | None = None
        self.when_cancelled: Callable[[], None] = lambda: None
        self._cancelled = threading.Event()

    @property
    def cancelled(self) -> bool:
        """Whether nobody waits for the answer any more."""
        return self._cancelled.is_set()

    def cancel(self) -> None:
        """End the answer before its next token; one that has not begun leaves the queue at once."""
        self._cancelled.set()
        self.when_cancelled()


class QueueFullError(Exception):
    """As many requests wait as may."""


class FairQueue:
    """Clients take turns; the requests of one client keep their order. At most ``limit`` wait.

    A job that is cancelled leaves at once, so that whoever asks and goes away fills no memory; ``abandoned`` is
    called for each.
    """

    def __init__(self, limit: int, abandoned: Callable[[], None] = lambda: None) -> None:
        self.limit = limit
        self._abandoned = abandoned
        self._changed = threading.Condition()
        self._waiting: OrderedDict[str, deque[Job]] = OrderedDict()  # whose turn it is comes first

    def __len__(self) -> int:
        with self._changed:
            return sum(len(jobs) for jobs in self._waiting.values())

    def put(self, job: Job, free: int) -> None:
        """Add a job. Raises QueueFullError where ``limit`` wait already, beside those for whom so many slots are
        ``free``: they start at once."""
        with self._changed:
            if len(self) >= self.limit + free:
                raise QueueFullError
            self._waiting.setdefault(job.ask.client, deque()).append(job)
            job.when_cancelled = lambda: self._leave(job)
            self._changed.notify()

    def take(self, timeout: float, may: Callable[[Job], bool] = lambda job: True) -> Job | None:
        """The next job that somebody still waits for, or None after ``timeout`` seconds, or where it is one that
        ``may`` not begin yet: nobody else has their turn before it."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._waiting, timeout):
                return None
            if not may(next(iter(self._waiting.values()))[0]):
                return None
            client, jobs = self._waiting.popitem(last=False)
            job = jobs.popleft()
            if jobs:
                self._waiting[client] = jobs  # to the end of the line
            return job

    def _leave(self, job: Job) -> None:
        with self._changed:
            jobs = self._waiting.get(job.ask.client, ())
            if job not in jobs:
                return  # its turn has come
            self._waiting[job.ask.client].remove(job)
            if len(jobs) == 0:
                del self._waiting[job.ask.client]
        self._abandoned()
