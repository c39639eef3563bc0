"""``adaptive records check``: which records of the log are damaged, and what ``--repair`` does about it.

A record whose text is whole keeps it and loses what is not (the supervision, the rounds); one whose text is
damaged is deleted. A file that is damaged itself is rebuilt from what can be read of it (``recover``).
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from adaptive.errors import AdaptiveError
from adaptive.records.log import Log
from adaptive.records.recover import examine, recover
from adaptive.records.rows import COLUMNS, insert, mended, read_rows, select_columns
from adaptive.records.schema import connect, transaction


@dataclass(frozen=True)
class Findings:
    """What is wrong with a log. ``records`` are all that it holds, ``damaged`` those that cannot be read with the
    reason, ``file`` what is wrong with the file itself, None where it is sound."""

    records: int
    damaged: dict[int, str]
    file: str | None


@dataclass(frozen=True)
class Repairs:
    """What a repair did: records that kept their text only, records that were deleted, what was said of the file."""

    mended: int
    deleted: int
    file: str | None


def check(path: Path) -> Findings:
    """Read all of the log at ``path``. Raises AdaptiveError where it cannot be read now."""
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
    """Mend what ``check`` found. Raises AdaptiveError where the log cannot be written."""
    if found.file is not None:
        return Repairs(0, 0, recover(path))
    connection = connect(path)
    try:
        with transaction(connection):
            kept = _mend(connection, found.damaged)
    except sqlite3.Error as error:
        raise AdaptiveError(f"log {path} cannot be repaired now ({error}); try again") from error
    finally:
        connection.close()
    return Repairs(kept, len(found.damaged) - kept, None)


def _mend(connection: sqlite3.Connection, damaged: Iterable[int]) -> int:
    """Replace each of these records by what is whole of it; how many had something."""
    kept = 0
    for number in damaged:
        generation = None
        try:
            for row, rounds in read_rows(connection, select_columns(True), [number]):
                generation = mended(dict(zip(("id", *COLUMNS), row, strict=True)), rounds)
        except sqlite3.DatabaseError:
            pass  # its text is not UTF-8, or its pages are gone
        connection.execute("DELETE FROM generations WHERE id = ?", (number,))
        if generation is not None:
            insert(connection, generation, number)
            kept += 1
    return kept
