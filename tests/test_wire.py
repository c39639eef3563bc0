"""The messages of a draft server come across as they were made, and what is no valid message is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from test_lossless_sampled import PROMPT, VOCAB

from adaptive.types import SamplingParams
from adaptive.wire import Asked, Origin, Refused, drafted_bytes, origin_of, packed, read_drafted, unpacked

ASKED = Asked("it", 0, PROMPT, 3, False, VOCAB, SamplingParams(temperature=1.0))
TREE = replace(ASKED, tree=True)
SEEDED = replace(ASKED, sampling=SamplingParams(temperature=0.7, seed=3))
ROWS = [np.array([0.5, 0.0, 0.25, 0.25, 0, 0, 0, 0], np.float32), np.full(VOCAB, 1 / VOCAB, np.float32)]


def body(
    chosen: tuple[int, ...] = (2, 7),
    first: dict[int, float] | None = None,
    more: tuple[int, ...] = (),
    parents: Any = None,
) -> bytes:
    """The bytes of a proposal; ``first`` replaces numbers of its first distribution."""
    rows = [row.copy() for row in ROWS]
    for token, number in (first or {}).items():
        rows[0][token] = number
    return drafted_bytes([*chosen, *more], parents, None if parents is not None else rows)


def test_a_proposal_comes_across_as_it_was_made() -> None:
    got = read_drafted(unpacked(body()), ASKED, True)
    assert got is not None
    assert got.tokens == [2, 7]
    assert got.probs is not None
    assert np.array_equal(got.probs, np.stack(ROWS))
    assert read_drafted(unpacked(drafted_bytes([], None, None)), ASKED, True) is None
    tree = read_drafted(unpacked(body((1, 2, 1), parents=[-1, -1, 0])), TREE, True)
    assert tree is not None
    assert tree.parents == [-1, -1, 0]
    assert Asked.from_bytes(SEEDED.to_bytes()) == SEEDED


INT, FLOAT = np.dtype("<i4"), np.dtype("<f4")
TWICE = packed(
    {"tree": False, "drawn": True},
    *(np.array(one, INT) for one in ([2], [2], [2, 2])),
    np.array([0.5, 0.5], FLOAT),
)


@pytest.mark.parametrize(
    ("sent", "asked", "said"),
    [
        (body(first={0: -0.5, 1: 1.0}), ASKED, "negative"),
        (body(first={0: float("nan")}), ASKED, "no number"),
        (body(first={0: float("inf")}), ASKED, "no number"),
        (body(first={0: 0.6}), ASKED, "add up to 1.1"),
        (body(first={0: 0.4999}), ASKED, "add up to"),
        (body((1, 7)), ASKED, "cannot give"),
        (body((VOCAB, 7)), ASKED, "not in the vocabulary"),
        (body((-1, 7)), ASKED, "not in the vocabulary"),
        (body(), replace(ASKED, vocab=7), "not in the vocabulary"),
        (body((2, 6)), replace(ASKED, vocab=7), "not in the vocabulary"),
        (body(more=(1,)), ASKED, "another shape"),
        (body((2, 7, 1, 1)), ASKED, "4 tokens were proposed where 3"),
        (body(parents=[-1, -1]), ASKED, "a chain was asked for"),
        (body(parents=[-1, 1]), TREE, "parents"),
        (body(parents=[-2, -1]), TREE, "parents"),
        (body(parents=[-1]), TREE, "parents"),
        (body((2, 2), parents=[-1, -1]), TREE, "the same text"),
        (TWICE, ASKED, "twice"),
        (body()[:-1], ASKED, "shorter"),
        (body() + b"x", ASKED, "longer"),
        (b"", ASKED, "no head"),
        (b"\xff\xff\xff\xff{}", ASKED, "no head"),
        (b"<html>It works!</html>", ASKED, "no head"),
        (b"\x02\x00\x00\x00{}", ASKED, "cannot be read"),
        (b"\x02\x00\x00\x00[]", ASKED, "cannot be read"),
        (b'\x1f\x00\x00\x00{"arrays": [["int32", 1e999]]}  ', ASKED, "cannot be read"),
        (b'\x1c\x00\x00\x00{"arrays": [["int32", -1]]} ', ASKED, "shorter"),
        (packed({}), ASKED, "not those of a proposal"),
    ],
)  # fmt: skip
def test_what_is_no_proposal_is_refused(sent: bytes, asked: Asked, said: str) -> None:
    with pytest.raises(Refused, match=said):
        read_drafted(unpacked(sent), asked, True)


def test_the_origin_of_a_proposal_comes_across() -> None:
    for origin in (Origin("0", None), Origin("ab", "0007")):
        assert origin_of(unpacked(drafted_bytes([2], None, None, origin))) == origin
    assert origin_of(unpacked(body())) is None  # of a server that does not say it
    for head in ({"weights": 3}, {"weights": "0", "adapter": 5}):
        with pytest.raises(Refused):
            origin_of(unpacked(packed(head)))
