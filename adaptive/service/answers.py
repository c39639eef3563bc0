"""Paths for single answers of the log: list them, show the drafter of each token, delete them permanently.

Only the user who runs the server may read the log, so these paths are as restricted: with an API key, to requests that
send it; without one, to programs of that user.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Annotated, Any, TypeVar

from fastapi import FastAPI, Query, Request
from fastapi import Path as InPath
from starlette.exceptions import HTTPException
from transformers import PreTrainedTokenizerBase

from adaptive.decoding.text import TextStream
from adaptive.records.erase import erase_beside
from adaptive.records.log import Log, LoggedGeneration
from adaptive.records.origins import origins
from adaptive.service.api import Api
from adaptive.service.peers import same_user
from adaptive.types import Generation

# Maximum number of answers in one response.
MOST = 100
# Characters of a question that the list shows.
LINE = 200
# Longest wait, in seconds, for the log writer before a deletion, so that answers just given are deleted too.
FLUSH_S = 5.0

Number = Annotated[int, InPath(ge=1, le=2**63 - 1)]
Found = TypeVar("Found")


def add_answers(app: FastAPI, api: Api) -> None:
    """Add ``/adaptive/answers`` and ``/adaptive/sessions`` to ``app``."""
    state = api.trainer.state

    async def with_log(request: Request, do: Callable[[Log], Found]) -> Found:
        _for_this_user(api, request)

        def run() -> Found:
            with Log(state.records) as log:
                return do(log)

        return await asyncio.to_thread(run)

    @app.get("/adaptive/answers")
    async def answers(
        request: Request,
        limit: Annotated[int, Query(ge=1, le=MOST)] = 20,
        before: Annotated[int, Query(ge=1, le=2**63 - 1)] = 2**63 - 1,
    ) -> dict[str, Any]:
        return await with_log(request, lambda log: _newest(log, limit, before))

    @app.get("/adaptive/answers/{number}")
    async def answer(request: Request, number: Number) -> dict[str, Any]:
        tokenizer = api.tokenizer
        return await with_log(request, lambda log: _whole(log, number, tokenizer))

    @app.delete("/adaptive/answers/{number}")
    async def forget(request: Request, number: Number) -> dict[str, int]:
        def delete(log: Log) -> int:
            _one(log, number)
            return log.purge(ids={number, *log.holders(number)})

        return await forgotten(request, delete)

    @app.get("/adaptive/sessions/{name:path}")
    async def session(request: Request, name: str) -> dict[str, int]:
        return {"answers": await with_log(request, lambda log: log.count(session=name))}

    @app.delete("/adaptive/sessions/{name:path}")
    async def forget_session(request: Request, name: str) -> dict[str, int]:
        return await forgotten(request, lambda log: log.purge(session=name))

    async def forgotten(request: Request, delete: Callable[[Log], int]) -> dict[str, int]:
        """Delete answers, their data in other files of the pair, and the caches in memory."""
        _for_this_user(api, request)
        written = api.session().assistant.log

        def run(log: Log) -> int:
            if written is not None:
                written.flush(FLUSH_S)
            deleted = delete(log)
            erase_beside(state, everything=False)
            return deleted

        try:
            deleted = await with_log(request, run)
        finally:
            api.engine.forget_conversations()
        return {"deleted": deleted}


def _for_this_user(api: Api, request: Request) -> None:
    """Without an API key: raise HTTPException unless the client is a program of the user who runs the server."""
    if api.settings.api_key is not None:
        return
    peer, here = request.client, request.scope.get("server")
    if peer is None or here is None or not same_user((peer.host, peer.port), tuple(here)):
        raise HTTPException(
            403,
            "what was said is shown to programs of the user who runs the server, which this may not be; an API key is "
            "the cure: start the server with --api-key-file FILE, and send the key",
        )


def _newest(log: Log, limit: int, before: int) -> dict[str, Any]:
    ids = log.newest(limit + 1, before - 1)
    wanted = ids[-limit:]
    found = log.generations(wanted[0] - 1, len(wanted), with_supervision=False) if wanted else ()
    return {"answers": [_line(one) for one in found][::-1], "more": len(ids) > limit}


def _line(logged: LoggedGeneration) -> dict[str, Any]:
    one = logged.generation
    asked = _question(one)
    return {
        "id": logged.id,
        "session": one.session,
        "created": one.created,
        "adapter": one.adapter,
        "finish_reason": one.finish_reason,
        "asked": asked if len(asked) <= LINE else f"{asked[:LINE]}…",
        "tokens": len(one.output),
        "tokens_per_second": one.timings.per_second or None,
        "drafted": sum(r.drafted for r in one.rounds),
        "accepted": sum(r.accepted for r in one.rounds),
    }


def _question(one: Generation) -> str:
    """The question, in one line."""
    said = next((m.content for m in reversed(one.messages) if m.role == "user"), one.prompt_text)
    return " ".join(said.split())


def _one(log: Log, number: int) -> LoggedGeneration:
    """The answer with this id. Raises HTTPException if it is missing or damaged."""
    with suppress(StopIteration):
        found = next(log.generations(number - 1, 1, with_supervision=False))
        if found.id == number:
            return found
    raise HTTPException(404, log.damaged.get(number, f"the log has no answer {number}"))


def _whole(log: Log, number: int, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    logged = _one(log, number)
    one = logged.generation
    stream = TextStream(tokenizer, (), () if one.messages else one.prompt.tolist())
    texts = [stream.push(token) for token in one.output.tolist()]
    if texts:
        texts[-1] += stream.finish()
    drafters = origins(one.rounds, len(texts))
    tokens = [{"text": text, "drafter": who} for text, who in zip(texts, drafters, strict=True)]
    return {**_line(logged), "text": one.text, "tokens": tokens, "held_by": list(log.holders(number))}
