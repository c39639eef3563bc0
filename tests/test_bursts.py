"""Bursts, rounds whose tokens are shown together: tokens decoded past the end of an answer leave no trace."""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest
from conftest import BUNDLED

from adaptive.assistant import Assistant
from adaptive.control.costs import LONGEST, CostTable
from adaptive.control.goodput import GoodputLength
from adaptive.control.policy import FixedLength
from adaptive.decoding import loop
from adaptive.pair import Pair, load_pair
from adaptive.settings import load_settings
from adaptive.types import Message, Round, SamplingParams, StopParams

GREEDY = SamplingParams(temperature=0.0)
FIRST = [Message("user", "Write a short story about a dog and a river.")]
# Costs under which drafting always pays.
CHEAP = CostTable(1e-5, 1e-6, 1e-6, tuple(1e-3 + 1e-6 * k for k in range(LONGEST + 1)), 1e-6, 1e-6, 0.0, 0)


@pytest.fixture(scope="module")
def pair() -> Pair:
    return load_pair(load_settings({"dtype": "float32", "device": "cpu", "threads": 1}))


def answer(assistant: Assistant, messages: list[Message], stop: StopParams, tokens: int | None = None) -> list[int]:
    """The tokens shown for an answer, which is cancelled after ``tokens`` tokens."""
    shown = []
    steps = assistant.chat(messages, GREEDY, stop)
    for step in steps:
        shown.append(step.token)
        if len(shown) == tokens:
            steps.close()  # type: ignore[attr-defined]
    return shown


@pytest.mark.parametrize("length", [0, 3])
@pytest.mark.parametrize("how", ["stop-string", "broken-off", "length"])
def test_what_follows_the_end_of_an_answer_is_forgotten(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, length: int, how: str
) -> None:
    monkeypatch.setattr(loop, "BURST_S", 60.0)  # the whole answer
    assistant = Assistant(pair, FixedLength(length), None)
    whole = answer(assistant, FIRST, StopParams(60, ignore_eos=True))
    assert assistant.last is not None
    assert len(whole) == 60
    text = assistant.last.text
    word = text[40:48]
    assistant = Assistant(pair, FixedLength(length), None)
    if how == "stop-string":
        shown = answer(assistant, FIRST, StopParams(60, ignore_eos=True, stop=(word,)))
    elif how == "broken-off":
        shown = answer(assistant, FIRST, StopParams(60, ignore_eos=True), tokens=17)
    else:
        shown = answer(assistant, FIRST, StopParams(23, ignore_eos=True))
    done = assistant.last
    assert done is not None
    assert done.finish_reason == {"stop-string": "stop", "broken-off": "cancelled", "length": "length"}[how]
    assert shown == done.output == whole[: len(shown)]
    assert 1 < len(shown) < 60
    if how == "stop-string":
        assert done.text == text[: text.index(word)]
    committed = [1 + r.accepted for r in done.rounds]
    assert 1 + sum(committed[:-1]) < len(shown) <= 1 + sum(committed)
    assert (done.drafted, done.accepted) == (sum(r.drafted for r in done.rounds), sum(r.accepted for r in done.rounds))
    assert done.timings.predicted_s >= sum(r.draft_s + r.verify_s for r in done.rounds) > 0

    second = [*FIRST, Message("assistant", done.text), Message("user", "And then?")]
    fresh = Assistant(pair, FixedLength(length), None)
    assert answer(assistant, second, StopParams(20)) == answer(fresh, second, StopParams(20))


@pytest.mark.parametrize("whole", [0, 3])
def test_the_time_of_a_burst_that_breaks_off_is_not_subtracted(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, whole: int
) -> None:
    """After the prompt and ``whole`` bursts of one round, the fifth round of a burst fails."""
    assistant, usual, calls = Assistant(pair, FixedLength(3), None), loop.speculative_round, itertools.count()

    def breaks_off(*args: Any, **kwargs: Any) -> Any:
        if (call := next(calls)) == whole:
            monkeypatch.setattr(loop, "BURST_S", 60.0)
        if call == whole + 5:
            raise KeyboardInterrupt
        return usual(*args, **kwargs)

    monkeypatch.setattr(loop, "BURST_S", 0.0)
    monkeypatch.setattr(loop, "speculative_round", breaks_off)
    with pytest.raises(KeyboardInterrupt):
        answer(assistant, FIRST, StopParams(60, ignore_eos=True))
    done = assistant.last
    assert done is not None
    assert len(done.rounds) == whole
    assert done.timings.predicted_s >= sum(r.draft_s + r.verify_s for r in done.rounds)


@pytest.mark.parametrize("how", ["end-token", "stop-string"])
def test_what_was_drafted_behind_the_end_of_an_answer_counts_nowhere(how: str) -> None:
    """The draft is the target itself, so all of its tokens are accepted, including those after the end."""
    target = str(BUNDLED / "target")
    twins = load_pair(load_settings({"target": target, "draft": target, "dtype": "float32", "device": "cpu"}))
    assistant = Assistant(twins, FixedLength(8), None)
    whole = answer(assistant, FIRST, StopParams(60, ignore_eos=True))
    assert assistant.last is not None
    assert [(r.drafted, r.accepted) for r in assistant.last.rounds[:3]] == [(8, 8)] * 3
    # End the answer at a drafted token that did not occur before and is followed by others of its round.
    place = next(i for i in range(10, 60) if (i - 1) % 9 in range(1, 7) and whole[i] not in whole[:i])
    before, inside = (place - 1) // 9, (place - 1) % 9 + 1
    if how == "end-token":
        stop = StopParams(60, stop_token_ids=(whole[place],))
    else:
        text, upto = (twins.tokenizer.decode(whole[:n], skip_special_tokens=True) for n in (place, place + 1))
        word = upto[max(0, len(text) - 12) :]
        assert word not in text
        stop = StopParams(60, ignore_eos=True, stop=(word,))
    shown = answer(assistant, FIRST, stop)
    assert shown == whole[: place + 1]
    assert [(r.drafted, r.accepted) for r in assistant.last.rounds] == [(8, 8)] * before + [(inside, inside)]
    assert assistant.last.accepted == 8 * before + inside


def test_text_comes_while_the_answer_is_being_decoded(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """A burst covers only a small part of an answer."""
    monkeypatch.setattr(loop, "BURST_S", 1e-4)
    assistant = Assistant(pair, FixedLength(0), None)
    decoded = []
    for _ in assistant.chat(FIRST, GREEDY, StopParams(100, ignore_eos=True)):
        assert assistant.last is not None
        decoded.append(len(assistant.last.committed) - len(assistant.last.request.prompt))
    assert decoded[0] == 1
    assert len(set(decoded)) > 5


@pytest.mark.thorough
def test_the_controller_knows_of_each_round_between_two_questions_how_sure_the_draft_was(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "BURST_S", 60.0)
    policy, learned, asked = GoodputLength(CHEAP), [], []
    settle, next_length = policy.settle, policy.next_length
    monkeypatch.setattr(
        policy, "settle", lambda: (learned.extend(zip(policy.seen, policy.sure, strict=True)), settle())
    )
    monkeypatch.setattr(policy, "next_length", lambda *now: asked.append(now) or next_length(*now))
    assistant = Assistant(pair, policy, None)
    answer(assistant, FIRST, StopParams(200, ignore_eos=True))
    done = assistant.last
    assert done is not None
    policy.settle()
    assert [timed.outcome for timed, _ in learned] == done.rounds
    # Between two decisions the number of tokens the draft has not seen follows from the tokens fed and accepted.
    for (before, _), (after, _) in itertools.pairwise(learned):
        if before.steps:
            assert after.waiting == max(0, 1 + before.outcome.accepted - before.steps)
    drafted = [(timed.outcome.drafted, timed.steps, bins) for timed, bins in learned if timed.steps]
    assert all(steps == len(bins) and 0 <= steps - count <= 1 for count, steps, bins in drafted)
    assert len({tuple(bins) for _, _, bins in drafted}) > 10
    assert len(asked) < 0.5 * len(done.rounds)


class Observing(FixedLength):
    """A policy whose clock counts only the thread's processor time. It keeps the seconds of the rounds it observes."""

    clock = staticmethod(time.thread_time)

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.observed: list[float] = []

    def observe(self, outcome: Round) -> None:
        super().observe(outcome)
        self.observed.append(outcome.draft_s + outcome.verify_s)


def test_a_round_that_waits_for_a_processor_is_observed_by_its_work_and_kept_by_the_time_on_the_wall(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "BURST_S", 60.0)  # the whole answer
    policy, extend = Observing(2), type(pair.target.sequence()).extend

    def late(*given: Any) -> Any:
        time.sleep(0.005)  # as if another program had the core
        return extend(*given)

    assistant = Assistant(pair, policy, None)
    monkeypatch.setattr(type(pair.target.sequence()), "extend", late)
    monkeypatch.setattr(type(pair.target.sequence()), "fused", None)
    answer(assistant, FIRST, StopParams(30, ignore_eos=True))
    done = assistant.last
    assert done is not None
    kept = [outcome.draft_s + outcome.verify_s for outcome in done.rounds]
    assert sum(policy.observed) > 0
    assert sum(kept) - sum(policy.observed) > 0.004 * len(kept)
    assert 0.005 * len(kept) < sum(kept) <= done.timings.predicted_s
