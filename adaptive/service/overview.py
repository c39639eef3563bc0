"""Collects the data of a pair's state folder for the dashboard and for the report of ``adaptive history``."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from adaptive import promotions
from adaptive.records.drafters import DrafterFigures
from adaptive.records.history import By, History, as_object, history
from adaptive.records.log import Log
from adaptive.records.saved import time_saved
from adaptive.service.storage import Storage, on_disk
from adaptive.state import PairState
from checkpoints.manifest import Manifest
from checkpoints.store import AdapterStore, training_seconds


@dataclass(frozen=True)
class Overview:
    """The history, the same as a JSON object with the time saved, the adapters, and the sizes on disk."""

    found: History
    history: dict[str, Any]
    adapters: list[dict[str, Any]]
    storage: Storage


def overview(state: PairState, by: By) -> Overview:
    """Everything for the report. Raises AdaptiveError if the log cannot be read."""
    store = AdapterStore(state.adapters)
    found, known = Past(state, store).read(by)
    return Overview(found, known, adapters(store, state), on_disk(state))


class Past:
    """Reads the history, for a page that asks for it again and again. Any thread may use it."""

    def __init__(self, state: PairState, store: AdapterStore) -> None:
        self._state, self._store = state, store
        self._drafters = DrafterFigures()  # so that only later rounds have to be read

    def read(self, by: By) -> tuple[History, dict[str, Any]]:
        """The history, and the same as a JSON object with the time saved and the effect of promotions."""
        with Log(self._state.records) as log:
            generations = log.figures()
            saved = time_saved(log.spent())
            drafters = self._drafters = log.drafter_figures(self._drafters)
        found = history(generations, by)
        return found, {
            **as_object(found),
            "saved": None if saved is None else {**asdict(saved), "text": saved.text},
            "training_seconds": training_seconds(self._store),
            "promotions": [{**asdict(one), "text": one.text} for one in promotions.load(self._state.promotions)],
            "drafters": {name: asdict(one) for name, one in drafters.drafters.items()},
        }


def adapters(store: AdapterStore, state: PairState) -> list[dict[str, Any]]:
    """Every adapter with its gate result, oldest first."""
    current = store.current_id()
    speeds = {one.adapter: one.text for one in promotions.load(state.promotions)}
    return [_object(manifest, current, speeds.get(manifest.id)) for manifest in store.list()]


def _object(manifest: Manifest, current: str | None, speed: str | None) -> dict[str, Any]:
    known = asdict(manifest)
    del known["files"]
    return {**known, "current": manifest.id == current, "speed": speed}
