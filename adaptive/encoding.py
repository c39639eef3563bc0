"""Converts chats and texts to token ids: applies the chat template, and refuses text that is far too long.

A tokenizer takes a second per megabyte or more, so a text far beyond the context is detected from its beginning.

In a chat only the template writes control tokens: a message that contains ``<|im_end|>`` does not end there. A
tokenizer finds such tokens anywhere in a text, so a message's text is encoded in two pieces where it contains one.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any
from weakref import WeakKeyDictionary

from transformers import PreTrainedTokenizerBase

from adaptive.errors import AdaptiveError, ContextFullError, first_line

# Characters tokenized at a time to detect that a text is too long: 16,000 take about 15 ms.
PIECE = 16_384
# Tokens that a cut between two pieces may add. Too low: a text that fits may be refused. Too high: a little more text
# is tokenized as a whole before it is refused.
PER_CUT = 16
# Stands where a message's text is cut within a control token. Unicode reserves it for use inside of programs; a
# template may write it as an escape, as in JSON.
CUT, CUTS = "\ufdd0", re.compile("\ufdd0|\\\\ufdd0")
# Added tokens that are control tokens although their tokenizer does not call them special, such as DeepSeek's
# ``<｜User｜>``; llama.cpp recognises them in the same way. Tags of thinking and calls, such as ``<think>``, are none:
# clients with call formats of their own write them into messages.
LOOKS_SPECIAL = re.compile(r"<[|｜].*[|｜]>")
_patterns: WeakKeyDictionary[PreTrainedTokenizerBase, re.Pattern[str]] = WeakKeyDictionary()


def encode_text(tokenizer: PreTrainedTokenizerBase, text: str, context: int, add_special: bool = True) -> list[int]:
    """Token ids of a text for a model whose context holds ``context`` tokens.

    Raises AdaptiveError for text that is not valid Unicode, or is certainly longer than the context.
    """
    return _encode_pieces(tokenizer, [text], context, add_special)


class RefusedChatError(AdaptiveError):
    """A chat template raises an error for this chat."""


def render_chat(
    tokenizer: PreTrainedTokenizerBase,
    chat: list[dict[str, Any]],
    context: int,
    tools: Sequence[dict[str, Any]] | None = None,
    variables: Mapping[str, Any] | None = None,
) -> list[int]:
    """Token ids of a chat, formatted by the chat template, with tool definitions and the generation prompt. Control
    tokens in the chat, the tools and the template's ``variables`` are text.

    Raises AdaptiveError if the tokenizer has no chat template, the template refuses the chat (RefusedChatError), or the
    chat is certainly longer than the ``context``.
    """
    given = chat, tools, variables
    try:
        cut = _with_cuts(given, _control_tokens(tokenizer))
        whole = cut == given
    except RecursionError as error:
        raise AdaptiveError("the chat or its tools are nested too deeply") from error
    text = chat_text(tokenizer, *cut)
    return _encode_pieces(tokenizer, [text] if whole else CUTS.split(text), context, add_special=False)


def chat_text(
    tokenizer: PreTrainedTokenizerBase,
    chat: list[dict[str, Any]],
    tools: Sequence[dict[str, Any]] | None = None,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """A chat formatted by the chat template, with tool definitions and the generation prompt. ``variables`` are further
    arguments of the template. Raises AdaptiveError as ``render_chat``, except for the length.
    """
    if not tokenizer.chat_template:
        raise AdaptiveError("the target's tokenizer has no chat template; it can only continue raw text (--raw)")
    offered: list[Any] | None = list(tools) if tools else None
    try:
        return str(
            tokenizer.apply_chat_template(
                chat, tools=offered, tokenize=False, add_generation_prompt=True, **(variables or {})
            )
        )
    except Exception as error:  # a template may raise anything
        raise RefusedChatError(f"the target's chat template refuses this chat: {first_line(error)}") from error


def encode_rendered(tokenizer: PreTrainedTokenizerBase, text: str, context: int) -> list[int]:
    """Token ids of a chat that a template has formatted, special tokens included. Raises AdaptiveError as
    ``encode_text``."""
    return encode_text(tokenizer, text, context, add_special=False)


def template_text(tokenizer: PreTrainedTokenizerBase) -> str:
    """The chat template, or all of them if there are several; empty if there is none."""
    template = tokenizer.chat_template
    if isinstance(template, dict):
        return "\n".join(str(text) for text in template.values())
    return template or ""


def _control_tokens(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str]:
    """Matches the beginning of a control token, up to the place where it is cut: before its first letter or digit,
    where most tokenizers separate a text anyway."""
    if (known := _patterns.get(tokenizer)) is not None:
        return known
    ends: dict[str, list[str]] = defaultdict(list)  # by beginning
    for token in tokenizer.added_tokens_decoder.values():
        text = token.content
        if len(text) > 1 and (token.special or LOOKS_SPECIAL.fullmatch(text)):
            letter = re.compile(r"\w").search(text, 1, len(text) - 1)
            place = letter.start() if letter else len(text) - 1
            ends[text[:place]].append(text[place:])
    either = (f"{re.escape(begins)}(?={_any_of(ends[begins])})" for begins in sorted(ends, reverse=True))
    return _patterns.setdefault(tokenizer, re.compile("|".join(either) or "(?!)"))


def _any_of(texts: Sequence[str]) -> str:
    """A regular expression for one of the texts. Those with the same first characters are one branch: vocabularies have
    thousands of reserved tokens, and HTML has a ``<`` in each line."""
    groups = groupby(sorted(texts), key=lambda text: text[:2])
    return "|".join(f"{re.escape(two)}(?:{'|'.join(re.escape(t[2:]) for t in group)})" for two, group in groups)


def _with_cuts(value: Any, control: re.Pattern[str]) -> Any:
    """The same strings, lists and dictionaries, with each control token in a string cut in two."""
    if isinstance(value, str):
        return control.sub(rf"\g<0>{CUT}", value)
    if isinstance(value, Mapping):
        return {_with_cuts(key, control): _with_cuts(one, control) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_with_cuts(one, control) for one in value)
    return value


def _encode_pieces(
    tokenizer: PreTrainedTokenizerBase, pieces: Sequence[str], context: int, add_special: bool
) -> list[int]:
    """Token ids of the pieces of one text, each tokenized alone. Raises AdaptiveError as ``encode_text``."""
    try:
        _refuse_too_long(tokenizer, "".join(pieces), context)
        # Not verbose: transformers would warn of long text, which callers refuse with their own message.
        encode = partial(tokenizer.encode, add_special_tokens=add_special, verbose=False)
        ids: list[int] = encode(pieces[0])
        # Within a line: some tokenizers begin a text with a space, but not a later line.
        line = encode("\n") if len(pieces) > 1 else []
        for piece in pieces[1:]:
            within = encode(f"\n{piece}")
            ids += within[len(line) :] if within[: len(line)] == line else encode(piece)
    except (TypeError, ValueError) as error:  # for example half of a surrogate pair
        raise AdaptiveError("the text is not valid Unicode") from error
    return ids


def _refuse_too_long(tokenizer: PreTrainedTokenizerBase, text: str, context: int) -> None:
    """Raise ContextFullError if ``text`` certainly has more tokens than the context. Tokenizes pieces only until
    then."""
    if len(text) <= PIECE or len(text) <= 2 * context:
        return  # quick to tokenize, or likely to fit
    count = 0
    for start in range(0, len(text), PIECE):
        count += len(tokenizer.encode(text[start : start + PIECE], add_special_tokens=False, verbose=False)) - PER_CUT
        if count > context:
            raise ContextFullError(
                f"prompt is too long: at least {count} tokens > {context} maximum, the model's context; shorten it"
            )
