"""One job's events as a response: what every dialect's writer has to say, and the stream of server-sent events."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

from adaptive.service.calls import Reading
from adaptive.service.jobs import Answer, Event, Failed, Job, Piece

# Seconds of silence, in the queue, over a long prompt or within a long call of a tool, after which a comment is sent:
# proxies and clients give a connection up that says nothing for half a minute.
PING_S = 15.0
PING = ": ping\n\n"

# A completion, whole or as server-sent events.
COMPLETION: dict[int | str, dict[str, Any]] = {
    200: {"content": {"application/json": {}, "text/event-stream": {}}, "description": "The answers"}
}


@dataclass(frozen=True)
class Served:
    """A request that is in the queue, as a writer has to know it.

    ``name`` is for ids, ``created`` in seconds of Unix time, ``prompt_tokens`` those of all its prompts.
    """

    name: str
    created: int
    model: str
    tokenizer: PreTrainedTokenizerBase
    reading: Reading
    prompt_tokens: int


class Writer(Protocol):
    """Writes one response in one dialect, as a whole or as the lines of a stream."""

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """The body of a response that is not streamed."""

    def begin(self) -> Iterable[str]:
        """What a stream begins with, before anything is decoded."""

    def piece(self, piece: Piece) -> Iterable[str]:
        """Text that has become certain."""

    def answer(self, answer: Answer) -> Iterable[str]:
        """The end of one answer."""

    def end(self, answers: Sequence[Answer]) -> Iterable[str]:
        """The end of the stream."""

    def failed(self, failed: Failed) -> Iterable[str]:
        """The end of a stream that came to nothing."""


async def chunks(job: Job, events: asyncio.Queue[Event], writer: Writer) -> AsyncIterator[str]:
    """The stream of one response. Closed early, it cancels the job."""
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
            else:
                lines = writer.failed(got) if isinstance(got, Failed) else writer.end(answers)
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
    """One server-sent event, with a name where the dialect gives them names."""
    named = "" if event is None else f"event: {event}\n"
    return f"{named}data: {written(body)}\n\n"


def written(body: dict[str, Any]) -> str:
    """A body as JSON, in which half a character that a client sent and is told again is a question mark."""
    return json.dumps(body, ensure_ascii=False).encode("utf-8", "replace").decode("utf-8")
