"""Streamed text is whole characters, equals the decoded answer, and ends before a stop string."""

from __future__ import annotations

import pytest
from conftest import BUNDLED
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from adaptive.decoding.text import TextStream

TOKENIZER = AutoTokenizer.from_pretrained(BUNDLED / "target")


def streamed(text: str, stop: tuple[str, ...] = ()) -> tuple[list[str], bool]:
    """The pieces of ``text``, token by token, and whether a stop string ended it."""
    stream = TextStream(TOKENIZER, stop)
    pieces = []
    for token in TOKENIZER.encode(text, add_special_tokens=False):
        pieces.append(stream.push(token))
        if stream.stopped:
            break
    pieces.append(stream.finish())
    return pieces, stream.stopped


@given(st.text(max_size=80))
@settings(max_examples=150, deadline=None)
def test_the_pieces_are_the_text(text: str) -> None:
    whole = TOKENIZER.decode(TOKENIZER.encode(text, add_special_tokens=False), skip_special_tokens=True)
    assert "".join(streamed(text)[0]) == whole


@pytest.mark.parametrize("text", ["naïve café — 你好 мир 🙂👩‍👩‍👧", "🙂" * 30])
def test_no_piece_is_half_a_character(text: str) -> None:
    pieces, _ = streamed(text)
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("stop", ["wor", "o w", "lo world, th", "\n\n", "d, this is"])
def test_a_stop_string_ends_the_text_wherever_tokens_break(stop: str) -> None:
    text = "hello world, this is\n\na text"
    pieces, stopped = streamed(text, (stop,))
    assert stopped
    assert "".join(pieces) == text[: text.index(stop)]


def test_text_that_only_began_like_a_stop_string_is_not_lost() -> None:
    pieces, stopped = streamed("one two thr", ("three",))
    assert not stopped
    assert "".join(pieces) == "one two thr"


def test_the_earliest_of_several_stop_strings_counts() -> None:
    assert "".join(streamed("a b c d", ("c", "b"))[0]) == "a "
