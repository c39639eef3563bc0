"""Retention: deletes records beyond a maximum age (days) or size (gigabytes), if set, while a server or chat runs.

Deleted pages are overwritten and reused, so that the file stops growing. ``adaptive records purge`` also returns
them to the file system and leaves no trace.

A clock that is wrongly set to a later year must not delete the whole log. So if no record was written for long, old
records are kept until new ones are a day old: after a real pause that is the second day of use.
"""

from __future__ import annotations

import logging
import sqlite3
import time
from dataclasses import dataclass

from adaptive.records.schema import transaction

logger = logging.getLogger("adaptive.records")

# Records deleted in one transaction: some ten milliseconds, during which no other process can write.
BATCH = 64
# Seconds between two checks.
LOOK_S = 600.0
DAY_S = 86400.0
# Seconds without a record after which the clock is doubted. Too low: after a short pause old records are kept for
# another day. Too high: a clock that is wrong by less deletes records that are not old.
PAUSE_S = 30 * DAY_S


@dataclass(frozen=True)
class Keep:
    """The limits: records of the last ``days`` are kept, at most ``gigabytes`` of them. None is no limit."""

    days: float | None = None
    gigabytes: float | None = None

    def enforce(self, connection: sqlite3.Connection, now: float | None = None) -> int:
        """Delete records beyond the limits, the oldest first, and return their number. ``now`` is in epoch seconds.
        Records beyond the age are kept, with a warning, while the clock is doubted (see the module)."""
        deleted = 0
        if self.days is not None:
            now = time.time() if now is None else now
            before = now - DAY_S * self.days
            if _is_doubtful(connection, now, before):
                logger.warning(
                    "records older than %g days are kept for now, since by the clock (%s) none was written for long; "
                    "if the clock is right, they are deleted when new ones are a day old",
                    self.days,
                    time.strftime("%Y-%m-%d", time.localtime(now)),
                )
            else:
                while gone := _delete(connection, OLDER, (before,)):
                    deleted += gone
        if self.gigabytes is not None:
            while _used_bytes(connection) > 1e9 * self.gigabytes and (gone := _delete(connection, OLDEST, ())):
                deleted += gone
        return deleted


# Ids of one batch. In the order of ``created``, whose index finds them without a scan of the table.
OLDER = f"SELECT id FROM generations WHERE created < ? ORDER BY created LIMIT {BATCH}"
OLDEST = f"SELECT id FROM generations ORDER BY id LIMIT {BATCH}"


def _is_doubtful(connection: sqlite3.Connection, now: float, before: float) -> bool:
    """Whether there are records from before ``before``, but none of the PAUSE_S that ended a day before ``now``."""
    oldest, last = connection.execute(
        "SELECT (SELECT min(created) FROM generations), (SELECT max(created) FROM generations WHERE created <= ?)",
        (now - DAY_S,),
    ).fetchone()
    return oldest is not None and oldest < before and last is not None and last < now - DAY_S - PAUSE_S


def _delete(connection: sqlite3.Connection, chosen: str, values: tuple[float, ...]) -> int:
    with transaction(connection):
        return connection.execute(f"DELETE FROM generations WHERE id IN ({chosen})", values).rowcount


def _used_bytes(connection: sqlite3.Connection) -> int:
    """Bytes of the file without its free pages."""
    names = "page_count", "freelist_count", "page_size"
    pages, free, size = (int(connection.execute(f"PRAGMA {name}").fetchone()[0]) for name in names)
    return (pages - free) * size
