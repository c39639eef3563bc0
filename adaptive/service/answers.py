"""Paths for single answers of the log: list them, show the drafter of each token, delete them permanently with the
later ones that hold them.

Only the user who runs the server may read the log, so these paths are as restricted: with an API key, to requests that
send it; without one, to programs of that user, and not to pages of other sites, even those that may use the model.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Annotated, Any, TypeVar

from fastapi import FastAPI, Query, Request
from fastapi import Path as InPath
from starlette.exceptions import HTTPException
from transformers import PreTrainedTokenizerBase

from adaptive.decoding.text import TextStream
from adaptive.records.deletion import begun, delete_answers
from adaptive.records.holders import Held
from adaptive.records.log import Log
from adaptive.records.logged import LoggedGeneration
from adaptive.records.origins import origins
from adaptive.records.stats import count_rounds, tokens_per_round
from adaptive.service.api import Api
from adaptive.service.engine import Work
from adaptive.service.guard import of_another_site
from adaptive.service.peers import same_user
from adaptive.types import Generation

# Maximum number of answers in one response.
MOST = 100
# Characters of a question that the list shows.
LINE = 200
# Longest wait, in seconds, for answers that have just ended and for the log writer before a deletion, so that these
# answers are deleted too.
FLUSH_S = 5.0

Number = Annotated[int, InPath(ge=1, le=2**63 - 1)]
Found = TypeVar("Found")


def add_answers(app: FastAPI, api: Api) -> None:
    """Add ``/adaptive/answers`` and ``/adaptive/sessions`` to ``app``."""
    state = api.trainer.state

    async def with_log(request: Request, do: Callable[[Log], Found]) -> Found:
        refuse_others(api, request)

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

    @app.get("/adaptive/answers/{number}/holders")
    async def holders(request: Request, number: Number) -> dict[str, Any]:
        return {"held_by": await with_log(request, lambda log: log.holders(known(log, number)))}

    @app.delete("/adaptive/answers/{number}")
    async def forget(request: Request, number: Number) -> dict[str, int]:
        return await forgotten(request, lambda log: known(log, number))

    def known(log: Log, number: int) -> tuple[int]:
        """The id of an answer that is in the log or whose deletion has failed. Raises HTTPException for another."""
        return (number if number in begun(state) else _one(log, number).id,)

    @app.get("/adaptive/sessions/{name:path}")
    async def session(request: Request, name: str) -> dict[str, int]:
        return {"answers": await with_log(request, lambda log: log.count(session=name))}

    @app.delete("/adaptive/sessions/{name:path}")
    async def forget_session(request: Request, name: str) -> dict[str, int]:
        return await forgotten(request, lambda log: log.session_ids(name), name)

    async def forgotten(
        request: Request, chosen: Callable[[Log], Collection[int]], session: str | None = None
    ) -> dict[str, int]:
        """Delete the ``chosen`` answers and those that hold them, their data in other files of the pair, and the caches
        in memory. Answers in progress that hold one, or belong to the ``session``, are not recorded."""
        refuse_others(api, request)
        written = api.session().assistant.log

        def newest(log: Log) -> Collection[int]:
            if written is not None:
                written.flush(FLUSH_S)
            return chosen(log)

        def run(log: Log) -> int:
            ids = newest(log)
            return delete_answers(state, log, {*ids, *log.holders(ids)})[0]

        await _keep_off_the_log(api, await with_log(request, lambda log: log.held(newest(log))), session)
        try:
            deleted = await with_log(request, run)
        finally:
            api.engine.forget_conversations()
        return {"deleted": deleted}


async def _keep_off_the_log(api: Api, held: Held, session: str | None) -> None:
    """See to it that no request is recorded whose prompt holds one of the answers, nor a waiting or running one that
    belongs to the ``session``. Wait until those of their answers that have just ended are with the log's writer."""
    api.forgotten.append(held)
    api.items.clear()
    running = [(work.job, work.answering) for work in api.engine.works]
    names = {job: answering.session for job, answering in running if answering is not None}
    found = set()
    for job in list(api.jobs):
        name = names.get(job, job.ask.session)
        if (session is not None and name == session) or job.ask.repeats([held], name):
            job.ask.forgotten.set()
            found.add(job)

    def ending(work: Work) -> bool:
        answering = work.answering
        ended = answering is not None and (answering.decoding.finish_reason is not None or work.job.cancelled)
        return ended and work.job in found

    until = time.monotonic() + FLUSH_S
    while any(map(ending, api.engine.works)) and time.monotonic() < until:
        await asyncio.sleep(0.01)


def refuse_others(api: Api, request: Request, what: str = "what was said") -> None:
    """Without an API key: raise HTTPException, which names ``what``, unless the client is a program of the user who
    runs the server, and no page of another site: its requests come from a browser of that user, too."""
    if api.settings.api_key is not None:
        return
    if of_another_site(dict(request.scope["headers"])):
        raise HTTPException(
            403,
            f"{what} is not for pages of other sites; to allow it, start the server with "
            "--api-key-file FILE, and send the key",
        )
    peer, here = request.client, request.scope.get("server")
    if peer is None or here is None or not same_user((peer.host, peer.port), tuple(here)):
        raise HTTPException(
            403,
            f"{what} is for programs of the user who runs the server, which this may not be; to allow it, "
            "start the server with --api-key-file FILE, and send the key",
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
        "tokens_per_round": tokens_per_round(count_rounds(one.rounds)),
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
    return {**_line(logged), "text": one.text, "tokens": tokens}
