"""Where the copy of a log lies while the log is rewritten."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from pathlib import Path

import pytest

from adaptive.records.erase import shrink


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs Linux")
def test_the_copy_of_a_log_stays_in_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.setenv("SQLITE_TMPDIR", str(elsewhere))  # too late for SQLite, which was used before
    places: set[Path] = set()

    def look() -> None:
        for number in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                file = Path(os.readlink(f"/proc/self/fd/{number}"))
                if file.name.startswith("etilqs"):  # SQLite's temporary files, which have no name in their folder
                    places.add(file.parent)

    home = tmp_path / "it's mine"
    home.mkdir()
    with contextlib.closing(sqlite3.connect(home / "records.db")) as connection:
        connection.execute("CREATE TABLE texts (text)")
        connection.executemany("INSERT INTO texts VALUES (?)", [("x" * 10_000,)] * 2000)  # more than SQLite's cache
        connection.commit()
        connection.set_progress_handler(look, 1000)
        shrink(connection, home / "records.db")
    assert places == {home}
