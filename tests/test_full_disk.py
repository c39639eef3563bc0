"""On a full disk every command reports it in one line and continues or ends cleanly; the answer is not lost."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from conftest import BUNDLED, save_random_adapter
from forked import run
from records_factory import generation
from service_server import Server
from small_disks import small_disk
from store_factory import NEW
from test_worker import Taught, taught

from adaptive.pair import pair_identity
from adaptive.records.log import Log
from adaptive.records.writer import LogWriter
from adaptive.settings import load_settings
from adaptive.state import PairState
from checkpoints.store import AdapterStore

__all__ = ["taught"]

pytestmark = pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="mounting needs root")


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of a megabyte."""
    with small_disk(tmp_path / "small", "1m") as folder:
        yield folder


def fill(folder: Path) -> Path:
    """Write until the file system is full. Returns the file that fills it."""
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as stream, contextlib.suppress(OSError):
        while stream.write(bytes(4096)) == 4096:
            pass
    return filler


def state_in(home: Path) -> PairState:
    return PairState(home / pair_identity(load_settings({})).id)


def ask(http: httpx.Client, prompt: str) -> str:
    answer = http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 8, "temperature": 0})
    assert answer.status_code == 200
    return str(answer.json()["choices"][0]["text"])


@pytest.mark.thorough
def test_a_server_starts_and_answers_on_a_full_disk_shows_it_and_logs_it_all_later(small: Path) -> None:
    with LogWriter(state_in(small).records) as writer:
        writer.write(generation(0, text="before"))
    filler = fill(small)
    server = Server(small, "--distill", "off", errors=small.parent)
    try:
        server.wait_until_ready()
        with server.http() as http:
            said = [ask(http, prompt) for prompt in ("One", "Two", "Three")]
            health = http.get("/health").json()
            assert health["status"] == "ok"
            assert health["log"] == {"writable": False, "waiting": 3, "stripped": 0, "lost": 0}
            metrics = http.get("/metrics").text
            assert "adaptive:log_writable 0.0" in metrics
            assert "adaptive:log_waiting 3.0" in metrics
            assert "Traceback" not in server.said
            filler.unlink()
            said.append(ask(http, "Four"))
            assert http.get("/health").json()["log"] == {"writable": True, "waiting": 0, "stripped": 0, "lost": 0}
            assert "adaptive:log_writable 1.0" in http.get("/metrics").text
    finally:
        server.stop()
    assert "disk is full" in server.said
    with Log(server.records) as log:
        assert [entry.generation.text for entry in log.generations()] == ["before", *said]
    assert not list(server.records.parent.glob("server.json*"))


@pytest.mark.thorough
def test_distilling_on_a_full_disk_is_one_line(small: Path, taught: Taught) -> None:
    state = PairState(small / taught.state.root.name)
    state.root.mkdir()
    # The log is on a disk with free space; only writing the adapter fails.
    state.records.symlink_to(taught.state.records)
    fill(small)
    pair = ("--target", str(taught.settings.target), "--draft", str(taught.settings.draft), "--device", "cpu")
    done = run("distill", "--state-dir", str(small), *pair, "--max-seconds", "2", "--force")
    assert done.returncode == 2, done.stdout
    assert "Traceback" not in done.stderr
    assert "cannot be written" in done.stderr.splitlines()[-1]
    assert not list(state.root.rglob(".tmp-*"))


@pytest.mark.thorough
def test_a_merged_draft_that_finds_no_room_is_one_line(small: Path, tmp_path: Path) -> None:
    adapter, identity = save_random_adapter(BUNDLED / "draft", tmp_path / "adapter"), pair_identity(load_settings({}))
    store = AdapterStore(state_in(tmp_path / "home").adapters)
    base = replace(identity.base, id=str(BUNDLED / "draft"))

    def write(folder: Path) -> None:
        shutil.copytree(adapter, folder, dirs_exist_ok=True)

    store.publish(write, replace(NEW, base=base))
    done = run("adapters", "export", "1", "--merged", str(small / "merged"))
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    said = done.stderr.splitlines()[-1]
    assert f"{small / 'merged'} cannot be written" in said
    assert "No space left" in said


@pytest.mark.thorough
def test_everything_can_be_purged_on_a_full_disk(small: Path) -> None:
    state = state_in(small)
    with LogWriter(state.records) as writer:
        for number in range(5):
            writer.write(generation(number, text="the-secret " * 4000))
    state.training.write_bytes(bytes(1000))
    state.records.with_name("records.db.damaged").write_bytes(b"the-secret")
    fill(small)
    with LogWriter(state.records) as held:  # as if a server had the log open
        held.write(generation(6, text="another " * 5000))
        assert not held.flush()
        purged = run("records", "purge", "--all", "--yes", "--state-dir", str(small))
        assert purged.returncode == 0, purged.stderr
        assert "deleted 5 records" in purged.stdout
        on_disk = b"".join(file.read_bytes() for file in state.root.iterdir() if file.is_file())
        assert b"the-secret" not in on_disk
        assert not state.training.exists()
        assert held.flush(), held.problem
    with Log(state.records) as log:
        assert [entry.id for entry in log.generations()] == [6]  # ids are not reused
    assert json.loads(run("records", "check", "--json", "--state-dir", str(small)).stdout)["file"] is None
