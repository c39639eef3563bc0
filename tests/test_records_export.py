"""An export that is killed leaves nothing behind once the next one into the same folder has run."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from records_factory import generation, start

from adaptive.records import export
from adaptive.records.export import export_jsonl, export_parquet
from adaptive.records.log import Log
from adaptive.records.writer import LogWriter

# Exports to log.jsonl beside the log, and is killed when the text is in the unfinished file.
DIES = """
import os, signal, sys
from pathlib import Path
from adaptive.records import export
from adaptive.records.log import Log
path, write = Path(sys.argv[1]), export._write_lines
def write_and_die(log, lines):
    write(log, lines)
    lines.flush()
    os.kill(os.getpid(), signal.SIGKILL)
export._write_lines = write_and_die
export.export_jsonl(Log(path), path.with_name("log.jsonl"))
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A log of one answer."""
    place = tmp_path / "records.db"
    with LogWriter(place) as writer:
        writer.write(generation(1, text="the secret"))
    return place


def holding_text(folder: Path) -> list[Path]:
    return [file for file in folder.rglob("*") if file.is_file() and b"the secret" in file.read_bytes()]


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_what_a_killed_export_leaves_is_removed_by_the_next_one(path: Path, kind: str) -> None:
    killed = start(DIES, path)
    _, errors = killed.communicate()
    assert killed.returncode < 0, errors
    (left,) = (file for file in holding_text(path.parent) if file != path)
    assert stat.S_IMODE(left.parent.stat().st_mode) == 0o700
    target = path.with_name(f"other.{kind}")
    written = export_jsonl(Log(path), target) if kind == "jsonl" else export_parquet(Log(path), target)
    assert written == 1
    assert not left.parent.exists()
    assert not list(path.parent.glob(".*"))


def test_an_export_leaves_the_files_of_a_running_one(path: Path) -> None:
    target = path.with_name("first.jsonl")
    with export._appearing_whole(target) as part:
        part.write_text("unfinished")
        assert export_jsonl(Log(path), path.with_name("second.jsonl")) == 1
        assert part.read_text() == "unfinished"
    assert target.read_text() == "unfinished"
    assert stat.S_IMODE(target.stat().st_mode) == 0o600
    assert not list(path.parent.glob(".*"))


def test_an_export_leaves_folders_that_are_not_its_own(path: Path) -> None:
    other = path.with_name(".export-of-somebody")
    other.mkdir()
    (other / "lock").touch()
    export_jsonl(Log(path), path.with_name("log.jsonl"))
    assert (other / "lock").exists()
