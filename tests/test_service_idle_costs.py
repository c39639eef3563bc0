"""A real server measures what a round costs in quiet moments, and gives way to a request."""

from __future__ import annotations

import json
import time
from pathlib import Path

from service_server import Server

BODY = {"prompt": "Once upon a time", "max_tokens": 24, "temperature": 0, "ignore_eos": True}
# Seconds for what takes two on an idle machine.
PATIENCE_S = 120.0


def served(home: Path) -> Server:
    """A server whose controller chooses the draft length, and which never trains."""
    server = Server(home, "--draft-length", "auto", "--distill", "off")
    return server.wait_until_ready()


def test_costs_of_another_day_are_measured_anew_when_nobody_asks_and_no_request_waits_for_that(tmp_path: Path) -> None:
    """Requests come with pauses in which a measurement begins: each interrupts it, and all are answered."""
    server = served(tmp_path)
    with server.http() as client:
        first = client.post("/v1/completions", json=BODY).json()["choices"][0]["text"]
    assert server.stop() == 0
    file = next(tmp_path.glob("*/controller.json"))
    kept = json.loads(file.read_text(encoding="utf-8"))
    kept["measured"] -= 3 * 86_400
    file.write_text(json.dumps(kept), encoding="utf-8")

    server = served(tmp_path)
    try:
        with server.http() as client:
            for _ in range(3):
                time.sleep(1.5)
                assert client.post("/v1/completions", json=BODY).json()["choices"][0]["text"] == first
            deadline = time.monotonic() + PATIENCE_S
            while "costs measured" not in server.said:
                assert time.monotonic() < deadline, server.said
                time.sleep(0.1)
            assert client.post("/v1/completions", json=BODY).json()["choices"][0]["text"] == first
    finally:
        assert server.stop() == 0
    assert "failed" not in server.said
    again = json.loads(file.read_text(encoding="utf-8"))
    assert again["costs"] is not None
    if "beside other programs" not in server.said:
        assert again["measured"] > kept["measured"]
