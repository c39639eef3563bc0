"""Prompt files: JSON lines of ``{"prompt": "..."}`` or ``{"messages": [...]}``, read completely before any work."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adaptive.errors import AdaptiveError
from adaptive.types import Message


@dataclass(frozen=True)
class PromptLine:
    """One line of a prompt file: a chat, and whether it was written as a bare prompt."""

    messages: tuple[Message, ...]
    bare: bool

    def as_given(self) -> str | list[dict[str, str]]:
        """The prompt in the form the user wrote it, for JSON output."""
        if self.bare:
            return self.messages[-1].content
        return [{"role": m.role, "content": m.content} for m in self.messages]


def bare_prompt(text: str) -> PromptLine:
    """A prompt of one user message."""
    return PromptLine((Message("user", text),), bare=True)


def read_prompts(file: Path) -> list[PromptLine]:
    """Every prompt of the file. Raises AdaptiveError, which names the wrong line, before anything is done."""
    try:
        lines = file.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise AdaptiveError(f"prompt file {file} cannot be read: {reason}") from error
    prompts = [_parse(line, f"{file} line {number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise AdaptiveError(f"prompt file {file} is empty")
    return prompts


def _parse(line: str, where: str) -> PromptLine:
    try:
        value: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise AdaptiveError(f"{where} is not JSON: {error.msg} at character {error.pos + 1}") from error
    if isinstance(value, dict) and isinstance(value.get("prompt"), str) and value["prompt"]:
        return bare_prompt(value["prompt"])
    messages = value.get("messages") if isinstance(value, dict) else None
    if not isinstance(messages, list) or not messages:
        raise AdaptiveError(f'{where} has neither a "prompt" text nor a "messages" list')
    for message in messages:
        fine = isinstance(message, dict) and isinstance(message.get("role"), str)
        if not fine or not isinstance(message.get("content"), str):
            raise AdaptiveError(f'{where}: every message needs a "role" and a "content", both text')
    return PromptLine(tuple(Message(m["role"], m["content"]) for m in messages), bare=False)
