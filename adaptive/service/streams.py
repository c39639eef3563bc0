"""One job's events as server-sent events, in OpenAI's chunks."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from adaptive.service.calls import Call, CallParser, parser_for
from adaptive.service.jobs import Answer, Event, Failed, Job, Piece
from adaptive.service.responses import Shape, ending, error_object, figures

# Seconds of silence, in the queue or over a long prompt, after which a comment is sent: proxies and clients give a
# connection up that says nothing for half a minute.
PING_S = 15.0
PING = ": ping\n\n"


@dataclass(frozen=True)
class Wanted:
    """What a response carries besides text: ``usage`` at the end, ``top`` alternatives a token (None for no
    logprobs at all), and calls of ``tools``."""

    usage: bool
    top: int | None
    tools: list[dict[str, Any]] | None


@dataclass
class _Choice:
    """Where one answer stands: the calls in it so far, and the characters that its tokens stood for."""

    parser: CallParser | None
    calls: int = 0
    offset: int = 0


async def chunks(
    job: Job, events: asyncio.Queue[Event], shape: Shape, tokenizer: PreTrainedTokenizerBase, wanted: Wanted
) -> AsyncIterator[str]:
    """The stream of one response. Closed early, it cancels the job."""
    choices: dict[int, _Choice] = {}
    answers: list[Answer] = []
    waiting: asyncio.Task[Event] | None = None
    try:
        while True:
            waiting = asyncio.create_task(events.get())
            while not waiting.done():
                await asyncio.wait({waiting}, timeout=PING_S)
                if not waiting.done():
                    yield PING
            got = waiting.result()
            if isinstance(got, Piece | Answer) and got.index not in choices:
                choices[got.index] = _Choice(parser_for(tokenizer, wanted.tools))
                if shape.chat:
                    yield _line(shape.piece(got.index, "", first=True))
            if isinstance(got, Piece):
                for chunk in _piece(got, choices[got.index], shape, tokenizer, wanted.top):
                    yield _line(chunk)
            elif isinstance(got, Answer):
                answers.append(got)
                for chunk in _ending(got, choices[got.index], shape):
                    yield _line(chunk)
            elif isinstance(got, Failed):
                yield _line(error_object(got.status, got.message))
                return
            else:
                if wanted.usage:
                    yield _line(shape.usage_chunk(answers))
                yield "data: [DONE]\n\n"
                return
    finally:
        if waiting is not None:
            waiting.cancel()
        job.cancel()


def _line(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"


def _piece(
    piece: Piece, choice: _Choice, shape: Shape, tokenizer: PreTrainedTokenizerBase, top: int | None
) -> Iterator[dict[str, Any]]:
    logprobs = shape.piece_logprobs(piece, tokenizer, top, choice.offset)
    if logprobs is not None and not shape.chat:
        choice.offset += len(logprobs["tokens"][0])
    said: list[str | Call] = [piece.text] if choice.parser is None else choice.parser.feed(piece.text)
    text = "".join(part for part in said if isinstance(part, str))
    if text or logprobs is not None:
        yield shape.piece(piece.index, text, logprobs=logprobs)
    yield from _calls(piece.index, said, choice, shape)


def _calls(index: int, said: list[str | Call], choice: _Choice, shape: Shape) -> Iterator[dict[str, Any]]:
    for part in said:
        if isinstance(part, Call):
            yield shape.call(index, choice.calls, part)
            choice.calls += 1


def _ending(answer: Answer, choice: _Choice, shape: Shape) -> Iterator[dict[str, Any]]:
    """What was held back, and the chunk that says how the answer ended."""
    said = [] if choice.parser is None else choice.parser.finish()
    text = "".join(part for part in said if isinstance(part, str))
    if text:
        yield shape.piece(answer.index, text)
    yield from _calls(answer.index, said, choice, shape)
    reason = ending(answer.finish_reason, choice.calls > 0)
    yield {**shape.piece(answer.index, "", reason), **figures([answer])}
