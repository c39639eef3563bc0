"""A real ``adaptive serve`` process for the benchmarks, and a client that notes the time of each token."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

PROMPTS = Path(__file__).resolve().parent.parent / "checkpoints" / "bundled" / "prompts"
# Seconds for a server to load on a busy machine, and for an answer in a full queue.
PATIENCE_S = 300.0


@dataclass(frozen=True)
class Served:
    """A server that is ready. ``home`` is its state folder."""

    url: str
    pid: int
    home: Path

    @property
    def state(self) -> Path:
        """The state folder of its only pair."""
        return next(self.home.glob("*/records.db")).parent

    @property
    def said(self) -> str:
        """The server's output so far."""
        return (self.home / "stderr").read_text(encoding="utf-8")

    @property
    def news(self) -> list[str]:
        """The lines of its output about training runs, and about adapters that came into use or were withdrawn."""
        words = ("training run:", "now drafting with", "is rolled back")
        return [line for line in self.said.splitlines() if any(word in line for word in words)]

    def get(self, path: str) -> Any:
        """The JSON at ``path``."""
        return httpx.get(self.url + path, timeout=PATIENCE_S).raise_for_status().json()

    def post(self, path: str, body: dict[str, Any] | None = None, session: str | None = None) -> Any:
        """The JSON answer to a POST request with ``body``."""
        headers = {} if session is None else {"x-session-id": session}
        return httpx.post(self.url + path, json=body, headers=headers, timeout=PATIENCE_S).raise_for_status().json()


def end_when_terminated() -> None:
    """Let SIGTERM end this program as ctrl-C does: by default it would leave the programs that it started running. To
    be called before they are started."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))


@contextlib.contextmanager
def served(
    home: Path, options: Sequence[str] = (), program: Sequence[str] = ("-m", "cli.main"), **settings: object
) -> Iterator[Served]:
    """Run ``adaptive serve`` on the bundled pair, with ``settings`` by their names in ``adaptive.toml``. ``program``:
    the arguments with which Python runs the command instead of ``adaptive``."""
    end_when_terminated()
    home.mkdir(parents=True, exist_ok=True)
    environment = {f"ADAPTIVE_{name.upper()}": str(value) for name, value in {"home": home, **settings}.items()}
    command = [sys.executable, *program, "serve", "--port", "0", *options]
    with (home / "stderr").open("w") as errors:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors, env={**os.environ, **environment})
    try:
        yield Served(wait_until_served(lambda: process.poll() is None, home / "stderr"), process.pid, home)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def wait_until_served(runs: Callable[[], bool], said: Path) -> str:
    """Wait until the server that writes to ``said`` is ready, and return its address."""
    while runs():
        found = re.search(r"listening on (http\S+)", said.read_text() if said.exists() else "")
        if found and httpx.get(f"{found.group(1)}/health", timeout=PATIENCE_S).status_code == 200:
            return found.group(1)
        time.sleep(0.1)
    raise SystemExit(said.read_text() if said.exists() else "the server did not start")


@dataclass(frozen=True)
class Stream:
    """One streamed answer. ``times``: seconds (perf_counter) at which text arrived. ``ending``: the last chunk."""

    asked: float
    times: tuple[float, ...]
    text: str
    ending: dict[str, Any] | None

    @property
    def whole(self) -> bool:
        """Whether the answer was complete."""
        return self.ending is not None and bool(self.ending["choices"][0]["finish_reason"])


def stream(client: httpx.Client, body: dict[str, Any], stop_after: int | None = None) -> Stream:
    """Stream a completion, of a chat if ``body`` has messages. Disconnects after ``stop_after`` pieces of text."""
    times: list[float] = []
    text, ending = "", None
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    asked = time.perf_counter()
    with client.stream("POST", path, json={**body, "stream": True}) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            now, chunk = time.perf_counter(), json.loads(line.removeprefix("data: "))
            choice = chunk["choices"][0]
            new = choice["delta"].get("content") if "messages" in body else choice["text"]
            if new:
                times.append(now)
                text += new
            if choice["finish_reason"]:
                ending = chunk
            if stop_after is not None and len(times) >= stop_after:
                break
    return Stream(asked, tuple(times), text, ending)


def prompts(kind: str, count: int, file: Path | None = None) -> list[str]:
    """The first ``count`` prompts of ``file`` (lines with a "prompt"), or of a kind of the bundled prompts."""
    lines = (file or PROMPTS / f"{kind}.jsonl").read_text(encoding="utf-8").splitlines()
    if len(lines) < count:
        print(f"there are {len(lines)} prompts of {kind}, not {count}", file=sys.stderr)
    return [json.loads(line)["prompt"] for line in lines[:count]]
