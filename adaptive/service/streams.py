"""Turns a job's events into a stream of server-sent events, and defines the interface of the dialects' writers."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

from adaptive.service.calls import Reading
from adaptive.service.jobs import Answer, Event, Failed, Job, Piece

# Seconds without output (in the queue, during a long prompt or a long tool call) after which a comment is sent. Proxies
# and clients close a connection after some 30 s of silence.
PING_S = 15.0
PING = ": ping\n\n"

# OpenAPI description of a completion, whole or as server-sent events.
COMPLETION: dict[int | str, dict[str, Any]] = {
    200: {"content": {"application/json": {}, "text/event-stream": {}}, "description": "The answers"}
}


@dataclass(frozen=True)
class Served:
    """The data of a queued request that a writer needs.

    ``name`` is part of ids, ``created`` is seconds since the epoch, ``prompt_tokens`` the total of all prompts, ``n``
    the number of answers to each.
    """

    name: str
    created: int
    model: str
    tokenizer: PreTrainedTokenizerBase
    reading: Reading
    prompt_tokens: int
    n: int = 1


class Writer(Protocol):
    """Writes one response in one dialect, as one object or as the events of a stream."""

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """The body of a response that is not streamed."""

    def begin(self) -> Iterable[str]:
        """The beginning of a stream, before anything is decoded."""

    def piece(self, piece: Piece) -> Iterable[str]:
        """New text."""

    def answer(self, answer: Answer) -> Iterable[str]:
        """The end of one answer."""

    def end(self, answers: Sequence[Answer]) -> Iterable[str]:
        """The end of the stream."""

    def failed(self, failed: Failed) -> Iterable[str]:
        """The end of a stream whose request failed."""


async def chunks(
    job: Job, events: asyncio.Queue[Event], writer: Writer, refused: Callable[[int], None] = lambda status: None
) -> AsyncIterator[str]:
    """The stream of one response. Closing it early cancels the job. ``refused`` receives the status if it fails."""
    answers: list[Answer] = []
    waiting: asyncio.Task[Event] | None = None
    try:
        for line in writer.begin():
            yield line
        spoke = time.monotonic()
        while True:
            waiting = asyncio.create_task(events.get())
            while not waiting.done():
                await asyncio.wait({waiting}, timeout=max(0.0, spoke + PING_S - time.monotonic()))
                if time.monotonic() - spoke >= PING_S:
                    yield PING
                    spoke = time.monotonic()
            got = waiting.result()
            if isinstance(got, Piece):
                lines = writer.piece(got)
            elif isinstance(got, Answer):
                answers.append(got)
                lines = writer.answer(got)
            elif isinstance(got, Failed):
                refused(got.status)
                lines = writer.failed(got)
            else:
                lines = writer.end(answers)
            for line in lines:
                yield line
                spoke = time.monotonic()
            if not isinstance(got, Piece | Answer):
                return
    finally:
        if waiting is not None:
            waiting.cancel()
        job.cancel()


def data_line(body: dict[str, Any], event: str | None = None) -> str:
    """One server-sent event; ``event`` is its name, for dialects that use names."""
    named = "" if event is None else f"event: {event}\n"
    return f"{named}data: {written(body)}\n\n"


def written(body: dict[str, Any]) -> str:
    """A body as JSON. Half of a surrogate pair, echoed from the request, becomes a question mark."""
    return json.dumps(body, ensure_ascii=False).encode("utf-8", "replace").decode("utf-8")
