"""The indexes of the log's records, one for each owner."""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace
from pathlib import Path

from records_factory import generation

from adaptive.drafting.archive import Archive, History
from adaptive.records.log import Log
from adaptive.records.retention import Keep
from adaptive.records.schema import connect
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
