"""How often what history finds is accepted is counted in bins, by the kernels as by Python."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adaptive.control.matches import KEEP, PRIORS, Bins
from adaptive.drafting.history import Counting
from adaptive.drafting.suffixes import compiled


def test_what_is_accepted_is_believed_and_a_longer_match_is_no_worse() -> None:
    bins = Bins()
    for _ in range(300):
        bins.observe([20, 20], 1)  # the second token is never accepted, so half of all are
    assert bins.table[20] == pytest.approx(0.5, abs=0.03)
    assert bins.accepted[20] + bins.rejected[20] < 1 / (1 - KEEP) + 1
    for agreement in range(5):
        row = list(bins.table[8 * agreement : 8 * agreement + 8])
        assert row == sorted(row)
    assert Bins().shares([39, 39]) == pytest.approx([PRIORS[39]] * 2)


def test_what_disappoints_in_some_bins_is_doubted_in_all() -> None:
    bins = Bins()
    for _ in range(40):
        bins.observe([8 * 2 + 1], 0)
    assert bins.table[39] < 0.6 * PRIORS[39]
    for _ in range(400):
        bins.observe([8 * 2 + 1], 1)
    assert bins.table[39] >= PRIORS[39]


def test_only_what_was_judged_counts() -> None:
    bins = Bins()
    bins.observe([1, 2, 3], 1)  # the third token was never judged
    assert (bins.accepted[1], bins.rejected[2]) == (1.0, 1.0)
    assert bins.accepted[3] == bins.rejected[3] == 0.0


@pytest.mark.thorough
@pytest.mark.skipif(compiled() is None, reason="built without a C++ compiler")
@settings(max_examples=200, deadline=None)
@given(
    rounds=st.lists(
        st.tuples(st.lists(st.tuples(st.integers(0, 2), st.integers(0, len(PRIORS) - 1)), max_size=6),
                  st.lists(st.integers(0, 2), max_size=6)),
        max_size=40,
    )
)  # fmt: skip
def test_the_kernels_count_what_was_accepted_as_python_does(
    rounds: list[tuple[list[tuple[int, int]], list[int]]],
) -> None:
    both = Counting(Bins()), Counting(Bins())
    both[1]._counter = None
    for found, said in rounds:
        for counting in both:
            counting.observe([token for token, _ in found], [b for _, b in found], said)
    compiled_one, plain = (counting.bins for counting in both)
    for name in ("accepted", "rejected", "table", "tally"):
        assert list(getattr(compiled_one, name)) == pytest.approx(list(getattr(plain, name)))
    assert compiled_one.rounds == plain.rounds
