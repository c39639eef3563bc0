"""Converts token ids to displayable text: whole characters, and nothing from a stop string on.

A text that ends within a character, as where a limit cuts it, is shown without the part of it. A text that continues
those tokens then begins with the whole character.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from adaptive.decoding.stops import stop_strings

# Fewest tokens kept before the new ones when decoding, so that a tokenizer which treats the first token of a text
# differently (a leading space) sees the true left context. Where that many tokens decode to another text alone, as the
# last byte of a character does, more are tried, up to LONGEST_CONTEXT (a few characters of three or four bytes).
LEFT_CONTEXT, LONGEST_CONTEXT = 4, 32
# Tokens decoded again at every step before the left end moves up. Too high: each step decodes more. Too low: the end
# moves more often.
WINDOW = 8
# Tokens after which text is shown although its last character may not be whole: a model may also say U+FFFD itself. A
# character has up to four bytes, and a token at least one, but tokens may contain the end of one character and the
# beginning of the next. Too low: the characters of several such tokens are shown as U+FFFD. Too high: a model that says
# U+FFFD again and again is shown in longer pieces, and each step decodes more. U+FFFD has three bytes; with a multiple
# of them, a text of it in tokens of one byte is shown up to the end of a character.
REPLACEMENT, MOST_HELD = 3, 18
# What decoding writes for bytes that are no character.
BROKEN = "\ufffd"


class TextStream:
    """Takes tokens and returns text. Text that may be the beginning of a stop string, or half of a UTF-8 character, is
    held back until that is decided."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stop: Sequence[str] = (),
        context: Sequence[int] = (),
        marks: Mapping[int, str] | None = None,
    ) -> None:
        """``context``: the tokens that the text continues, if it does not begin anew. ``marks``: special tokens that
        belong to the text, with their text; other special tokens are left out."""
        self._marks = marks or {}
        self._stops = stop_strings(tuple(stop)) if stop else None
        self._state = 0  # of the automaton, after all text so far
        self._text = _decoder(tokenizer)
        self._encode: Callable[[str], list[int]] = partial(tokenizer.encode, add_special_tokens=False)
        self.window: list[int] = []  # the last tokens; their text up to now is `before`
        self.before = ""
        self.undecided = 0  # tokens since the last whole character
        self._go_on(list(context[-LONGEST_CONTEXT - MOST_HELD :]))
        self.held = ""  # decoded text that may begin a stop string
        self.stopped = False
        self.stopped_by = ""  # the stop string that ended the text

    def _go_on(self, context: list[int]) -> None:
        """Continue ``context``: begin with the fewest of its last tokens that decode to whole characters, and the part
        of a character after them."""
        for end in range(len(context), max(-1, len(context) - MOST_HELD), -1):
            part = context[end:]
            for count in range(LEFT_CONTEXT, LONGEST_CONTEXT):
                window = context[max(0, end - count) : end]
                before = self._text(window)
                if BROKEN not in before:
                    self.window = window + part
                    self.before = self._text(self.window)
                    if part and self._is_cut(part):
                        self.undecided = len(part)
                        self.before = max(before, self.before.rstrip(BROKEN), key=len)
                    return

    def _is_cut(self, tokens: list[int]) -> bool:
        """Whether these last tokens, whose text ends with U+FFFD, end within a character. Else the model has said
        U+FFFD itself, which is encoded as these tokens."""
        return self._encode(self._text(tokens))[-len(tokens) :] != tokens

    def push(self, token: int) -> str:
        """The text that becomes certain with one more token; sets ``stopped`` at a stop string."""
        if (mark := self._marks.get(token)) is not None:
            new = self._text(self.window)[len(self.before) :] + mark
            self.window, self.before, self.undecided = [], "", 0
            return self._release(new)
        self.window.append(token)
        after = self._text(self.window)
        self.undecided = self.undecided + 1 if after.endswith(BROKEN) else 0
        if 0 < self.undecided < MOST_HELD:
            return ""
        new = after[len(self.before) :]
        self.before = after
        if self.undecided:
            self.undecided, self.window = 0, self.window[-REPLACEMENT:]
            self.before = self._text(self.window)
        elif len(self.window) > WINDOW:
            self._move_up()
        return self._release(new)

    def _move_up(self) -> None:
        """Shorten the window to the fewest last tokens that decode to the same text alone: a tokenizer that falls back
        to bytes decodes nothing of a run of byte tokens that begins within a character."""
        for count in range(LEFT_CONTEXT, min(len(self.window), LONGEST_CONTEXT)):
            text = self._text(self.window[-count:])
            if self.before.endswith(text):
                self.window, self.before = self.window[-count:], text
                return
        if len(self.window) > LONGEST_CONTEXT:
            self.window = self.window[-LEFT_CONTEXT:]
            self.before = self._text(self.window)

    def finish(self) -> str:
        """The text that is still held back, when no more tokens come; not a part of a character."""
        if self.stopped:
            return ""
        after = self._text(self.window)
        if self.undecided and self._is_cut(self.window[-self.undecided :]):
            after = after.rstrip(BROKEN)
        text = self._release(after[len(self.before) :]) + self.held
        self.held = ""
        return text

    def _release(self, new: str) -> str:
        if self._stops is None:
            return new
        for place, character in enumerate(new, start=1):
            self._state = self._stops.step(self._state, character)
            if ends := self._stops.ends[self._state]:
                text = self.held + new[:place]
                self.stopped, self.held, self.stopped_by = True, "", text[len(text) - ends :]
                return text[: len(text) - ends]
        text = self.held + new
        shown = len(text) - self._stops.depth[self._state]
        self.held = text[shown:]
        return text[:shown]


def _decoder(tokenizer: PreTrainedTokenizerBase) -> Callable[[list[int]], str]:
    """A function from token ids to text. The wrapper of transformers takes five times as long for one token as the
    tokenizers library; it is skipped where it changes nothing."""
    plain = (
        isinstance(tokenizer, PreTrainedTokenizerFast)
        and type(tokenizer).decode is PreTrainedTokenizerBase.decode
        and type(tokenizer)._decode is PreTrainedTokenizerFast._decode
        and not tokenizer.clean_up_tokenization_spaces
    )
    decode: Callable[..., Any] = tokenizer.backend_tokenizer.decode if plain else tokenizer.decode
    return partial(decode, skip_special_tokens=True)
