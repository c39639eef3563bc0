"""Paths for the pages and for the dashboard's data: history, trainer, adapters, memory and disk, change events."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from fastapi import FastAPI, Request, Response
from fastapi import Path as InPath
from fastapi.responses import StreamingResponse
from starlette.exceptions import HTTPException

from adaptive.records.history import By
from adaptive.service import pages
from adaptive.service.answers import refuse_others
from adaptive.service.api import Api
from adaptive.service.events import Changes
from adaptive.service.overview import Past
from adaptive.service.overview import adapters as known_adapters
from adaptive.service.storage import on_disk, with_memory

# The pages load nothing from other sites, run only their own script files, and cannot be shown in a frame of another
# page.
PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
READS = ["GET", "HEAD"]
AdapterId = Annotated[str, InPath(pattern=r"^[0-9]{1,9}$")]
CHOICE = "the choice of an adapter"


def add_dashboard(app: FastAPI, api: Api) -> None:
    """Add the pages, ``/adaptive/history``, ``trainer``, ``adapters``, ``storage`` and ``events`` to ``app``."""
    trainer = api.trainer
    store, state = trainer.store, trainer.state
    past, changes = Past(state, store), Changes(api)

    @app.api_route("/", methods=READS, include_in_schema=False)
    async def page() -> Response:
        return _page(pages.dashboard())

    @app.api_route("/chat", methods=READS, include_in_schema=False)
    async def chat() -> Response:
        return _page(pages.part("chat.html"))

    @app.api_route("/assets/{name}", methods=READS, include_in_schema=False)
    async def asset(name: str) -> Response:
        if name not in pages.ASSETS:
            raise HTTPException(404, "there is no such file")
        return Response(pages.part(name), media_type=pages.TYPES[Path(name).suffix], headers=PAGE_HEADERS)

    @app.get("/adaptive/history")
    async def history(request: Request, by: By = "adapter") -> dict[str, Any]:
        if by == "session":
            refuse_others(api, request)
        return (await asyncio.to_thread(past.read, by))[1]

    @app.get("/adaptive/trainer")
    async def training() -> dict[str, Any]:
        return asdict(trainer.status)

    # Not in the OpenAPI description: a client generated from it would wait for the end of an endless stream.
    @app.get("/adaptive/events", include_in_schema=False)
    async def events() -> Response:
        return StreamingResponse(
            changes.stream(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"}
        )

    @app.get("/adaptive/storage")
    async def storage() -> dict[str, Any]:
        return asdict(await asyncio.to_thread(lambda: with_memory(on_disk(state), api.engine.session)))

    @app.get("/adaptive/adapters")
    async def adapters() -> list[dict[str, Any]]:
        return await asyncio.to_thread(known_adapters, store, state)

    @app.post("/adaptive/adapters/rollback")
    async def rollback(request: Request) -> dict[str, Any]:
        refuse_others(api, request, CHOICE)
        back = await asyncio.to_thread(store.rollback, "rolled back by hand, at the server")
        return {"current": None if back is None else back.id}

    @app.post("/adaptive/adapters/{name}/promote")
    async def promote(request: Request, name: AdapterId) -> dict[str, Any]:
        refuse_others(api, request, CHOICE)
        promoted = await asyncio.to_thread(store.promote, name, "promoted by hand, at the server")
        return {"current": promoted.id}


def _page(text: str) -> Response:
    return Response(text, media_type="text/html; charset=utf-8", headers=PAGE_HEADERS)
