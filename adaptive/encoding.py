"""Converts chats and texts to token ids: applies the chat template, and refuses text that is far too long.

A tokenizer takes a second per megabyte or more, so a text far beyond the context is detected from its beginning.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from adaptive.errors import AdaptiveError, ContextFullError, first_line

# Characters tokenized at a time to detect that a text is too long: 16,000 take about 15 ms.
PIECE = 16_384
# Tokens that a cut between two pieces may add. Too low: a text that fits may be refused. Too high: a little more text
# is tokenized as a whole before it is refused.
PER_CUT = 16


def encode_text(tokenizer: PreTrainedTokenizerBase, text: str, context: int, add_special: bool = True) -> list[int]:
    """Token ids of a text for a model whose context holds ``context`` tokens.

    Raises AdaptiveError for text that is not valid Unicode, or is certainly longer than the context.
    """
    try:
        _refuse_too_long(tokenizer, text, context)
        # Not verbose: transformers would warn of long text, which callers refuse with their own message.
        ids: list[int] = tokenizer.encode(text, add_special_tokens=add_special, verbose=False)
    except (TypeError, ValueError) as error:  # for example half of a surrogate pair
        raise AdaptiveError("the text is not valid Unicode") from error
    return ids


def render_chat(
    tokenizer: PreTrainedTokenizerBase,
    chat: list[dict[str, Any]],
    context: int,
    tools: Sequence[dict[str, Any]] | None = None,
) -> list[int]:
    """Token ids of a chat, formatted by the chat template, with tool definitions and the generation prompt.

    Raises AdaptiveError if the tokenizer has no chat template, the template refuses the chat, or the chat is certainly
    longer than the ``context``.
    """
    return encode_rendered(tokenizer, chat_text(tokenizer, chat, tools), context)


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
        raise AdaptiveError(f"the target's chat template refuses this chat: {first_line(error)}") from error


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
                f"the prompt has far more than the {context} tokens that the model's context holds; shorten it"
            )
