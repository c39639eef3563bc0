"""What the decoding loop asks of a model.

An ``Engine`` is a model with its weights; a ``Sequence`` is one text in its cache. The loop never
sees more than this, so that any engine that can extend, roll back and return logits stands behind
it: transformers here, others beside it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import torch

from adaptive.engines.cpu.decoder import Choice
from adaptive.engines.cpu.kernels import Rule
from adaptive.engines.threads import ThreadChoice
from adaptive.tokens import Ids
from adaptive.types import SamplingParams


class FusedCalls(Protocol):
    """A sequence of an engine that does in one call what ``extend`` and a choice do token by token, and what it and the
    acceptance rule do. What runs between two passes finds the processor's caches full of weights."""

    def draft(self, tokens: list[int], choice: Choice) -> list[int]:
        """Append n ``tokens``, and one after the other at most as many more as ``choice`` is prepared for, each chosen
        from what those before it make likely; return those. The last of them is not appended. ``choice.probs`` holds
        what they were drawn from."""

    def verify(self, tokens: list[int], rule: Rule) -> tuple[int, torch.Tensor]:
        """Append n ``tokens``, and judge the last K of them by ``rule``, which is prepared for as many: how many stand,
        and the logits (K + 1, vocab) as from ``extend``."""


class Sequence(Protocol):
    """The cached context of one text. Its length is how many tokens the cache holds.

    ``fused`` is the same sequence where its engine offers that.
    """

    @property
    def fused(self) -> FusedCalls | None:
        """See above."""

    @property
    def length(self) -> int:
        """Tokens in the cache."""

    @property
    def nbytes(self) -> int:
        """Bytes that the cache takes."""

    def reserve(self, length: int) -> None:
        """Make room for ``length`` tokens in all, so that no pass up to there allocates. Raises AdaptiveError where
        there is no memory for them; what is held stays."""

    def extend(self, tokens: Ids, rows: int) -> torch.Tensor:
        """Append n ``tokens`` and return the logits of the last ``rows`` of them, (rows, vocab).

        Row i predicts the token after the (n - rows + i)-th one. Tokens may be on any device; logits
        are on the engine's, in its dtype, and may be overwritten by the sequence's next ``extend``. The caller
        keeps ``length + n`` within the context.
        """

    def rollback(self, length: int) -> None:
        """Forget everything after the first ``length`` tokens. Copies nothing."""

    def copy_prefix(self, other: Sequence, length: int) -> None:
        """Hold the first ``length`` tokens of ``other``, a sequence of the same engine, instead of what is held.

        Raises AdaptiveError where there is no memory; nothing is held then.
        """


class Engine(Protocol):
    """A model that can score tokens in the context of a sequence.

    ``weights`` says how they are held (a dtype, a quantisation), ``end_tokens`` are the ids its
    checkpoint calls the end of a sequence, ``sampling`` what the checkpoint recommends. ``threads`` chooses how many
    threads short passes use; None where that is not chosen while it runs.
    """

    name: str
    weights: str
    vocab_size: int
    context_length: int
    device: torch.device
    end_tokens: frozenset[int]
    sampling: SamplingParams

    @property
    def threads(self) -> ThreadChoice | None:
        """See above."""

    def sequence(self) -> Sequence:
        """A new empty sequence."""

    def apply_adapter(self, folder: Path | None) -> None:
        """Use the weights with this LoRA adapter (a PEFT folder), or the pristine ones for None.

        Takes effect for the next ``extend`` of any sequence. Raises AdaptiveError, leaving the weights
        as they were, when the adapter does not fit.
        """

    def swap_adapter(self, folder: Path | None) -> Iterator[None]:
        """``apply_adapter`` in steps short enough to come between two rounds; it is checked up to the first.

        Between two steps other engines, and sequences of this one that are rolled back, may be used;
        this one may not be extended. Whoever begins it runs it to its end.
        """
