"""Opens the log for writing; a damaged file is set aside and its readable records are copied into a new one.

A damaged file stays beside the new one as ``records.db.damaged`` (numbered from the second on) until
records are purged. Every record keeps its id. One process at a time replaces the file, under ``records.lock``; the
other processes detect that the path has another file (``Place``).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adaptive.errors import AdaptiveError
from adaptive.printable import counted
from adaptive.records.overwrite import overwrite_and_remove, set_aside_logs
from adaptive.records.pages import Pages, cut_short, page_size
from adaptive.records.place import Place, abandon
from adaptive.records.rows import CHECKED, ROUND, continue_ids, insert, mended
from adaptive.records.schema import (
    BUSY_S,
    DamagedLogError,
    DiskFullError,
    connect,
    is_damage,
    is_disk_full,
    transaction,
)
from adaptive.types import Round
from checkpoints import files

# Largest log, in bytes, whose pages are all checked when it is opened for writing: about 0.7 s from the system's
# cache. A larger log is checked when a write meets damage, or by ``adaptive records check``.
CHECKED_AT_START = 1 << 30

# Largest write-ahead log, in bytes, whose frames are checked: 80 microseconds a frame, 0.1 s for the 4 MB at which
# SQLite starts over.
LARGEST_WAL = 64 << 20

# Seconds to wait for another process that is replacing the log.
REPLACE_S = 120.0

# Most copies of a log that changes while it is copied. Too low: a busy log is replaced only at a later try.
REBUILDS = 5


def open_for_writing(path: Path, suspect: bool = False) -> tuple[sqlite3.Connection, str | None]:
    """Open the log at ``path``, creating it if missing and replacing it if damaged. Also returns a message about the
    replacement, or None. With ``suspect``, set after an error that means damage, a log of any size is checked.

    Raises AdaptiveError if the log cannot be used for another reason than damage, or cannot be replaced now.
    """
    suspect = suspect or _known_damage(path) is not None
    if not path.exists() or (path.stat().st_size > CHECKED_AT_START and not suspect):
        with contextlib.suppress(DamagedLogError):
            return connect(path), None
    found = examine(path)
    if found.connection is not None and found.wrong is None:
        return found.connection, None
    found.let_go()
    said = recover(path)
    return connect(path), said or None


@dataclass(frozen=True)
class Examined:
    """The result of ``examine``. ``wrong`` describes the damage, None if the file is sound.

    The connection to a damaged file stays open, since closing the last connection empties the write-ahead log.
    """

    connection: sqlite3.Connection | None
    wrong: str | None

    def let_go(self) -> None:
        """Abandon the connection, so that the write-ahead log is kept for ``recover``."""
        if self.connection is not None:
            abandon(self.connection)

    def close(self) -> None:
        """Close the connection if the file is sound, else ``let_go``."""
        if self.wrong is not None:
            self.let_go()
        elif self.connection is not None:
            self.connection.close()


# Damaged logs that could not be replaced yet, by their paths. Every next try, some seconds later, would read the whole
# file again, and open connections that must stay open.
_damaged: dict[Path, tuple[Place, Examined]] = {}


def _known_damage(path: Path) -> Examined | None:
    """The result of ``examine`` for the damaged file that is still at ``path``; None if there is no such file."""
    place, found = _damaged.get(path, (None, None))
    return found if place is not None and place.holds() else None


def examine(path: Path) -> Examined:
    """Check whether the file itself is sound; the contents of records are not checked.

    Raises AdaptiveError if it cannot be read now.
    """
    if (known := _known_damage(path)) is not None:
        return known
    place = Place.of(path) if path.exists() else None
    found = _examined(path)
    if found.wrong is not None and place is not None and place.holds():
        _damaged[path] = place, found
    return found


def _examined(path: Path) -> Examined:
    try:
        connection = connect(path)
    except DamagedLogError as error:
        return Examined(None, error.reason)
    try:
        return Examined(connection, _what_is_wrong(connection, path))
    except (sqlite3.Error, UnicodeDecodeError) as error:
        if is_damage(error):
            return Examined(connection, str(error))
        with contextlib.suppress(sqlite3.Error):
            connection.close()
        if is_disk_full(path, error):
            raise DiskFullError(f"the disk is full ({error})") from error
        raise AdaptiveError(f"log {path} cannot be read now ({error}); try again") from error


def _what_is_wrong(connection: sqlite3.Connection, path: Path) -> str | None:
    found = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
    if found != "ok":
        return str(found).splitlines()[-1]
    wal = path.with_name(path.name + "-wal")
    try:
        connection.execute("BEGIN IMMEDIATE")  # no other process can write while the write-ahead log is read
    except sqlite3.OperationalError as error:
        if "locked" in str(error):  # by a writer, which will find damage itself
            return None
        raise
    try:
        readable = wal.exists() and wal.stat().st_size <= LARGEST_WAL
        return "its write-ahead log is cut short" if readable and cut_short(wal.read_bytes()) else None
    finally:
        connection.execute("ROLLBACK")


def recover(path: Path) -> str:
    """Set the damaged log aside and start a new one with its readable records. Returns a message, empty if the file is
    sound (another process has just replaced it).

    Raises AdaptiveError if the folder cannot be written, or another program writes to the log for long; DiskFullError
    if the disk has no room for the new log.
    """
    with replacing(path):
        found = examine(path)
        if found.wrong is None:
            found.close()
            return ""
        new = None
        try:
            _require_room(path, found.wrong)
            new = files.unfinished(path.parent)
            with _nobody_writes(path, found.connection):
                kept = _rebuild_unchanged(path, new)
                aside = _set_aside(path)
                os.replace(new, path)
                files.flush(path.parent)
        except (OSError, sqlite3.Error) as error:
            kind = DiskFullError if is_disk_full(path, error) else AdaptiveError
            raise kind(
                f"log {path} is damaged ({found.wrong}) and cannot be replaced ({error}); free some disk space"
            ) from error
        finally:
            found.let_go()
            if new is not None:
                files.finished(new)
        _damaged.pop(path, None)
    return (
        f"the log was damaged ({found.wrong}): a new one has the {counted(kept, 'record')} that could be read, and the "
        f"damaged file is set aside as {aside.name}"
    )


@contextmanager
def replacing(path: Path) -> Iterator[None]:
    """Hold ``records.lock`` while the log's file is replaced. Raises AdaptiveError if another process holds the lock
    for more than REPLACE_S."""
    from filelock import FileLock, Timeout

    try:
        with FileLock(path.with_name("records.lock"), timeout=REPLACE_S, mode=0o600):
            yield
    except Timeout as error:
        raise AdaptiveError(f"another process has held {path.with_name('records.lock')} for long; end it") from error


def _require_room(path: Path, wrong: str) -> None:
    """Raise DiskFullError if the disk has no room for the pages in use of a log, before gigabytes are copied in
    vain."""
    with path.open("rb") as file:
        header = file.read(100)
    size = path.stat().st_size
    unused = page_size(header) * int.from_bytes(header[36:40], "big")
    needed, free = size - (unused if unused < size else 0), shutil.disk_usage(path.parent).free
    if free < needed:
        raise DiskFullError(
            f"log {path} is damaged ({wrong}) and cannot be replaced: a new one takes up to {needed / 1e6:.0f} MB, and "
            f"{free / 1e6:.0f} MB are free; free some disk space"
        )


@contextmanager
def _nobody_writes(path: Path, connection: sqlite3.Connection | None) -> Iterator[None]:
    """Hold the write lock of a damaged log, unless the damage prevents that. A record that another process commits
    after its page was read would be in the damaged file only. ``connection`` is one to it, if it could be opened.

    Raises AdaptiveError if another program holds the lock for BUSY_S.
    """
    own = None if connection is not None else sqlite3.connect(path, timeout=BUSY_S, isolation_level=None)
    holder = connection or own
    assert holder is not None
    replaced = False
    try:
        try:
            holder.execute("BEGIN IMMEDIATE")
        except (sqlite3.Error, UnicodeDecodeError) as error:
            if "locked" in str(error):
                raise _in_use(path) from error
        yield
        replaced = True
    finally:
        with contextlib.suppress(sqlite3.Error):
            holder.execute("ROLLBACK")
        if own is not None and replaced:
            abandon(own)
        elif own is not None:
            with contextlib.suppress(sqlite3.Error):
                own.close()


def _rebuild_unchanged(path: Path, new: Path) -> int:
    """``_rebuild``, repeated if the files change meanwhile. They do if the damage prevents locking and a process that
    opened the log before writes to it. Raises AdaptiveError after REBUILDS times."""
    for _ in range(REBUILDS):
        before = _stamps(path)
        kept = _rebuild(path, new)
        if _stamps(path) == before:
            return kept
        files.remove(new)
    raise _in_use(path)


def _in_use(path: Path) -> AdaptiveError:
    return AdaptiveError(f"log {path} is damaged and cannot be replaced while another program writes to it; try again")


def _stamps(path: Path) -> list[tuple[int, int]]:
    """Size and time of the last change of the log and its write-ahead log."""
    found = [file.stat() for file in (path, path.with_name(path.name + "-wal")) if file.exists()]
    return [(stat.st_size, stat.st_mtime_ns) for stat in found]


def _rebuild(path: Path, new: Path) -> int:
    """Write the readable records of the log at ``path`` into a new log at ``new``. Returns their number."""
    with Pages(path) as pages, contextlib.closing(connect(new)) as connection:
        names = [row[1] for row in connection.execute("PRAGMA table_info(generations)")]
        # Not a write-ahead log, which would take as much room again; and one file, which can be renamed.
        connection.execute("PRAGMA journal_mode=MEMORY")
        count = 2 + len(Round._fields)
        copy_round = f"INSERT OR IGNORE INTO rounds (generation, idx, {ROUND}) VALUES (?{', ?' * (count - 1)})"
        newest = kept = 0
        with transaction(connection):
            connection.execute("PRAGMA defer_foreign_keys=ON")
            for row, values in pages.records():
                if row is None and _is_round(values):
                    connection.execute(copy_round, (*values, 0, 0)[:count])
                elif row is not None and _is_sequence(values):
                    newest = max(newest, values[1])  # so that no id is used again
            for row, values in pages.records():
                if row is not None and _is_id(row) and _take(connection, row, dict(zip(names, values, strict=False))):
                    kept, newest = kept + 1, max(newest, row)
            connection.execute("DELETE FROM rounds WHERE generation NOT IN (SELECT id FROM generations)")
            continue_ids(connection, newest)
    return kept


def _is_id(value: object) -> bool:
    return isinstance(value, int) and 0 < value < 1 << 53


def _is_round(values: tuple[object, ...]) -> bool:
    if len(values) not in (7, 8, 9):  # from before schema 7 added the column ``first``, and schema 9 ``shared``
        return False
    whole = all(isinstance(values[place], int) for place in (0, 1, 3, 4, *range(7, len(values))))
    return whole and isinstance(values[2], str) and all(isinstance(v, (int, float)) for v in values[5:])


def _take(connection: sqlite3.Connection, number: int, values: dict[str, object]) -> bool:
    """Insert the intact parts of a record that was found; False if it is not a record, or cannot be used."""
    if not set(CHECKED) - {"expected_s"} <= set(values):
        return False
    query = f"SELECT {ROUND} FROM rounds WHERE generation = ? ORDER BY idx"
    rounds = [Round(*row) for row in connection.execute(query, (number,))]
    columns = {"expected_s": 0.0, "checksum": None, "supervision": None, **values}
    generation = mended(columns, rounds)
    if generation is None or connection.execute("SELECT 1 FROM generations WHERE id = ?", (number,)).fetchone():
        return False
    connection.execute("DELETE FROM rounds WHERE generation = ?", (number,))
    try:
        insert(connection, generation, number)
    except (sqlite3.IntegrityError, sqlite3.DataError, sqlite3.InterfaceError):  # a damaged row without a checksum
        return False
    return True


def _set_aside(path: Path) -> Path:
    """Give the log and its write-ahead log a second name, and remove the -wal and -shm files beside ``path``. Returns
    the second name; the log's file also stays at ``path`` until it is replaced."""
    aside, number = path.with_name(f"{path.name}.damaged"), 1
    while aside.exists():
        number += 1
        aside = path.with_name(f"{path.name}.damaged{number}")
    for end in ("", "-wal"):
        old = path.with_name(path.name + end)
        if old.exists() and (old.stat().st_size or not end):
            _same_file(old, aside.with_name(aside.name + end))
    remove_beside(path)
    return aside


def _same_file(old: Path, new: Path) -> None:
    try:
        os.link(old, new)
    except OSError:  # a file system without hard links
        shutil.copyfile(old, new)
        os.chmod(new, 0o600)


def remove_beside(path: Path) -> None:
    """Remove the -wal and -shm files beside the log, which belong to a file that is no longer there."""
    for end in ("-wal", "-shm"):
        path.with_name(path.name + end).unlink(missing_ok=True)


def remove(path: Path) -> int:
    """Overwrite and remove the log's file and begin a new one. Returns the number of records removed.

    This needs no disk space. New ids continue those of the removed log. Processes that have the file open detect the
    change (``Place``). Raises AdaptiveError if the folder cannot be written.
    """
    with replacing(path):
        removed, newest = _count_pages(path)
        doomed = [path, *(path.with_name(path.name + end) for end in ("-wal", "-shm")), *set_aside_logs(path)]
        try:
            for file in doomed:
                overwrite_and_remove(file)
            with contextlib.suppress(DiskFullError):
                connection = connect(path)
                with contextlib.closing(connection), transaction(connection):
                    continue_ids(connection, newest)
        except OSError as error:
            raise AdaptiveError(f"log {path} cannot be removed ({error.strerror}); check its permissions") from error
    return removed


def _count_pages(path: Path) -> tuple[int, int]:
    """The number of records of a log and the last id given, both read from its pages."""
    found, newest = set(), 0
    if path.exists():
        with Pages(path) as pages:
            for row, values in pages.records():
                if row is not None and len(values) >= len(CHECKED) and _is_id(row):
                    found.add(row)
                elif row is not None and _is_sequence(values):
                    newest = max(newest, values[1])
    return len(found), max({newest, *found})


def _is_sequence(values: tuple[Any, ...]) -> bool:
    """Whether this is the row of ``sqlite_sequence`` that holds the last id given."""
    return len(values) == 2 and values[0] == "generations" and _is_id(values[1])
