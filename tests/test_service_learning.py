"""A served pair learns from its answers while it is idle, and drops a bad draft."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from conftest import BUNDLED, save_random_adapter
from service_server import Server

from adaptive.pair import pair_identity
from adaptive.settings import load_settings
from checkpoints.manifest import TrainedOn
from checkpoints.store import AdapterStore, NewAdapter

pytestmark = pytest.mark.thorough

PATIENCE_S = 600.0
JSON = {"Content-Type": "application/json"}
ANSWERS = 72


def until(what: Callable[[], bool], server: Server) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not what():
        assert time.monotonic() < deadline, server.said[-2000:]
        time.sleep(0.1)


def ask(http: httpx.Client, prompt: str) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": 40, "temperature": 0.7}
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def publish_random_adapter(store: AdapterStore, folder: Path, seed: int = 0, draft: Path = BUNDLED / "draft") -> str:
    """Publish a bad adapter as a candidate, for the bundled draft or another model; returns its id."""
    made = save_random_adapter(draft, folder, seed, std=0.5)

    def write(place: Path) -> None:
        for name in ("adapter_model.safetensors", "adapter_config.json"):
            shutil.copyfile(made / name, place / name)

    base = pair_identity(load_settings({})).base
    return store.publish(write, NewAdapter(base, TrainedOn(None, None, 0, 0))).id


def test_a_server_learns_while_idle_and_rolls_a_forced_bad_adapter_back(tmp_path: Path) -> None:
    lines = (BUNDLED / "prompts" / "math.jsonl").read_text(encoding="utf-8").splitlines()
    prompts = [json.loads(line)["prompt"] for line in lines[:ANSWERS]]
    settings = tmp_path / "adaptive.toml"
    settings.write_text(f"distill_after = {ANSWERS}\ndistill_idle_seconds = 0.3\ndistill_nice = 0\n")
    # The draft must draft all rounds, although the prompts repeat.
    options = ("--config", str(settings), "--dtype", "auto", "--history", "off")
    server = Server(tmp_path / "home", *options).wait_until_ready()
    try:
        with server.http() as http:
            before = [ask(http, prompt) for prompt in prompts]
            assert {answer["adapter"] for answer in before} == {None}
            until(lambda: http.get("/adaptive/trainer").json()["runs"] == 1, server)
            store = AdapterStore(next(server.home.glob("*/adapters")))
            learned = store.current_id()
            assert learned is not None, http.get("/adaptive/trainer").json()["last_run"]
            until(lambda: http.get("/props").json()["adapter"] == learned, server)
            assert ask(http, prompts[0])["adapter"] == learned

            bad = publish_random_adapter(store, tmp_path / "bad")
            rounds = sum(ask(http, prompt)["speculative_decoding"]["num_spec_steps"] for prompt in prompts[:12])
            assert rounds >= 60  # enough to estimate the acceptance of the draft in use
            store.promote(bad, "forced by the test")
            until(lambda: http.get("/props").json()["adapter"] == bad, server)
            rounds = 0
            for prompt in prompts:
                answer = ask(http, prompt)
                if answer["adapter"] != bad:
                    break
                rounds += answer["speculative_decoding"]["num_spec_steps"]
                time.sleep(0.1)
            assert rounds <= 300
            until(lambda: http.get("/props").json()["adapter"] == learned, server)
            assert store.show(bad).status == "rolled_back"
    finally:
        server.stop()


def test_an_adapter_promoted_in_the_middle_of_a_stream_is_used_in_it_and_the_text_stays(tmp_path: Path) -> None:
    server = Server(tmp_path / "home", "--distill", "off").wait_until_ready()
    body = {"prompt": "Once upon a time", "max_tokens": 1500, "temperature": 0, "ignore_eos": True}
    try:
        with server.http() as http:
            expected = http.post("/v1/completions", json=body).json()["choices"][0]["text"]
            store = AdapterStore(next(server.home.glob("*/records.db")).parent / "adapters")
            names = [publish_random_adapter(store, tmp_path / str(seed), seed) for seed in (1, 2)]
            said, waiting = "", list(names)
            with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as stream:
                for line in stream.iter_lines():
                    if not line.startswith("data: {"):
                        continue
                    chunk = json.loads(line.removeprefix("data: "))
                    said += chunk["choices"][0]["text"]
                    if waiting:
                        name = waiting.pop(0)
                        promoted = httpx.post(f"{server.url}/adaptive/adapters/{name}/promote", headers=JSON)
                        assert promoted.status_code == 200
                        until(lambda name=name: httpx.get(f"{server.url}/props").json()["adapter"] == name, server)
                        assert httpx.get(f"{server.url}/slots").json()[0]["is_processing"]  # the answer continues
            assert said == expected
            assert chunk["adapter"] is None  # the adapter at the start of the answer
            assert server.said.count("now drafting with adapter") == 2
    finally:
        server.stop()
