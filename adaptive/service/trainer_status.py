"""What the trainer says of itself, for ``/adaptive/trainer``, the dashboard and the chat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Activity = Literal["off", "waiting", "training", "paused", "backing off"]


@dataclass(frozen=True)
class TrainerStatus:
    """The trainer's activity and its reason in words; the progress of the run; how the last run ended; and the
    judgement of the adapter in use by live acceptance, in words (``watch``)."""

    activity: Activity
    reason: str
    policy: str
    new_generations: int
    share: float | None
    acceptance: float | None
    last_run: str | None
    runs: int
    crashes: int
    watch: str
