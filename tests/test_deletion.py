"""A deletion that was begun is finished by the next start or the next deletion, wherever the process was killed."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import Command
from records_factory import generation
from test_feature_spool import states

from adaptive.errors import AdaptiveError
from adaptive.opened import opened
from adaptive.pair import load_pair, pair_identity
from adaptive.records.deletion import begun, delete_answers, finish
from adaptive.records.features import Features, FeatureSpool
from adaptive.records.log import Log
from adaptive.records.overwrite import forget_set_aside, overwrite_and_remove, remove_deleted
from adaptive.records.retention import BATCH
from adaptive.records.writer import LogWriter
from adaptive.settings import load_settings
from adaptive.state import PairState, open_state

posix = pytest.mark.skipif(os.name != "posix", reason="needs SIGKILL")
SECRET = "Aurelian-4711"

# Deletes the session "secret", and is killed in the middle: after the first batch of records, before the file is
# rewritten, before the files beside it are removed, or between two of these.
KILLED = """
import os, signal, sys
from pathlib import Path
from adaptive.records import deletion, erase, log
from adaptive.records.log import Log
from adaptive.state import PairState
state, where, whole = PairState(Path(sys.argv[1])), sys.argv[2], sys.argv[3] == "all"
def killed(*args):
    os.kill(os.getpid(), signal.SIGKILL)
if where == "records":
    transaction, left = erase.transaction, [1, 0]
    erase.transaction = lambda connection: transaction(connection) if left.pop(0) else killed()
elif where == "file":
    log.shrink = killed
elif where == "features":
    erase.FeatureSpool.sweep = erase.FeatureSpool.erase = killed
else:
    deletion.erase_beside = killed
with Log(state.records) as found:
    deletion.delete_answers(state, found, found.ids(session="secret"), everything=whole)
"""


def filled(state: PairState) -> None:
    """A log of many answers with a secret and two without, with features, a cache and typed lines."""
    features = Features.of(states(1))
    with LogWriter(state.records, spool=FeatureSpool(state.features, 10**9)) as writer:
        for number in range(BATCH + 8):
            writer.write(generation(number, session="secret", text=SECRET, created=time.time()), features)
        for number in range(2):
            writer.write(generation(number, session="kept", created=time.time()), features)
    state.caches.mkdir()
    for file in (state.caches / "1.safetensors", state.typed):
        file.write_text(SECRET, encoding="utf-8")


def on_disk(state: PairState) -> bytes:
    return b"".join(file.read_bytes() for file in sorted(state.root.rglob("*")) if file.is_file())


def kill_while_deleting(state: PairState, where: str, what: str = "session") -> None:
    killed = subprocess.run([sys.executable, "-c", KILLED, str(state.root), where, what], check=False)
    assert killed.returncode == -signal.SIGKILL


@posix
@pytest.mark.parametrize("where", ["records", "file", "features", "beside"])
def test_a_deletion_that_was_killed_is_finished_at_the_next_start(tmp_path: Path, where: str) -> None:
    settings = load_settings({"home": tmp_path / "home", "dtype": "float32", "draft_length": "4"})
    state = open_state(settings.state_dir, pair_identity(settings).id)
    filled(state)
    kill_while_deleting(state, where)
    assert SECRET.encode() in on_disk(state)
    with opened(settings, load_pair(settings)):
        state.typed.unlink()  # stays: the log was not deleted as a whole
        assert SECRET.encode() not in on_disk(state)
        assert not begun(state)
    assert not list(state.root.glob("deletion-*"))
    with Log(state.records) as log:
        assert [one.generation.session for one in log.generations()] == ["kept", "kept"]
        assert FeatureSpool(state.features, 0).ids() == sorted(log.ids())


def with_a_later_answer(folder: Path) -> PairState:
    """A state in which the deletion of the whole log was killed, and an answer was logged after it."""
    state = open_state(folder, "pair")
    filled(state)
    kill_while_deleting(state, "records", "all")
    with LogWriter(state.records) as writer:
        writer.write(generation(session="new"))
    return state


@posix
def test_what_was_said_after_a_deletion_of_the_whole_log_stays(tmp_path: Path) -> None:
    state = with_a_later_answer(tmp_path)
    assert finish(state) is None
    assert SECRET.encode() not in on_disk(state)
    assert not state.typed.exists()
    with Log(state.records) as log:
        assert [one.generation.session for one in log.generations()] == ["new"]


@posix
def test_the_next_deletion_finishes_one_that_was_killed(tmp_path: Path, adaptive: Command) -> None:
    state = open_state(tmp_path / "home", "big--small-1234")
    filled(state)
    kill_while_deleting(state, "records")
    status, out, _ = adaptive("records", "purge", "--session", "nobody", "--yes")
    assert (status, "2 left" in out) == (0, True)
    state.typed.unlink()
    assert SECRET.encode() not in on_disk(state)


def test_a_deletion_that_meets_a_reader_is_finished_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("adaptive.records.schema.BUSY_S", 0.1)
    state = open_state(tmp_path, "pair")
    filled(state)
    reader = sqlite3.connect(state.records, isolation_level=None)
    reader.execute("BEGIN")
    reader.execute("SELECT * FROM generations").fetchone()
    with Log(state.records) as log:
        ids = log.ids(session="secret")
        with pytest.raises(AdaptiveError, match="then purge again"):
            delete_answers(state, log, ids)
    assert begun(state) == ids
    said = finish(state)
    assert said is not None
    assert "cannot be finished now" in said
    assert begun(state) == ids
    reader.execute("COMMIT")
    reader.close()
    assert finish(state) is None
    state.typed.unlink()
    assert SECRET.encode() not in on_disk(state)
    assert not list(state.root.glob("deletion-*"))


def test_a_damaged_note_still_erases_traces_and_is_gone(tmp_path: Path) -> None:
    state = open_state(tmp_path, "pair")
    filled(state)
    (state.root / "deletion-1.json").write_text("{", encoding="utf-8")
    assert finish(state) is None
    assert not state.caches.exists()
    assert not list(state.root.glob("deletion-*"))
    with Log(state.records) as log:
        assert log.count() == BATCH + 10


KILLED_WHILE_OVERWRITING = """
import os, signal, sys
from pathlib import Path
from adaptive.records import overwrite
class Stops:
    def __index__(self):
        os.kill(os.getpid(), signal.SIGKILL)
overwrite.ZEROS = Stops()  # the bytes to overwrite at a time
overwrite.overwrite_and_remove(Path(sys.argv[1]))
"""


@posix
def test_a_file_whose_overwriting_was_killed_is_overwritten_later(tmp_path: Path) -> None:
    file, same = tmp_path / "folder" / "records.db", tmp_path / "same"
    file.parent.mkdir()
    file.write_text(SECRET, encoding="utf-8")
    os.link(file, same)  # keeps the data readable after the file is unlinked
    subprocess.run([sys.executable, "-c", KILLED_WHILE_OVERWRITING, str(file)], check=False)
    assert not file.exists()
    assert SECRET in same.read_text(encoding="utf-8")
    remove_deleted(file.parent)
    assert not same.read_bytes().strip(b"\0")
    assert not list(file.parent.iterdir())
    overwrite_and_remove(file)  # of nothing


@posix
def test_damage_after_a_deletion_of_the_whole_log_does_not_delete_what_came_later(tmp_path: Path) -> None:
    state = with_a_later_answer(tmp_path)
    with state.records.open("r+b") as file:
        file.write(b"no database")
    assert "cannot be finished now" in str(finish(state))
    with LogWriter(state.records), Log(state.records) as log:  # replaces the damaged file
        assert "new" in {one.generation.session for one in log.generations()}
    assert finish(state) is None
    assert SECRET.encode() not in on_disk(state)
    with Log(state.records) as log:
        assert [one.generation.session for one in log.generations()] == ["new"]


def test_what_is_left_of_an_overwriting_goes_with_the_next_old_log(tmp_path: Path) -> None:
    (tmp_path / ".deleted-1").write_text(SECRET, encoding="utf-8")
    assert forget_set_aside(tmp_path / "records.db", time.time()) == 0
    assert not list(tmp_path.iterdir())
