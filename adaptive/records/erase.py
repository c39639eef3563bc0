"""Deletes records so that no trace of them stays in the log's file, its WAL or a temporary copy.

A DELETE alone leaves old bytes in the WAL, in freed pages and, after SQLite has moved rows between
pages, in the slack of pages still in use. So the module deletes with ``secure_delete`` on (``schema.connect``), in
batches that each reuse the WAL, rewrites the file with VACUUM, then empties the WAL. Freed blocks that the disk itself
keeps are out of this program's reach.
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
from adaptive.printable import counted
from adaptive.records.features import FeatureSpool
from adaptive.records.overwrite import overwrite_and_remove, remove_deleted, remove_set_aside, set_aside_logs
from adaptive.records.retention import BATCH
from adaptive.records.rows import storable
from adaptive.records.schema import DiskFullError, connect, is_disk_full, transaction
from adaptive.state import PairState
from checkpoints import files


def selection(
    older_than_s: float | None, session: str | None, now: float, ids: Collection[int] | None = None
) -> tuple[str, tuple[object, ...]]:
    """A WHERE clause and its values for the records that meet every given condition: older than an age in seconds, in
    a session, and among ``ids``. Without a condition it selects all records."""
    terms: list[tuple[str, object]] = []
    if older_than_s is not None:
        terms.append(("created < ?", now - older_than_s))
    if session is not None:
        terms.append(("session = ?", storable(session)))
    if ids is not None:  # as JSON, since the number of values of a statement is limited
        terms.append(("id IN (SELECT value FROM json_each(?))", json.dumps(sorted(ids))))
    return " AND ".join(term for term, _ in terms) or "1", tuple(value for _, value in terms)


def delete(connection: sqlite3.Connection, where: str, values: tuple[object, ...]) -> int:
    """Delete the chosen generations and, by the cascade, their rounds. Returns how many generations.

    They are deleted in batches, so that other processes can write between two of them. Before each batch the WAL is
    copied into the file. While no other program reads, its space is then reused, so it grows by one batch only. Raises
    DiskFullError, whose text says how many are left, if the disk has no room for that; sqlite3.Error.
    """
    ids = [row[0] for row in connection.execute(f"SELECT id FROM generations WHERE {where}", values).fetchall()]
    deleted = 0
    try:
        for first in range(0, len(ids), BATCH):
            connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
            chosen = json.dumps(ids[first : first + BATCH])
            with transaction(connection):
                cursor = connection.execute(
                    "DELETE FROM generations WHERE id IN (SELECT value FROM json_each(?))", (chosen,)
                )
            deleted += cursor.rowcount
    except sqlite3.OperationalError as error:
        if not is_disk_full(_path(connection), error):
            raise
        with contextlib.suppress(sqlite3.Error):
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        raise DiskFullError(
            f"{counted(len(ids) - deleted, 'record')} cannot be deleted: the disk is full; free disk space, then purge "
            "again"
        ) from error
    return deleted


def _path(connection: sqlite3.Connection) -> Path:
    return Path(connection.execute("SELECT file FROM pragma_database_list WHERE name = 'main'").fetchone()[0])


def shrink(connection: sqlite3.Connection, path: Path) -> None:
    """Rewrite the file without its free pages and empty the WAL, even if the file cannot be rewritten.

    Raises AdaptiveError, whose text names the remaining steps, if the disk has no room or another program reads.
    """
    try:
        try:
            with _temporary_files_in(connection, path.parent):
                connection.execute("VACUUM")
        finally:  # the WAL may hold the text of deleted records
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
    """Remove other copies of logged text from the state folder. Returns the names of the removed files (damaged logs,
    training state, typed lines).

    Any purge removes damaged logs that were set aside (their readable records are in the log), the features of records
    that are no longer logged, and all caches of conversations. ``everything`` also removes all features, the state of
    an interrupted training run, and the lines typed in a chat.
    """
    spool = FeatureSpool(state.features, 0)
    _erase_caches(state)
    if everything:
        spool.erase()
    elif state.features.is_dir():
        with contextlib.closing(connect(state.records)) as connection:
            spool.sweep(connection)
    others = [file for file in (state.training, state.replays, state.typed) if everything and file.exists()]
    doomed = set_aside_logs(state.records)
    for file in doomed:
        remove_set_aside(state.records, file)
    for file in others:
        overwrite_and_remove(file)
    files.sweep(state.root)
    remove_deleted(state.root)
    return [file.name for file in doomed + others]


def _erase_caches(state: PairState) -> None:
    """Remove the caches that are kept on disk. The folder is renamed first: a server that writes there sees that it is
    gone, and no file is added to it. Raises OSError if something stays."""
    if not state.caches.is_dir():
        return
    doomed = files.unfinished(state.root)
    os.rename(state.caches, doomed)
    shutil.rmtree(doomed)
    files.finished(doomed)


@contextmanager
def _temporary_files_in(connection: sqlite3.Connection, folder: Path) -> Iterator[None]:
    """Have SQLite put temporary files into ``folder``: VACUUM copies the remaining records into a temporary file, which
    must not leave the private folder. (SQLITE_TMPDIR would have to be set before SQLite is first used.)"""
    place = str(folder.absolute()).replace("'", "''")
    connection.execute(f"PRAGMA temp_store_directory = '{place}'")
    try:
        yield
    finally:
        connection.execute("PRAGMA temp_store_directory = ''")
