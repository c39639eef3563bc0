"""Server-sent events for the dashboard: they report changes, so that a page fetches data only after a change."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from adaptive.service.api import Api
from adaptive.service.streams import PING, PING_S
from adaptive.speculation import who_drafts
from adaptive.state import PairState

# Seconds between two checks for changes. Too low: more work than a reader can notice. Too high: the page lags behind.
LOOK_S = 0.5


class Changes:
    """Detects changes, by event name. One check serves all open pages."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._looked = float("-inf")
        self._found: dict[str, Any] = {}

    async def look(self) -> dict[str, Any]:
        """The current data of each event; of ``log`` and ``adapters`` only a version, which differs after a change."""
        if time.monotonic() - self._looked >= LOOK_S / 2:
            self._looked = time.monotonic()
            log, adapters = await asyncio.to_thread(_versions, self._api.trainer.state)
            trainer = asdict(self._api.trainer.status)
            self._found = {"now": now(self._api), "trainer": trainer, "log": log, "adapters": adapters}
        return self._found

    async def stream(self) -> AsyncIterator[str]:
        """All events at first, then those that changed, and comments in long silences, until the server stops."""
        told: dict[str, Any] = {}
        spoke = time.monotonic()
        while not self._api.leaving():
            for name, found in (await self.look()).items():
                if name not in told or told[name] != found:
                    told[name] = found
                    yield f"event: {name}\ndata: {json.dumps(found)}\n\n"
                    spoke = time.monotonic()
            if time.monotonic() - spoke >= PING_S:
                yield PING
                spoke = time.monotonic()
            await asyncio.sleep(LOOK_S)


def now(api: Api) -> dict[str, Any]:
    """The server's state: how the last answer was decoded, the adapter in use, and whether requests run or wait."""
    engine, session = api.engine, api.engine.session
    draft = None if session is None else who_drafts(session.pair)
    return {
        "state": engine.state,
        "model": api.model,
        "draft": draft,
        "adapter": engine.adapter,
        "speculation": engine.speculation.as_object(),
        "running": bool(engine.works),
        "waiting": len(engine.queue),
    }


def _versions(state: PairState) -> tuple[str, str]:
    """Versions of the log and of the adapters: their store, and the speed that each brought. They change with every
    change, also by other processes."""
    log = [state.records, state.records.with_name(f"{state.records.name}-wal")]
    return _version(log), _version([state.adapters, *_inside(state.adapters), state.promotions])


def _version(places: list[Path]) -> str:
    found = []
    for place in places:
        try:
            seen = place.stat()
        except OSError:
            continue
        found.append((seen.st_ino, seen.st_mtime_ns, seen.st_size if place.is_file() else 0))
    return format(hash(tuple(found)) % 2**64, "x")


def _inside(folder: Path) -> Iterator[Path]:
    try:
        entries = sorted(os.listdir(folder))
    except OSError:
        return
    # Without the hidden lock file, which changes even when a process only reads the store.
    yield from (folder / name for name in entries if not name.startswith("."))
