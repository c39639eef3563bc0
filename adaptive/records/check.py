"""``adaptive records check``: finds the damaged records of the log, and repairs them with ``--repair``.

A damaged record with intact text keeps the text and loses its damaged parts (supervision, rounds). A record with
damaged text is deleted. A damaged file is rebuilt from its readable records (``recover``).
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from adaptive.errors import AdaptiveError, first_line
from adaptive.records.log import Log
from adaptive.records.recover import examine, recover
from adaptive.records.rows import COLUMNS, insert, mended, read_rows, readable, select_columns
from adaptive.records.schema import connect, is_damage, transaction


@dataclass(frozen=True)
class Findings:
    """The result of a check. ``records`` counts the log's records, ``damaged`` maps the id of each unreadable record to
    the reason, ``file`` describes the damage of the file itself (None if it is sound)."""

    records: int
    damaged: dict[int, str]
    file: str | None


@dataclass(frozen=True)
class Repairs:
    """The result of a repair: the number of records that were mended, the number that were deleted, and for a damaged
    file the message of ``recover``."""

    mended: int
    deleted: int
    file: str | None


def check(path: Path) -> Findings:
    """Read the whole log at ``path``. Raises AdaptiveError if it cannot be read now."""
    if not path.exists():
        return Findings(0, {}, None)
    with Log(path) as log:
        with contextlib.closing(examine(path)) as examined:
            if examined.wrong is not None:
                return Findings(0, {}, examined.wrong)
        records = log.count()
        for _ in log.generations():
            pass
        return Findings(records, dict(log.damaged), None)


def repair(path: Path, found: Findings) -> Repairs:
    """Repair the damage that ``check`` found. Raises AdaptiveError if the log cannot be written."""
    if found.file is not None:
        return Repairs(0, 0, recover(path))
    connection = connect(path)
    connection.text_factory = readable
    try:
        with transaction(connection):
            kept = _mend(connection, found.damaged)
    except (sqlite3.Error, MemoryError) as error:
        raise AdaptiveError(f"log {path} cannot be repaired now ({first_line(error)}); try again") from error
    finally:
        connection.close()
    return Repairs(kept, len(found.damaged) - kept, None)


def _mend(connection: sqlite3.Connection, damaged: Iterable[int]) -> int:
    """Replace each of these records by its intact parts, or delete it. Returns how many had intact parts. Raises
    sqlite3.Error if a record cannot be read or written now."""
    kept = 0
    for number in damaged:
        generation = None
        try:
            for row, rounds in read_rows(connection, select_columns(True), [number]):
                generation = mended(dict(zip(("id", *COLUMNS), row, strict=True)), rounds)
        except sqlite3.DatabaseError as error:
            if not is_damage(error):  # the record may be intact
                raise
        connection.execute("DELETE FROM generations WHERE id = ?", (number,))
        if generation is not None:
            insert(connection, generation, number)
            kept += 1
    return kept
