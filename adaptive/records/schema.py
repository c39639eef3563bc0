"""The log on disk: one private SQLite file in WAL mode, brought to today's schema by numbered migrations.

``PRAGMA user_version`` counts the migrations a file has seen. ``docs/schema.md`` describes the
tables for people who query them.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from adaptive.errors import AdaptiveError

# How long a statement waits for another process's lock, in seconds. Too low and two assistants that
# write at once report false problems; too high and a stuck process is noticed late.
BUSY_S = 10.0


def create_tables(connection: sqlite3.Connection) -> None:
    """Migration 1. Small columns come first: figures are read without walking the large ones' pages."""
    connection.execute(
        """CREATE TABLE generations (
            id INTEGER PRIMARY KEY AUTOINCREMENT,
            session TEXT NOT NULL,
            created REAL NOT NULL,
            adapter TEXT,
            engine TEXT NOT NULL,
            domain TEXT,
            finish_reason TEXT NOT NULL,
            temperature REAL NOT NULL,
            sampling TEXT NOT NULL,
            prompt_n INTEGER NOT NULL,
            cached_n INTEGER NOT NULL,
            prompt_s REAL NOT NULL,
            predicted_n INTEGER NOT NULL,
            predicted_s REAL NOT NULL,
            rounds_n INTEGER NOT NULL,
            draft_n INTEGER NOT NULL,
            draft_n_accepted INTEGER NOT NULL,
            messages TEXT NOT NULL,
            prompt_text TEXT NOT NULL,
            text TEXT NOT NULL,
            prompt BLOB NOT NULL,
            output BLOB NOT NULL,
            supervision BLOB
        )"""
    )
    connection.execute(
        """CREATE TABLE rounds (
            generation INTEGER NOT NULL REFERENCES generations (id) ON DELETE CASCADE,
            idx INTEGER NOT NULL,
            drafter TEXT NOT NULL,
            drafted INTEGER NOT NULL,
            accepted INTEGER NOT NULL,
            draft_s REAL NOT NULL,
            verify_s REAL NOT NULL,
            PRIMARY KEY (generation, idx)
        ) WITHOUT ROWID"""
    )


def index_session_and_created(connection: sqlite3.Connection) -> None:
    """Migration 2. Resuming a session and purging by age find their rows without a scan."""
    connection.execute("CREATE INDEX generations_by_session ON generations (session)")
    connection.execute("CREATE INDEX generations_by_created ON generations (created)")


def add_expected_seconds(connection: sqlite3.Connection) -> None:
    """Migration 3. What the draft-length policy expected, beside what it took; 0 in older rows."""
    connection.execute("ALTER TABLE generations ADD COLUMN expected_s REAL NOT NULL DEFAULT 0")


MIGRATIONS = (create_tables, index_session_and_created, add_expected_seconds)


@contextmanager
def transaction(connection: sqlite3.Connection, mode: str = "IMMEDIATE") -> Iterator[None]:
    """All of the block's statements or none. ``mode`` DEFERRED gives readers one consistent view."""
    connection.execute(f"BEGIN {mode}")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        # A full disk may already have rolled back; a second ROLLBACK would hide the real error.
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def connect(path: Path) -> sqlite3.Connection:
    """Open the log at ``path``, creating it (0600, in 0700 folders) and migrating it where needed.

    The connection is in autocommit mode (use ``transaction``) and may pass between threads, one at a
    time. ``synchronous=NORMAL`` syncs at checkpoints only: a commit survives the death of the process
    at any moment, and the last commits before a power cut may be missing, never half there.

    Raises AdaptiveError for a file that is damaged, is not SQLite, is newer than this program, or
    cannot be opened.
    """
    try:
        _make_private(path)
        connection = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
    except (OSError, sqlite3.Error) as error:
        raise AdaptiveError(
            f"log {path} cannot be opened ({_reason(error)}); check the folder's permissions"
        ) from error
    try:
        _use_wal(connection)
        connection.execute("PRAGMA synchronous=NORMAL")
        connection.execute("PRAGMA foreign_keys=ON")
        connection.execute("PRAGMA secure_delete=ON")
        _migrate(connection, path)
    except AdaptiveError:
        connection.close()
        raise
    except sqlite3.OperationalError as error:
        connection.close()
        raise AdaptiveError(
            f"log {path} cannot be used ({error}); check its permissions and the disk's space"
        ) from error
    except sqlite3.DatabaseError as error:
        connection.close()
        raise AdaptiveError(f"log {path} is damaged ({error}); move it away and a new one will be started") from error
    return connection


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _make_private(path: Path) -> None:
    missing = [folder for folder in (path.parent, *path.parent.parents) if not folder.exists()]
    for folder in reversed(missing):
        folder.mkdir(mode=0o700, exist_ok=True)
    # SQLite gives -wal and -shm the mode of the main file, so that one must be private first.
    # One that exists is not opened here: closing it would drop the locks that every other connection of
    # this process holds on it, and then another process's reader takes the WAL away from under a writer.
    with contextlib.suppress(FileExistsError):
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
    if stat.S_IMODE(path.stat().st_mode) & 0o077:
        path.chmod(0o600)


def _use_wal(connection: sqlite3.Connection) -> None:
    """Switch the file to WAL. SQLite does not wait for a lock here, so two first openers must."""
    deadline = time.monotonic() + BUSY_S
    while True:
        try:
            if connection.execute("PRAGMA journal_mode=WAL").fetchone()[0] == "wal":
                return
            raise sqlite3.OperationalError("the file system does not support SQLite's WAL mode")
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def _migrate(connection: sqlite3.Connection, path: Path) -> None:
    if _version(connection, path) == len(MIGRATIONS):
        return
    with transaction(connection):
        # Read again under the lock: another process may have migrated meanwhile.
        for number in range(_version(connection, path), len(MIGRATIONS)):
            MIGRATIONS[number](connection)
            connection.execute(f"PRAGMA user_version={number + 1}")


def _version(connection: sqlite3.Connection, path: Path) -> int:
    version = int(connection.execute("PRAGMA user_version").fetchone()[0])
    if version > len(MIGRATIONS):
        raise AdaptiveError(
            f"log {path} was written by a newer adaptive (schema {version}, this one knows {len(MIGRATIONS)}); upgrade"
        )
    return version
