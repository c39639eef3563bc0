"""The price of a token of a draft: the rate at which the text would go on without it, where history drafts too."""

from __future__ import annotations

import random
from dataclasses import replace
from statistics import fmean

import pytest
from test_control import TABLE, Clock, World

from adaptive.control.continuation import Continuation
from adaptive.control.goodput import GoodputLength
from adaptive.control.policy import Scope
from adaptive.control.sources import GoodputWithHistory

PLAIN_S = 1.0
PLAIN = (1.0, PLAIN_S)


def test_where_nothing_is_found_the_price_is_that_of_the_best_way_whatever_chance_brought() -> None:
    continuation = Continuation()
    continuation.observe(False, [5] * 60, [1.2] * 60, None, False)  # a lucky minute of the draft
    assert continuation.rate(False, PLAIN_S, [PLAIN, (1.5, 1.25)]) == pytest.approx(1.2)
    assert continuation.rate(False, PLAIN_S, [PLAIN, (1.1, 1.25)]) == pytest.approx(1.0)


def test_rounds_with_a_match_count_by_what_they_brought_and_the_others_by_the_best_way() -> None:
    """Every second round has a match, which brings six tokens in 1.5 seconds."""
    continuation = Continuation()
    after = None
    for number in range(600):
        found = number % 2 == 0
        continuation.observe(found, [6] if found else [1], [1.5] if found else [1.0], after, found)
        after = found
    # Behind a round without a match there always is one, and the other way round.
    assert continuation.rate(False, PLAIN_S, [PLAIN]) == pytest.approx(6 / 1.5, rel=0.05)
    assert continuation.rate(True, PLAIN_S, [PLAIN, (1.5, 1.2)]) == pytest.approx(1.5 / 1.2, rel=0.1)
    assert continuation.general(PLAIN_S) == pytest.approx(7 / 2.5, rel=0.05)
    assert continuation.share_left(PLAIN_S) == pytest.approx(1 / 2.5, rel=0.1)
    assert continuation.free_a_round_left() == pytest.approx(6, rel=0.1)


def test_several_rounds_at_once_count_as_one_by_one() -> None:
    chance = random.Random(3)
    at_once, singly = Continuation(), Continuation()
    after: bool | None = None
    for _ in range(40):
        found, count = chance.random() < 0.4, chance.randint(1, 9)
        tokens = [chance.randint(1, 8) for _ in range(count)]
        seconds = [chance.uniform(1, 2) for _ in range(count)]
        at_once.observe(found, tokens, seconds, after, found)
        for token, took in zip(tokens, seconds, strict=True):
            singly.observe(found, [token], [took], after, found)
            after = found
    ways = [PLAIN, (1.8, 1.3)]
    for found in (False, True):
        assert at_once.rate(found, PLAIN_S, ways) == pytest.approx(singly.rate(found, PLAIN_S, ways))
    assert at_once.left_a_token() == pytest.approx(singly.left_a_token())
    assert at_once.found_a_token() == pytest.approx(singly.found_a_token())
    assert at_once.free_a_round_left() == pytest.approx(singly.free_a_round_left())


@pytest.mark.thorough
@pytest.mark.parametrize("dear", [2.6, 3.0])
def test_history_that_finds_nothing_leaves_the_drafts_as_they_are(dear: float) -> None:
    """On text where drafting brings some percent, chance must not end it more often than without history."""
    table = replace(TABLE, draft_s=dear * TABLE.draft_s)
    speeds: dict[type[GoodputLength], list[float]] = {GoodputLength: [], GoodputWithHistory: []}
    for kind, found in speeds.items():
        for seed in range(6):
            clock = Clock()
            world, chance = World(kind(table, clock=clock), clock, seed, table), random.Random(seed)
            world.policy.begin(Scope("s", 0.0))
            for _ in range(3000):
                world.round([chance.choice((0.3, 0.5, 0.6)) for _ in range(16)])
            found.append(world.tokens / world.seconds)
    assert fmean(speeds[GoodputWithHistory]) > 0.995 * fmean(speeds[GoodputLength])
