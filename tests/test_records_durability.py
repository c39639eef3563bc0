"""No acknowledged record is lost by killed writers, full disks or vanished files."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sqlite3
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from records_factory import generation, same, start

from adaptive.records.log import Log
from adaptive.records.schema import connect
from adaptive.records.waiting import size_of
from adaptive.records.writer import LogWriter, WriterState

posix = pytest.mark.skipif(os.name != "posix", reason="signals and limits of POSIX")

# Writes until it is killed; after each flush prints the number of acknowledged generations.
WRITES_FOREVER = """
import itertools, sys
from pathlib import Path
from adaptive.records.writer import LogWriter
from records_factory import generation
writer = LogWriter(Path(sys.argv[1]))
for number in itertools.count(1):
    writer.write(generation(number, tokens=200))
    if number % 3 == 0 and writer.flush():
        print(number, flush=True)
"""


def kill_while_writing(path: Path, seed: int) -> None:
    """Start a writing process, kill it at a random moment, and check the log that it leaves."""
    before = Log(path).count()
    process = start(WRITES_FOREVER, path)
    assert process.stdout is not None
    process.stdout.readline()  # the process is writing now
    time.sleep(random.Random(seed).uniform(0, 0.15))
    process.send_signal(signal.SIGKILL)
    acknowledged = int((process.stdout.read().split() or ["3"])[-1])
    process.wait()
    with Log(path) as log:
        logged = list(log.generations())
        assert len(logged) - before >= acknowledged
        for number, found in enumerate(logged[before:], start=1):
            assert same(found.generation, generation(number, tokens=200))  # complete, with rounds and supervision
    connection = connect(path)
    assert connection.execute("PRAGMA integrity_check").fetchone()[0] == "ok"
    assert connection.execute("PRAGMA foreign_key_check").fetchall() == []
    connection.close()


@posix
def test_a_killed_writer_leaves_a_log_with_every_acknowledged_generation(tmp_path: Path) -> None:
    for seed in range(4):
        kill_while_writing(tmp_path / "records.db", seed)


@posix
@pytest.mark.long
def test_twenty_killed_writers_leave_a_log_with_every_acknowledged_generation(tmp_path: Path) -> None:
    for seed in range(20):
        kill_while_writing(tmp_path / "records.db", 100 + seed)


# With RLIMIT_FSIZE the kernel refuses to let any file grow, as with a full disk; later the limit is lifted.
FILLS_THE_DISK = """
import resource, signal, sys
from pathlib import Path
from adaptive.records.writer import LogWriter
from records_factory import generation
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
path = Path(sys.argv[1])
writer = LogWriter(path)
writer.write(generation(0))
assert writer.flush() and writer.problem is None
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
size = path.with_name(path.name + "-wal").stat().st_size
resource.setrlimit(resource.RLIMIT_FSIZE, (size + 5000, hard))
for number in range(1, 6):
    writer.write(generation(number, tokens=500))
assert not writer.flush(), "a full disk was not noticed"
print(writer.problem)
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
assert writer.flush(), writer.problem
assert writer.problem is None, writer.problem
writer.write(generation(6))
assert writer.close()
"""


def run_script(code: str, path: Path) -> str:
    process = start(code, path)
    said, errors = process.communicate()
    assert process.returncode == 0, errors
    return said


@posix
def test_a_full_disk_is_said_and_nothing_is_lost_once_there_is_room(tmp_path: Path) -> None:
    path = tmp_path / "records.db"
    said = run_script(FILLS_THE_DISK, path)
    assert "cannot be written" in said
    assert "waiting in memory" in said
    assert [g.generation.prompt[0] for g in Log(path).generations()] == list(range(7))  # in order, without duplicates


# SQLite gets no more memory once a record is stored, and then looks for what has expired.
RUNS_OUT_OF_MEMORY = """
import contextlib, sqlite3, sys
from pathlib import Path
from adaptive.records import writer as module
from adaptive.records.retention import Keep
from records_factory import generation
def crowd():
    with contextlib.suppress(MemoryError):
        sqlite3.connect(":memory:").execute("PRAGMA hard_heap_limit=1")
module.LOOK_S = 0.0
writer = module.LogWriter(Path(sys.argv[1]), keep=Keep(days=1))
writer.on_stored = crowd
writer.write(generation(0))
assert writer.flush()
writer.write(generation(1))
assert not writer.flush()
print(writer.problem)
"""


def test_a_writer_without_memory_to_delete_what_has_expired_goes_on(tmp_path: Path) -> None:
    """Its thread ended, and nothing was logged from then on, nor was that said."""
    assert "cannot be written (MemoryError); 1 waiting" in run_script(RUNS_OUT_OF_MEMORY, tmp_path / "records.db")


def fill(file: Path) -> None:
    """Write until the file system is full."""
    with file.open("wb", buffering=0) as filler, contextlib.suppress(OSError):
        while filler.write(bytes(4096)) == 4096:
            pass


@posix
@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="mounting needs root")
def test_a_full_file_system_is_said_and_nothing_is_lost_once_there_is_room(tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=768k", "tmpfs", small], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("mounting is not allowed here")
    try:
        filler = small / "filler"
        with LogWriter(small / "records.db") as writer:
            writer.write(generation(0))
            assert writer.flush()
            fill(filler)
            for number in range(1, 10):
                writer.write(generation(number, tokens=500))
            assert not writer.flush()
            assert writer.problem is not None
            assert "waiting in memory" in writer.problem
            filler.unlink()
            assert writer.flush()
            assert writer.problem is None
        with Log(small / "records.db") as log:
            assert log.count() == 10
    finally:
        subprocess.run(["umount", small], check=True)


def test_what_waits_is_bounded_and_the_oldest_goes_first(tmp_path: Path) -> None:
    path = tmp_path / "records.db"
    small = size_of(generation(0, tokens=500, supervised=False))
    writer = LogWriter(path, memory_bytes=4 * small)
    with locked(path, writer):
        for number in range(6):
            writer.write(generation(number, tokens=500))
        assert writer.lost > 0
        assert f"{writer.lost} lost" in str(writer.problem)
        assert writer.state == WriterState(False, 7 - writer.lost, writer.stripped, writer.lost)
    assert writer.flush()
    assert "could not be logged" in str(writer.problem)  # the loss remains reported
    found = [g.generation for g in Log(path).generations()]
    assert [int(g.prompt[0]) for g in found] == [0, 0, 1, 2, 3, 4, 5][writer.lost :]
    assert writer.stripped >= len(found)
    assert not writer.close()


def test_supervision_is_dropped_before_any_text_is(tmp_path: Path) -> None:
    path = tmp_path / "records.db"
    whole, text = (size_of(generation(0, tokens=500, supervised=supervised)) for supervised in (True, False))
    writer = LogWriter(path, memory_bytes=5 * text + 2 * whole)
    with locked(path, writer):
        for number in range(6):
            writer.write(generation(number, tokens=500))
        assert "without supervision" in str(writer.problem)
    assert writer.flush()
    assert writer.lost == 0
    assert "without supervision" in str(writer.problem)
    found = [g.generation for g in Log(path).generations()]
    assert [int(g.prompt[0]) for g in found] == [0, 0, 1, 2, 3, 4, 5]
    without = [g.supervision is None for g in found]
    assert sum(without) == writer.stripped > 0
    assert without == sorted(without, reverse=True)  # the oldest lose it first
    writer.close()


class locked:  # noqa: N801, used as a function
    """Holds the log's write lock on entry until the writer has met it, and releases it on exit."""

    def __init__(self, path: Path, writer: LogWriter) -> None:
        self.other = sqlite3.connect(path, isolation_level=None)
        self.writer = writer

    def __enter__(self) -> None:
        self.other.execute("BEGIN EXCLUSIVE")
        self.writer._connection.execute("PRAGMA busy_timeout=1")  # type: ignore[union-attr]
        self.writer.write(generation(0))
        assert not self.writer.flush()

    def __exit__(self, *_: object) -> None:
        self.other.execute("ROLLBACK")
        self.other.close()


def test_a_generation_that_cannot_be_stored_does_not_stop_the_others(tmp_path: Path) -> None:
    path = tmp_path / "records.db"
    with LogWriter(path) as writer:
        writer.write(generation(0))
        writer.write(generation(1, session=None))  # type: ignore[arg-type]
        writer.write(generation(2))
        assert not writer.flush()
        assert writer.lost == 1
        assert "could not be logged" in str(writer.problem)
    assert Log(path).count() == 2


@posix
def test_a_log_deleted_under_a_running_writer_is_started_again(tmp_path: Path) -> None:
    path = tmp_path / "pair" / "records.db"
    with LogWriter(path) as writer:
        writer.write(generation(0))
        assert writer.flush()
        for file in path.parent.iterdir():
            file.unlink()
        writer.write(generation(1))
        assert writer.flush()
    assert [int(g.generation.prompt[0]) for g in Log(path).generations()] == [1]


def test_write_returns_while_the_disk_is_busy(tmp_path: Path) -> None:
    path = tmp_path / "records.db"
    writer = LogWriter(path)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    for number in range(20):
        writer.write(generation(number))  # would wait schema.BUSY_S each if `write` itself wrote
    assert not writer.flush(timeout_s=0.05)
    assert Log(path).count() == 0
    other.execute("ROLLBACK")
    assert writer.close()
    assert Log(path).count() == 20


def test_several_threads_may_write(tmp_path: Path) -> None:
    path = tmp_path / "records.db"
    with LogWriter(path, memory_bytes=5 * size_of(generation(0))) as writer:

        def write_some() -> None:
            for number in range(30):
                writer.write(generation(number))

        threads = [threading.Thread(target=write_some) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert Log(path).count() == 120


def test_a_program_that_ends_without_closing_still_logs(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from adaptive.records.writer import LogWriter;"
        "from records_factory import generation\n"
        "writer = LogWriter(Path(sys.argv[1]))\n"
        "for i in range(50): writer.write(generation(i))"
    )
    run_script(code, tmp_path / "records.db")
    assert Log(tmp_path / "records.db").count() == 50


def test_closing_is_final(tmp_path: Path) -> None:
    writer = LogWriter(tmp_path / "records.db")
    assert writer.close()
    assert writer.close()
    with pytest.raises(RuntimeError, match="closed"):
        writer.write(generation())


def test_at_the_end_one_that_cannot_be_written_does_not_keep_the_others_from_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, insert = LogWriter(tmp_path / "records.db"), LogWriter._insert

    def inserted(self: LogWriter, waiting: Any) -> int:
        if waiting.generation.session == "large":
            raise MemoryError("no room")
        return insert(self, waiting)

    monkeypatch.setattr(LogWriter, "_insert", inserted)
    with locked(writer.path, writer):
        for number, session in enumerate(["large", "a", "b"]):
            writer.write(generation(number, session=session))
    assert not writer.close()
    with Log(writer.path) as log:
        assert {"a", "b"} <= {one.generation.session for one in log.generations()}
