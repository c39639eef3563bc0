"""One answer of an assistant: the question, its decoding, and the record that is logged at its end."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from adaptive.caches import Conversation
from adaptive.decoding.loop import Decoding
from adaptive.grammar import Grammar
from adaptive.records.features import Features, kept
from adaptive.records.stats import learned_rounds
from adaptive.types import Generation, Message, Round, SamplingParams, StopParams


@dataclass(frozen=True)
class Question:
    """A request to an assistant: a ``prompt`` of token ids, which came from ``messages`` or from a raw ``text``.

    Without a ``session``, if several conversations are kept, the prompt's beginning and the ``client`` identify the
    conversation. ``owner`` owns the record, and only the owner's records are drafted from. ``supervise`` keeps the
    target's distribution even if nothing is recorded. ``goes_on``: the prompt ends within an answer, which this one
    continues. The answer matches the ``grammar``, if there is one, unless a limit cuts it. ``marks`` are special tokens
    that are part of the text (``TextStream``). ``forgotten`` is set, on any thread, if nothing may be recorded after
    all: the prompt holds a deleted answer.
    """

    prompt: list[int]
    messages: tuple[Message, ...]
    text: str
    sampling: SamplingParams
    stop: StopParams
    session: str | None = None
    domain: str | None = None
    record: bool = True
    supervise: bool = False
    client: str = ""
    owner: str = ""
    goes_on: bool = False
    grammar: Grammar | None = None
    marks: Mapping[int, str] | None = None
    forgotten: threading.Event = field(default_factory=threading.Event, compare=False)


@dataclass(eq=False)
class Answering:
    """An answer that has begun, in ``session``, under ``sampling``; ``adapter`` is the draft's adapter at its
    beginning.

    ``drafted_by`` lists the adapters that drafted its rounds: (adapter, its first round), oldest first.
    """

    question: Question
    decoding: Decoding
    conversation: Conversation
    session: str
    sampling: SamplingParams
    adapter: str | None
    recorded: bool
    created: float = field(default_factory=time.time)
    drafted_by: list[tuple[str | None, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.drafted_by.append((self.adapter, 0))

    @property
    def record(self) -> bool:
        """Whether it is logged at its end."""
        return self.recorded and not self.question.forgotten.is_set()

    def swapped(self, adapter: str | None) -> None:
        """Another adapter drafts from now on."""
        self.drafted_by.append((adapter, len(self.decoding.rounds)))

    @property
    def rounds_by_adapter(self) -> list[tuple[str | None, tuple[Round, ...]]]:
        """The plain rounds and those of the model's drafts, by adapter, since an adapter may be swapped in during an
        answer. Empty for an answer under a seed: it accepts fewer drafted tokens, whatever the adapter."""
        if self.decoding.request.sampling.seeded:
            return []
        rounds = self.decoding.rounds
        ends = [first for _, first in self.drafted_by[1:]] + [len(rounds)]
        return [
            (adapter, tuple(learned_rounds(rounds[first:end])))
            for (adapter, first), end in zip(self.drafted_by, ends, strict=True)
        ]

    def hold(self) -> None:
        """Record this answer's tokens as the contents of the conversation's caches."""
        self.conversation.target.tokens = self.decoding.committed
        if self.conversation.draft:
            self.conversation.draft.tokens = self.decoding.committed

    def generation(self, engine: str) -> Generation:
        """The record to be logged; ``engine`` names the target's engine."""
        question, decoding = self.question, self.decoding
        return Generation(
            session=self.session,
            created=self.created,
            messages=question.messages,
            prompt_text=question.text,
            text=decoding.text,
            prompt=np.array(question.prompt, dtype=np.int32),
            output=np.array(decoding.output, dtype=np.int32),
            sampling=self.sampling,
            adapter=self.adapter,
            engine=engine,
            domain=question.domain,
            finish_reason=decoding.finish_reason or "cancelled",
            rounds=tuple(decoding.rounds),
            timings=decoding.timings,
            supervision=decoding.supervision,
            owner=question.owner,
        )

    def features(self) -> Features:
        """The target's hidden states of the part of the text that training reads. Raises RuntimeError or MemoryError
        without memory for them."""
        sequence = self.conversation.target.sequence
        first, end = kept(len(self.question.prompt), sequence.length)
        return Features.of(sequence.features(first, end).cpu().float().numpy(), first)
