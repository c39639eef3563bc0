"""The log on disk: one private SQLite file in WAL mode, brought to the current schema by numbered migrations.

``PRAGMA user_version`` is the number of migrations applied to a file. ``docs/schema.md`` describes the
tables for users who query them.
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
from adaptive.records.stats import ASKED, RoundCount
from adaptive.types import FREE

# Seconds that a statement waits for another process's lock. Too low: two assistants that
# write at the same time report false problems. Too high: a stuck process is noticed late.
BUSY_S = 10.0


def create_tables(connection: sqlite3.Connection) -> None:
    """Migration 1. Small columns come first, so that they are read without following the pages of the large ones."""
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
    """Migration 2: indices, so that resuming a session and purging by age need no scan."""
    connection.execute("CREATE INDEX generations_by_session ON generations (session)")
    connection.execute("CREATE INDEX generations_by_created ON generations (created)")


def add_expected_seconds(connection: sqlite3.Connection) -> None:
    """Migration 3: the seconds that the draft-length policy forecast; 0 in older rows."""
    connection.execute("ALTER TABLE generations ADD COLUMN expected_s REAL NOT NULL DEFAULT 0")


def add_checksum(connection: sqlite3.Connection) -> None:
    """Migration 4: the checksum that reveals a damaged row (``rows.checksum``); NULL in older rows."""
    connection.execute("ALTER TABLE generations ADD COLUMN checksum INTEGER")


# Free bytes on the disk below which SQLite cannot create the -wal and -shm files.
SQLITE_NEEDS = 256 << 10

# A higher schema number is damage, not the work of a newer program.
MOST_VERSIONS = 1000

# Words in SQLite's errors whose cause is the machine, not the file.
NOT_DAMAGE = (
    "locked", "locking", "busy", "full", "disk i/o", "readonly", "unable to open", "wal mode", "interrupted", "memory",
)  # fmt: skip


def add_round_times(connection: sqlite3.Connection) -> None:
    """Migration 5: the seconds of the rounds of an answer, summed up so that they are read without the rounds' rows.

    They have their own table, since a column added to ``generations`` would be behind the large ones.
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
    """Migration 6: the figures of every answer in one short row, so that the history does not read a million rounds."""
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
    try:
        for done, (number, rows) in enumerate(counts, start=1):
            packed_counts = packed(RoundCount(*row[1:]) for row in rows if plausible_round(row[1], row[2]))
            connection.execute(f"{FIGURES_OF_GENERATIONS} WHERE id = ?", (packed_counts, number))
            if done % 256 == 0:
                on_migration(done / total)
        connection.execute(f"{FIGURES_OF_GENERATIONS} WHERE id NOT IN (SELECT generation FROM figures)", (b"",))
    finally:
        on_migration(1.0)


FIGURES_OF_GENERATIONS = """INSERT INTO figures
    SELECT id, session, created, adapter, predicted_n, predicted_s, expected_s, ? FROM generations"""


def tell_drafters_apart(connection: sqlite3.Connection) -> None:
    """Migration 7: ``rounds.first`` for rounds in which two drafters took turns, and ``figures.own`` for the counts of
    an answer's draft without the drafters of ``FREE``, set if any of these drafted."""
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


def leave_out_dropped_drafts(connection: sqlite3.Connection) -> None:
    """Migration 8: ``round_times`` anew, where rounds whose draft was dropped or late had counted as plain."""
    connection.execute(
        """INSERT OR REPLACE INTO round_times (generation, rounds_n, rounds_s, plain_n, plain_s)
        SELECT generation, count(*), sum(draft_s + verify_s), sum(plain), sum(plain * (draft_s + verify_s))
        FROM (SELECT *, NOT asked AND lag(asked, 1, 0) OVER (PARTITION BY generation ORDER BY idx) = 0 AS plain
              FROM (SELECT *, drafted > 0 OR draft_s > ? * verify_s AS asked FROM rounds))
        GROUP BY generation""",
        (ASKED,),
    )


def tell_shared_passes(connection: sqlite3.Connection) -> None:
    """Migration 9: the other answers in the pass of a round, and the number of such rounds of an answer; 0 in older
    rows, where that is not known."""
    for table, column in (("rounds", "shared"), ("round_times", "shared_n")):
        if (column,) not in connection.execute("SELECT name FROM pragma_table_info(?)", (table,)).fetchall():
            connection.execute(f"ALTER TABLE {table} ADD COLUMN {column} INTEGER NOT NULL DEFAULT 0")


def leave_out_starts(connection: sqlite3.Connection) -> None:
    """Migration 10: ``round_times`` anew, with the seconds by which the passes at the start of an answer took longer.
    Rounds there had counted as plain decoding."""
    if ("start_s",) not in connection.execute("SELECT name FROM pragma_table_info('round_times')").fetchall():
        connection.execute("ALTER TABLE round_times ADD COLUMN start_s REAL NOT NULL DEFAULT 0")
    connection.execute(
        """INSERT OR REPLACE INTO round_times (generation, rounds_n, rounds_s, plain_n, plain_s, start_s, shared_n)
        SELECT generation, n, total,
               CASE WHEN drafting THEN plain_n ELSE n END, CASE WHEN drafting THEN plain_s ELSE total - start_s END,
               start_s, shared_n
        FROM (SELECT generation, count(*) AS n, sum(draft_s + verify_s) AS total, max(asked) AS drafting,
                     sum(plain) AS plain_n, sum(plain * (draft_s + verify_s)) AS plain_s,
                     sum(CASE WHEN place < start THEN coalesce(verify_s - usual_s, 0) ELSE 0 END) AS start_s,
                     sum(shared > 0) AS shared_n
              FROM (SELECT *, place >= start AND NOT asked
                              AND lag(asked, 1, 0) OVER (PARTITION BY generation ORDER BY idx) = 0 AS plain,
                           avg(CASE WHEN place >= start THEN verify_s END)
                               OVER (PARTITION BY generation, drafted) AS usual_s
                    FROM (SELECT *, drafted > 0 OR draft_s > ? * verify_s AS asked,
                                 row_number() OVER (PARTITION BY generation ORDER BY idx) - 1 AS place,
                                 min(8, count(*) OVER (PARTITION BY generation) / 2) AS start
                          FROM rounds))
              GROUP BY generation)""",
        (ASKED,),
    )


MIGRATIONS = (
    create_tables, index_session_and_created, add_expected_seconds, add_checksum, add_round_times, sum_up_generations,
    tell_drafters_apart, leave_out_dropped_drafts, tell_shared_passes, leave_out_starts,
)  # fmt: skip


def plausible_round(drafted: object, accepted: object) -> bool:
    """Whether a round can have these counts of drafted and accepted tokens; a damaged round may have billions."""
    return isinstance(drafted, int) and isinstance(accepted, int) and 0 <= accepted <= drafted <= LONGEST_DRAFT


def _silent(share: float) -> None:
    pass


# Called with the completed share of a long migration, 0 to 1, and with 1 also if it fails; a front end sets it to
# update its progress bar.
on_migration: Callable[[float], None] = _silent


class DamagedLogError(AdaptiveError):
    """The log's file is damaged or is not a log; ``reason`` describes the damage."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(
            f"log {path} is damaged ({reason}); `adaptive records check --repair` keeps what can be read of it"
        )
        self.reason = reason


class DiskFullError(AdaptiveError):
    """The disk has no room for the log."""


@contextmanager
def transaction(connection: sqlite3.Connection, mode: str = "IMMEDIATE") -> Iterator[None]:
    """Commit all of the block's statements or none. ``mode`` DEFERRED gives readers one consistent view."""
    connection.execute(f"BEGIN {mode}")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        # A full disk may already have caused a rollback; a second ROLLBACK would hide the real error.
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def connect(path: Path) -> sqlite3.Connection:
    """Open the log at ``path``, creating it (0600, in 0700 folders) and migrating it if needed.

    The connection is in autocommit mode (use ``transaction``) and may be used by several threads, one at a
    time. ``synchronous=NORMAL`` syncs at checkpoints only: a commit survives the end of the process
    at any moment; the last commits before a power failure may be missing, but never in part.

    Raises DamagedLogError for a file that is damaged or is not a log, DiskFullError if the disk is full, AdaptiveError
    for a log that is newer than this program or cannot be opened.
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
        raise unusable(path, error) from error
    return connection


def unusable(path: Path, error: Exception) -> AdaptiveError:
    """The error of this program for one of SQLite while the log at ``path`` is opened."""
    if is_damage(error):
        return damaged(path, error)
    if is_disk_full(path, error):
        return DiskFullError(f"the disk is full ({error})")
    return AdaptiveError(f"log {path} cannot be used ({error}); check its permissions and the disk's space")


def is_disk_full(path: Path, error: BaseException) -> bool:
    """Whether a full disk caused ``error``; SQLite reports that in several ways."""
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
    """Whether this SQLite error means that the file is damaged, not that it cannot be used now."""
    said = str(error).lower()
    return not isinstance(error, sqlite3.OperationalError) or not any(word in said for word in NOT_DAMAGE)


def damaged(path: Path, reason: object) -> DamagedLogError:
    """The error for a damaged log, whose text names the remedy."""
    return DamagedLogError(path, str(reason))


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _make_private(path: Path) -> None:
    missing = [folder for folder in (path.parent, *path.parent.parents) if not folder.exists()]
    for folder in reversed(missing):
        folder.mkdir(mode=0o700, exist_ok=True)
    # SQLite gives -wal and -shm the mode of the main file, so the main file must be private first.
    # An existing file is not opened here: closing it would release the locks that all other connections of
    # this process hold on it, and another process's reader could then remove the WAL while this process writes.
    with contextlib.suppress(FileExistsError):
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
    if stat.S_IMODE(path.stat().st_mode) & 0o077:
        path.chmod(0o600)


def _use_wal(connection: sqlite3.Connection) -> None:
    """Switch the file to WAL mode. SQLite does not wait for a lock in this statement, so the function retries for up to
    BUSY_S: two processes may open a new log at the same time."""
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
    """Raise DamagedLogError if a table lacks columns that it was created with, since damage can change their names."""
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
    """For every table the names and types of its columns, and its foreign keys: table and ON DELETE action."""
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
