"""From chats and texts to token ids: the chat template, and what is refused before it is tokenized.

A tokenizer takes a second a megabyte and more, so that a text far beyond the context is told by its beginning.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from adaptive.errors import AdaptiveError, ContextFullError, first_line

# Characters tokenized at a time to tell that a text is too long: 16,000 take about 15 ms.
PIECE = 16_384
# Tokens that a cut between two pieces may add; more lets a little more text through to be tokenized whole.
PER_CUT = 16


def encode_text(tokenizer: PreTrainedTokenizerBase, text: str, context: int, add_special: bool = True) -> list[int]:
    """Token ids of a text for a model whose context holds ``context`` tokens.

    Raises AdaptiveError for text that is no valid Unicode, or surely longer than the context.
    """
    try:
        _refuse_too_long(tokenizer, text, context)
        # It would warn of what is refused in a sentence.
        ids: list[int] = tokenizer.encode(text, add_special_tokens=add_special, verbose=False)
    except (TypeError, ValueError) as error:  # half of a surrogate pair, say
        raise AdaptiveError("the text is not valid Unicode") from error
    return ids


def render_chat(
    tokenizer: PreTrainedTokenizerBase,
    chat: list[dict[str, Any]],
    context: int,
    tools: Sequence[dict[str, Any]] | None = None,
) -> list[int]:
    """Token ids of a chat, as the chat template takes it, with tool definitions and the generation prompt.

    Raises AdaptiveError where the tokenizer has no chat template, the template refuses the chat, or the chat is
    surely longer than the ``context``.
    """
    return encode_rendered(tokenizer, chat_text(tokenizer, chat, tools), context)


def chat_text(
    tokenizer: PreTrainedTokenizerBase,
    chat: list[dict[str, Any]],
    tools: Sequence[dict[str, Any]] | None = None,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """A chat as the chat template writes it, with tool definitions and the generation prompt; ``variables`` are what
    the template is told beside. Raises AdaptiveError as ``render_chat``, but for the length.
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
    except Exception as error:  # a template raises whatever its author chose
        raise AdaptiveError(f"the target's chat template refuses this chat: {first_line(error)}") from error


def encode_rendered(tokenizer: PreTrainedTokenizerBase, text: str, context: int) -> list[int]:
    """Token ids of a chat that a template has written, special tokens included. Raises AdaptiveError as
    ``encode_text``."""
    return encode_text(tokenizer, text, context, add_special=False)


def template_text(tokenizer: PreTrainedTokenizerBase) -> str:
    """The chat template, or all of them where there are several; empty where there is none."""
    template = tokenizer.chat_template
    if isinstance(template, dict):
        return "\n".join(str(text) for text in template.values())
    return template or ""


def _refuse_too_long(tokenizer: PreTrainedTokenizerBase, text: str, context: int) -> None:
    """Tokenize ``text`` by pieces until there are surely more tokens than the context holds."""
    if len(text) <= PIECE or len(text) <= 2 * context:
        return  # quick to tokenize, or more likely to fit than not
    count = 0
    for start in range(0, len(text), PIECE):
        count += len(tokenizer.encode(text[start : start + PIECE], add_special_tokens=False, verbose=False)) - PER_CUT
        if count > context:
            raise ContextFullError(
                f"the prompt has far more than the {context} tokens that the model's context holds; shorten it"
            )
