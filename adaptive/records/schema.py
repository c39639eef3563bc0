"""The log on disk: one private SQLite file in WAL mode, brought to today's schema by numbered migrations.

``PRAGMA user_version`` counts the migrations a file has seen. ``docs/schema.md`` describes the
tables for people who query them.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import os
import shutil
import sqlite3
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from adaptive.errors import AdaptiveError
from adaptive.records.figures import LONGEST_DRAFT, packed
from adaptive.records.stats import RoundCount
from adaptive.types import FREE

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


def add_checksum(connection: sqlite3.Connection) -> None:
    """Migration 4. What tells a damaged row from a whole one (``rows.checksum``); NULL in older rows."""
    connection.execute("ALTER TABLE generations ADD COLUMN checksum INTEGER")


# Bytes below which SQLite cannot make what it keeps beside a file.
SQLITE_NEEDS = 256 << 10

# A higher number of a schema is damage, not the work of a newer program.
MOST_VERSIONS = 1000

# What SQLite says where the machine, and not the file, is the matter (its codes are there from Python 3.11 on only).
NOT_DAMAGE = ("locked", "busy", "full", "disk i/o", "readonly", "unable to open", "wal mode", "interrupted", "memory")


def add_round_times(connection: sqlite3.Connection) -> None:
    """Migration 5. What the rounds of an answer took, summed up where it is read without their rows.

    A table of its own: a column that is added to ``generations`` stands behind the large ones.
    """
    connection.execute(
        """CREATE TABLE round_times (
            generation INTEGER PRIMARY KEY REFERENCES generations (id) ON DELETE CASCADE,
            rounds_n INTEGER NOT NULL,
            rounds_s REAL NOT NULL,
            plain_n INTEGER NOT NULL,
            plain_s REAL NOT NULL
        )"""
    )
    connection.execute(
        """INSERT INTO round_times
        SELECT generation, count(*), sum(draft_s + verify_s), sum(plain), sum(plain * (draft_s + verify_s))
        FROM (SELECT *, drafted = 0 AND lag(drafted, 1, 0) OVER (PARTITION BY generation ORDER BY idx) = 0 AS plain
              FROM rounds)
        GROUP BY generation"""
    )


def sum_up_generations(connection: sqlite3.Connection) -> None:
    """Migration 6. The figures of every answer in one short row, so that a history need not read a million rounds."""
    connection.execute("DROP TABLE IF EXISTS figures")
    connection.execute(
        """CREATE TABLE figures (
            generation INTEGER PRIMARY KEY REFERENCES generations (id) ON DELETE CASCADE,
            session TEXT NOT NULL,
            created REAL NOT NULL,
            adapter TEXT,
            predicted_n INTEGER NOT NULL,
            predicted_s REAL NOT NULL,
            expected_s REAL NOT NULL,
            counts BLOB NOT NULL
        )"""
    )
    total = connection.execute("SELECT count(*) FROM generations").fetchone()[0]
    if not total:
        return
    counts = itertools.groupby(
        connection.execute(
            """SELECT generation, drafted, accepted, count(*) FROM rounds
            GROUP BY generation, drafted, accepted ORDER BY generation"""
        ),
        key=lambda row: row[0],
    )
    for done, (number, rows) in enumerate(counts, start=1):
        packed_counts = packed(RoundCount(*row[1:]) for row in rows if plausible_round(row[1], row[2]))
        connection.execute(f"{FIGURES_OF_GENERATIONS} WHERE id = ?", (packed_counts, number))
        if done % 256 == 0:
            on_migration(done / total)
    connection.execute(f"{FIGURES_OF_GENERATIONS} WHERE id NOT IN (SELECT generation FROM figures)", (b"",))
    on_migration(1.0)


FIGURES_OF_GENERATIONS = """INSERT INTO figures
    SELECT id, session, created, adapter, predicted_n, predicted_s, expected_s, ? FROM generations"""


def tell_drafters_apart(connection: sqlite3.Connection) -> None:
    """Migration 7. Two drafters may have taken turns in a round; and what an answer's draft did without the others (the
    drafters of ``FREE``) is summed up too, where any of them drafted."""
    for table, column in (("rounds", "first INTEGER NOT NULL DEFAULT 0"), ("figures", "own BLOB")):
        if (column.split()[0],) not in connection.execute("SELECT name FROM pragma_table_info(?)", (table,)).fetchall():
            connection.execute(f"ALTER TABLE {table} ADD COLUMN {column}")
    names = tuple(sorted(FREE))
    others = f"drafter IN ({', '.join('?' * len(names))})"
    connection.execute(
        f"UPDATE figures SET own = x'' WHERE generation IN (SELECT generation FROM rounds WHERE {others})", names
    )
    rows = connection.execute(
        f"""SELECT generation, drafted, accepted, count(*) FROM rounds WHERE NOT {others}
        AND generation IN (SELECT generation FROM figures WHERE own IS NOT NULL)
        GROUP BY generation, drafted, accepted ORDER BY generation""",
        names,
    ).fetchall()
    for number, counts in itertools.groupby(rows, key=lambda row: row[0]):
        own = packed(RoundCount(*row[1:]) for row in counts if plausible_round(row[1], row[2]))
        connection.execute("UPDATE figures SET own = ? WHERE generation = ?", (own, number))


MIGRATIONS = (
    create_tables, index_session_and_created, add_expected_seconds, add_checksum, add_round_times, sum_up_generations,
    tell_drafters_apart,
)  # fmt: skip


def plausible_round(drafted: object, accepted: object) -> bool:
    """Whether a round may have drafted and accepted so much; a damaged one could name billions of tokens."""
    return isinstance(drafted, int) and isinstance(accepted, int) and 0 <= accepted <= drafted <= LONGEST_DRAFT


def _silent(share: float) -> None:
    pass


# Called with how much of a long migration is done, 0 to 1; a front end puts its progress bar here.
on_migration: Callable[[float], None] = _silent


class DamagedLogError(AdaptiveError):
    """The file of the log is not what SQLite wrote, or is none of ours: ``reason``."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(
            f"log {path} is damaged ({reason}); `adaptive records check --repair` keeps what can be read of it"
        )
        self.reason = reason


class DiskFullError(AdaptiveError):
    """The disk has no room for the log."""


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

    Raises DamagedLogError for a file that is damaged or is not a log, AdaptiveError for one that is newer than this
    program or cannot be opened.
    """
    try:
        _make_private(path)
        connection = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
    except (OSError, sqlite3.Error) as error:
        if is_disk_full(path, error):
            raise DiskFullError(f"the disk is full ({_reason(error)})") from error
        raise AdaptiveError(
            f"log {path} cannot be opened ({_reason(error)}); check the folder's permissions"
        ) from error
    try:
        _use_wal(connection)
        connection.execute("PRAGMA synchronous=NORMAL")
        connection.execute("PRAGMA foreign_keys=ON")
        connection.execute("PRAGMA secure_delete=ON")
        _migrate(connection, path)
        _check_tables(connection, path)
    except AdaptiveError:
        connection.close()
        raise
    except (sqlite3.Error, UnicodeDecodeError) as error:
        connection.close()
        if is_damage(error):
            raise damaged(path, error) from error
        if is_disk_full(path, error):
            raise DiskFullError(f"the disk is full ({error})") from error
        raise AdaptiveError(
            f"log {path} cannot be used ({error}); check its permissions and the disk's space"
        ) from error
    return connection


def is_disk_full(path: Path, error: BaseException) -> bool:
    """Whether this error came of a full disk, which SQLite says in several ways."""
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    said = str(error).lower()
    if "full" in said:
        return True
    if "disk i/o" not in said and "unable to open" not in said:
        return False
    with contextlib.suppress(OSError):
        return shutil.disk_usage(path.parent).free < SQLITE_NEEDS
    return False


def is_damage(error: Exception) -> bool:
    """Whether this error of SQLite says that the file is damaged, and not that it cannot be used now."""
    said = str(error).lower()
    return not isinstance(error, sqlite3.OperationalError) or not any(word in said for word in NOT_DAMAGE)


def damaged(path: Path, reason: object) -> DamagedLogError:
    """The error that says so, and what to do."""
    return DamagedLogError(path, str(reason))


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


def _check_tables(connection: sqlite3.Connection, path: Path) -> None:
    """Raise DamagedLogError where a table has not the columns that it was made with: their names may be damaged."""
    found = _tables(connection)
    for table, columns in _expected_tables().items():
        missing = columns - found.get(table, frozenset())
        if missing:
            raise damaged(path, f"{table} has no {min(missing)}" if table in found else f"it has no table {table}")


@functools.cache
def _expected_tables() -> dict[str, frozenset[tuple[str, str]]]:
    with contextlib.closing(sqlite3.connect(":memory:", isolation_level=None)) as connection:
        for migration in MIGRATIONS:
            migration(connection)
        return _tables(connection)


def _tables(connection: sqlite3.Connection) -> dict[str, frozenset[tuple[str, str]]]:
    """Names and types of the columns of every table, and what each refers to and goes with."""
    names = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
    query = """SELECT name, type FROM pragma_table_info(:name)
        UNION ALL SELECT "table", on_delete FROM pragma_foreign_key_list(:name)"""
    return {name: frozenset(connection.execute(query, {"name": name}).fetchall()) for (name,) in names}


def _version(connection: sqlite3.Connection, path: Path) -> int:
    version = int(connection.execute("PRAGMA user_version").fetchone()[0])
    known = _expected_tables()
    if not 0 <= version <= MOST_VERSIONS or (version > len(MIGRATIONS) and _tables(connection) == known):
        raise damaged(path, f"its schema would have number {version}")
    if version > len(MIGRATIONS):
        raise AdaptiveError(
            f"log {path} was written by a newer adaptive (schema {version}, this one knows {len(MIGRATIONS)}); upgrade"
        )
    return version
