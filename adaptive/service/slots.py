"""Determines how many answers can be decoded at once, and describes the state of a slot."""

from __future__ import annotations

from dataclasses import dataclass

from adaptive.assistant import Assistant
from adaptive.engines.protocol import PreparesTogether, ReadsFeatures
from adaptive.errors import AdaptiveError

# Number of slots for ``auto``, and the tokens (prompt and answer) that each must have memory for. Too many slots: each
# answer is slow while all are in use. Too few: requests wait longer.
SLOTS, TOKENS = 4, 4096


@dataclass(frozen=True)
class Slot:
    """The state of one slot: token counts of the answer in progress, 0 if there is none; ``began`` by perf_counter."""

    busy: bool = False
    prompt_tokens: int = 0
    predicted_tokens: int = 0
    began: float | None = None


def possible_slots(assistant: Assistant, wanted: str) -> tuple[int, str | None]:
    """The number of slots for ``wanted`` (a number or ``auto``), and the reason if it is lower than wanted."""
    if wanted == "1":
        return 1, None
    target, conversations = assistant.pair.target, assistant.conversations
    if not target.joint:
        return 1, f"one answer at a time: {target.name} makes no passes over several texts of this model"
    if not conversations.limit:
        return 1, "one answer at a time: no memory is given to the caches of conversations (cache_mb)"
    try:
        each = min(TOKENS, target.context_length) * conversations.token_bytes
    except AdaptiveError as error:
        return 1, f"one answer at a time: {error}"
    if wanted != "auto":
        return int(wanted), None
    fits = max(1, conversations.limit // each)
    if fits >= SLOTS:
        return SLOTS, None
    return fits, f"{fits} at once: an answer of {TOKENS} tokens takes {each / 1e6:.0f} MB of cache_mb"


def prepare_slots(assistant: Assistant, slots: int) -> None:
    """Let the target prepare its passes over several answers, before the first request."""
    target = assistant.pair.target
    if slots > 1 and isinstance(target, PreparesTogether):
        target.prepare_together(slots, isinstance(assistant.pair.draft, ReadsFeatures))
