"""A real server measures the costs of a round while it is idle, and interrupts that for a request."""

from __future__ import annotations

import io
import json
import time
from pathlib import Path

import pytest
from quick_costs import MEASURE
from rich.console import Console
from service_server import Server

from adaptive.control.acceptance import Acceptance
from adaptive.control.confidence import Calibration
from adaptive.control.costs import LONGEST, CostTable
from adaptive.control.memory import Memory, last_costs, save
from adaptive.machine import identity
from adaptive.measure import where_it_runs
from adaptive.pair import Pair, load_pair
from adaptive.service import engine
from adaptive.service.metrics import Metrics
from adaptive.settings import load_settings
from adaptive.state import open_state
from cli.opened import open_pair

BODY = {"prompt": "Once upon a time", "max_tokens": 24, "temperature": 0, "ignore_eos": True}
# Timeout in seconds of work that takes two on an idle machine.
PATIENCE_S = 120.0


def leave_costs(home: Path, pair: Pair) -> Path:
    """Write the file of a session that measured costs three days ago and recorded nothing else."""
    costs = CostTable(0.0, 0.001, 0.0, tuple(0.004 + 0.001 * k for k in range(LONGEST + 1)), 1e-4, 1e-5, 0.0, 0)
    state = open_state(home, pair.identity.id)
    known = Acceptance(), Calibration()
    save(state.controller, Memory(where_it_runs(pair), identity(), time.time() - 3 * 86_400, None, costs, *known))
    return state.controller


@pytest.mark.thorough
def test_costs_of_another_day_are_measured_anew_when_nobody_asks_and_no_request_waits_for_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A measurement begins in each pause between requests; each request interrupts it, and all are answered."""
    monkeypatch.setenv(MEASURE, "whole")
    pair = load_pair(load_settings({"dtype": "float32", "device": "cpu", "threads": 1}))
    file = leave_costs(tmp_path, pair)
    kept = json.loads(file.read_text(encoding="utf-8"))
    # The server's controller chooses the draft length, and it never trains.
    server = Server(tmp_path, "--draft-length", "auto", "--distill", "off").wait_until_ready()
    said = set()
    try:
        with server.http() as client:
            for _ in range(3):
                time.sleep(1.5)
                said.add(client.post("/v1/completions", json=BODY).json()["choices"][0]["text"])
            deadline = time.monotonic() + PATIENCE_S
            while "costs measured" not in server.said:
                assert time.monotonic() < deadline, server.said
                time.sleep(0.1)
            said.add(client.post("/v1/completions", json=BODY).json()["choices"][0]["text"])
    finally:
        assert server.stop() == 0
    assert len(said) == 1
    assert "failed" not in server.said
    again = json.loads(file.read_text(encoding="utf-8"))
    assert again["costs"] is not None
    assert again["costs"] != kept["costs"]
    if "beside other programs" not in server.said:
        assert again["measured"] > kept["measured"]


def test_what_was_learned_is_on_the_disk_before_the_end(own_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server may always end by a kill or a power failure."""
    monkeypatch.setattr(engine, "QUIET_S", 0.0)
    settings = load_settings({"dtype": "float32", "record": False})
    thread = engine.EngineThread(lambda: open_pair(settings, Console(file=io.StringIO())), Metrics(), queue=4)
    thread.start(when_over=lambda: None)
    try:
        deadline = time.monotonic() + PATIENCE_S
        while not any(last_costs(file) for file in own_home.glob("*/controller.json")):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert thread.state == "ready"
    finally:
        thread.close()
