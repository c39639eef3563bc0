"""The feature spool: precision and retention of hidden states, and its files after a kill."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import sqlite3
import stat
import time
from pathlib import Path

import numpy as np
import pytest
from records_factory import generation, start
from test_records_durability import locked

from adaptive.records import overwrite
from adaptive.records.erase import erase_beside
from adaptive.records.features import LONGEST, Features, FeatureSpool, tokens_hash
from adaptive.records.log import Log
from adaptive.records.overwrite import overwrite_and_remove
from adaptive.records.retention import Keep
from adaptive.records.schema import connect
from adaptive.records.writer import LogWriter, WriterState
from adaptive.state import PairState

posix = pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
GIGABYTE = 10**9


def states(number: int, tokens: int = 7, width: int = 96) -> np.ndarray:
    """Random hidden states (tokens, width), determined by ``number``."""
    rng = np.random.default_rng(number)
    return rng.standard_normal((tokens, width)).astype(np.float32)


def filled(path: Path, count: int, limit: int = GIGABYTE, created: float | None = None) -> FeatureSpool:
    """The spool of a log of ``count`` records with features."""
    spool = FeatureSpool(path.parent / "features", limit)
    with LogWriter(path, spool=spool) as writer:
        for number in range(1, count + 1):
            writer.write(generation(number, created=created), Features.of(states(number)))
        assert writer.flush()
    return spool


def kept(spool: FeatureSpool, log: Log, number: int) -> Features | None:
    (found,) = log.generations(number - 1, 1)
    return spool.read(number, tokens_hash(found.generation.prompt, found.generation.output))


def test_states_come_back_to_a_hundredth_also_beside_numbers_a_thousand_times_as_large() -> None:
    given = states(1, 50, 200)
    given[:, 5] *= 3000.0
    back = Features.of(given).states()
    others = np.delete(np.arange(200), np.arange(64))  # the columns outside the large number's block
    error = np.abs(back - given)[:, others].max() / np.abs(given[:, others]).max()
    assert error < 0.01
    assert np.abs(back[:, 5] / given[:, 5] - 1).max() < 0.01


def test_nothing_that_a_model_may_give_is_a_mistake() -> None:
    given = np.zeros((4, 70), np.float32)
    given[0] = 1e30
    given[1] = np.nan
    given[2, ::2] = 1e-9
    given[3, 69] = -np.inf
    found = Features.of(given).states()
    assert np.isfinite(found).all()
    assert not found[1].any()
    assert (found[0] > 0).all()


def test_of_a_long_text_the_end_is_kept() -> None:
    found = Features.of(np.arange(LONGEST + 9, dtype=np.float32)[:, None], first=2)
    assert (found.first, len(found.values)) == (11, LONGEST)


def test_what_was_written_is_read_and_is_the_users_own(tmp_path: Path) -> None:
    spool = filled(tmp_path / "records.db", 3)
    with Log(tmp_path / "records.db") as log:
        for number in (1, 2, 3):
            found = kept(spool, log, number)
            assert found is not None
            np.testing.assert_allclose(found.states(), states(number), atol=0.02)
    assert stat.S_IMODE((spool.folder / "2.safetensors").stat().st_mode) == 0o600
    assert stat.S_IMODE(spool.folder.stat().st_mode) == 0o700
    assert sorted(p.name for p in spool.folder.iterdir()) == [f"{n}.safetensors" for n in (1, 2, 3)]


def test_features_of_other_tokens_and_broken_files_are_none(tmp_path: Path) -> None:
    spool = filled(tmp_path / "records.db", 2)
    first, second = (tokens_hash(one.prompt, one.output) for one in (generation(1), generation(2)))
    assert spool.has(1, first)
    assert not spool.has(1, second)
    assert spool.read(1, second) is None
    assert spool.read(7, first) is None
    file = spool.folder / "1.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    assert spool.read(1, first) is None
    file.write_bytes(b"")
    assert spool.read(1, first) is None
    assert not spool.has(1, first)


def test_the_cap_holds_and_the_oldest_go_first(tmp_path: Path) -> None:
    one = filled(tmp_path / "one" / "records.db", 1).nbytes
    spool = filled(tmp_path / "all" / "records.db", 40, limit=10 * one)
    assert spool.nbytes <= 10 * one
    assert spool.ids() == list(range(41 - len(spool.ids()), 41))
    assert len(spool.ids()) >= 9
    with Log(tmp_path / "all" / "records.db") as log:
        assert log.count() == 40


def test_a_cap_of_nothing_keeps_nothing(tmp_path: Path) -> None:
    assert filled(tmp_path / "records.db", 2, limit=0).ids() == []


def test_what_other_processes_wrote_counts(tmp_path: Path) -> None:
    one = filled(tmp_path / "records.db", 1).nbytes
    others = filled(tmp_path / "records.db", 30)
    spool = FeatureSpool(others.folder, 10 * one)
    spool.write(100, "of another process", Features.of(states(100)))
    assert spool.nbytes <= 10 * one
    assert 100 in spool.ids()


def test_a_purge_takes_the_features_of_what_it_deletes(tmp_path: Path) -> None:
    state = PairState(tmp_path)
    spool = filled(state.records, 6)
    os.link(spool.folder / "2.safetensors", tmp_path / "second")  # keeps the data readable after the file is unlinked
    with Log(state.records) as log:
        log.purge(older_than_s=time.time() - generation(4).created + 0.5)
        erase_beside(state, everything=False)
        assert [found.id for found in log.generations()] == spool.ids() == [4, 5, 6]
        assert not (tmp_path / "second").read_bytes().strip(b"\0")
        log.purge(everything=True)
        erase_beside(state, everything=True)
    assert list(spool.folder.iterdir()) == []


def test_retention_takes_features_too(tmp_path: Path) -> None:
    created = time.time() - 86400 * 10
    spool = filled(tmp_path / "records.db", 3, created=created)
    assert spool.ids() == [1, 2, 3]
    with LogWriter(tmp_path / "records.db", spool=spool, keep=Keep(days=9)) as writer:
        writer.write(generation(9, created=time.time()), Features.of(states(9)))
        assert writer.flush()
    assert spool.ids() == [4]


def test_orphans_are_removed_at_a_start(tmp_path: Path) -> None:
    spool = filled(tmp_path / "records.db", 2)
    spool.write(17, "of a record that never was", Features.of(states(17)))  # as if its transaction had not committed
    (spool.folder / ".tmp-0123456789abcdef").write_bytes(b"half")
    filled(tmp_path / "records.db", 1)
    assert spool.ids() == [1, 2, 3]
    assert not list(spool.folder.glob(".tmp-*"))


def test_a_log_that_is_begun_anew_leaves_no_features_of_the_old_one(tmp_path: Path) -> None:
    spool = FeatureSpool(tmp_path / "features", GIGABYTE)
    with LogWriter(tmp_path / "records.db", spool=spool) as writer:
        writer.write(generation(1), Features.of(states(1)))
        assert writer.flush()
        (tmp_path / "records.db").rename(tmp_path / "moved.db")
        writer.write(generation(2), Features.of(states(2)))
        assert writer.flush()
    with Log(tmp_path / "records.db") as log:
        assert [found.id for found in log.generations()] == spool.ids() == [2]


def test_a_spool_that_cannot_be_written_loses_no_record(tmp_path: Path) -> None:
    (tmp_path / "features").write_text("no folder")
    spool = FeatureSpool(tmp_path / "features", GIGABYTE)
    with LogWriter(tmp_path / "records.db", spool=spool) as writer:
        writer.write(generation(1), Features.of(states(1)))
        assert writer.flush()
        assert writer.state == WriterState(True, 0, 0, 0)
    with Log(tmp_path / "records.db") as log:
        assert log.count() == 1


def test_features_that_wait_are_dropped_before_any_text_is(tmp_path: Path) -> None:
    path, large = tmp_path / "records.db", Features.of(states(1, 500, 1024))
    spool = FeatureSpool(tmp_path / "features", GIGABYTE)
    with LogWriter(path, memory_bytes=2 * large.nbytes, spool=spool) as writer:
        with locked(path, writer):
            for number in range(6):
                writer.write(generation(number), large)
        assert writer.flush()
        assert writer.lost == 0
    with Log(path) as log:
        assert log.count() == 7
    assert len(spool.ids()) <= 2


def test_others_can_write_while_the_features_of_deleted_records_are_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "records.db"
    spool = filled(path, 5)
    overwritten: list[Path] = []

    def overwrite_it(file: Path) -> None:
        with contextlib.closing(sqlite3.connect(path, timeout=0.1)) as other, other:
            other.execute("UPDATE generations SET domain = 'other'")
        overwrite_and_remove(file)
        overwritten.append(file)

    monkeypatch.setattr(overwrite, "overwrite_and_remove", overwrite_it)
    with contextlib.closing(connect(path)) as connection:
        connection.execute("DELETE FROM generations WHERE id != 3")
        assert spool.sweep(connection) == 4
        assert spool.sweep(connection) == 0
    assert len(overwritten) == 4
    assert [file.name for file in spool.folder.iterdir()] == ["3.safetensors"]


# Is killed when it has overwritten the features of two of the deleted records.
KILLED_IN_A_SWEEP = """
import os, signal, sys
from pathlib import Path
from adaptive.records import features, overwrite
from adaptive.records.schema import connect
path, really, done = Path(sys.argv[1]), overwrite.overwrite_and_remove, []
def overwrite_two(file):
    if len(done) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    really(file)
    done.append(file)
overwrite.overwrite_and_remove = overwrite_two
features.FeatureSpool(path.parent / "features", 10**9).sweep(connect(path))
"""


@posix
@pytest.mark.parametrize("everything", [False, True])
def test_what_a_killed_sweep_left_is_overwritten_by_the_next(tmp_path: Path, everything: bool) -> None:
    path = tmp_path / "records.db"
    spool = filled(path, 6)
    for number in range(1, 7):  # keeps the data readable after the file is unlinked
        os.link(spool.folder / f"{number}.safetensors", tmp_path / f"again{number}")
    with contextlib.closing(connect(path)) as connection:
        connection.execute("DELETE FROM generations WHERE id != 3")
        process = start(KILLED_IN_A_SWEEP, path)
        assert process.wait() == -signal.SIGKILL
        assert spool.ids() == [3]
        assert len(list(spool.folder.iterdir())) == 1 + 3
        if everything:
            spool.erase()
        else:
            assert spool.sweep(connection) == 0
    left = {file.name for file in tmp_path.glob("again*") if file.read_bytes().strip(b"\0")}
    assert left == (set() if everything else {"again3"})
    assert [file.name for file in spool.folder.iterdir()] == ([] if everything else ["3.safetensors"])


WRITES_FOREVER = """
import itertools, sys
from pathlib import Path
from adaptive.records.features import Features, FeatureSpool
from adaptive.records.writer import LogWriter
from records_factory import generation
from test_feature_spool import GIGABYTE, states
path = Path(sys.argv[1])
writer = LogWriter(path, spool=FeatureSpool(path.parent / "features", GIGABYTE))
for number in itertools.count(1):
    writer.write(generation(number, tokens=200), Features.of(states(number, 200)))
    if number % 3 == 0 and writer.flush():
        print(number, flush=True)
"""


def kill_while_writing(folder: Path, times: int) -> None:
    """Kill a writing process ``times`` times, and check that every spool file is complete and belongs to its record."""
    path = folder / "records.db"
    for turn in range(times):
        process = start(WRITES_FOREVER, path)
        assert process.stdout is not None
        process.stdout.readline()  # wait for the first record
        time.sleep(random.Random(turn).uniform(0, 0.1))
        process.send_signal(signal.SIGKILL)
        process.wait()
        spool = FeatureSpool(folder / "features", GIGABYTE)
        with contextlib.closing(connect(path)) as connection:
            assert spool.sweep(connection) <= 1, "more than the one under way had no record"
        with Log(path) as log:
            there = {found.id: found.generation for found in log.generations()}
        assert there.keys() == set(spool.ids()), "a record that was not killed on the way has its features"
        for number, found in there.items():
            features = spool.read(number, tokens_hash(found.prompt, found.output))
            assert features is not None
            assert len(features.values) == 200
        assert all(a < b for a, b in itertools.pairwise(there))


@pytest.mark.thorough
@posix
def test_a_kill_in_the_middle_of_a_write_leaves_whole_files(tmp_path: Path) -> None:
    kill_while_writing(tmp_path, 3)


@posix
@pytest.mark.long
def test_twenty_kills_leave_whole_files(tmp_path: Path) -> None:
    kill_while_writing(tmp_path, 20)


def test_a_sweep_gives_way_and_goes_on_later(tmp_path: Path) -> None:
    path = tmp_path / "records.db"
    spool = filled(path, 6)
    looks = iter([False, False, True])
    with contextlib.closing(connect(path)) as connection:
        connection.execute("DELETE FROM generations WHERE id != 3")
        assert spool.sweep(connection, lambda: next(looks)) == 5
        assert (spool.unswept, spool.ids()) == (True, [3])
        assert len(list(spool.folder.iterdir())) == 1 + 3
        assert spool.sweep(connection) == 0
    assert not spool.unswept
    assert [file.name for file in spool.folder.iterdir()] == ["3.safetensors"]
