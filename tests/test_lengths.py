"""Chains end where a token more is not worth its time, by the draft's confidence, on targets whose passes are slow."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable

import pytest

from adaptive.control.confidence import bin_of
from adaptive.control.lengths import FIRST_TRIES, LENGTHS, LengthByCost
from adaptive.control.policy import Advice, Scope, SharedLength
from adaptive.types import Round

Seconds = Callable[[int], float]
Confidences = Callable[[random.Random], list[float]]


def sure_or_lost(chance: random.Random) -> list[float]:
    """The draft's confidence in each token: high in some rounds, and low in others."""
    return [0.95 if chance.random() < 0.95 else 0.4] * 32 if chance.random() < 0.5 else [0.35] * 32


def one_word(chance: random.Random) -> list[float]:
    """The same for every token."""
    return [0.75] * 32


def asked(policy: LengthByCost | SharedLength, confidences: list[float], most: int) -> int:
    """The tokens that a draft of these confidences makes, at most ``most``."""
    if not most:
        return 0
    assert policy.adviser is not None
    for position, confidence in enumerate(confidences[:most], 1):
        advice = policy.adviser(position, confidence)
        if advice is not Advice.MORE:
            return position - (advice is Advice.DROP)
    return most


def accepted(confidences: list[float], drafted: int, truth: float, chance: random.Random) -> int:
    right = (chance.random() < truth * c for c in confidences[:drafted])
    return sum(1 for _ in itertools.takewhile(bool, right))


def expected(confidences: list[float], drafted: int, truth: float) -> float:
    """The mean of the accepted tokens."""
    return sum(math.prod(truth * c for c in confidences[:place]) for place in range(1, drafted + 1))


def live(
    policy: LengthByCost, seconds: Seconds, text: Confidences, truth: float = 1.0, count: int = 900
) -> tuple[float, list[int]]:
    """The tokens per second expected of the last third of the rounds, and the lengths of these. A token of confidence c
    is accepted with probability ``truth`` * c."""
    chance, tokens, time, lengths = random.Random(7), 0.0, 0.0, list[int]()
    for number in range(count):
        confidences = text(chance)
        drafted = asked(policy, confidences, policy.next_length(1000))
        kept = accepted(confidences, drafted, truth, chance)
        took = seconds(drafted) * (1 + 0.05 * chance.random())
        policy.observe(Round("head" if drafted else "none", drafted, kept, 0.0, took))
        if number >= 2 * count // 3:
            tokens, time = tokens + 1 + expected(confidences, drafted, truth), time + seconds(drafted)
            lengths.append(drafted)
    return tokens / time, lengths


def best_fixed(seconds: Seconds, text: Confidences, truth: float = 1.0) -> float:
    """The tokens per second of the best fixed length."""
    chance = random.Random(8)
    rounds = [text(chance) for _ in range(2000)]

    def rate(length: int) -> float:
        return sum(1 + expected(one, length, truth) for one in rounds) / len(rounds) / seconds(length)

    return max(rate(length) for length in range(33))


@pytest.mark.parametrize(
    "seconds",
    [
        pytest.param(lambda n: 1 + 0.005 * n, id="nearly free"),
        pytest.param(lambda n: 1 + 0.05 * n, id="dear"),
        pytest.param(lambda n: max(1.0, 0.8 + 0.03 * n), id="the first are free"),
    ],
)
@pytest.mark.parametrize(
    ("text", "truth"),
    [
        pytest.param(sure_or_lost, 1.0, id="sure or lost"),
        pytest.param(one_word, 1.0, id="one word"),
        pytest.param(one_word, 0.7, id="too sure of itself"),
    ],
)
def test_a_chain_is_drafted_as_far_as_it_pays(seconds: Seconds, text: Confidences, truth: float) -> None:
    rate, _ = live(LengthByCost(), seconds, text, truth)
    assert rate > 0.98 * best_fixed(seconds, text, truth)


def test_a_sure_text_gets_longer_chains_than_an_unsure_one() -> None:
    """With dear tokens, no fixed length is right for both."""
    rate, lengths = live(LengthByCost(), lambda n: 1 + 0.06 * n, sure_or_lost)
    assert rate > 1.04 * best_fixed(lambda n: 1 + 0.06 * n, sure_or_lost)
    assert sum(n <= 3 for n in lengths) > 0.3 * len(lengths)
    assert sum(n >= 8 for n in lengths) > 0.3 * len(lengths)


def test_a_draft_that_is_never_right_is_left_but_for_tries() -> None:
    _, lengths = live(LengthByCost(), lambda n: 1 + 0.05 * n, one_word, truth=0.0)
    assert 0 < sum(n > 0 for n in lengths) < 0.15 * len(lengths)


def test_greedy_and_sampled_answers_are_calibrated_apart() -> None:
    policy = LengthByCost()
    for temperature, truth in ((0.0, 1.0), (0.7, 0.5)):
        policy.begin(Scope("", temperature))
        live(policy, lambda n: 1 + 0.05 * n, one_word, truth)
    greedy, sampled = (policy.calibration[which].table[bin_of(0.75)] for which in (True, False))
    assert greedy == pytest.approx(0.75, abs=0.08)
    assert sampled == pytest.approx(0.375, abs=0.08)


def test_the_first_chains_are_whole() -> None:
    policy = LengthByCost()
    for length in FIRST_TRIES:
        assert asked(policy, [0.05] * 32, policy.next_length(1000)) == length
        policy.observe(Round("head", length, 2, 0.0, 1 + 0.01 * length))
    assert policy.next_length(1000) == LENGTHS[-1]
    assert asked(policy, [0.05] * 32, 32) < FIRST_TRIES[0]


def test_of_several_answers_each_gets_shorter_chains() -> None:
    policy, drafted = LengthByCost(), []
    live(policy, lambda n: 1 + 0.03 * n, one_word)
    for answers in (1, 2, 8):
        shared = policy.among(Scope("", 0.7))
        drafted.append(asked(shared, [0.85] * 32, shared.next_length(1000, answers)))
        shared.observe(Round("head", drafted[-1], 1, 0.0, 1.0))
    assert drafted[0] > drafted[1] >= drafted[2] > 0


def test_another_draft_is_judged_anew() -> None:
    policy, seconds = LengthByCost(), lambda n: 1 + 0.02 * n
    live(policy, seconds, one_word, truth=0.2)
    policy.swapped()
    rate, _ = live(policy, seconds, one_word, count=150)
    assert rate > 0.9 * best_fixed(seconds, one_word)
