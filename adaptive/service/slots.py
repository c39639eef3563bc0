"""How many answers are decoded at once, and what each slot does, as the server says it."""

from __future__ import annotations

from dataclasses import dataclass

from adaptive.assistant import Assistant
from adaptive.errors import AdaptiveError

# Slots where none are asked for, and the tokens of an answer with its prompt that there has to be memory for in each.
# More slots make each answer slower while all are in use, fewer let others wait for longer.
SLOTS, TOKENS = 4, 4096


@dataclass(frozen=True)
class Slot:
    """What one slot does: tokens of the answer under way, 0 of 0 where there is none; ``began`` by perf_counter."""

    busy: bool = False
    client: str | None = None
    prompt_tokens: int = 0
    predicted_tokens: int = 0
    began: float | None = None


def possible_slots(assistant: Assistant, wanted: str) -> tuple[int, str | None]:
    """How many slots there can be of those ``wanted``, a number or ``auto``; and why not more, where more are."""
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
