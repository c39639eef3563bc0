"""One answer of an assistant: what was asked, what is decoded, and what is logged of it at its end."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from adaptive.caches import Conversation
from adaptive.decoding.loop import Decoding
from adaptive.grammar import Grammar
from adaptive.records.features import LONGEST, Features
from adaptive.records.stats import learned_rounds
from adaptive.types import Generation, Message, Round, SamplingParams, StopParams


@dataclass(frozen=True)
class Question:
    """What an assistant is asked: a ``prompt`` of token ids, which came from ``messages`` or from a raw ``text``.

    The rest as in ``Assistant.answer``.
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


@dataclass(eq=False)
class Answering:
    """An answer that has begun, in ``session``, under ``sampling``, by an adapter.

    ``drafted_by`` tells which adapter drafted which of its rounds: (adapter, its first round), oldest first.
    """

    question: Question
    decoding: Decoding
    conversation: Conversation
    session: str
    sampling: SamplingParams
    adapter: str | None
    record: bool
    created: float = field(default_factory=time.time)
    drafted_by: list[tuple[str | None, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.drafted_by.append((self.adapter, 0))

    def swapped(self, adapter: str | None) -> None:
        """Another adapter drafts from now on."""
        self.drafted_by.append((adapter, len(self.decoding.rounds)))

    @property
    def rounds_by_adapter(self) -> list[tuple[str | None, tuple[Round, ...]]]:
        """Its rounds as the model had them, or nobody, apart by adapter: one may have been swapped in while it was
        under way. None of an answer under a seed: fewer of its drafted tokens stand, which says nothing of an
        adapter."""
        if self.decoding.request.sampling.seeded:
            return []
        rounds = self.decoding.rounds
        ends = [first for _, first in self.drafted_by[1:]] + [len(rounds)]
        return [
            (adapter, tuple(learned_rounds(rounds[first:end])))
            for (adapter, first), end in zip(self.drafted_by, ends, strict=True)
        ]

    def hold(self) -> None:
        """The caches are those of this text now."""
        self.conversation.target.tokens = self.decoding.committed
        if self.conversation.draft:
            self.conversation.draft.tokens = self.decoding.committed

    def generation(self, engine: str) -> Generation:
        """What is logged of it; ``engine`` is the target's."""
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
        """The target's hidden states of the text, as far as they are learned from."""
        sequence = self.conversation.target.sequence
        first = max(0, sequence.length - LONGEST)
        return Features.of(sequence.features(first, sequence.length).float().cpu().numpy(), first)
