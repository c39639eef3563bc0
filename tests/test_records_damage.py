"""A damaged log: damaged records are skipped, a damaged file is set aside and its readable records kept; each is
reported."""

from __future__ import annotations

import json
import logging
import os
import random
import re
import shutil
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Command
from records_factory import generation, same

from adaptive.errors import AdaptiveError
from adaptive.records import check as checking
from adaptive.records import recover
from adaptive.records.check import Repairs, check, repair
from adaptive.records.log import Log
from adaptive.records.overwrite import forget_set_aside
from adaptive.records.recover import open_for_writing
from adaptive.records.schema import connect
from adaptive.records.writer import LogWriter
from adaptive.types import Generation

COUNT = 60


def said(number: int) -> Generation:
    return generation(number, tokens=40 + 60 * (number % 7), text=f"answer {number} " * (number % 40))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A log of COUNT answers."""
    place = tmp_path / "home" / "big--small-1234" / "records.db"
    with LogWriter(place) as writer:
        for number in range(1, COUNT + 1):
            writer.write(said(number))
    return place


@pytest.mark.parametrize("problem", ["disk I/O error", "locking protocol"])
def test_an_error_that_may_pass_is_no_damage(path: Path, monkeypatch: pytest.MonkeyPatch, problem: str) -> None:
    """A disk that cannot be read for a moment, or locks of a network disk that cannot be had: training would leave
    sound records out, `check` name them, and a writer replace the log."""

    def unreadable(*args: object) -> None:
        raise sqlite3.OperationalError(problem)

    with Log(path) as log:
        monkeypatch.setattr("adaptive.records.log.read_rows", unreadable)
        with pytest.raises(AdaptiveError, match=problem):
            list(log.generations())
        assert log.damaged == {}
        monkeypatch.undo()
        assert len(list(log.generations())) == COUNT


def flip(file: Path, at: int, bit: int = 3) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1 << bit
    file.write_bytes(data)


def damage_column(path: Path, number: int, column: str, kind: str = "BLOB") -> None:
    """Flip a bit in the middle of one record's column, as a bad disk does, without SQLite noticing."""
    connection = connect(path)
    (value,) = connection.execute(f"SELECT CAST({column} AS BLOB) FROM generations WHERE id = ?", (number,)).fetchone()
    changed = bytearray(value)
    changed[len(changed) // 2] ^= 0x80
    connection.execute(f"UPDATE generations SET {column} = CAST(? AS {kind}) WHERE id = ?", (bytes(changed), number))
    connection.close()


def whole(path: Path) -> dict[int, Generation]:
    with Log(path) as log:
        return {entry.id: entry.generation for entry in log.generations()}


@pytest.mark.parametrize(
    ("column", "kind"),
    [("supervision", "BLOB"), ("output", "BLOB"), ("text", "TEXT"), ("messages", "TEXT"), ("sampling", "TEXT")],
)
def test_a_damaged_record_is_passed_over_and_counted(path: Path, column: str, kind: str) -> None:
    damage_column(path, 7, column, kind)
    with Log(path) as log:
        found = {entry.id for entry in log.generations()}
        assert found == set(range(1, COUNT + 1)) - {7}
        assert list(log.damaged) == [7]
        assert "record 7 is damaged" in log.damaged[7]
        assert log.figures()
        assert log.sessions()
        assert [entry.id for entry in log.generations(5, limit=3)] == [6, 8]  # the skipped record counts in the limit


def test_rounds_that_are_gone_make_a_damaged_record(path: Path) -> None:
    connection = connect(path)
    connection.execute("DELETE FROM rounds WHERE generation = 9 AND idx = 1")
    connection.close()
    assert 9 not in whole(path)


def test_what_is_damaged_is_named_and_repaired(path: Path, adaptive: Command) -> None:
    assert adaptive("records", "check")[0] == 0
    damage_column(path, 7, "supervision")
    damage_column(path, 8, "text", "TEXT")
    status, out, _ = adaptive("records", "check")
    assert status == 1
    assert "record 7 is damaged" in out
    assert "record 8 is damaged" in out
    found = json.loads(adaptive("records", "check", "--json")[1])
    assert sorted(found["damaged"]) == ["7", "8"]
    status, out, _ = adaptive("records", "check", "--repair")
    assert status == 0
    assert "1 lost what was damaged and keep their text" in out
    assert "1 deleted" in out
    assert adaptive("records", "check")[0] == 0
    now = whole(path)
    assert set(now) == set(range(1, COUNT + 1)) - {8}
    assert now[7].supervision is None
    assert now[7].text == said(7).text


def test_a_repair_keeps_the_text_where_the_name_of_a_drafter_is_damaged_too(path: Path) -> None:
    damage_column(path, 7, "supervision")
    connection = connect(path)
    connection.execute("UPDATE rounds SET drafter = CAST(x'ff6d' AS TEXT) WHERE generation = 7 AND idx = 0")
    connection.close()
    found = check(path)
    assert list(found.damaged) == [7]
    assert repair(path, found) == Repairs(mended=1, deleted=0, file=None)
    now = whole(path)
    assert set(now) == set(range(1, COUNT + 1))
    assert now[7].text == said(7).text


def test_a_repair_deletes_nothing_when_a_record_cannot_be_read_at_the_moment(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    damage_column(path, 7, "supervision")

    def interrupted(place: Path) -> sqlite3.Connection:
        connection = connect(place)
        connection.set_trace_callback(lambda sql: connection.interrupt() if sql.startswith("SELECT id, ") else None)
        return connection

    monkeypatch.setattr(checking, "connect", interrupted)
    with pytest.raises(AdaptiveError, match="cannot be repaired now"):
        repair(path, check(path))
    monkeypatch.undo()
    assert repair(path, check(path)) == Repairs(mended=1, deleted=0, file=None)


def test_a_record_that_is_not_read_for_want_of_memory_is_not_damaged(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A repair would have deleted its supervision."""
    connection = connect(path)
    connection.execute("DELETE FROM rounds WHERE generation = 9 AND idx = 1")
    connection.close()
    found = check(path)
    assert list(found.damaged) == [9]

    def without_memory(data: bytes) -> None:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr("adaptive.records.rows.decode", without_memory)
        with pytest.raises(MemoryError):
            check(path)
        with pytest.raises(AdaptiveError, match="cannot be repaired now"):
            repair(path, found)
    assert repair(path, found) == Repairs(mended=1, deleted=0, file=None)
    assert whole(path)[9].supervision is not None


def test_an_export_leaves_damaged_records_out_and_says_so(path: Path, adaptive: Command, tmp_path: Path) -> None:
    damage_column(path, 7, "text", "TEXT")
    status, _, err = adaptive("records", "export", str(tmp_path / "out.jsonl"))
    assert status == 0
    assert f"exported {COUNT - 1} records" in err
    assert "1 damaged" in err


def spoil_schema(path: Path) -> None:
    data = path.read_bytes()
    flip(path, data.index(b"predicted_n"), 1)


def spoil_schema_text(path: Path) -> None:
    data = path.read_bytes()
    flip(path, data.index(b"finish_reason"), 7)


def spoil_header(path: Path) -> None:
    flip(path, 5)


def spoil_version(path: Path) -> None:
    flip(path, 63, 3)


def spoil_a_page(path: Path) -> None:
    size = 4096
    for number in range(2, path.stat().st_size // size):
        if path.read_bytes()[number * size] == 0x0D:
            flip(path, number * size)
            return


@pytest.mark.parametrize("spoil", [spoil_schema, spoil_schema_text, spoil_header, spoil_version, spoil_a_page])
def test_a_damaged_file_is_set_aside_and_what_can_be_read_is_kept(
    path: Path, spoil: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    spoil(path)
    before = path.read_bytes()
    with caplog.at_level(logging.WARNING), LogWriter(path) as writer:
        writer.write(said(COUNT + 1))
        assert writer.flush()
    aside = path.with_name("records.db.damaged")
    assert aside.read_bytes() == before
    (line,) = (record.getMessage() for record in caplog.records)
    assert "was damaged" in line
    assert "set aside as records.db.damaged" in line
    now = whole(path)
    assert len(now) >= COUNT - 8
    assert max(now) == COUNT + 1  # ids continue
    for number, found in now.items():
        assert same(found, said(number)), number
    assert sorted(p.name for p in path.parent.iterdir()) == ["records.db", "records.db.damaged", "records.lock"]
    with LogWriter(path):
        pass
    assert len(caplog.records) == 1  # reported once


def test_a_damaged_write_ahead_log_does_not_end_before_its_end(path: Path, tmp_path: Path) -> None:
    writer = LogWriter(path)
    for number in range(COUNT + 1, COUNT + 21):
        writer.write(said(number))
    assert writer.flush()
    copy = tmp_path / "copy" / "records.db"  # as a killed process leaves it
    copy.parent.mkdir()
    for end in ("", "-wal"):
        shutil.copyfile(f"{path}{end}", f"{copy}{end}")
    writer.close()
    flip(copy.with_name("records.db-wal"), 32 + 24 + 1000)
    connection, recovered = open_for_writing(copy)
    connection.close()
    assert recovered is not None
    assert "write-ahead log is cut short" in recovered
    assert len(whole(copy)) >= COUNT + 18


@pytest.mark.thorough
def test_any_flipped_byte_leaves_a_log_that_opens(path: Path) -> None:
    rng = random.Random(3)
    data = path.read_bytes()
    for _ in range(25):
        at = rng.choice((rng.randrange(len(data)), rng.randrange(4096)))
        path.parent.joinpath("records.db.damaged").unlink(missing_ok=True)
        path.write_bytes(data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :])
        with LogWriter(path) as writer:
            writer.write(said(COUNT + 1))
            assert writer.flush(), (at, writer.problem)
        now = whole(path)
        assert len(now) >= COUNT - 10, at
        for number, found in now.items():
            if number <= COUNT:
                assert same(found, said(number)) or found.supervision is None or not found.rounds, (at, number)


@pytest.mark.parametrize("names", [("records.db",), ("records.db", "records.db-wal", "records.db-shm")])
def test_a_log_that_is_moved_away_is_noticed_by_whoever_has_it_open(
    path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, names: tuple[str, ...]
) -> None:
    away = tmp_path / "away"
    away.mkdir()
    with caplog.at_level(logging.WARNING), LogWriter(path) as writer, Log(path) as reader:
        writer.write(said(COUNT + 1))
        assert writer.flush()
        assert reader.last_id() == COUNT + 1
        for name in names:
            (path.parent / name).rename(away / name)
        assert reader.count() == 0
        writer.write(said(COUNT + 2))
        assert writer.flush()
        assert [entry.id for entry in reader.generations()] == [COUNT + 2]  # ids continue
    assert any("moved or deleted" in record.getMessage() for record in caplog.records)
    assert sqlite3.connect(path).execute("PRAGMA integrity_check").fetchone() == ("ok",)
    assert sorted(whole(path)) == [COUNT + 2]
    assert sorted(whole(away / "records.db")) == list(range(1, COUNT + 2))  # the moved log is complete


def test_a_log_with_a_second_name_is_not_overwritten_with_it(path: Path) -> None:
    """As a process leaves it that is killed after it has set the damaged log aside, and before it has replaced it."""
    aside = path.with_name("records.db.damaged")
    os.link(path, aside)
    assert forget_set_aside(path, time.time() + 1) == 1
    assert not aside.exists()
    assert len(whole(path)) == COUNT


def test_a_writer_starts_on_a_damaged_log_that_the_disk_has_no_room_to_replace(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil_header(path)

    def full(*_: object) -> int:
        raise sqlite3.OperationalError("database or disk is full")

    with monkeypatch.context() as patched:
        patched.setattr(recover, "_rebuild_unchanged", full)
        writer = LogWriter(path, retry_s=0.05)
        writer.write(said(COUNT + 1))
        assert not writer.flush()
        assert "free some disk space" in str(writer.problem)
    assert writer.flush()
    assert writer.close()
    assert COUNT + 1 in whole(path)


def test_a_reader_that_opens_a_log_while_it_is_replaced_reads_the_new_one(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = tmp_path / "new.db"
    with LogWriter(new) as writer:
        writer.write(said(1))

    def connected(place: Path) -> sqlite3.Connection:
        connection = connect(place)
        connection.execute("SELECT count(*) FROM generations").fetchone()
        if new.exists():
            new.replace(path)
        return connection

    monkeypatch.setattr("adaptive.records.log.connect", connected)
    with Log(path) as log:
        assert log.count() == 1


@pytest.mark.parametrize("created", [1e300, "text"])
def test_a_damaged_time_is_shown_as_a_dash(path: Path, adaptive: Command, created: object) -> None:
    connection = connect(path)
    connection.execute("UPDATE generations SET created = ?", (created,))
    connection.close()
    code, out, err = adaptive("records", "stats")
    assert code == 0, err
    assert re.search(r"from +–", out)


def test_a_session_whose_name_is_no_unicode_is_found(path: Path) -> None:
    with LogWriter(path) as writer:
        writer.write(generation(session="caf\udce9"))
    with Log(path) as log:
        assert log.session_messages("caf\udce9")
        assert len(log.session_ids("caf\udce9")) == log.count(session="caf\udce9") == 1
