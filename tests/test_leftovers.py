"""The next start removes the unfinished files of a killed process, and no recorded text survives a purge."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import Command
from records_factory import generation

from adaptive.errors import AdaptiveError
from adaptive.records.log import Log
from adaptive.records.writer import LogWriter
from adaptive.service.server import only_server
from adaptive.state import PairState, open_state
from checkpoints import files

# Saves the state of a training run, and is killed when the tensors are in the unfinished file.
SAVES = """
import os, signal, sys
from pathlib import Path
import torch
from checkpoints import files
from trainers.resume import Standing, TrainingState
files.flush = lambda path: os.kill(os.getpid(), signal.SIGKILL)
weight = torch.nn.Parameter(torch.ones(100, 100))
TrainingState(Path(sys.argv[1])).save(Standing(), [weight], torch.optim.SGD([weight]))
"""


@pytest.mark.thorough
def test_a_training_state_that_was_half_written_is_gone_at_the_next_start(tmp_path: Path) -> None:
    state = open_state(tmp_path, "pair")
    killed = subprocess.run([sys.executable, "-c", SAVES, str(state.training)], capture_output=True, check=False)
    assert killed.returncode < 0, killed.stderr
    assert any(file.stat().st_size >= 40_000 for file in state.root.iterdir())
    open_state(tmp_path, "pair")
    assert list(state.root.iterdir()) == []


def test_the_state_of_models_that_were_renamed_is_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    open_state(tmp_path, "big--small-12345678").adapters.mkdir()
    open_state(tmp_path, "big--small-87654321").adapters.mkdir()
    assert not caplog.records
    for _ in range(2):
        open_state(tmp_path, "larger--small-12345678")
    (warning,) = caplog.messages
    assert f"in {tmp_path / 'big--small-12345678'}; to go on" in warning
    assert "rename the old one to larger--small-12345678" in warning


@pytest.mark.thorough
def test_a_second_server_says_who_holds_the_pair_also_where_the_note_is_damaged(tmp_path: Path) -> None:
    state = open_state(tmp_path, "pair")
    with only_server(state) as note:
        for written, said in ((None, f"by process {os.getpid()} at http://127.0.0.1:1"), (b"\xff", "just started")):
            if written is None:
                note("http://127.0.0.1:1")
            else:
                (state.root / "server.json").write_bytes(written)
            with pytest.raises(AdaptiveError, match=said), only_server(state):
                pass


def fail_at_the_start(state: PairState) -> None:
    with only_server(state) as note:
        note("http://127.0.0.1:1")
        assert (state.root / "server.json").exists()
        raise AdaptiveError("the port is taken")


def test_a_server_that_fails_at_its_start_leaves_no_note(tmp_path: Path) -> None:
    state = open_state(tmp_path, "pair")
    with pytest.raises(AdaptiveError, match="the port is taken"):
        fail_at_the_start(state)
    assert not (state.root / "server.json").exists()


def test_a_purge_takes_what_was_set_aside_and_the_training_state(tmp_path: Path, adaptive: Command) -> None:
    state = open_state(tmp_path / "home", "big--small-1234")
    with LogWriter(state.records) as writer:
        for number in range(4):
            writer.write(generation(number, session=f"s{number % 2}"))
    aside = state.records.with_name("records.db.damaged")
    for file in (state.training, aside):
        file.write_bytes(b"what was said")
    status, out, _ = adaptive("records", "purge", "--session", "s1", "--yes")
    assert (status, "deleted with them: records.db.damaged" in out) == (0, True)
    assert state.training.exists()  # the next run resumes with the remaining records
    assert not aside.exists()
    status, out, _ = adaptive("records", "purge", "--all", "--yes")
    assert (status, "training.safetensors" in out) == (0, True)
    assert Log(state.records).count() == 0
    assert {file.name for file in state.root.iterdir()} <= {"records.db", "records.db-wal", "records.db-shm"}


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="there is no folder of the kernel's own")
def test_where_no_file_can_be_locked_that_is_said_and_not_tried_for_ever() -> None:
    with pytest.raises(OSError, match="No locks available"):
        files.unfinished(Path("/proc"))
