"""Supervision comes out of the log bit for bit as it went in."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from adaptive.errors import AdaptiveError
from adaptive.records.codec import decode, encode
from adaptive.types import Supervision

FIELDS = ("ids", "logprobs", "rest", "chosen")


@st.composite
def supervisions(draw: st.DrawFn) -> Supervision:
    n, k = draw(st.integers(0, 9)), draw(st.integers(0, 5))
    largest = draw(st.sampled_from([10, 2**16 - 1, 2**16, 2**31 - 1]))
    bits = st.integers(0, 2**16 - 1)  # all float16 values: infinities, both zeros, subnormals, all NaNs

    def halves(shape: tuple[int, ...]) -> st.SearchStrategy[np.ndarray]:
        return arrays(np.uint16, shape, elements=bits).map(lambda a: a.view(np.float16))

    return Supervision(
        ids=draw(arrays(np.int32, (n, k), elements=st.integers(0, largest))),
        logprobs=draw(halves((n, k))),
        rest=draw(halves((n,))),
        chosen=draw(halves((n,))),
    )


@settings(deadline=None)
@given(supervisions())
def test_decoding_gives_back_every_bit(supervision: Supervision) -> None:
    back = decode(encode(supervision))
    for name in FIELDS:
        ours, theirs = getattr(supervision, name), getattr(back, name)
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        assert ours.tobytes() == theirs.tobytes()


def test_a_small_vocabulary_takes_two_bytes_an_id() -> None:
    def size(largest: int) -> int:
        rng = np.random.default_rng(0)
        ids = rng.integers(0, largest, (200, 32), dtype=np.int32)
        ids[0, 0] = largest
        flat = np.zeros((200, 32), np.float16)
        return len(encode(Supervision(ids, flat, flat[:, 0], flat[:, 0])))

    assert size(2**16 - 1) < 200 * 32 * 2 + 500
    assert size(2**20) > 200 * 32 * 2 + 500


@pytest.mark.parametrize("damage", [b"", b"\x01\x00", b"\x09" + bytes(40), b"\x01\x01\x20\x00\x09\x00\x00\x00junk"])
def test_damaged_bytes_are_refused_in_one_line(damage: bytes) -> None:
    with pytest.raises(AdaptiveError, match="supervision in the log"):
        decode(damage)


def test_arrays_that_disagree_are_refused() -> None:
    flat = np.zeros((3, 2), np.float16)
    with pytest.raises(ValueError, match="3 positions"):
        encode(Supervision(np.zeros((3, 2), np.int32), flat, flat[:2, 0], flat[:, 0]))
