"""Streamed text consists of whole characters, equals the decoded answer, and ends before a stop string."""

from __future__ import annotations

import pytest
from conftest import BUNDLED
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from adaptive.decoding.stops import stop_strings
from adaptive.decoding.text import TextStream

WORDS = ["A", "B", "C", ".", "▁", "▁B"]
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


@given(
    st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=6),
    st.lists(st.text("ab", max_size=4), max_size=8),
)
def test_many_stop_strings_are_found_like_each_by_itself(stops: list[str], parts: list[str]) -> None:
    automaton, state, text = stop_strings(tuple(stops)), 0, ""
    for character in "".join(parts):
        state, text = automaton.step(state, character), text + character
        ends = [len(stop) for stop in stops if text.endswith(stop)]
        assert automaton.ends[state] == max(ends, default=0)
        beginnings = {stop[:n] for stop in stops for n in range(len(stop) + 1)}
        assert automaton.depth[state] == max(n for n in range(len(text) + 1) if text[len(text) - n :] in beginnings)


def test_the_text_ends_at_the_same_place_however_it_came_in_tokens() -> None:
    assert "".join(streamed("x abcd", ("abcd", "bc"))[0]) == "x a"


def by_bytes() -> PreTrainedTokenizerFast:
    """A tokenizer like Llama 2's: tokens for a few words, bytes for everything else, and no space before the text."""
    vocabulary = {token: i for i, token in enumerate(["<unk>", *(f"<0x{b:02X}>" for b in range(256)), *WORDS])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


@pytest.mark.parametrize("text", ["ABC한국어는 재미있다.", "한국어는아름다운말이다" * 4 + ".", "🙂🙃" * 9 + ".A"])
def test_characters_that_are_three_tokens_each_are_not_lost(text: str) -> None:
    tokenizer = by_bytes()
    ids = [
        id
        for letter in text.replace(" ", "▁")
        for id in (
            [tokenizer.convert_tokens_to_ids(letter)]
            if letter in WORDS
            else [1 + byte for byte in letter.encode("utf-8")]
        )
    ]
    stream = TextStream(tokenizer)
    pieces = [stream.push(token) for token in ids] + [stream.finish()]
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("count", [5, 60])
@pytest.mark.parametrize("tokenizer", [TOKENIZER, by_bytes()], ids=["byte level", "byte fallback"])
def test_a_model_that_says_the_replacement_character_is_shown(tokenizer: PreTrainedTokenizerFast, count: int) -> None:
    text = "\ufffd" * count + "AB"
    ids = [1 + byte for byte in ("\ufffd" * count).encode("utf-8")]
    ids += [tokenizer.convert_tokens_to_ids(letter) for letter in "AB"]
    if tokenizer is TOKENIZER:
        ids = tokenizer.encode(text, add_special_tokens=False)
    stream = TextStream(tokenizer)
    pieces, decoded = [], []
    for token in ids:
        pieces.append(stream.push(token))
        decoded.append(len(stream.window))
    assert "".join([*pieces, stream.finish()]) == text
    assert count < 20 or any(pieces[:20])
    assert max(decoded) < 32


@pytest.mark.parametrize("text", ["I like 🦊 and 日本", "A\ufffd🦊\ufffd"])
@pytest.mark.parametrize("tokenizer", [TOKENIZER, by_bytes()], ids=["byte level", "byte fallback"])
def test_a_text_that_was_cut_within_a_character_goes_on_with_it(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    for end in range(len(ids) + 1):
        first, then = TextStream(tokenizer), TextStream(tokenizer, context=ids[:end])
        begun = "".join([*map(first.push, ids[:end]), first.finish()])
        assert text.startswith(begun)
        assert "".join([begun, *map(then.push, ids[end:]), then.finish()]) == text


def test_a_text_that_goes_on_keeps_its_first_space() -> None:
    tokenizer = by_bytes()
    first, second = (tokenizer.convert_tokens_to_ids(word) for word in ("A", "▁B"))
    assert TextStream(tokenizer).push(second) == "B"
    assert TextStream(tokenizer, context=[first]).push(second) == " B"
