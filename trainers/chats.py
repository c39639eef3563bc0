"""Reads chat-message files as training data: ``{"messages": [...]}`` a line, the assistant's turns as hard labels."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from adaptive.engines.llamacpp.files import gguf_tokenizer
from adaptive.errors import AdaptiveError, first_line, why_unread
from adaptive.types import SamplingParams
from trainers.dataset import from_rows, row

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

    from adaptive.engines.load import Source


def end_tokens(target: Source) -> frozenset[int]:
    """The ids at which ``target`` ends an answer, besides its tokenizer's end-of-sequence token; known without its
    weights. Many chat models end a turn with another token than a text."""
    if target.gguf is not None:
        return gguf_tokenizer(target.gguf).end_tokens
    for name in ("generation_config.json", "config.json"):
        try:
            ends = json.loads((target.folder / name).read_text(encoding="utf-8"))["eos_token_id"]
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if ends is not None:
            return frozenset(ends if isinstance(ends, list) else [ends])
    return frozenset()


def read_chats(file: Path, tokenizer: PreTrainedTokenizerBase, ends: Collection[int] = ()) -> Dataset:
    """One row for each assistant turn of each line; ids are the negated line numbers, the domain is the file's name.

    ``ends``: the ids at which the target ends an answer, besides the tokenizer's end-of-sequence token
    (``end_tokens``). Every line is checked before anything is returned. Raises AdaptiveError if a line is invalid (the
    message has the number of the first one), the file cannot be read, or the tokenizer has no chat template.
    """
    if not tokenizer.chat_template:
        raise AdaptiveError("the target's tokenizer has no chat template, so chat messages cannot be turned into text")
    try:
        lines = file.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise AdaptiveError(f"data file {file} cannot be read: {why_unread(error)}") from error
    rows: list[dict[str, Any]] = []
    all_ends = {*ends, tokenizer.eos_token_id}
    for number, line in enumerate(lines, start=1):
        if line.strip():
            where = f"{file}, line {number}"
            try:
                rows += _turns(_messages(line, where), number, file, tokenizer, all_ends)
            except (TypeError, UnicodeEncodeError) as error:  # half of a surrogate pair, from a text that was cut off
                raise AdaptiveError(f"{where} is not valid Unicode") from error
    if not rows:
        raise AdaptiveError(f"data file {file} holds no assistant turn to learn from")
    return from_rows(rows)


def _messages(line: str, where: str) -> list[dict[str, str]]:
    """The messages of one line. Raises AdaptiveError, which names ``where``, for anything else."""
    try:
        found = json.loads(line)["messages"]
    except (ValueError, RecursionError) as error:
        raise AdaptiveError(f"{where}: not JSON ({error})") from error
    except (KeyError, TypeError) as error:
        raise AdaptiveError(f'{where}: expected an object {{"messages": [...]}}') from error
    if not isinstance(found, list) or not found:
        raise AdaptiveError(f"{where}: messages must be a list with at least one message")
    for place, message in enumerate(found, start=1):
        whole = isinstance(message, dict) and all(isinstance(message.get(k), str) for k in ("role", "content"))
        if not whole:
            raise AdaptiveError(f"{where}: message {place} needs role and content, both text")
    if all(message["role"] != "assistant" for message in found):
        raise AdaptiveError(f"{where}: no message has the role assistant, so there is nothing to learn from")
    return found


def _turns(
    messages: list[dict[str, str]], number: int, file: Path, tokenizer: PreTrainedTokenizerBase, ends: set[int | None]
) -> Iterator[dict[str, Any]]:
    """A row for each assistant turn: the messages before it are the prompt, the turn is the output."""
    for place, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = messages[:place]
        try:
            opening = str(tokenizer.apply_chat_template(before, tokenize=False, add_generation_prompt=True))
            whole = str(tokenizer.apply_chat_template(messages[: place + 1], tokenize=False))
        except Exception as error:  # a template may raise anything, for example if roles are out of order
            raise AdaptiveError(
                f"{file}, line {number}: the chat template refuses these messages: {first_line(error)}"
            ) from error
        if whole.startswith(opening):
            answer = _ids(whole[len(opening) :], tokenizer)
        else:  # the template rewrites a finished turn; a model would have written the turn's own text and its end
            marks = [token for token in _ids(whole, tokenizer) if token in ends]
            end = marks[-1] if marks else tokenizer.eos_token_id
            answer = _ids(message["content"], tokenizer) + ([] if end is None else [end])
        output = _up_to_end(answer, ends)
        prompt = _ids(opening, tokenizer)
        if len(output) < 2 or not prompt:
            continue
        key = next((m["content"] for m in reversed(before) if m["role"] == "user"), opening)
        yield row(
            -number,
            key,
            file.stem,
            np.array(prompt, np.int32),
            np.array(output, np.int32),
            SamplingParams(),
            None,
            limited=False,
        )


def _ids(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))


def _up_to_end(ids: list[int], ends: Collection[int | None]) -> list[int]:
    """``ids`` up to and including the first of ``ends``: no model writes what a template adds after it."""
    for place, token in enumerate(ids):
        if token in ends:
            return ids[: place + 1]
    return ids
