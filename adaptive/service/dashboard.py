"""The page at ``/`` and what it reads: the history of ``adaptive history``, the trainer, the adapters."""

from __future__ import annotations

import asyncio
import functools
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from fastapi import FastAPI, Response
from fastapi import Path as InPath

from adaptive import promotions
from adaptive.records.history import By, as_object, history
from adaptive.records.log import Log
from adaptive.records.saved import time_saved
from adaptive.service.trainer import Trainer
from adaptive.state import PairState
from checkpoints.manifest import Manifest
from checkpoints.store import AdapterStore, training_seconds

PAGE = Path(__file__).with_name("page.html")

# A day: the script comes with the installed plotly and changes with it only.
SCRIPT_HEADERS = {"Cache-Control": "private, max-age=86400"}
# Nothing from elsewhere is loaded, and no other page may show this one in a frame.
PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; script-src 'self' 'unsafe-inline'; "
    "style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; frame-ancestors 'none'",
    "Cache-Control": "no-cache",
}

AdapterId = Annotated[str, InPath(pattern=r"^[0-9]{1,9}$")]


def add_dashboard(app: FastAPI, trainer: Trainer) -> None:
    """Add the page, ``/adaptive/history``, ``/adaptive/trainer`` and ``/adaptive/adapters`` to ``app``."""
    store = trainer.store

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return Response(_page(), media_type="text/html; charset=utf-8", headers=PAGE_HEADERS)

    @app.get("/plotly.js", include_in_schema=False)
    async def script() -> Response:
        return Response(_plotly(), media_type="text/javascript; charset=utf-8", headers=SCRIPT_HEADERS)

    @app.get("/adaptive/history")
    async def past(by: By = "adapter") -> dict[str, Any]:
        return await asyncio.to_thread(_history, trainer.state, store, by)

    @app.get("/adaptive/trainer")
    async def training() -> dict[str, Any]:
        return asdict(trainer.status)

    @app.get("/adaptive/adapters")
    async def adapters() -> list[dict[str, Any]]:
        return await asyncio.to_thread(_adapters, store, trainer.state)

    @app.post("/adaptive/adapters/rollback")
    async def rollback() -> dict[str, Any]:
        back = await asyncio.to_thread(store.rollback, "rolled back by hand, at the server")
        return {"current": None if back is None else back.id}

    @app.post("/adaptive/adapters/{name}/promote")
    async def promote(name: AdapterId) -> dict[str, Any]:
        promoted = await asyncio.to_thread(store.promote, name, "promoted by hand, at the server")
        return {"current": promoted.id}


@functools.cache
def _page() -> bytes:
    return PAGE.read_bytes()


@functools.cache
def _plotly() -> bytes:
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs()).encode()


def _history(state: PairState, store: AdapterStore, by: By) -> dict[str, Any]:
    with Log(state.records) as log:
        generations = log.figures()
        saved = time_saved(log.spent())
    found = history(generations, by)
    return {
        **as_object(found),
        "saved": None if saved is None else {**asdict(saved), "text": saved.text},
        "training_seconds": training_seconds(store),
        "promotions": [{**asdict(one), "text": one.text} for one in promotions.load(state.promotions)],
    }


def _adapters(store: AdapterStore, state: PairState) -> list[dict[str, Any]]:
    current = store.current_id()
    speeds = {one.adapter: one.text for one in promotions.load(state.promotions)}
    return [_object(manifest, current, speeds.get(manifest.id)) for manifest in store.list()]


def _object(manifest: Manifest, current: str | None, speed: str | None) -> dict[str, Any]:
    known = asdict(manifest)
    del known["files"]
    return {**known, "current": manifest.id == current, "speed": speed}
