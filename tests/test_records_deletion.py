"""Deletion from the log, by purge and by retention: what it costs, and what it leaves if it fails."""

from __future__ import annotations

import contextlib
import logging
import sqlite3
import time
from pathlib import Path

import pytest
from records_factory import generation
from test_full_disk import fill, small

from adaptive.errors import AdaptiveError
from adaptive.records.erase import delete
from adaptive.records.log import Log
from adaptive.records.retention import BATCH, Keep
from adaptive.records.rows import insert
from adaptive.records.schema import DiskFullError, connect, transaction
from adaptive.types import Generation

__all__ = ["small"]

DAY = 86400.0
SECRET = "the-secret-of-this-test "


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "records.db"


def filled(path: Path, *generations: Generation) -> None:
    with contextlib.closing(connect(path)) as connection, transaction(connection):
        for one in generations:
            insert(connection, one)


def wal(path: Path) -> Path:
    return path.with_name(path.name + "-wal")


def kept(connection: sqlite3.Connection) -> list[int]:
    return [row[0] for row in connection.execute("SELECT id FROM generations ORDER BY id")]


def test_records_beyond_an_age_are_found_by_the_index_of_their_times(path: Path) -> None:
    now = time.time()
    filled(path, *(generation(number, created=now - (9 - number) * DAY) for number in range(10)))
    done: list[str] = []
    with contextlib.closing(connect(path)) as connection:
        connection.set_trace_callback(done.append)
        assert Keep(days=4.5).enforce(connection, now) == 5
        connection.set_trace_callback(None)
        (statement, *_) = (one for one in done if one.startswith("DELETE"))
        plan = [row[3] for row in connection.execute(f"EXPLAIN QUERY PLAN {statement}")]
        assert any("generations_by_created (created<?)" in step for step in plan), plan
        assert not any(step.startswith(("SCAN generations", "USE TEMP B-TREE")) for step in plan), plan
        assert kept(connection) == list(range(6, 11))


def test_a_clock_that_jumps_ahead_deletes_nothing_until_it_is_seen_on_two_days(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    now, later = time.time(), 2_180_000_000.0  # in 2039
    keep = Keep(days=30)
    filled(path, *(generation(number, created=now - number) for number in range(100)))
    with contextlib.closing(connect(path)) as connection, caplog.at_level(logging.WARNING, "adaptive.records"):
        assert keep.enforce(connection, later) == 0
        assert "(2039-" in caplog.text
        filled(path, generation(100, created=later))
        assert keep.enforce(connection, later + 3600) == 0
        caplog.clear()
        assert keep.enforce(connection, now + 3600) == 0  # the clock is right again
        assert not caplog.text
        assert keep.enforce(connection, later + DAY) == 100
        assert kept(connection) == [101]


@pytest.mark.parametrize("days", [20.0, 60.0])
def test_after_a_pause_old_records_are_deleted_at_once_or_on_the_second_day_of_use(path: Path, days: float) -> None:
    now = time.time()
    said = [generation(number, created=now - days * DAY + number) for number in range(3)]
    filled(path, *said, generation(3, created=now))
    with contextlib.closing(connect(path)) as connection:
        assert Keep(days=7).enforce(connection, now + 60) == (3 if days < 30 else 0)
        Keep(days=7).enforce(connection, now + DAY)
        assert kept(connection) == [4]


def test_nothing_is_said_of_the_clock_where_nothing_is_old(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    filled(path, generation(created=time.time()))
    with contextlib.closing(connect(path)) as connection, caplog.at_level(logging.WARNING, "adaptive.records"):
        assert Keep(days=365).enforce(connection, time.time() + 100 * DAY) == 0
    assert not caplog.text


def test_a_purge_of_many_records_takes_the_disk_space_of_a_few(path: Path) -> None:
    """Of one transaction, the write-ahead log would be as large as the deleted records."""
    count = 10 * BATCH
    filled(path, *(generation(number, session="xy"[number == 7], text=SECRET * 800) for number in range(count)))
    batch = path.stat().st_size / count * BATCH
    with contextlib.closing(connect(path)) as connection:
        assert delete(connection, "session = ?", ("x",)) == count - 1
        assert wal(path).stat().st_size < 3 * batch
        assert kept(connection) == [8]
        assert connection.execute("SELECT DISTINCT generation FROM rounds").fetchall() == [(8,)]


def test_a_purge_that_finds_no_room_says_so_and_goes_on_once_there_is_room(small: Path) -> None:
    path = small / "records.db"
    filled(path, *(generation(number, session="xy"[number == 7], text=SECRET * 300) for number in range(50)))
    with Log(path) as log:
        assert log.count() == 50
        filler = fill(small)
        with pytest.raises(DiskFullError, match="49 records cannot be deleted: the disk is full"):
            log.purge(session="x")
        assert log.count() == 50
        filler.unlink()
        assert log.purge(session="x") == 49
        assert [one.id for one in log.generations()] == [8]


def test_where_the_file_cannot_be_rewritten_no_deleted_text_stays_in_the_write_ahead_log(small: Path) -> None:
    path = small / "records.db"
    connect(path).close()
    with contextlib.closing(connect(path)) as writer, Log(path) as log:
        with transaction(writer):
            for number in range(40):
                text = SECRET if number == 7 else "kept " * 1000
                insert(writer, generation(number, session=f"s{number}", text=text))
        writer.execute("PRAGMA wal_checkpoint(PASSIVE)")
        assert SECRET.encode() in wal(path).read_bytes()
        assert log.count() == 40
        fill(small)
        with pytest.raises(AdaptiveError, match="could not be rewritten"):
            log.purge(session="s7")
        assert wal(path).stat().st_size == 0
        assert SECRET.encode() not in path.read_bytes()
        assert log.count() == 39
