"""Prompt files: JSON lines of ``{"prompt": "..."}`` or ``{"messages": [...]}``, read completely before any work."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adaptive.errors import AdaptiveError, why_unread
from adaptive.types import Message

if TYPE_CHECKING:
    from adaptive.pair import Pair


@dataclass(frozen=True)
class PromptLine:
    """One line of a prompt file: a chat, whether it was written as a bare prompt, and its file and line, for errors."""

    messages: tuple[Message, ...]
    bare: bool
    where: str = ""

    def as_given(self) -> str | list[dict[str, str]]:
        """The prompt in the form the user wrote it, for JSON output."""
        if self.bare:
            return self.messages[-1].content
        return [{"role": m.role, "content": m.content} for m in self.messages]


def bare_prompt(text: str, where: str = "") -> PromptLine:
    """A prompt of one user message."""
    return PromptLine((Message("user", text),), bare=True, where=where)


def read_prompts(file: Path, kind: str = "prompt file") -> list[PromptLine]:
    """Every prompt of the file, which errors call a ``kind``. Raises AdaptiveError, which names the wrong line, before
    anything is done."""
    try:
        lines = file.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise AdaptiveError(f"{kind} {file} cannot be read: {why_unread(error)}") from error
    prompts = [_parse(line, f"{file} line {number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise AdaptiveError(f"{kind} {file} is empty")
    return prompts


def require_answerable(prompts: Sequence[PromptLine], pair: Pair, raw: bool = False) -> None:
    """Encode every prompt, without the chat template if ``raw``. Raises AdaptiveError, which names the line, for one
    that the target cannot answer: a file is answered as a whole or not at all."""
    from adaptive.assistant import encode_chat
    from adaptive.encoding import encode_text

    context = pair.target.context_length
    for prompt in prompts:
        try:
            if raw:
                tokens = len(encode_text(pair.tokenizer, prompt.messages[-1].content, context))
            else:
                tokens = len(encode_chat(pair, prompt.messages))
        except AdaptiveError as error:
            raise AdaptiveError(f"{prompt.where}: {error}") from error
        if not 0 < tokens < context:
            raise AdaptiveError(
                f"{prompt.where}: the prompt has {tokens} tokens; it must have at least one, and fewer than the "
                f"target's context of {context}"
            )


def _parse(line: str, where: str) -> PromptLine:
    try:
        value: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise AdaptiveError(f"{where} is not JSON: {error.msg} at character {error.pos + 1}") from error
    except (ValueError, RecursionError) as error:
        raise AdaptiveError(f"{where} has too many levels, or a number of too many digits") from error
    if isinstance(value, dict) and isinstance(value.get("prompt"), str) and value["prompt"]:
        return bare_prompt(value["prompt"], where)
    messages = value.get("messages") if isinstance(value, dict) else None
    if not isinstance(messages, list) or not messages:
        raise AdaptiveError(f'{where} has neither a "prompt" text nor a "messages" list')
    for message in messages:
        fine = isinstance(message, dict) and isinstance(message.get("role"), str)
        if not fine or not isinstance(message.get("content"), str):
            raise AdaptiveError(f'{where}: every message needs a "role" and a "content", both text')
    return PromptLine(tuple(Message(m["role"], m["content"]) for m in messages), bare=False, where=where)
