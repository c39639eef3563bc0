"""Drafting ahead while a target reads its weights from disk: no text changes, nothing guessed stays in a cache."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import BUNDLED, Command, save_random_adapter

from adaptive.assistant import Assistant
from adaptive.control.policy import FixedLength, LengthPolicy
from adaptive.drafting.ahead import AheadDrafter
from adaptive.engines.cpu.kernels import library
from adaptive.pair import Pair, load_pair
from adaptive.settings import load_settings
from adaptive.types import Message, SamplingParams, StopParams

GREEDY, SEEDED = SamplingParams(temperature=0.0), SamplingParams(temperature=0.7, seed=3)
STREAMED = {"target": str(BUNDLED / "target"), "draft": str(BUNDLED / "draft"), "dtype": "float32", "memory": "20MB"}


@pytest.fixture(scope="module")
def streamed(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """The bundled pair, most of whose target is read from disk."""
    if library() is None:
        pytest.skip("the kernels were not built")
    return load_pair(load_settings({**STREAMED, "home": str(tmp_path_factory.mktemp("streamed"))}))


def answers(assistant: Assistant, prompts: list[str], sampling: SamplingParams, most: int) -> list[list[int]]:
    stop = StopParams(max_new_tokens=most, ignore_eos=True)
    return [[step.token for step in assistant.chat([Message("user", one)], sampling, stop)] for one in prompts]


@pytest.mark.thorough
@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seed"])
@pytest.mark.parametrize("policy", [FixedLength(5), FixedLength(24, True)], ids=["chains", "trees"])
def test_a_streamed_target_says_what_it_says_alone(
    streamed: Pair, prompts: list[str], sampling: SamplingParams, policy: LengthPolicy
) -> None:
    plain, drafted = Assistant(streamed, FixedLength(0), None), Assistant(streamed, policy, None)
    assert answers(drafted, prompts[:2], sampling, 30) == answers(plain, prompts[:2], sampling, 30)
    assert drafted.last is not None
    assert isinstance(drafted.last.drafter, AheadDrafter)
    assert drafted.last.drafter.ahead_s > 0
    assert drafted.last.accepted > 0


@pytest.fixture(scope="module")
def alone(prompts: list[str]) -> list[list[int]]:
    """The answers of the target without a draft, all of its weights in memory."""
    resident = load_pair(load_settings({name: said for name, said in STREAMED.items() if name != "memory"}))
    return answers(Assistant(resident, FixedLength(0), None), prompts, GREEDY, 200)


@pytest.mark.long
@pytest.mark.parametrize("adapter", [False, True], ids=["plain-draft", "with-adapter"])
@pytest.mark.parametrize(
    "policy", [FixedLength(5), *(FixedLength(n, True) for n in (8, 32, 128))], ids=lambda p: p.name
)
def test_twenty_answers_of_two_hundred_tokens_of_a_streamed_target(
    streamed: Pair,
    alone: list[list[int]],
    prompts: list[str],
    policy: LengthPolicy,
    adapter: bool,
    tmp_path: Path,
) -> None:
    drafted = Assistant(streamed, policy, None)
    if adapter:
        drafted.use_adapter("0001", save_random_adapter(BUNDLED / "draft", tmp_path / "adapter"))
    try:
        assert answers(drafted, prompts, GREEDY, 200) == alone
    finally:
        drafted.use_adapter(None, None)


@pytest.mark.thorough
def test_conversations_go_on_behind_what_was_drafted_ahead(streamed: Pair, adaptive: Command) -> None:
    """At the next turn the caches hold the text and no guessed tokens."""
    once, anew = Assistant(streamed, FixedLength(4), None), Assistant(streamed, FixedLength(4), None)
    stop, chat = StopParams(max_new_tokens=24, ignore_eos=True), [Message("user", "Count from one to ten.")]
    list(once.chat(chat, GREEDY, stop))
    assert once.last is not None
    chat += [Message("assistant", once.last.text), Message("user", "And on.")]
    said = [[step.token for step in one.chat(chat, GREEDY, stop)] for one in (once, anew)]
    assert said[0] == said[1]
    drafted = [one.last.accepted for one in (once, anew) if one.last is not None]
    assert drafted[0] == drafted[1]


def test_nothing_is_drafted_ahead_on_a_draft_that_is_being_changed(streamed: Pair, tmp_path: Path) -> None:
    """An answer may begin in the middle of a swap, whose parts change the weights between the rounds of another."""
    draft = streamed.draft
    assert draft is not None
    assistant = Assistant(streamed, FixedLength(24, True), None)
    assistant.between_rounds = lambda: not assistant.swapping
    assistant.begin_swap("0001", save_random_adapter(BUNDLED / "draft", tmp_path / "adapter"))
    try:
        steps = assistant.chat([Message("user", "Count.")], GREEDY, StopParams(max_new_tokens=4, ignore_eos=True))
        assert len(list(steps)) == 4
        assert assistant.last is not None
        assert isinstance(assistant.last.drafter, AheadDrafter)
        assert assistant.last.drafter.ahead_s == 0.0
    finally:
        assistant.finish_swap()
        draft.apply_adapter(None)
