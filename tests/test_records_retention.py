"""Retention gives way to new records, and takes the damaged logs that were set aside."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from records_factory import DEFAULT_ROUNDS, generation

from adaptive.records import writer as writing
from adaptive.records.log import Log
from adaptive.records.retention import Keep
from adaptive.records.rows import insert
from adaptive.records.schema import connect, transaction
from adaptive.records.writer import LogWriter

DAY_S = 86400.0
MANY = 4000


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A log of MANY answers of the last hundred days."""
    place, now = tmp_path / "records.db", time.time()
    connection = connect(place)
    with transaction(connection):
        for number in range(MANY):
            created = now - 100 * DAY_S * (1 - number / MANY)
            insert(connection, generation(number, created=created, rounds=DEFAULT_ROUNDS * 15, supervised=False))
    connection.close()
    return place


def count(path: Path) -> int:
    with Log(path) as log:
        return log.count()


def _after(begun: threading.Event, call: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, which waits for the event first."""

    def waits(*given: Any) -> Any:
        assert begun.wait(60)
        return call(*given)

    return waits


def wait_for(path: Path, records: int) -> None:
    """Wait until at most this many records are left."""
    deadline = time.monotonic() + 60
    while count(path) > records:
        assert time.monotonic() < deadline, count(path)
        time.sleep(0.05)


@pytest.mark.thorough(but="keep0")
@pytest.mark.parametrize("keep", [Keep(days=0.9), Keep(gigabytes=1e-9)])
def test_a_record_is_written_before_all_old_ones_are_deleted(
    path: Path, keep: Keep, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, insert_one = list[int](), LogWriter._insert

    def inserted(self: LogWriter, waiting: Any) -> int:
        left.append(count(path))
        return insert_one(self, waiting)

    monkeypatch.setattr(LogWriter, "_insert", inserted)
    began = threading.Event()
    monkeypatch.setattr(Keep, "enforce", _after(began, Keep.enforce))
    with LogWriter(path, keep=keep) as writer:
        writer.write(generation(MANY, created=time.time()))
        began.set()  # the deletion begins only now, and gives way at once
        assert writer.flush()
        assert left[0] > MANY // 20
        wait_for(path, MANY // 100)


@pytest.mark.thorough
def test_closing_does_not_wait_for_the_deletion_and_the_next_start_continues_it(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "CLOSING_S", 0.0)
    began = threading.Event()
    with monkeypatch.context() as patched:
        patched.setattr(Keep, "enforce", _after(began, Keep.enforce))
        writer = LogWriter(path, keep=Keep(days=1))
        closing = threading.Thread(target=writer.close)
        closing.start()
        while not writer._closing:
            time.sleep(0.01)
        began.set()
        closing.join()
    assert count(path) > MANY // 20
    with LogWriter(path, keep=Keep(days=1)):
        wait_for(path, MANY // 100)


@pytest.mark.thorough
def test_records_grow_too_old_for_a_server_that_nobody_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "LOOK_S", 0.1)
    path, moved = tmp_path / "records.db", tmp_path / "moved.db"
    with LogWriter(path, keep=Keep(days=1)) as writer:
        writer.write(generation(1, created=time.time() - DAY_S + 2))
        writer.write(generation(2, created=time.time()))
        assert writer.flush()
        assert count(path) == 2
        wait_for(path, 1)
        writer.write(generation(3, created=time.time() - DAY_S + 1))
        assert writer.flush()
        path.rename(moved)
        time.sleep(1.5)
    assert count(moved) == 2  # what was moved away is nobody's to trim


def test_damaged_logs_that_were_set_aside_are_deleted_when_their_records_are_too_old(tmp_path: Path) -> None:
    path = tmp_path / "records.db"
    names = ("records.db.damaged", "records.db.damaged-wal", "records.db.damaged2")
    old, old_wal, young = asides = [path.with_name(name) for name in names]
    for file in asides:
        file.write_bytes(b"what was said")
    for file in (old, old_wal):
        os.utime(file, (time.time() - 201 * DAY_S,) * 2)
    os.utime(young, (time.time() - 199 * DAY_S,) * 2)
    with LogWriter(path) as writer:
        writer.write(generation(1, created=time.time()))
    assert all(file.exists() for file in asides)
    with LogWriter(path, keep=Keep(days=200)):
        pass
    assert [file.exists() for file in asides] == [False, False, True]
    assert count(path) == 1
