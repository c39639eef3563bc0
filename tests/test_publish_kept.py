"""Which drafts of ``adaptive publish`` stay on the disk: those that a server has, and those given to one by hand."""

# ruff: noqa: F811 - the fixtures are those of another file

from __future__ import annotations

import json
import signal
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import forked
import pytest
from conftest import BUNDLED, save_random_adapter
from test_publish import adapter, box, state, state_with, use  # noqa: F401
from upstream_server import until

from adaptive.state import PairState
from adaptive.upstream.kinds import KINDS
from checkpoints.store import AdapterStore
from cli import publish_notes


@pytest.mark.thorough
def test_drafts_that_no_server_uses_any_more_are_deleted(
    adaptive: Any, own_home: Path, adapter: Path, box: Any, tmp_path: Path
) -> None:
    """One that was rolled back, and one that a later one replaces at the same server."""
    state = state_with(own_home, adapter, {}, answers=30)
    server, start, running = box
    folder, store = state.root / "published", AdapterStore(state.adapters)

    def publish(restart: str) -> int:
        given = ("--upstream", server.url, "--start", str(start), "--restart", restart, "--draft-length", "3")
        return int(adaptive("publish", *given, "--prompts", "4")[0])

    good = f"sed s/draft-0001/better/ {start} > {running}"
    assert publish(f"cp {start} {running}") == 1
    assert list(folder.iterdir()) == []
    assert publish(good) == 0
    (first,) = folder.iterdir()
    mine = tmp_path / "mine"
    publish_notes.remember(state, "http://other", publish_notes.Put("vllm", "0001", str(mine), 3))
    mine.touch()
    use(store, save_random_adapter(BUNDLED / "draft", tmp_path / "second", seed=7), store.list()[0].base)
    assert publish(good.replace("0001", "0002")) == 0
    (left,) = folder.iterdir()
    assert left != first
    publish_notes.remember(state, "http://other", publish_notes.Put("vllm", "0002", str(left), 3))
    assert mine.exists()  # in a folder of the user's
    publish_notes.remember(state, server.url, publish_notes.Put("vllm", "0002", str(mine), 3))
    assert left.exists()  # the other server has it
    status, out, errors = adaptive("publish", "--engine", "vllm", "--json")
    assert (status, json.loads(out)["draft"]) == (0, str(left)), errors
    publish_notes.remember(state, "http://other", publish_notes.Put("vllm", "0002", str(mine), 3))
    assert left.exists()  # somebody starts a server with it by hand


def test_the_login_of_a_servers_address_is_not_noted_down(state: PairState) -> None:
    mine, file = publish_notes.Put("vllm", "0001", "/mine", 3), state.root / "published.json"
    file.write_text(json.dumps({"http://me:secret@other": asdict(mine)}))
    assert publish_notes.earlier(state, "http://me:new@other", KINDS["vllm"]) == mine
    publish_notes.remember(state, "http://me:secret@other", replace(mine, draft_length=4))
    assert list(json.loads(file.read_text())) == ["http://other"]


@pytest.mark.thorough
def test_an_interrupted_trial_leaves_no_draft_behind(state: PairState, box: Any) -> None:
    server, start, running = box
    restart = f"cp {start} {running}; if grep -q draft-0001 {running}; then exec sleep 60; fi"
    arguments = ["publish", "--upstream", server.url, "--start", str(start), "--restart", restart]
    with tempfile.TemporaryFile("w+b") as errors:
        publish = forked.start(*arguments, "--draft-length", "3", "--prompts", "2", stderr=errors)
        until(lambda: "draft-0001" in running.read_text() or publish.poll() is not None, 120)
        publish.send_signal(signal.SIGTERM)
        publish.wait(60)
        errors.seek(0)
        assert b"earlier state is being restored" in errors.read()
    assert list((state.root / "published").iterdir()) == []
    assert "draft-0001" not in start.read_text()
