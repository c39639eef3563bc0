"""How an adapter is trained: all choices in one frozen object, which is also written into the manifest."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, get_args

from adaptive.errors import AdaptiveError

LossName = Literal["auto", "forward-kl", "reverse-kl", "js", "tv", "kl-tv", "cross-entropy"]
Start = Literal["zero", "parent"]


def default_rank(width: int) -> int:
    """Adapter rank for a draft of hidden size ``width``: 128 at 256, 64 up to 512, 32 beyond; at most half the width.

    In a draft of width 256, rank 32 achieves 88% of the gain of training all weights, 128 achieves 91% and 256 93%
    (docs/notes/2026-11-distillation.md). In a wider draft, rank 32 trains more parameters than 128 does at width 256.
    """
    power_of_two = 1 << (2**15 // width).bit_length() >> 1
    return max(1, min(width // 2, max(32, power_of_two)))


@dataclass(frozen=True)
class Recipe:
    """The choices of one training run.

    ``loss`` auto is the KL-TV mixture where the target's distribution was stored, and cross-entropy where
    only text is known (``per_position.position_losses``). ``rank`` and ``learning_rate`` None depend on the draft's
    width (``default_rank``, ``lora.default_learning_rate``). ``b_factor`` multiplies the rate of the B matrices, which
    start at zero and learn too slowly at the rate of the others (LoRA+, Hayou et al. 2024). ``start`` zero trains
    a new adapter over the supervision buffer, parent continues the adapter in use. ``buffer`` is the number of
    generations in the supervision buffer, the newest ones. Each update is on ``batch`` of them and ``rehearsed`` texts
    of the draft itself (``trainers.rehearsal``; 0: none). A run ends after ``epochs`` (None:
    see ``fit.DEFAULT_EPOCHS``), after ``max_seconds`` of training, or when ``patience`` evaluations in a row
    found no better weights, whichever is first. ``draft_length`` is the one for which the gate computes its figures. A
    head is trained on ``unroll`` steps of a draft, and always continues the one in use.
    """

    loss: LossName = "auto"
    rank: int | None = None
    start: Start = "zero"
    learning_rate: float | None = None
    b_factor: float = 4.0
    batch: int = 8
    rehearsed: int = 2
    epochs: float | None = None
    max_seconds: float | None = None
    evaluations: int = 16
    patience: int = 5
    buffer: int = 2000
    draft_length: int = 4
    unroll: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise AdaptiveError, naming the choice, for a value that cannot work."""
        if self.loss not in get_args(LossName):
            raise AdaptiveError(f"loss is {self.loss!r}; it must be one of {', '.join(get_args(LossName))}")
        positive = {
            "rank": 1 if self.rank is None else self.rank,
            "lr": 1.0 if self.learning_rate is None else self.learning_rate,
            "b factor": self.b_factor,
            "epochs": 1.0 if self.epochs is None else self.epochs,
            "max-seconds": 1.0 if self.max_seconds is None else self.max_seconds,
            "batch": self.batch,
            "evaluations": self.evaluations,
            "patience": self.patience,
            "records": self.buffer,
            "draft length": self.draft_length,
            "unroll": self.unroll,
        }
        for name, value in positive.items():
            if not 0 < value < math.inf:  # also refuses nan
                raise AdaptiveError(f"{name} is {value}; it must be above 0, and finite")
        if self.rehearsed < 0:
            raise AdaptiveError(f"rehearsed is {self.rehearsed}; it must be at least 0")

    def rivals(self, width: int) -> tuple[Recipe, ...]:
        """Other recipes worth trying for a draft of this width when time does not matter (``--compare``).

        Each changes one choice to a value that won on some kind of text (docs/notes/2026-11-distillation.md).
        """
        others: tuple[dict[str, Any], ...] = (
            {"loss": "js" if self.loss != "js" else "kl-tv"},
            {"rank": 2 * (self.rank or default_rank(width))},
            {"start": "zero" if self.start == "parent" else "parent"},
        )
        return tuple(replace(self, **other) for other in others)

    def difference(self, other: Recipe) -> str:
        """The choices that differ from ``other``'s, as ``name=value``."""
        mine, theirs = self.to_json(), other.to_json()
        return ", ".join(f"{name}={value}" for name, value in mine.items() if value != theirs[name])

    def to_json(self) -> dict[str, Any]:
        """Every choice as plain JSON values, for the manifest."""
        return asdict(self)
