"""A command whose reader has ended, as in ``adaptive history | head -1``, ends quietly as other programs do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from records_factory import generation
from store_factory import published

from adaptive.records.writer import LogWriter
from adaptive.state import open_state

pytestmark = pytest.mark.skipif(os.name != "posix", reason="Windows reports a reader that has ended differently")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A state folder with a log and an adapter."""
    folder = tmp_path_factory.mktemp("home")
    state = open_state(folder, "big--small-1234")
    with LogWriter(state.records) as writer:
        writer.write(generation())
    published(state.adapters, 1, promote=1)
    return folder


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("command", ["history", "history --json", "records export -", "adapters list", "--help"])
def test_a_command_whose_reader_has_ended_ends_quietly(home: Path, command: str, joined: bool) -> None:
    """``joined``: its errors go the same way, as by ``2>&1 | head``."""
    running = subprocess.Popen(
        [sys.executable, "-m", "cli.main", *command.split()],
        env={**os.environ, "ADAPTIVE_HOME": str(home)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if joined else subprocess.PIPE,
        text=True,
    )
    assert running.stdout is not None
    running.stdout.close()
    said = "" if running.stderr is None else running.stderr.read()
    assert (running.wait(), said.replace("adaptive: pair big--small-1234", "").strip()) == (141, "")


def test_an_error_of_the_user_is_said_though_nobody_reads_the_output(home: Path) -> None:
    running = subprocess.Popen(
        [sys.executable, "-m", "cli.main", "history", "--last", "-3"],
        env={**os.environ, "ADAPTIVE_HOME": str(home)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert running.stdout is not None
    running.stdout.close()
    _, said = running.communicate()
    assert running.returncode == 2
    assert said.strip()
