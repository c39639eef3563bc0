"""Who proposes the next tokens.

A drafter sees the committed text and returns a ``Proposal``. It keeps whatever state it needs and
catches up by itself, so that a round without it (draft length 0) costs it nothing until it is asked.
"""

from __future__ import annotations

from typing import Protocol

import torch

from adaptive.decoding.params import SamplingParams
from adaptive.decoding.sampling import Penalties, draw, transform_logits
from adaptive.decoding.verify import Proposal
from adaptive.engines.protocol import Sequence


class Drafter(Protocol):
    """Proposes tokens that follow the committed text."""

    name: str

    def limit(self, committed: int) -> int:
        """The most tokens it can propose after ``committed`` tokens."""

    def propose(self, committed: list[int], length: int) -> Proposal:
        """``length`` (at least 1) tokens after ``committed``."""

    def rollback(self, length: int) -> None:
        """Tokens after the first ``length`` committed ones did not stand."""


class ModelDrafter:
    """A small model drafts token by token, under the target's own sampling transforms."""

    name = "model"

    def __init__(
        self,
        sequence: Sequence,
        context_length: int,
        target_vocab: int,
        params: SamplingParams,
        penalties: Penalties,
        generator: torch.Generator,
    ) -> None:
        self.sequence = sequence
        self.context_length = context_length
        self.target_vocab = target_vocab
        self.params = params
        self.penalties = penalties
        self.generator = generator

    def limit(self, committed: int) -> int:
        """The last drafted token is never fed back, so it may stand just past the context."""
        return max(0, self.context_length - committed + 1)

    def propose(self, committed: list[int], length: int) -> Proposal:
        """One forward per token; the first also feeds what was committed since the last proposal."""
        feed = torch.tensor(committed[self.sequence.length :])
        tokens: list[torch.Tensor] = []
        probs: list[torch.Tensor] = []
        drafted = feed[:0]
        for _ in range(length):
            logits = self.sequence.extend(feed, 1)[:, : self.target_vocab]
            logits = self.penalties.apply(logits, drafted) if self._adjusts else logits
            if self.params.greedy:
                feed = logits.argmax(-1)
            else:
                q = transform_logits(logits.float(), self.params).softmax(-1)
                feed = draw(q, self.generator)
                probs.append(q)
            tokens.append(feed)
            if self._adjusts:
                drafted = torch.cat(tokens)
        return Proposal(self.name, torch.cat(tokens), torch.cat(probs) if probs else None)

    @property
    def _adjusts(self) -> bool:
        return self.penalties.active or self.penalties.bias is not None

    def rollback(self, length: int) -> None:
        """Forget the drafts that did not stand."""
        self.sequence.rollback(length)
