"""Deletes from the log so that nothing of it stays in the file, its WAL or a temporary copy.

A DELETE alone leaves old bytes in the WAL, in freed pages and, after SQLite has moved rows between
pages, in the slack of pages that live on. So: delete with ``secure_delete`` on (``schema.connect``),
rewrite the file with VACUUM, then empty the WAL. What the disk itself keeps of freed blocks is
beyond this program.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sqlite3
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from adaptive.errors import AdaptiveError
from adaptive.records.features import FeatureSpool
from adaptive.records.recover import set_aside_logs
from adaptive.records.schema import connect, transaction
from adaptive.state import PairState
from checkpoints import files


def selection(
    older_than_s: float | None, session: str | None, now: float, ids: Collection[int] | None = None
) -> tuple[str, tuple[object, ...]]:
    """A WHERE clause and its values: older than an age in seconds, of a session, and among ``ids``, where given."""
    terms: list[tuple[str, object]] = []
    if older_than_s is not None:
        terms.append(("created < ?", now - older_than_s))
    if session is not None:
        terms.append(("session = ?", session))
    if ids is not None:  # as JSON, since a statement takes so many values only
        terms.append(("id IN (SELECT value FROM json_each(?))", json.dumps(sorted(ids))))
    return " AND ".join(term for term, _ in terms) or "1", tuple(value for _, value in terms)


def delete(connection: sqlite3.Connection, where: str, values: tuple[object, ...]) -> int:
    """Delete the chosen generations and, by the cascade, their rounds. Returns how many generations."""
    with transaction(connection):
        return connection.execute(f"DELETE FROM generations WHERE {where}", values).rowcount


def shrink(connection: sqlite3.Connection, path: Path) -> None:
    """Rewrite the file without its holes and empty the WAL.

    Raises AdaptiveError, saying what is left to do, when the disk has no room or a reader stays.
    """
    try:
        with _temporary_files_in(path.parent):
            connection.execute("VACUUM")
        busy = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]
    except sqlite3.OperationalError as error:
        raise AdaptiveError(
            f"records are deleted, but {path} could not be rewritten ({error}); "
            "close other programs that use it or free disk space, then purge again"
        ) from error
    if busy:
        raise AdaptiveError(
            f"records are deleted, but another program is reading {path}, so traces stay in {path.name}-wal; "
            "close it, then purge again"
        )


def erase_beside(state: PairState, everything: bool) -> list[str]:
    """Remove what else in the state folder holds what was said; the names of what was there.

    Damaged logs that were set aside go with any purge: whatever could be read of them is in the log; so do the features
    of what is no longer in it, and all caches of conversations. With ``everything``, all features go, where an
    interrupted training run stood, and what was typed in a chat.
    """
    spool = FeatureSpool(state.features, 0)
    shutil.rmtree(state.caches, ignore_errors=True)
    if everything:
        spool.erase()
    elif state.features.is_dir():
        with contextlib.closing(connect(state.records)) as connection:
            spool.sweep(connection)
    others = [file for file in (state.training, state.typed) if everything and file.exists()]
    doomed = set_aside_logs(state.records) + others
    for file in doomed:
        file.unlink(missing_ok=True)
    files.sweep(state.root)
    return [file.name for file in doomed]


@contextmanager
def _temporary_files_in(folder: Path) -> Iterator[None]:
    """VACUUM copies what stays into a temporary file, which must not leave the private folder."""
    before = os.environ.get("SQLITE_TMPDIR")
    os.environ["SQLITE_TMPDIR"] = str(folder)
    try:
        yield
    finally:
        if before is None:
            del os.environ["SQLITE_TMPDIR"]
        else:
            os.environ["SQLITE_TMPDIR"] = before
