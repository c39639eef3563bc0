"""kill -9 of the server and of its training process: given answers are in the log, and both recover by themselves."""

from __future__ import annotations

import contextlib
import json
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from conftest import BUNDLED
from service_server import Server

from adaptive.records.log import Log
from checkpoints.store import AdapterStore

PATIENCE_S = 240.0
# Seconds within which the server notices that its trainer is dead.
NOTICED_S = 15.0
# Answers that the first training round needs; later rounds start without a wait.
ANSWERS = 90
SETTINGS = "distill_after = 1\ndistill_idle_seconds = 0\ndistill = 'always'\n"


def ask(http: httpx.Client, prompt: str, seed: int) -> str:
    body = {"prompt": prompt, "max_tokens": 24, "seed": seed, "temperature": 0.7, "ignore_eos": True}
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def until(what: Callable[[], Any], server: Server) -> Any:
    deadline = time.monotonic() + PATIENCE_S
    while not (found := what()):
        assert time.monotonic() < deadline, server.said[-2000:]
        time.sleep(0.02)
    return found


def prompts() -> list[str]:
    lines = (BUNDLED / "prompts" / "tools.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["prompt"] for line in lines]


def check_whole(server: Server, given: Counter[tuple[str, str]]) -> str:
    """Check that the log holds every given answer as often as it was given, each complete, and that the store is
    valid."""
    with Log(server.records) as log:
        logged = [entry.generation for entry in log.generations()]
    kept = Counter((g.prompt_text, g.text) for g in logged)
    assert not given - kept, "an answer that was given is not in the log"
    for g in logged:
        assert g.supervision is not None
        assert len(g.supervision.ids) == len(g.output) == g.timings.predicted_n
    store = AdapterStore(server.records.parent / "adapters")
    assert not store.damaged()
    for manifest in store.list():
        store.verify(manifest.id)
    current = store.current_id()
    assert current is None or store.show(current).status == "promoted"
    return f"{given.total()} answers given, {len(logged)} in the log, {len(store.list())} adapters, in use {current}"


def training_process(server: Server) -> psutil.Process | None:
    children = psutil.Process(server.process.pid).children()
    return next((child for child in children if "trainers.worker" in " ".join(child.cmdline())), None)


def kill_the_trainer(server: Server, http: httpx.Client, rng: random.Random) -> str:
    """Kill the trainer at a random moment of a round, or of the next one if this one ends first. Returns its activity
    then."""
    over = ""
    while True:
        worker = until(lambda: training_process(server), server)
        time.sleep(rng.uniform(0.0, 8.0))
        doing = http.get("/adaptive/trainer").json()["reason"]
        with contextlib.suppress(psutil.NoSuchProcess):
            worker.send_signal(signal.SIGKILL)
        deadline = time.monotonic() + NOTICED_S
        while time.monotonic() < deadline:
            if http.get("/adaptive/trainer").json()["crashes"]:
                return str(over or doing)
            time.sleep(0.02)
        # The process had reported its round before it was killed, which does not count as a crash.
        over = "the round before had just ended"
        ask(http, "One more answer begins another round.", 0)


def kill_while_answering(server: Server, rng: random.Random) -> None:
    """Kill the server in the middle of a streamed answer."""
    body = {"prompt": "Once", "max_tokens": 800, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as stream:
        next(stream.iter_lines())
        time.sleep(rng.uniform(0, 0.3))
        server.kill()


@pytest.mark.long
def test_twenty_kills_of_the_trainer_and_of_the_server_lose_nothing(tmp_path: Path) -> None:
    settings = tmp_path / "adaptive.toml"
    settings.write_text(SETTINGS, encoding="utf-8")
    given: Counter[tuple[str, str]] = Counter()
    texts = prompts()
    for turn in range(20):
        rng = random.Random(turn)
        server = Server(tmp_path / "home", "--config", str(settings)).wait_until_ready()
        try:
            with server.http() as http:
                for prompt in texts[: ANSWERS if not turn else 5]:
                    given[prompt, ask(http, prompt, turn)] += 1
                doing = kill_the_trainer(server, http, rng)
                prompt = rng.choice(texts)
                given[prompt, ask(http, prompt, turn)] += 1
            kill_while_answering(server, rng)
        finally:
            server.kill()
        print(f"kill {turn + 1} (trainer: {doing[:60]}): {check_whole(server, given)}", flush=True)
    last = Server(tmp_path / "home", "--distill", "off").wait_until_ready()
    try:
        with last.http() as http:
            assert ask(http, texts[0], 0)
    finally:
        assert last.stop() == 0


@pytest.mark.thorough
def test_a_server_that_is_still_loading_ends_when_it_is_told_twice(tmp_path: Path) -> None:
    server = Server(tmp_path / "home")
    try:
        until(lambda: answers(server) in (503, 200), server)
        loading = answers(server) == 503
        server.process.send_signal(signal.SIGTERM)
        until(lambda: "stopping" in server.said, server)
        server.process.send_signal(signal.SIGTERM)
        ended = server.process.wait(PATIENCE_S)
        assert ended in ((0, -signal.SIGTERM, 128 + signal.SIGTERM) if loading else (0,)), server.said
    finally:
        server.kill()


def answers(server: Server) -> int:
    try:
        return httpx.get(f"{server.url}/health", timeout=PATIENCE_S).status_code
    except httpx.HTTPError:  # not listening yet
        return 0
