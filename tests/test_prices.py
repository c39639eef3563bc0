"""How many tokens of a proposal are verified."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaptive.control.costs import LONGEST
from adaptive.control.prices import RUN, best_length, pays


def run_gain(gain: float, sure: float) -> float:
    """The gain of rounds like one of ``gain`` until a proposal is rejected; all of it is ``sure`` to be accepted."""
    return gain / (1 - RUN * sure) if gain > 0 else gain


def test_where_text_repeats_two_short_proposals_may_be_better_than_a_long_one() -> None:
    """Four tokens cost little more than one here, eight almost two rounds of four. Each is accepted with 0.97; a text
    that goes on at 3.5 tokens a plain step elsewhere goes on at 4.4 in proposals of four."""
    seconds = [1.0, 1.01, 1.01, 1.01, 1.01, 1.36, 1.71, 1.75, 1.79]
    reach = [0.97**i for i in range(1, 9)]
    length, gain = best_length(reach, seconds, 3.5)
    assert length == 4
    assert gain == pytest.approx(1 + sum(reach[:4]) - 3.5 * seconds[4])
    assert gain < 1 + sum(reach) - 3.5 * seconds[8]
    assert best_length(reach, seconds[:4] + [2.0] * 5, 3.5)[0] == 8


@given(
    reach=st.lists(st.floats(0, 1), max_size=20).map(lambda found: sorted(found, reverse=True)),
    more=st.lists(st.one_of(st.just(0.0), st.floats(0, 0.4)), min_size=LONGEST, max_size=LONGEST),
    rate=st.floats(0.5, 10),
    token_s=st.floats(0, 0.1),
)
def test_no_other_length_promises_more(reach: list[float], more: list[float], rate: float, token_s: float) -> None:
    seconds = list(itertools.accumulate(more, initial=1.0))

    def gain(k: int) -> float:
        tokens = 1 + sum(reach[:k])
        return tokens - rate * (seconds[k] + token_s * tokens)

    nothing = gain(0)
    best, gained = best_length(reach, seconds, rate, token_s, nothing)
    possible = [gain(k) for k in range(1, min(len(reach), LONGEST) + 1)]
    if best:
        assert gained == pytest.approx(gain(best))
        assert run_gain(gain(best), reach[best - 1]) == pytest.approx(
            max(run_gain(gain(k), reach[k - 1]) for k in range(1, 1 + len(possible)))
        )
    most = max(possible, default=nothing)
    assert (best > 0) == (most > nothing) or abs(most - nothing) < 1e-9  # rounding
    lengths = range(1, min(len(reach), LONGEST) + 1)
    most = max((1 + sum(reach[:k]) - seconds[k] for k in lengths), default=0.0)
    assert pays(reach, seconds) == (most > 0) or abs(most) < 1e-9
