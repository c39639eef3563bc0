"""Retention: what is older than some days, or beyond some gigabytes, is deleted as records come, where asked for.

Deleted pages are overwritten and used again, so that the file stops growing; ``adaptive records purge`` also gives
them back and leaves no trace.
"""

from __future__ import annotations

import sqlite3
import time
from dataclasses import dataclass

from adaptive.records.schema import transaction

# Records deleted in one transaction: some ten milliseconds in which nobody else can write.
BATCH = 64
# Seconds between two looks while records come.
LOOK_S = 600.0


@dataclass(frozen=True)
class Keep:
    """What stays: records of the last ``days``, and at most ``gigabytes`` of them. None is no limit."""

    days: float | None = None
    gigabytes: float | None = None

    def enforce(self, connection: sqlite3.Connection, now: float | None = None) -> int:
        """Delete what is not to stay, the oldest first; how many records that were. ``now`` is in epoch seconds."""
        deleted = 0
        if self.days is not None:
            before = (time.time() if now is None else now) - 86400 * self.days
            while gone := _delete_oldest(connection, "WHERE created < ?", (before,)):
                deleted += gone
        if self.gigabytes is not None:
            while _used_bytes(connection) > 1e9 * self.gigabytes and (gone := _delete_oldest(connection, "", ())):
                deleted += gone
        return deleted


def _delete_oldest(connection: sqlite3.Connection, where: str, values: tuple[float, ...]) -> int:
    with transaction(connection):
        chosen = f"SELECT id FROM generations {where} ORDER BY id LIMIT {BATCH}"
        return connection.execute(f"DELETE FROM generations WHERE id IN ({chosen})", values).rowcount


def _used_bytes(connection: sqlite3.Connection) -> int:
    """Bytes of the file but for its free pages."""
    names = "page_count", "freelist_count", "page_size"
    pages, free, size = (int(connection.execute(f"PRAGMA {name}").fetchone()[0]) for name in names)
    return (pages - free) * size
