"""The indexes of the log's records, one for each owner."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from records_factory import generation

from adaptive.drafting.archive import Archive, History
from adaptive.errors import AdaptiveError
from adaptive.records.log import Log
from adaptive.records.retention import Keep
from adaptive.records.rows import insert
from adaptive.records.schema import connect, transaction
from adaptive.records.writer import LogWriter


def test_who_has_no_records_has_no_index(tmp_path: Path) -> None:
    """It takes 150 kB even when it is empty: a server with many users would have memory for nothing else."""
    path = tmp_path / "records.db"
    with LogWriter(path) as log:
        for number in range(6):
            log.write(replace(generation(number, tokens=40), owner=f"user {number % 3}"))
    archive = Archive(path, 1 << 20)
    archive.catch_up()
    most = archive.nbytes
    for number in range(50):
        History(archive).drafter(f"nobody {number}", 0.0).look([1, 2, 3])
    assert archive.nbytes == most
    with Log(path) as log:
        log.purge(ids=[1, 4, 2])  # all of one user's, half of another's
    archive.catch_up()
    assert 0 < archive.nbytes < most
    with Log(path) as log:
        log.purge(everything=True)
    archive.catch_up()
    assert (archive.tokens, archive.nbytes) == (0, 0)


def test_what_has_expired_is_no_longer_in_the_index(tmp_path: Path) -> None:
    path = tmp_path / "records.db"
    with LogWriter(path) as log:
        for number, age_s in enumerate((3 * 86400, 0)):
            log.write(replace(generation(number, tokens=40), created=time.time() - age_s))
    archive = Archive(path, 1 << 20)
    archive.catch_up()
    both = archive.tokens
    with contextlib.closing(connect(path)) as connection:
        assert Keep(days=1).enforce(connection)
    History(archive).drafter("", 0.0)  # of the next answer
    assert archive.tokens == both / 2


@contextlib.contextmanager
def instructions(log: Log) -> Iterator[list[int]]:
    """The number of SQLite's instructions in reads of ``log`` so far, in steps of ten."""
    count = [0]

    def counted() -> int:
        count[0] += 10
        return 0

    log.count()
    assert log._file is not None
    log._file.set_progress_handler(counted, 10)
    yield count
    log._file.set_progress_handler(None, 10)


@pytest.mark.thorough
def test_a_log_that_grows_for_years_delays_neither_the_first_answer_nor_later_ones(tmp_path: Path) -> None:
    """The first one waits for where the newest records begin, every one for what was deleted since the one before."""
    path = tmp_path / "records.db"
    with contextlib.closing(connect(path)) as connection, transaction(connection):
        for number in range(3000):
            insert(connection, generation(number, tokens=37, supervised=False))
    archive = Archive(path, 1 << 20, most=400)
    with instructions(archive._log) as count:
        archive.catch_up()
        assert (archive.tokens, count[0] < 10_000) == (400, True)
    with LogWriter(path) as log:
        log.write(generation(3000, tokens=37))
    with instructions(archive._log) as count:
        History(archive).drafter("", 0.0)
        assert 0 < count[0] < 10_000


@pytest.mark.skipif(os.name != "posix", reason="Windows does not move the folder of an open file")
def test_history_outlives_a_time_in_which_the_log_cannot_be_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As of a network disk that is away: nothing is forgotten, no answer fails, and the thread goes on."""
    folder, away = tmp_path / "pair", tmp_path / "away"
    path = folder / "records.db"
    with LogWriter(path) as log:
        log.write(generation(1, tokens=40))
    archive = Archive(path, 1 << 20)
    archive.start()
    assert archive.loaded.wait(30)
    history, one = History(archive), archive.tokens
    folder.rename(away)
    folder.symlink_to(folder)  # an error that even the superuser gets
    with pytest.raises(AdaptiveError, match="cannot be read now"):
        Log(path).count()
    for _ in range(3):
        history.drafter("", 0.0)
        history.forget()
        archive.catch_up()
    assert (archive.tokens, len(caplog.records)) == (one, 1)
    folder.unlink()
    away.rename(folder)
    with LogWriter(path) as log:
        log.write(generation(2, tokens=40))
    archive.poke()
    deadline = time.monotonic() + 30
    while archive.tokens == one and time.monotonic() < deadline:
        time.sleep(0.01)
    assert archive.tokens == 2 * one
    archive.close()
