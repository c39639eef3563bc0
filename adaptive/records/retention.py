"""Retention: deletes records beyond a maximum age (days) or size (gigabytes), if set, while records are written.

Deleted pages are overwritten and reused, so that the file stops growing. ``adaptive records purge`` also returns
them to the file system and leaves no trace.
"""

from __future__ import annotations

import sqlite3
import time
from dataclasses import dataclass

from adaptive.records.schema import transaction

# Records deleted in one transaction: some ten milliseconds, during which no other process can write.
BATCH = 64
# Seconds between two checks while records are written.
LOOK_S = 600.0


@dataclass(frozen=True)
class Keep:
    """The limits: records of the last ``days`` are kept, at most ``gigabytes`` of them. None is no limit."""

    days: float | None = None
    gigabytes: float | None = None

    def enforce(self, connection: sqlite3.Connection, now: float | None = None) -> int:
        """Delete records beyond the limits, the oldest first, and return their number. ``now`` is in epoch seconds."""
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
    """Bytes of the file without its free pages."""
    names = "page_count", "freelist_count", "page_size"
    pages, free, size = (int(connection.execute(f"PRAGMA {name}").fetchone()[0]) for name in names)
    return (pages - free) * size
