"""How many answers are decoded at once, whose they are, and what happens when memory runs out."""

from __future__ import annotations

import contextlib
import io
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import BUNDLED
from rich.console import Console

from adaptive.caches import Conversations
from adaptive.errors import NoMemoryError, out_of_memory
from adaptive.opened import OpenedPair
from adaptive.pair import load_pair
from adaptive.service.ending import failure
from adaptive.service.engine import EngineThread
from adaptive.service.jobs import Ask, Done, Event, Job, Piece, Prompt
from adaptive.service.metrics import Metrics
from adaptive.service.slots import SLOTS, TOKENS, possible_slots
from adaptive.settings import load_settings
from adaptive.types import SamplingParams, StopParams
from cli.opened import open_pair

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


@pytest.mark.thorough
def test_a_request_for_many_answers_gives_slots_to_those_who_wait(own_home: Path) -> None:
    settings = load_settings({"dtype": "float32", "record": False})

    def opened() -> contextlib.AbstractContextManager[OpenedPair]:
        return open_pair(settings, Console(file=io.StringIO()), cache_bytes=10**9)

    thread = EngineThread(opened, Metrics(), queue=4, slots="2")
    order, waiting, over = list[str](), threading.Event(), threading.Event()

    def ask(name: str, answers: int, tokens: int) -> Job:
        stop = StopParams(tokens, ignore_eos=True)
        asked = Ask((Prompt([5, 6, 7], (), "text"),), SamplingParams(), stop, answers, name, None, False, False, True)
        return Job(asked, lambda event: said(name, event))

    def said(name: str, event: Event) -> None:
        if isinstance(event, Piece) and name == "many" and len(thread.works) == 2 and not waiting.is_set():
            waiting.set()  # both slots are taken
            thread.submit(ask("one", 1, 8))
        if isinstance(event, Done):
            order.append(name)
            if len(order) == 2:
                over.set()

    thread.start(when_over=lambda: None)
    try:
        thread.submit(ask("many", 8, 60))
        assert over.wait(120)
    finally:
        thread.close()
    assert order == ["one", "many"]


def test_without_memory_for_a_copy_the_copy_is_empty_and_idle_conversations_give_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on a device, where the buffers are allocated with their first contents."""
    pair = load_pair(load_settings({"target": str(BUNDLED / "draft"), "draft": "none", "dtype": "float64"}))
    one, other = pair.target.sequence(), pair.target.sequence()
    one.extend([3, 4, 5, 6], 1)

    def full(cache: Any, source: Any, length: int) -> None:
        cache.length = length  # as if some layers had been copied
        raise torch.OutOfMemoryError("no memory")

    with monkeypatch.context() as patched:
        patched.setattr(type(one.cache), "copy_prefix", full)
        with pytest.raises(NoMemoryError) as raised:
            other.copy_prefix(one, 3)
    assert other.length == 0
    assert out_of_memory(raised.value)
    assert out_of_memory(torch.OutOfMemoryError("x"))
    assert failure(torch.OutOfMemoryError("x")).status == failure(raised.value).status == 503
    conversations = Conversations(pair.target, None, 10**9)
    kept, used = conversations.take([3, 4, 5]), conversations.take([9, 8, 7], name="used")
    for conversation in (kept, used):
        conversation.target.sequence.extend([3, 4, 5], 1)
    used.under_way = True
    conversations.free_idle()
    assert (kept.nbytes, used.nbytes > 0) == (0, True)
