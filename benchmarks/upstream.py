"""Measures what the proxy costs: seconds to the first token and tokens per second, through it and direct, in turn.

    python benchmarks/upstream.py --upstream http://127.0.0.1:8080 --through http://127.0.0.1:8090

Without addresses it starts ``adaptive serve`` and ``adaptive learn`` on the bundled pair. Each prompt is sent in
both ways, in an order that alternates between prompts, so that a slow moment of the machine affects both. Streams are
greedy and as long as ``--tokens``. Prints one JSON object: for each figure the median of both ways, and what the proxy
adds: the median of the differences in pairs with its 95% interval (bootstrap).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
from served import end_when_terminated

BUNDLED = Path(__file__).resolve().parent.parent / "checkpoints" / "bundled"
# Seconds allowed for a program to start.
START_S = 300.0
RESAMPLES = 2000


@dataclass(frozen=True)
class Taken:
    """One stream: seconds to its first token, and tokens per second after it."""

    first_s: float
    per_second: float


def ask(client: httpx.Client, url: str, model: str, prompt: str, tokens: int) -> Taken:
    """Stream one answer; every event with text counts as a token."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": tokens,
        "temperature": 0,
        "stream": True,
    }
    began, first, last, events = time.perf_counter(), 0.0, 0.0, 0
    with client.stream("POST", f"{url}/v1/chat/completions", json=body) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            choices = json.loads(line[6:])["choices"]
            if choices and (choices[0]["delta"].get("content") or choices[0]["delta"].get("reasoning_content")):
                last, events = time.perf_counter(), events + 1
                first = first or last
    if events < 2:
        raise SystemExit(f"an answer of {events} tokens says nothing; choose longer ones")
    return Taken(first - began, (events - 1) / (last - first))


def interval(values: Sequence[float]) -> dict[str, float]:
    """The median and its 95% interval by bootstrap over the pairs."""
    rng = random.Random(0)
    drawn = sorted(statistics.median(rng.choices(values, k=len(values))) for _ in range(RESAMPLES))
    low, high = drawn[int(0.025 * RESAMPLES)], drawn[int(0.975 * RESAMPLES)]
    return {"median": statistics.median(values), "low": low, "high": high}


def compare(upstream: str, through: str, prompts: Sequence[str], tokens: int) -> dict[str, object]:
    """Send every prompt in both ways, in turn; the first two prompts only warm up."""
    pairs: list[tuple[Taken, Taken]] = []
    # A new connection each time: llama-server may close a connection after a stream just as the next request uses it.
    limits = httpx.Limits(max_keepalive_connections=0)
    with httpx.Client(timeout=600, trust_env=False, limits=limits) as client:
        model = client.get(f"{upstream}/v1/models").json()["data"][0]["id"]
        for number, prompt in enumerate(prompts):
            taken: dict[str, Taken] = {}
            ways = (upstream, through) if number % 2 == 0 else (through, upstream)
            for url in ways:
                ask(client, url, model, prompt, 2)  # so that the server's cache holds the prompt for both ways
                taken[url] = ask(client, url, model, prompt, tokens)
            if number >= 2:
                pairs.append((taken[upstream], taken[through]))
    direct, proxied = zip(*pairs, strict=True)
    return {
        "pairs": len(pairs),
        "first_token_ms": {
            "direct": 1000 * statistics.median(one.first_s for one in direct),
            "through": 1000 * statistics.median(one.first_s for one in proxied),
            "added": interval([1000 * (b.first_s - a.first_s) for a, b in pairs]),
        },
        "tokens_per_second": {
            "direct": statistics.median(one.per_second for one in direct),
            "through": statistics.median(one.per_second for one in proxied),
            "lost_percent": interval([100 * (1 - b.per_second / a.per_second) for a, b in pairs]),
        },
    }


@contextlib.contextmanager
def started(home: Path, *arguments: str) -> Iterator[str]:
    """Start one of our commands that listens on a port, and yield its address."""
    errors = home / f"{arguments[0]}.txt"
    command = [sys.executable, "-m", "cli.main", *arguments, "--state-dir", str(home / arguments[0]), "--port", "0"]
    with errors.open("wb") as stream:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=stream, env=os.environ)
    try:
        deadline = time.monotonic() + START_S
        found = None
        while found is None:
            said = errors.read_text(encoding="utf-8")
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(said)
            found = re.search(r"listening on (http://[^,\s]+)", said)
            time.sleep(0.05)
        yield found.group(1)
    finally:
        process.terminate()
        process.wait()


def wait_until_ready(url: str) -> None:
    """Wait until the models are loaded."""
    deadline = time.monotonic() + START_S
    while httpx.get(f"{url}/health", timeout=START_S).status_code != 200:
        if time.monotonic() > deadline:
            raise SystemExit(f"{url} is not ready after {START_S:.0f} s")
        time.sleep(0.1)


def main() -> None:
    """Read the arguments, start the servers if no addresses are given, print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--upstream", help="address of a server")
    parser.add_argument("--through", help="address of `adaptive learn` in front of it")
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=128)
    given = parser.parse_args()
    end_when_terminated()
    if (given.upstream is None) != (given.through is None):
        parser.error("--upstream and --through go together")
    lines = [line for file in sorted((BUNDLED / "prompts").glob("*.jsonl")) for line in file.open(encoding="utf-8")]
    prompts = [
        json.loads(line)["prompt"] for line in random.Random(0).sample(lines, min(len(lines), given.prompts + 2))
    ]
    with contextlib.ExitStack() as stack:
        upstream, through = given.upstream, given.through
        if upstream is None:
            home = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            pair = ("--target", str(BUNDLED / "target"), "--draft", str(BUNDLED / "draft"), "--distill", "off")
            # The second answer to a prompt would be drafted from the first, whichever way that went.
            upstream = stack.enter_context(started(home, "serve", "--history", "off", *pair))
            wait_until_ready(upstream)
            through = stack.enter_context(started(home, "learn", "--upstream", upstream, *pair))
        print(json.dumps(compare(upstream, through, prompts, given.tokens), indent=2))


if __name__ == "__main__":
    main()
