"""Estimated costs follow the machine and the rounds of each length, and do not drift by chance."""

from __future__ import annotations

import dataclasses
import random

import pytest
from test_control import TABLE

from adaptive.control.between import Between
from adaptive.control.costs import CostModel, Timed, from_samples
from adaptive.types import Round


def test_costs_follow_a_machine_that_changes_speed_and_ignore_hiccups() -> None:
    model, rng = CostModel(TABLE), random.Random(2)
    for number in range(600):
        k = rng.choice([0, 1, 4])
        hiccup = 20.0 if number % 37 == 0 else 1.0
        seconds = TABLE.verify_s[k] * 1.7 * hiccup * rng.uniform(0.9, 1.1)
        model.observe([Timed(Round("model", k, 0, (0.03 + 0.1 * k) * 1.7, seconds), k, 0)])
    for k in (0, 1, 4):
        assert model.verify(k) == pytest.approx(1.7 * TABLE.verify_s[k], rel=0.1)
    assert model.draft(1) == pytest.approx(1.7 * (TABLE.start_s + TABLE.draft_s), rel=0.1)


def test_a_cost_measured_in_a_bad_moment_is_mended_in_a_few_rounds() -> None:
    model = CostModel(dataclasses.replace(TABLE, start_s=TABLE.start_s * 50, draft_s=TABLE.draft_s * 50))
    for _ in range(20):
        model.observe([Timed(Round("model", 1, 0, TABLE.draft_s, TABLE.verify_s[1]), 1, 0)])
    assert model.draft(1) == pytest.approx(TABLE.draft_s, rel=0.35)


def test_a_stray_slow_pass_is_expected_and_a_slower_machine_is_not() -> None:
    model = CostModel(TABLE)
    usual, slow = (Timed(Round("none", 0, 0, 0.0, times * TABLE.verify_s[0]), 0, 0) for times in (1.0, 3.0))
    model.observe([usual] * 14 + [slow] * 2)
    assert model.as_expected
    model.observe([slow] * 4)
    assert not model.as_expected
    model.observe([usual] * 16)
    assert model.as_expected


@pytest.mark.parametrize("slower", [0.25, 1.5, 6.0])
def test_rounds_that_are_learned_from_together_move_the_costs_no_further_than_they_are_off(slower: float) -> None:
    model = CostModel(TABLE)
    batch = [Timed(Round("none", 0, 0, 0.0, TABLE.verify_s[0] * slower), 0, 0)] * 8
    for _ in range(3):
        model.observe(batch)
        assert min(1.0, slower) * 0.85 < model.verify(0) / TABLE.verify_s[0] < max(1.0, slower) * 1.15
    for _ in range(3):
        model.observe(batch)
    assert model.verify(0) == pytest.approx(TABLE.verify_s[0] * slower, rel=0.1)


def test_costs_of_lengths_that_are_not_seen_stay_where_they_are() -> None:
    """Only a common factor moves them, which must not drift by chance over thousands of plain rounds and tries."""
    model, rng = CostModel(TABLE), random.Random(5)

    def plain(again: bool, steps: int = 0) -> Timed:
        hiccup = 4.0 if rng.random() < 0.02 else 1.0
        return Timed(Round("none", 0, 0, 0.15 * steps, hiccup * rng.lognormvariate(0.0, 0.1)), steps, 0, again)

    for number in range(3000):
        batch = [plain(True) for _ in range(8)]
        if number % 5 == 0:
            batch[3:5] = [plain(False, steps=1), plain(False)]
        model.observe(batch)
    for k in (0, 1, 4, 16):
        assert model.verify(k) == pytest.approx(TABLE.verify_s[k], rel=0.1)


def test_a_machine_that_changes_its_speed_moves_no_length_away_from_another() -> None:
    """While only one length is in use, its cost cannot be told apart from the machine's speed."""
    model = CostModel(TABLE)
    before = model.verify(1) / model.verify(4)
    for slower in (1.08, 0.93, 1.08, 0.93, 1.08):
        for _ in range(40):
            model.observe([Timed(Round("model", 4, 2, 0.5, TABLE.verify_s[4] * slower), 0, 0)] * 8)
    assert model.verify(4) == pytest.approx(1.08 * TABLE.verify_s[4], rel=0.02)
    assert model.verify(1) / model.verify(4) == pytest.approx(before, rel=0.01)


@pytest.mark.parametrize("suddenly", ["slower", "faster"])
def test_passes_that_are_in_use_do_not_drift_away_from_those_that_are_not(suddenly: str) -> None:
    """The machine's speed changes suddenly in one direction and gradually in the other."""
    table = dataclasses.replace(TABLE, verify_s=tuple(0.6 + 0.1 * k for k in range(len(TABLE.verify_s))))
    model, rng, slower = CostModel(table), random.Random(2), 1.0
    for _ in range(1500):
        if suddenly == "slower":
            slower = rng.choice([1.3, 1.6, 2.0]) if rng.random() < 0.03 else max(1.0, slower * 0.97)
        else:
            slower = 1.0 if rng.random() < 0.03 else min(2.0, slower * 1.02)
        batch = []
        for k in rng.choices([0, 1], [3, 7], k=8):
            seconds = table.verify_s[k] * slower * rng.lognormvariate(0.0, 0.08)
            batch.append(Timed(Round("model", k, 0, 0.1 * k * slower, seconds), k, 0, again=not k))
        model.observe(batch)
    assert model.verify(2) / model.verify(1) == pytest.approx(0.8 / 0.7, rel=0.04)


@pytest.mark.parametrize(("of_round", "of_token"), [(0.06, 0.01), (0.01, 0.05)])
def test_what_comes_between_rounds_is_told_apart_from_what_comes_with_tokens(of_round: float, of_token: float) -> None:
    """From a wrong initial estimate, and although the process is stopped now and then."""
    between, rng = Between(0.01, 0.06), random.Random(2)
    for _ in range(600):
        rounds = rng.randint(4, 16)
        tokens = sum(rng.choice((1, 1, 2, 4)) for _ in range(rounds))
        seconds = (rounds * of_round + tokens * of_token) * rng.lognormvariate(0.0, 0.1)
        between.observe(rounds, tokens, seconds + (5.0 if rng.random() < 0.01 else 0.0))
    assert between.of_round == pytest.approx(of_round, abs=0.015)
    assert between.of_token == pytest.approx(of_token, abs=0.01)


def test_verification_is_never_cheaper_for_more_tokens() -> None:
    table = from_samples({0: 1.0, 1: 1.3, 2: 1.1, 4: 1.2, 8: 2.0})
    assert list(table) == sorted(table)
    assert table[1] == pytest.approx(1.2)
    assert table[6] == pytest.approx(1.6)
