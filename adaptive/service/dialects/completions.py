"""OpenAI's ``/v1/chat/completions`` and ``/v1/completions``: requests, and responses as one object or as chunks."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import accumulate
from typing import Any

from fastapi import FastAPI, Request, Response
from transformers import PreTrainedTokenizerBase

from adaptive.decoding.text import BROKEN
from adaptive.service.api import Api
from adaptive.service.calls import AnswerReader, Part, Thought
from adaptive.service.errors import error_object
from adaptive.service.figures import figures, tokens_of, usage
from adaptive.service.formats import Call
from adaptive.service.jobs import Answer, Failed, Piece
from adaptive.service.partial import Arguments, CallBegins, CallBroken
from adaptive.service.schemas import ChatRequest, CompletionRequest, StreamOptions
from adaptive.service.streams import COMPLETION, Served, data_line
from adaptive.types import Supervision

# The log-probability that OpenAI's API reports for a token outside the top alternatives.
UNLIKELY = -9999.0


def add_completions(app: FastAPI, api: Api) -> None:
    """Add the two paths to ``app``."""

    @app.post("/v1/chat/completions", responses=COMPLETION, response_class=Response)
    async def chat(body: ChatRequest, request: Request) -> Response:
        top = (body.top_logprobs or 0) if body.logprobs else None
        return await api.chat(body, request, partial(Completion, chat=True, top=top, options=body.streams), top)

    @app.post("/v1/completions", responses=COMPLETION, response_class=Response)
    async def complete(body: CompletionRequest, request: Request) -> Response:
        write = partial(Completion, chat=False, top=body.logprobs, options=body.streams)
        return await api.complete(body, request, write, body.logprobs)


@dataclass
class _Choice:
    """The state of one answer: its calls so far, those of them that turned out to be none, the characters of its tokens
    so far, and its thinking."""

    reader: AnswerReader
    calls: int = 0
    broken: int = 0
    offset: int = 0
    thoughts: str = ""


class Completion:
    """Writes one response. ``top``: alternatives per token if logprobs are requested, else None. ``options``: extra
    contents of a stream."""

    def __init__(self, served: Served, chat: bool, top: int | None, options: StreamOptions) -> None:
        self._served, self._chat, self._top, self._options = served, chat, top, options
        self._id = f"{'chatcmpl' if chat else 'cmpl'}-{served.name}"
        self._choices: dict[int, _Choice] = {}

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """See ``Writer.whole``."""
        choices, thoughts = [], []
        for answer in sorted(answers, key=lambda a: a.index):
            said: dict[str, Any] = {"text": answer.text}
            reason = answer.finish_reason
            if self._chat:
                reader = self._served.reading.reader()
                message = _message(reader.feed(answer.text) + reader.finish())
                thoughts.append(message.get("reasoning_content", ""))
                said = {"message": message}
                reason = ending(reason, "tool_calls" in message)
            logprobs = None
            if self._top is not None and answer.supervision is not None:
                logprobs = self._logprobs(answer.tokens, answer.supervision)
            choices.append({"index": answer.index, **said, "logprobs": logprobs, "finish_reason": reason})
        kind = "chat.completion" if self._chat else "text_completion"
        counts = {"usage": self._usage(answers, thoughts), **figures(answers)}
        return {**self._head(kind), "choices": choices, **counts}

    def begin(self) -> Iterator[str]:
        """For a chat the first chunk of each answer, with the role: clients number the answers as they begin."""
        for index in range(self._served.n if self._chat else 0):
            yield from self._opened(index)

    def piece(self, piece: Piece) -> Iterator[str]:
        """Chunks of new text; with logprobs, one for every token."""
        yield from self._opened(piece.index)
        choice = self._choices[piece.index]
        logprobs = None
        if self._top is not None and piece.token is not None and piece.supervision is not None:
            logprobs = self._logprobs((piece.token,), piece.supervision, choice.offset)
            choice.offset += _characters(self._served.tokenizer, piece.token)
        parts = choice.reader.feed(piece.text) if self._chat else [piece.text]
        if logprobs is not None and not any(isinstance(part, str) for part in parts):
            parts = ["", *parts]
        yield from self._parts(piece.index, parts, logprobs, piece.drafted if self._options.include_drafted else None)

    def answer(self, answer: Answer) -> Iterator[str]:
        """The text that was held back, and the chunk with the finish reason."""
        yield from self._opened(answer.index)
        choice = self._choices[answer.index]
        yield from self._parts(answer.index, choice.reader.finish() if self._chat else [], None)
        reason = ending(answer.finish_reason, choice.calls > choice.broken)
        yield data_line({**self._chunk(answer.index, self._said(""), reason), **figures([answer])})

    def end(self, answers: Sequence[Answer]) -> Iterator[str]:
        """The usage, if requested, and the end mark."""
        if self._options.include_usage:
            thoughts = [choice.thoughts for choice in self._choices.values()]
            counts = {"usage": self._usage(answers, thoughts), **figures(answers)}
            yield data_line({**self._head(self._kind), "choices": [], **counts})
        yield "data: [DONE]\n\n"

    def failed(self, failed: Failed) -> Iterator[str]:
        """The error, as an event."""
        yield data_line(error_object(failed.status, failed.message))

    def _usage(self, answers: Sequence[Answer], thoughts: Sequence[str]) -> dict[str, Any]:
        thought = tokens_of(thoughts, self._served.tokenizer) if self._chat else None
        return usage(answers, self._served.n, thought)

    @property
    def _kind(self) -> str:
        return "chat.completion.chunk" if self._chat else "text_completion"

    def _opened(self, index: int) -> Iterator[str]:
        if index not in self._choices:
            self._choices[index] = _Choice(self._served.reading.reader(partial=True))
            if self._chat:
                yield data_line(self._chunk(index, {"delta": {"role": "assistant", "content": ""}}))

    def _parts(
        self, index: int, parts: Sequence[Part], logprobs: dict[str, Any] | None, drafted: bool | None = None
    ) -> Iterator[str]:
        choice = self._choices[index]
        for part in parts:
            if isinstance(part, Call):
                said = _call_delta(choice.calls, part.object())
                choice.calls += 1
            elif isinstance(part, CallBegins):
                said = _call_delta(choice.calls, part.call.object())
                choice.calls += 1
            elif isinstance(part, Arguments):
                said = _call_delta(choice.calls - 1, {"function": {"arguments": part.text}})
            elif isinstance(part, CallBroken):
                choice.broken += 1
                continue
            elif isinstance(part, Thought):
                said = {"delta": {"reasoning_content": part.text}}
                choice.thoughts += part.text
            elif part or logprobs is not None:
                said = self._said(part)
            else:
                continue
            tokens, logprobs = (logprobs, None) if isinstance(part, str) else (None, logprobs)
            if drafted is not None:
                said["drafted"] = drafted
            yield data_line(self._chunk(index, said, logprobs=tokens))

    def _said(self, text: str) -> dict[str, Any]:
        if not self._chat:
            return {"text": text}
        return {"delta": {"content": text} if text else {}}

    def _chunk(
        self, index: int, said: dict[str, Any], reason: str | None = None, logprobs: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        choice = {"index": index, **said, "logprobs": logprobs, "finish_reason": reason}
        return {**self._head(self._kind), "choices": [choice]}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._served.created, "model": self._served.model}

    def _logprobs(self, tokens: Sequence[int], rows: Supervision, offset: int = 0) -> dict[str, Any]:
        """Log-probabilities of ``tokens``, which begin ``offset`` characters into the answer: the target's at
        temperature 1, as the log keeps them (the likeliest 32, in float16)."""
        content, tokenizer = [], self._served.tokenizer
        for place, token in enumerate(tokens):
            known = {int(i): float(p) for i, p in zip(rows.ids[place], rows.logprobs[place], strict=True)}
            likeliest = [_token(tokenizer, i, p) for i, p in list(known.items())[: self._top]]
            content.append({**_token(tokenizer, token, known.get(token, UNLIKELY)), "top_logprobs": likeliest})
        if self._chat:
            return {"content": content, "refusal": None}
        return {
            "tokens": [_name(entry) for entry in content],
            "token_logprobs": [entry["logprob"] for entry in content],
            "top_logprobs": [{_name(one): one["logprob"] for one in entry["top_logprobs"]} for entry in content],
            "text_offset": list(accumulate((_characters(tokenizer, t) for t in tokens[:-1]), initial=offset)),
        }


def _call_delta(number: int, call: dict[str, Any]) -> dict[str, Any]:
    """A delta with the call of this number in the answer, or with more of it."""
    return {"delta": {"tool_calls": [{"index": number, **call}]}}


def ending(reason: str, called: bool) -> str:
    """OpenAI's finish reason: ``tool_calls`` instead of ``stop`` if the answer has calls."""
    return "tool_calls" if called and reason == "stop" else reason


def _message(parts: Sequence[Part]) -> dict[str, Any]:
    """The message of one answer, with its thinking and its tool calls."""
    content = "".join(part for part in parts if isinstance(part, str))
    thoughts = "".join(part.text for part in parts if isinstance(part, Thought))
    calls = [part.object() for part in parts if isinstance(part, Call)]
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if thoughts:
        message["reasoning_content"] = thoughts
    return {**message, "content": content or None, "tool_calls": calls} if calls else message


def _token(tokenizer: PreTrainedTokenizerBase, token: int, logprob: float) -> dict[str, Any]:
    text, data = _text_of(tokenizer, token)
    # JSON has no -inf, which stands for a probability below the range of float16.
    return {"token": text, "logprob": max(logprob, UNLIKELY), "bytes": None if data is None else list(data)}


def _name(entry: dict[str, Any]) -> str:
    """The token of ``_token`` as a text that no other token has: like OpenAI, its bytes if they are no characters."""
    if BROKEN not in entry["token"] or entry["bytes"] is None:
        return str(entry["token"])
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in entry["bytes"])


def _characters(tokenizer: PreTrainedTokenizerBase, token: int) -> int:
    """The number of characters that begin in a token."""
    text, data = _text_of(tokenizer, token)
    return len(text) if data is None else sum(byte & 0xC0 != 0x80 for byte in data)  # others continue a character


# Decoding a token takes as long as writing ten of them, and the alternatives of an answer's tokens are mostly the same.
@lru_cache(maxsize=1 << 16)
def _text_of(tokenizer: PreTrainedTokenizerBase, token: int) -> tuple[str, bytes | None]:
    """A token's text and its bytes; None for a part of a character whose bytes the tokenizer does not tell."""
    text, form = str(tokenizer.decode([token])), str(tokenizer.convert_ids_to_tokens(token))
    if form.replace("▁", " ") == f" {text}":  # some tokenizers drop a space before a text, which this token is not
        text = f" {text}"
    return text, _bytes_of(form) if BROKEN in text else text.encode("utf-8")


def _bytes_of(form: str) -> bytes | None:
    """The bytes of a token that is one byte, ``<0xE2>``, or is written in the alphabet of byte-level tokenizers."""
    if (byte := re.fullmatch("<0x([0-9A-F]{2})>", form)) is not None:
        return bytes.fromhex(byte[1])
    return bytes(ALPHABET[letter] for letter in form) if ALPHABET.keys() >= set(form) else None


def _alphabet() -> dict[str, int]:
    """The byte for each character of GPT-2's alphabet: printable ones stand for themselves, the others are moved."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


ALPHABET = _alphabet()
