"""The number of answers at once that ``auto`` chooses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from adaptive.service.slots import SLOTS, TOKENS, possible_slots

EACH = 1000 * TOKENS  # bytes of the caches of one answer


def assistant(limit: int, joint: bool = True) -> Any:
    target = SimpleNamespace(joint=joint, name="it", context_length=10 * TOKENS)
    return SimpleNamespace(
        pair=SimpleNamespace(target=target), conversations=SimpleNamespace(limit=limit, token_bytes=1000)
    )


@pytest.mark.parametrize(
    ("limit", "slots"), [(SLOTS * EACH, SLOTS), (10 * SLOTS * EACH, SLOTS), (2 * EACH, 2), (EACH // 2, 1), (0, 1)]
)
def test_there_are_as_many_slots_as_memory_has_room_for(limit: int, slots: int) -> None:
    found, reason = possible_slots(assistant(limit), "auto")
    assert found == slots
    assert (reason is None) == (slots == SLOTS)
    assert reason is None or "cache_mb" in reason


def test_a_model_without_joint_passes_has_one_slot_whatever_is_wanted() -> None:
    for wanted in ("auto", "4"):
        found, reason = possible_slots(assistant(10 * SLOTS * EACH, joint=False), wanted)
        assert (found, "no passes over several texts" in str(reason)) == (1, True)
    assert possible_slots(assistant(EACH), "4") == (4, None)
