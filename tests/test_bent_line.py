"""The seconds of a round follow from those of others: a line that bends upwards at one place."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from adaptive.control.bend import BentLine

BENDS = (8, 16, 32, 64, 96)


def fitted(token_s: float, more_s: float, bend: int, spread: float = 0.0, seed: int = 0) -> BentLine:
    """A line fitted to 200 rounds of up to 128 tokens, at least half of them of no more than ``bend``."""
    chance, line = random.Random(seed), BentLine(BENDS)
    for _ in range(200):
        n = chance.randint(0, chance.choice([bend, 128]))
        took = 1 + token_s * n + more_s * max(0, n - bend)
        line.observe(n, took * (1 + chance.gauss(0, spread)))
    return line


@pytest.mark.parametrize("bend", BENDS)
def test_exact_rounds_give_the_seconds(bend: int) -> None:
    line = fitted(0.001, 0.01, bend)
    for n in range(129):
        assert line(n) == pytest.approx(1 + 0.001 * n + 0.01 * max(0, n - bend), rel=0.02)
    assert line.steps(128)[-1] == pytest.approx(0.011, abs=1e-3)


@pytest.mark.parametrize("bend", [32, 64, 96])
def test_exact_rounds_give_both_slopes(bend: int) -> None:
    """Before the smaller bends, all tokens together add hardly more than the line is off."""
    steps = fitted(0.001, 0.01, bend).steps(128)
    assert steps[: bend // 2] == pytest.approx([0.001] * (bend // 2), abs=5e-4)
    assert steps[-1] == pytest.approx(0.011, abs=1e-3)


def test_a_line_without_a_bend_is_found_too() -> None:
    line = fitted(0.004, 0.0, 8)
    for n in range(0, 129, 4):
        assert line(n) == pytest.approx(1 + 0.004 * n, rel=0.01)
    assert line.steps(128) == pytest.approx([0.004] * 128, abs=3e-4)


def test_a_bend_between_two_places_is_met_by_the_mean_of_lines() -> None:
    """Rounds vary by a twentieth; no single place is right."""
    lines = [fitted(0.0, 0.004, 80, 0.05, seed) for seed in range(60)]
    for n in (0, 20, 40, 60, 80, 100, 128):
        right = 1 + 0.004 * max(0, n - 80)
        errors = [line(n) / right - 1 for line in lines]
        assert math.sqrt(sum(e * e for e in errors) / len(errors)) < 0.035


@pytest.mark.parametrize("seed", range(4))
def test_no_token_costs_less_than_nothing_or_than_the_one_before(seed: int) -> None:
    """Also where rounds seem to say so: they fall, then rise less."""
    chance, line = random.Random(seed), BentLine(BENDS)
    assert not line
    assert line(5) == 0.0
    for number in range(60):
        n = chance.randrange(129)
        line.observe(n, chance.choice([1 - 0.004 * n, 1 + 0.01 * min(n, 40)]) * (1 + 0.1 * chance.random()))
        steps = line.steps(128)
        assert all(0.0 <= one <= other + 1e-15 for one, other in itertools.pairwise(steps)), number
        assert line(0) > 0
        assert sum(steps) == pytest.approx(line(128) - line(0))


def test_equal_rounds_say_that_more_tokens_cost_nothing() -> None:
    line = BentLine(BENDS)
    for _ in range(5):
        line.observe(16, 2.0)
    assert line(0) == line(16) == line(200) == pytest.approx(2.0)


@pytest.mark.parametrize("least", [16, 32])
def test_below_all_rounds_the_line_goes_on_straight(least: int) -> None:
    line = BentLine(BENDS)
    for number in range(40):
        n = least * (1, 2, 4)[number % 3]
        line.observe(n, 1 + 0.2 * n)
    assert line(0) == pytest.approx(1.0, abs=0.05 * line(least))


def test_a_change_of_the_machine_is_followed() -> None:
    line = fitted(0.0, 0.01, 32)
    chance = random.Random(1)
    for _ in range(300):
        n = chance.randrange(129)
        line.observe(n, 3 + 0.002 * n)
    assert line(0) == pytest.approx(3.0, rel=0.05)
    assert line(128) == pytest.approx(3.256, rel=0.05)
