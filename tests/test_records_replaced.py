"""A damaged log of any size is replaced while other processes write to it, and no acknowledged record is lost."""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from records_factory import generation, start
from small_disks import small_disk

from adaptive.errors import AdaptiveError
from adaptive.records import recover, schema
from adaptive.records.log import Log
from adaptive.records.recover import open_for_writing
from adaptive.records.retention import Keep
from adaptive.records.writer import LogWriter

COUNT = 40
PAGE = 4096

# Damages the page of the oldest records, or the header, without which no process can lock the file.
SPOILS_A_PAGE = """
with path.open("r+b") as file:
    page = next(p for p in range(1, 1000) if file.seek(p * 4096) and file.read(1) == b"\\r")
    file.seek(page * 4096)
    file.write(b"\\xff")
"""
SPOILS_THE_HEADER = """
with path.open("r+b") as file:
    file.write(b"\\xff")
"""

# Opens the damaged log as another program does. Between the reading of the damaged file and its replacement it waits,
# as it does for long with a large log.
REPLACES = """
import sys, time
from pathlib import Path
from adaptive.records import recover
path = Path(sys.argv[1])
SPOILS
rebuild = recover._rebuild
def slowly(path, new):
    kept = rebuild(path, new)
    print("read", flush=True)
    time.sleep(1)
    return kept
recover._rebuild = slowly
connection, said = recover.open_for_writing(path)
print(said, flush=True)
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A log of COUNT answers."""
    place = tmp_path / "records.db"
    with LogWriter(place) as writer:
        for number in range(COUNT):
            writer.write(generation(number, text=f"answer {number}", tokens=60))
    return place


def spoil_index(path: Path) -> None:
    """Damage the first page of an index into which every record is inserted."""
    with contextlib.closing(sqlite3.connect(path)) as connection:
        query = "SELECT rootpage FROM sqlite_master WHERE name = 'generations_by_created'"
        (page,) = connection.execute(query).fetchone()
    spoil_page(path, page)


def spoil_page(path: Path, page: int) -> None:
    with path.open("r+b") as file:
        file.seek((page - 1) * PAGE)
        file.write(b"\xff")


def texts(path: Path) -> list[str]:
    with Log(path) as log:
        return [entry.generation.text for entry in log.generations()]


@contextlib.contextmanager
def held(path: Path) -> Iterator[None]:
    """Hold the log's write lock, as a program does that writes for long."""
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        yield
        other.execute("ROLLBACK")


@pytest.mark.skipif(os.name != "posix", reason="Windows does not replace an open file")
@pytest.mark.parametrize("spoils", [SPOILS_A_PAGE, SPOILS_THE_HEADER], ids=["page", "header"])
def test_an_answer_that_ends_while_another_process_replaces_the_log_is_in_the_new_one(path: Path, spoils: str) -> None:
    with LogWriter(path) as writer:
        other = start(REPLACES.replace("SPOILS", spoils), path)
        assert other.stdout is not None
        assert other.stdout.readline() == "read\n"
        writer.write(generation(COUNT, text="said meanwhile"))
        assert writer.flush()
        said, errors = other.communicate()
        assert "was damaged" in said, errors
        assert "said meanwhile" in texts(path)
        writer.write(generation(COUNT + 1, text="said after"))
        assert writer.flush()
    assert texts(path)[-2:] == ["said meanwhile", "said after"]
    assert len(texts(path)) > COUNT // 2


def test_a_damaged_log_is_not_replaced_while_another_program_writes(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (recover, schema):
        monkeypatch.setattr(module, "BUSY_S", 0.2)
    spoil_index(path)
    with held(path):
        with pytest.raises(AdaptiveError, match="while another program writes to it; try again"):
            open_for_writing(path)
        writer = LogWriter(path)  # starts, and keeps what is said in memory
        assert "while another program writes" in str(writer.problem)
        writer.write(generation(COUNT, text="said meanwhile"))
        assert not writer.flush()
        assert not list(path.parent.glob("*.damaged*"))
    assert writer.flush(), writer.problem
    assert writer.close()
    assert texts(path)[-1] == "said meanwhile"


@pytest.mark.parametrize("opened", ["before", "after"])
def test_a_log_too_large_to_be_checked_at_the_start_is_replaced_when_a_record_meets_the_damage(
    path: Path, monkeypatch: pytest.MonkeyPatch, opened: str
) -> None:
    monkeypatch.setattr(recover, "CHECKED_AT_START", 1000)
    if opened == "after":
        spoil_index(path)
    with LogWriter(path) as writer:
        if opened == "before":
            spoil_index(path)
        writer.write(generation(COUNT, text="the newest"))
        assert writer.flush(), writer.problem
        assert writer.problem is None
    assert texts(path) == [*(f"answer {number}" for number in range(COUNT)), "the newest"]
    assert path.with_name("records.db.damaged").exists()


def test_a_log_too_large_to_be_checked_is_replaced_when_retention_meets_the_damage(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recover, "CHECKED_AT_START", 1000)
    spoil_index(path)
    with LogWriter(path, keep=Keep(days=1)):
        pass
    assert path.with_name("records.db.damaged").exists()
    assert len(texts(path)) == COUNT


def test_a_writer_starts_while_another_program_holds_the_lock_and_its_ids_continue(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schema, "BUSY_S", 0.2)
    with held(path):
        writer = LogWriter(path, after=500)
        assert "locked" in str(writer.problem)
        writer.write(generation(COUNT))
        assert not writer.flush()
    assert writer.flush()
    assert writer.problem is None
    assert writer.close()
    assert Log(path).last_id() == 501


def large(folder: Path) -> Path:
    """A damaged log of some 3 MB, which only a new record meets."""
    path = folder / "large" / "records.db"
    with LogWriter(path) as writer:
        for number in range(COUNT):
            writer.write(generation(number, text=f"answer {number}", tokens=2500))
    spoil_index(path)
    return path


def test_a_new_log_takes_no_more_room_than_its_records(tmp_path: Path) -> None:
    """It took twice as much, in a write-ahead log: a log of half a disk could never be replaced."""
    full = large(tmp_path)
    size = full.stat().st_size
    with small_disk(tmp_path / "small", f"{5 * size // 2 >> 10}k") as folder:
        path = folder / "records.db"
        shutil.copyfile(full, path)
        connection, said = open_for_writing(path, suspect=True)
        connection.close()
        assert "was damaged" in str(said)
        assert len(texts(path)) == COUNT


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts what this process has open")
def test_a_damaged_log_for_which_there_is_no_room_is_neither_copied_nor_opened_again_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each try, one for every answer, kept two connections open, and wrote the disk full with a part of a copy."""
    monkeypatch.setattr(recover, "CHECKED_AT_START", 1000)
    full = large(tmp_path)
    size = full.stat().st_size
    with small_disk(tmp_path / "small", f"{3 * size >> 10}k") as folder:
        path = folder / "records.db"
        shutil.copyfile(full, path)
        filler = folder / "filler"
        filler.write_bytes(bytes(3 * size // 2))
        with LogWriter(path) as writer:
            counts = []
            for number in range(COUNT, COUNT + 12):
                writer.write(generation(number, text=f"answer {number}"))
                assert not writer.flush()
                counts.append(len(os.listdir("/proc/self/fd")))
            assert "a new one takes up to" in str(writer.problem)
            assert max(counts) <= counts[0] + 2
            filler.unlink()
            assert writer.flush(), writer.problem
        assert texts(path) == [f"answer {number}" for number in range(COUNT + 12)]
