"""The items of recent responses, for requests that refer to them by their ids instead of sending them again."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

# Limits of what is kept: more would only use memory, since a conversation refers to its own items.
MOST_ITEMS = 1000
MOST_CHARACTERS = 1 << 25


class KeptItems:
    """The newest items of ``/v1/responses`` by their ids, in memory only. Used on the event loop."""

    def __init__(self) -> None:
        self._items: OrderedDict[str, dict[str, Any]] = OrderedDict()

    def keep(self, item: dict[str, Any]) -> None:
        """Keep an item, which may still grow, and drop the oldest ones beyond the limits."""
        self._items[item["id"]] = item
        size = sum(map(_characters, self._items.values()))
        while len(self._items) > MOST_ITEMS or (size > MOST_CHARACTERS and len(self._items) > 1):
            size -= _characters(self._items.popitem(last=False)[1])

    def find(self, name: str) -> dict[str, Any] | None:
        """The item with this id, which counts as new again; None if it is not kept."""
        if name in self._items:
            self._items.move_to_end(name)
        return self._items.get(name)

    def clear(self) -> None:
        """Drop all items."""
        self._items.clear()


def _characters(item: dict[str, Any]) -> int:
    parts = [*item.get("summary", ()), *item.get("content", ())]
    return len(item.get("arguments", "")) + len(item.get("input", "")) + sum(len(part["text"]) for part in parts)
