"""An adapter swapped in between two rounds of an answer: the text stays the target's, and figures stay separate."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import BUNDLED, save_random_adapter
from rich.console import Console
from shortages import replaced_by_a_folder
from slow_disk import promoted_on_a_slow_disk, until
from test_service_learning import publish_random_adapter

from adaptive import swapper
from adaptive.control.policy import FixedLength
from adaptive.decoding import loop
from adaptive.errors import AdaptiveError
from adaptive.opened import OpenedPair
from adaptive.records.log import Log
from adaptive.service.trainer import Trainer
from adaptive.settings import load_settings
from adaptive.types import Round, SamplingParams, StopParams
from cli.chat_session import Chat
from cli.opened import open_pair

GREEDY = SamplingParams(temperature=0.0, seed=1)
LONG = StopParams(160, ignore_eos=True)
PROMPT = "Once upon a time there was a small boat that"


@pytest.fixture
def session(own_home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[OpenedPair]:
    monkeypatch.setattr(swapper, "LOOK_S", 0.0)
    monkeypatch.setattr(swapper, "SLICE_S", 0.0)  # one step of a swap between two rounds
    monkeypatch.setattr(swapper, "WAIT_S", 60.0)  # an adapter is read in the gap in which it was noticed
    monkeypatch.setattr(loop, "BURST_S", 0.0)  # one round per burst
    settings = load_settings({"dtype": "float32", "draft_length": "4", "history": "off"})
    with open_pair(settings, Console(file=io.StringIO())) as opened:
        opened.assistant.between_rounds = opened.swapper.between_rounds
        yield opened


def alone(session: OpenedPair) -> list[int]:
    """The target's output without a draft."""
    policy, session.assistant.policy = session.assistant.policy, FixedLength(0)
    said = [step.token for step in session.assistant.complete(PROMPT, GREEDY, LONG, record=False)]
    session.assistant.policy = policy
    return said


def test_swaps_between_rounds_change_no_token_and_each_adapters_rounds_are_known(
    session: OpenedPair, tmp_path: Path
) -> None:
    expected = alone(session)
    names = [publish_random_adapter(session.store, tmp_path / str(seed), seed) for seed in (1, 2)]
    plan: dict[int, str | None] = {30: names[0], 70: names[1], 110: None}
    said, assistant = [], session.assistant
    for step in assistant.complete(PROMPT, GREEDY, LONG):
        said.append(step.token)
        wanted = plan.get(len(said), "")
        if wanted:
            session.store.promote(wanted, "the test says so")
        elif wanted is None:
            session.store.rollback("the test says so")
            session.store.rollback("the test says so")
    assert said == expected
    assert [adapter for adapter, _ in assistant.drafted_by] == [None, *names, None]
    assert session.swapper.swaps == 3
    assert assistant.last is not None
    rounds = assistant.last.rounds
    firsts = [first for _, first in assistant.drafted_by[1:]]
    assert all(rounds[first].drafted for first in firsts)
    # Swaps go in slices, so that each let the answer continue without a draft for some rounds.
    assert all(not rounds[first - 1].drafted for first in firsts)
    assert assistant.log is not None
    assert assistant.log.flush()
    with Log(session.state.records) as log:
        assert [g.generation.adapter for g in log.generations()] == [None]
    # Caches of the previous draft are gone, so the next answer is drafted from this draft's own.
    assert [step.token for step in assistant.complete(PROMPT, GREEDY, LONG)] == expected


@pytest.mark.thorough
def test_a_chat_credits_every_round_to_the_adapter_that_drafted_it(
    session: OpenedPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = publish_random_adapter(session.store, tmp_path / "adapter")
    credited: list[tuple[str | None, int]] = []

    class Listening(Trainer):
        def answered(self, adapter: str | None, rounds: tuple[Round, ...]) -> None:
            super().answered(adapter, rounds)
            credited.append((adapter, len(rounds)))

    class Screen(io.StringIO):
        """Promotes the adapter once part of the answer has been shown."""

        def write(self, text: str) -> int:
            if len(self.getvalue()) < 60 <= len(self.getvalue()) + len(text):
                session.store.promote(name, "the test says so")
            return super().write(text)

    settings = load_settings({"dtype": "float32", "draft_length": "4", "max_new_tokens": 160, "temperature": 0.0})
    console = Console(file=io.StringIO())
    conversation = Chat(settings, session, console, None, None, Listening(settings, session.state, 0))
    conversation.limits = LONG
    monkeypatch.setattr(sys, "stdout", Screen())
    conversation.ask(PROMPT)
    monkeypatch.undo()
    assert session.assistant.last is not None
    (_, before), (_, after) = credited
    assert [adapter for adapter, _ in credited] == [None, name]
    assert before > 0
    assert after > 0
    assert before + after == len(session.assistant.last.rounds)


@pytest.mark.thorough
def test_a_swap_that_the_answer_was_too_short_for_is_finished_before_the_next(
    session: OpenedPair, tmp_path: Path
) -> None:
    name = publish_random_adapter(session.store, tmp_path / "adapter")
    expected, assistant = alone(session), session.assistant
    steps = assistant.complete(PROMPT, GREEDY, LONG)
    next(steps)
    session.store.promote(name, "the test says so")
    while not assistant.swapping:
        next(steps)
    steps.close()  # type: ignore[attr-defined]
    assert assistant.adapter is None
    assert session.swapper.use_promoted()
    assert assistant.adapter == name
    assert [step.token for step in assistant.complete(PROMPT, GREEDY, LONG)] == expected


@pytest.mark.thorough
@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_an_answer_goes_on_with_its_draft_while_an_adapter_is_verified_and_read(
    session: OpenedPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(swapper, "WAIT_S", 0.0)
    expected, assistant = alone(session), session.assistant
    name, slow = promoted_on_a_slow_disk(session.store, tmp_path / "adapter")
    for reads in range(2):  # by the hash, and by the swap
        assert [step.token for step in assistant.complete(PROMPT, GREEDY, LONG)] == expected
        assert not slow.in_vain, "the answer waited for the disk"
        assert assistant.last is not None
        assert all(outcome.drafted for outcome in assistant.last.rounds[:-1])  # by the draft as it is
        assert assistant.adapter is None
        assert not assistant.swapping
        slow.answer(1)
        until(lambda reads=reads: slow.reads == 2 + reads)  # one was for the promotion
    while assistant.adapter is None:
        assert [step.token for step in assistant.complete(PROMPT, GREEDY, LONG)] == expected
    assert assistant.adapter == name
    assert session.swapper.swaps == 1
    assert [step.token for step in assistant.complete(PROMPT, GREEDY, LONG)] == expected


@pytest.mark.thorough
@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_an_adapter_that_is_rolled_back_while_it_is_read_does_not_come_into_use(
    session: OpenedPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(swapper, "WAIT_S", 0.0)
    expected, assistant = alone(session), session.assistant
    _, slow = promoted_on_a_slow_disk(session.store, tmp_path / "adapter")
    assert session.swapper.between_rounds()
    until(lambda: slow.opened == 2)  # one was for the promotion
    assert not slow.in_vain
    session.store.rollback("the test says so")
    slow.answer(2)
    until(lambda: slow.reads == 3)
    assert [step.token for step in assistant.complete(PROMPT, GREEDY, LONG)] == expected
    assert not session.swapper.use_promoted()
    assert assistant.adapter is None
    assert session.swapper.swaps == 0


@pytest.mark.thorough
def test_an_adapter_that_does_not_fit_is_passed_over_in_the_middle_of_an_answer(
    session: OpenedPair, tmp_path: Path
) -> None:
    expected = alone(session)
    foreign = publish_random_adapter(session.store, tmp_path / "adapter", draft=BUNDLED / "target")
    session.store.promote(foreign, "the test says so")
    assert [step.token for step in session.assistant.complete(PROMPT, GREEDY, LONG)] == expected
    assert session.assistant.adapter is None
    assert session.swapper.swaps == 0


def test_an_adapter_that_cannot_be_read_for_a_while_comes_into_use_afterwards(
    session: OpenedPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    session.swapper._say = said.append
    names = [publish_random_adapter(session.store, tmp_path / str(seed), seed) for seed in (1, 2)]
    for name in names:
        session.store.promote(name, "the test says so")
    with replaced_by_a_folder(session.store.path(names[1]) / "adapter_model.safetensors"):
        assert session.swapper.use_promoted()
        assert session.assistant.adapter == names[0]  # meanwhile
        monkeypatch.setattr(swapper, "AGAIN_S", 0.0)
        session.swapper._looked = 0.0
        for _ in range(3):
            session.swapper.between_rounds()
        assert session.assistant.adapter == names[0]
    assert len(said) == 1
    assert f"cannot be read (Is a directory); adapter {names[0]} is used" in said[0]
    assert session.swapper.use_promoted()
    assert session.assistant.adapter == names[1]


def test_the_adapter_that_is_promoted_while_anothers_merge_fails_comes_into_use(
    session: OpenedPair, tmp_path: Path
) -> None:
    names = [publish_random_adapter(session.store, tmp_path / str(seed), seed) for seed in (1, 2)]
    draft = session.assistant.pair.draft
    assert draft is not None

    def burst(changed: frozenset[str]) -> None:
        draft.adapter.listeners.remove(burst)  # type: ignore[attr-defined]
        raise MemoryError("no room")

    session.store.promote(names[0], "the test says so")
    session.swapper.between_rounds()
    assert session.assistant.swapping
    session.store.promote(names[1], "the test says so")
    draft.adapter.listeners.append(burst)  # type: ignore[attr-defined]
    assert session.swapper.use_promoted()
    assert session.assistant.adapter == names[1]


@pytest.mark.parametrize("passes", [True, False], ids=["for-a-while", "for-long"])
def test_an_adapter_for_whose_merging_memory_is_short_comes_into_use_afterwards(
    session: OpenedPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, passes: bool
) -> None:
    said: list[str] = []
    told: list[str | None] = []
    session.swapper._say = said.append
    session.swapper.on_swap = lambda: told.append(session.assistant.adapter)
    monkeypatch.setattr(swapper, "AGAIN_S", 0.0)
    names = [publish_random_adapter(session.store, tmp_path / str(seed), seed) for seed in (1, 2)]
    session.store.promote(names[0], "the test says so")
    assert session.swapper.use_promoted()
    draft = session.assistant.pair.draft
    assert draft is not None
    listeners = draft.adapter.listeners  # type: ignore[attr-defined]

    def burst(changed: frozenset[str]) -> None:
        if any(draft.adapter._pristine[name].equal(draft.adapter._weight(name)) for name in changed):  # type: ignore[attr-defined]
            return  # the weights are restored
        raise MemoryError("no room")

    session.store.promote(names[1], "the test says so")
    listeners.append(burst)
    assert session.swapper.use_promoted()
    assert (session.assistant.adapter, told) == (None, [names[0], None])
    for _ in range(0 if passes else 9):
        session.swapper.between_rounds()
    listeners.remove(burst)
    for _ in range(99):
        session.swapper.between_rounds()
    assert (session.assistant.adapter, told) == (names[1], [names[0], None, names[1]])
    assert len(said) == 1
    assert "could not be merged (no room); adapter none is used" in said[0]


def test_a_merge_that_fails_midway_leaves_the_plain_draft(session: OpenedPair, tmp_path: Path) -> None:
    assistant = session.assistant
    draft = assistant.pair.draft
    assert draft is not None
    expected = [step.token for step in assistant.complete(PROMPT, GREEDY, LONG)]
    assert assistant.last is not None
    accepted = assistant.last.accepted
    assistant.begin_swap("0001", save_random_adapter(BUNDLED / "draft", tmp_path / "adapter"))

    def burst(changed: frozenset[str]) -> None:
        draft.adapter.listeners.remove(burst)  # type: ignore[attr-defined]
        raise MemoryError("no room")

    draft.adapter.listeners.append(burst)  # type: ignore[attr-defined]
    with pytest.raises(AdaptiveError, match="could not be merged"):
        assistant.finish_swap()
    assert assistant.adapter is None
    assert [step.token for step in assistant.complete(PROMPT, GREEDY, LONG)] == expected
    assert assistant.last.accepted == accepted
