"""The data of one adapter that ``manifest.json`` beside its weights holds, as frozen data classes."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

Status = Literal["candidate", "promoted", "rejected", "rolled_back"]
# Kind of adapter: LoRA matrices for a draft's weights, or all weights of a head on the target's hidden states.
Kind = Literal["lora", "head"]

# Reasons of a candidate whose run was ended, by a kill or a full disk, before it had drawn the consequences of the
# figures: as published, and after half a promotion.
NOT_JUDGED, INTERRUPTED = "not judged yet", "its promotion was interrupted"


@dataclass(frozen=True)
class Interval:
    """A mean with its 95% confidence interval."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class HeldOut:
    """Figures of one held-out set, before (by the draft in use) and after (by this adapter).

    ``mean_acceptance_length_*`` are by replay at ``draft_length``. ``gain`` is the paired difference in
    acceptance rate, after minus before. ``generations`` counts those of one prompt as one, the unit of evidence.
    """

    generations: int
    positions: int
    draft_length: int
    acceptance_before: Interval
    acceptance_after: Interval
    gain: Interval
    mean_acceptance_length_before: Interval
    mean_acceptance_length_after: Interval


@dataclass(frozen=True)
class TrainedOn:
    """The records an adapter was trained on: first and last id in the log, counts, and counts by domain."""

    first_id: int | None
    last_id: int | None
    generations: int
    tokens: int
    domains: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class BaseDraft:
    """The draft an adapter belongs to: its id and the hash of its weights."""

    id: str
    weights: str


@dataclass(frozen=True)
class Manifest:
    """One adapter. ``files`` maps file name to sha256; ``created`` is seconds since the epoch.

    ``hyperparameters`` holds the recipe as plain JSON values. ``recent`` and ``older`` are the figures of the gate's
    held-out sets; None if there was no such set. ``reason`` explains the status in words. ``kind`` is missing in
    manifests from before there were heads.
    """

    id: str
    parent: str | None
    created: float
    status: Status
    reason: str
    base: BaseDraft
    trained_on: TrainedOn
    hyperparameters: dict[str, Any]
    train_seconds: float
    device: str
    recent: HeldOut | None
    older: HeldOut | None
    files: dict[str, str]
    kind: Kind = "lora"

    @property
    def judged(self) -> bool:
        """Whether the gate has judged it and its run has ended as it should. Else the run begins or goes on anew, with
        the same records."""
        return self.recent is not None and not (self.status == "candidate" and self.reason in (NOT_JUDGED, INTERRUPTED))

    @property
    def vocabulary(self) -> str | None:
        """A phrase on a head's draft vocabulary; None if it drafts among all of its target's tokens."""
        noted = self.hyperparameters
        try:
            return (
                f"drafts among {noted['vocabulary']:,} of {noted['vocabulary_of']:,} tokens: "
                f"{noted['vocabulary_coverage']:.1%} of what was said"
            )
        except (KeyError, TypeError, ValueError):
            return None

    def with_status(self, status: Status, reason: str) -> Manifest:
        """The same manifest with another status and reason."""
        return replace(self, status=status, reason=reason)

    def to_json(self) -> str:
        """Indented JSON, one key per field."""
        return json.dumps(asdict(self), indent=2, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """The inverse of ``to_json``. Raises ValueError, KeyError or TypeError for anything else."""
        values = json.loads(text)
        values["base"] = BaseDraft(**values["base"])
        values["trained_on"] = TrainedOn(**values["trained_on"])
        for name in ("recent", "older"):
            held = values[name]
            if held is not None:
                fields: dict[str, Any] = {k: Interval(**v) if isinstance(v, dict) else v for k, v in held.items()}
                values[name] = HeldOut(**fields)
        return cls(**values)
