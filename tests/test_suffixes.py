"""The index of history drafting: the compiled one and its Python twin agree, and are right about the texts."""

from __future__ import annotations

import random
import threading
import time
import tracemalloc
from array import array

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adaptive.control.matches import LENGTHS, PRIORS
from adaptive.drafting.suffixes import (
    AHEAD,
    LEAST_REACH,
    LONGEST,
    PlainFollower,
    PlainSuffixes,
    Suffixes,
    compiled,
    follower,
    length_bin,
    suffixes,
)

CERTAIN = array("d", [1.0] * len(PRIORS))
TEXTS = st.lists(st.lists(st.integers(0, 3), max_size=60), max_size=6)
needs_compiled = pytest.mark.skipif(compiled() is None, reason="built without a C++ compiler")


def both(largest: int) -> list[Suffixes]:
    return [PlainSuffixes(), compiled().Suffixes(0, largest)]


def add(index: Suffixes, number: int, tokens: list[int]) -> None:
    index.add(number, np.array(tokens, np.int32))


@pytest.mark.thorough
@needs_compiled
@settings(max_examples=300, deadline=None)
@given(
    texts=TEXTS,
    removed=st.sets(st.integers(0, 5)),
    later=TEXTS,
    context=st.lists(st.integers(0, 3), max_size=40),
    largest=st.sampled_from([64, 128, 1 << 20]),
)
def test_compiled_index_follows_as_the_plain_one(
    texts: list[list[int]], removed: set[int], later: list[list[int]], context: list[int], largest: int
) -> None:
    found = []
    for index in both(largest):
        for number, tokens in enumerate(texts):
            add(index, number, tokens)
        index.remove(sorted(removed))
        for number, tokens in enumerate(later):
            add(index, 10 + number, tokens)
        follows = [tuple(index.follow(text[:end])) for text in [context, *texts, *later] for end in (len(text), 5)]
        found.append((follows, len(index)))
    assert found[0] == found[1]


@pytest.mark.thorough
@needs_compiled
@settings(max_examples=300, deadline=None)
@given(
    steps=st.lists(st.tuples(st.lists(st.integers(0, 2), max_size=40), st.integers(0, 50)), max_size=8),
    largest=st.sampled_from([64, 1 << 20]),
)
def test_taking_back_leaves_what_was_there_before(steps: list[tuple[list[int], int]], largest: int) -> None:
    found: list[list[tuple[object, ...]]] = []
    for index in both(largest):
        text: list[int] = []
        answers: list[tuple[object, ...]] = []
        index.begin(7)
        for tokens, back in steps:
            index.append(tokens)
            text += tokens
            taken = min(back, len(text))
            index.take_back(taken)
            text = text[: len(text) - taken]
            answers.append((*index.follow(text, True), len(index)))
            assert tuple(index.follow_end(index, CERTAIN))[:2] == answers[-1][:2]
        fresh = PlainSuffixes()
        add(fresh, 7, text)
        answers.append(tuple(fresh.follow(text, True)))
        assert answers[-2:-1] == [] or answers[-2][:2] == answers[-1]
        found.append(answers)
    assert found[0] == found[1]


@pytest.mark.thorough
def test_texts_that_were_taken_back_take_no_memory() -> None:
    """As those of other conversations, and drafts, in the running text of a server that runs for months."""
    index, rng = PlainSuffixes(), random.Random(0)
    index.begin(0)

    def come_and_go() -> None:
        index.append([rng.randrange(1000) for _ in range(2000)])
        index.take_back(2000)

    come_and_go()
    tracemalloc.start()
    try:
        for _ in range(10):
            come_and_go()
        taken = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert taken < 5_000_000, "18 MB with the contexts of all of them"


@needs_compiled
@pytest.mark.parametrize("seed", range(20))
def test_texts_that_go_back_and_on_over_many_segments_are_followed_as_by_the_plain_index(seed: int) -> None:
    rng, text = random.Random(seed), list[int]()
    plain, fast = both(64)
    for index in (plain, fast):
        index.begin(7)
    for _ in range(40):
        new = [rng.randrange(5) for _ in range(rng.randrange(120))]
        back = rng.choice([0, rng.randrange(20), rng.randrange(200)])
        text = (text + new)[: max(0, len(text) + len(new) - back)]
        for index in (plain, fast):
            index.append(new)
            index.take_back(back)
        for end in (len(text), *(rng.randrange(len(text) + 1) for _ in range(5))):
            assert tuple(fast.follow(text[:end])) == tuple(plain.follow(text[:end]))
        assert len(fast) == len(plain) == len(text)


@pytest.mark.thorough
@needs_compiled
@settings(max_examples=200, deadline=None)
@given(
    texts=TEXTS,
    text=st.lists(st.integers(0, 3), max_size=40),
    shares=st.lists(st.floats(0.0, 1.0), min_size=len(PRIORS), max_size=len(PRIORS)),
)
def test_what_follows_ends_where_it_is_hardly_reached(
    texts: list[list[int]], text: list[int], shares: list[float]
) -> None:
    found, table = [], array("d", shares)
    for index in both(1 << 20):
        for number, tokens in enumerate(texts):
            add(index, number, tokens)
        index.begin(9)
        index.append(text)
        whole, expected = index.follow(text, True), index.follow_end(index, table)
        count, sure = len(expected[0]), 1.0
        assert list(expected[0]) == list(whole[0])[:count]
        assert list(expected[1]) == list(whole[1])[:count]
        for b, reach in zip(*expected[1:], strict=True):
            sure *= table[b]
            assert reach == pytest.approx(sure)
            assert reach >= LEAST_REACH
        assert count == len(whole[0]) or sure * table[whole[1][count]] < LEAST_REACH
        found.append(tuple(expected))
    assert found[0] == found[1]


@pytest.mark.parametrize("make", [PlainSuffixes, suffixes])
def test_a_repeated_text_is_continued_and_a_longer_match_wins(make: type[PlainSuffixes]) -> None:
    index = make()
    add(index, 1, [*range(100, 140), 1, 2, 3])
    add(index, 2, [130, 131, 138, 139, 9, 9, 9, 9])  # a later match, but of two tokens only
    tokens, bins = index.follow(list(range(100, 140)))
    assert tokens == [1, 2, 3]
    assert bins[0] == 2 * LENGTHS + length_bin(LONGEST)


@pytest.mark.parametrize("make", [PlainSuffixes, suffixes])
def test_the_majority_is_proposed_and_how_many_agree_is_told(make: type[PlainSuffixes]) -> None:
    index = make()
    for number, last in enumerate([5, 6, 5]):
        add(index, number, [1, 2, 3, 4, last, 7])
    tokens, bins = index.follow([1, 2, 3, 4])
    assert tokens == [5, 7]
    assert [b // LENGTHS for b in bins] == [1, 3]  # two of three agree, then both of the remaining two


@pytest.mark.parametrize("make", [PlainSuffixes, suffixes])
def test_a_period_goes_on_for_as_long_as_is_asked_for(make: type[PlainSuffixes]) -> None:
    index = make()
    index.begin(0)
    text = [1, 2, 3] * 3
    index.append(text)
    assert index.follow(text, True)[0] == ([1, 2, 3] * AHEAD)[:AHEAD]
    assert index.follow(text, False)[0] == [1, 2, 3]


@pytest.mark.parametrize("make", [PlainSuffixes, suffixes])
def test_what_is_removed_is_never_proposed(make: type[PlainSuffixes]) -> None:
    index = make()
    add(index, 3, list(range(50)))
    add(index, 4, [*range(20), 77, 78])
    assert index.follow(list(range(20)))[0] == [77, 78]
    assert index.remove([4, 99]) == 1
    assert index.follow(list(range(20)))[0][:2] == [20, 21]
    index.remove([3])
    assert tuple(index.follow(list(range(20)))) == ([], [])
    assert len(index) == 0


@pytest.mark.parametrize("make", [PlainSuffixes, lambda most: compiled().Suffixes(most, 1024) if compiled() else None])
def test_the_oldest_texts_go_first(make: type[PlainSuffixes]) -> None:
    index = make(4096)
    if index is None:
        pytest.skip("built without a C++ compiler")
    chance = random.Random(1)
    texts = [[chance.randrange(1 << 20) for _ in range(500)] for _ in range(20)]
    for number, text in enumerate(texts):
        add(index, number, text)
    assert len(index) <= 4096
    assert index.follow(texts[0][:100])[0] == []
    assert index.follow(texts[-1][:100])[0] == texts[-1][100 : 100 + AHEAD]


@needs_compiled
def test_one_thread_may_add_and_remove_while_another_asks() -> None:
    index = suffixes(1 << 16)
    chance = random.Random(2)
    texts = [[chance.randrange(500) for _ in range(300)] for _ in range(400)]
    ended = threading.Event()

    def change() -> None:
        for number, text in enumerate(texts):
            add(index, number, text)
            if number % 3 == 0:
                index.remove([number - 1])
        ended.set()

    thread = threading.Thread(target=change)
    thread.start()
    until = time.monotonic() + 60
    asked = 0
    while not ended.is_set() and time.monotonic() < until:
        text = texts[asked % 400]
        tokens, bins = index.follow(text[:50])
        assert len(tokens) == len(bins) <= AHEAD
        asked += 1
    thread.join()
    assert index.follow(texts[399][:50])[0] == texts[399][50 : 50 + AHEAD]


@pytest.mark.thorough
@needs_compiled
@settings(max_examples=200, deadline=None)
@given(
    texts=TEXTS,
    pieces=st.lists(st.lists(st.integers(0, 3), max_size=6), max_size=12),
    shares=st.lists(st.floats(0.0, 1.0), min_size=2 * len(PRIORS), max_size=2 * len(PRIORS)),
)
def test_several_indexes_are_asked_in_one_call_as_one_by_one(
    texts: list[list[int]], pieces: list[list[int]], shares: list[float]
) -> None:
    tables = array("d", shares[: len(PRIORS)]), array("d", shares[len(PRIORS) :])
    found = []
    for plain, text, records in zip((True, False), both(1 << 20), both(1 << 20), strict=True):
        for number, tokens in enumerate(texts):
            add(records, number, tokens)
        text.begin(9)
        one = follower(text, [(text, tables[0]), (records, tables[1])])
        assert isinstance(one, PlainFollower) is plain
        found.append([(number, *map(list, said)) for number, said in map(one.look, pieces)])
    assert found[0] == found[1]
