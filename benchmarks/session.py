"""Does a server get faster while it is used? Two servers, one with background training and one without, get
the same prompts of one kind in turn, with pauses; speed and acceptance of the first and of the last prompts.

    python benchmarks/session.py --count 400 --out session.json

Prints one line a block of prompts and the two ratios; --out keeps every answer's figures as JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

PROMPTS = Path(__file__).resolve().parent.parent / "checkpoints" / "bundled" / "prompts"


@dataclass(frozen=True)
class Answered:
    """One answer: tokens and seconds after the first token, rounds that drafted, tokens of theirs accepted."""

    tokens: int
    seconds: float
    rounds: int
    accepted: int
    adapter: str | None


def main() -> None:
    """Run the session and print what came of it."""
    options = _options()
    prompts = _prompts(options.kind, options.count)
    answers: dict[str, list[Answered]] = {"idle": [], "off": []}
    with tempfile.TemporaryDirectory() as home, contextlib.ExitStack() as stack:
        urls = {
            policy: stack.enter_context(_server(Path(home) / policy, policy, options)) for policy in sorted(answers)
        }
        for number, prompt in enumerate(prompts):
            # The order alternates, so that neither is always the one that comes after a pause.
            for policy in sorted(urls, reverse=bool(number % 2)):
                answers[policy].append(_ask(urls[policy], prompt, number, options))
                time.sleep(options.pause)
            if (number + 1) % options.block == 0:
                _print_block(number + 1, answers, options.block)
        print(f"trainer: {_get(urls['idle'], '/adaptive/trainer')['last_round']}")
    block = options.block
    first, last, plain = answers["idle"][:block], answers["idle"][-block:], answers["off"][-block:]
    print(f"last {block} against first {block}: {_speed(last) / _speed(first):.2f}x")
    print(f"last {block} against the server without training: {_speed(last) / _speed(plain):.2f}x")
    if options.out is not None:
        found = {policy: [asdict(answer) for answer in given] for policy, given in answers.items()}
        options.out.write_text(json.dumps(found))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=400, help="prompts")
    parser.add_argument("--block", type=int, default=50, help="prompts that are compared")
    parser.add_argument("--kind", default="math", help="a file of the bundled prompts")
    parser.add_argument("--tokens", type=int, default=120, help="longest answer")
    parser.add_argument("--pause", type=float, default=1.5, help="seconds between two requests")
    parser.add_argument("--after", type=int, default=80, help="answers that a round of training needs")
    parser.add_argument("--threads", type=int, default=1, help="threads of each server")
    parser.add_argument("--out", type=Path, help="file for every answer's figures")
    return parser.parse_args()


def _prompts(kind: str, count: int) -> list[str]:
    lines = (PROMPTS / f"{kind}.jsonl").read_text(encoding="utf-8").splitlines()
    if len(lines) < count:
        print(f"there are {len(lines)} prompts of {kind}, not {count}", file=sys.stderr)
    return [json.loads(line)["prompt"] for line in lines[:count]]


@contextlib.contextmanager
def _server(home: Path, policy: str, options: argparse.Namespace) -> Iterator[str]:
    """The address of a server that is ready."""
    home.mkdir(parents=True)
    settings = {
        "ADAPTIVE_HOME": str(home),
        "ADAPTIVE_DISTILL": policy,
        "ADAPTIVE_DISTILL_AFTER": str(options.after),
        "ADAPTIVE_DISTILL_IDLE_SECONDS": str(options.pause / 3),
    }
    command = [sys.executable, "-m", "cli.main", "serve", "--port", "0", "--threads", str(options.threads)]
    said = home / "stderr"
    with said.open("w") as errors:
        process = subprocess.Popen(command, stderr=errors, env={**os.environ, **settings})
    try:
        while not (found := re.search(r"listening on (http\S+)", said.read_text())):
            if process.poll() is not None:
                raise SystemExit(said.read_text())
            time.sleep(0.1)
        while not _ready(found.group(1)):
            if process.poll() is not None:
                raise SystemExit(said.read_text())
            time.sleep(0.2)
        yield found.group(1)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def _ready(url: str) -> bool:
    try:
        _get(url, "/health")
    except urllib.error.HTTPError:
        return False
    return True


def _get(url: str, path: str) -> Any:
    with urllib.request.urlopen(url + path) as answer:
        return json.load(answer)


def _ask(url: str, prompt: str, seed: int, options: argparse.Namespace) -> Answered:
    body = {
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": options.tokens,
        "temperature": 0.7,
        "seed": seed,
    }
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as answer:
        found = json.load(answer)
    timings, stats = found["timings"], found["speculative_decoding"]
    return Answered(
        tokens=timings["predicted_n"] - 1,
        seconds=timings["predicted_ms"] / 1000,
        rounds=stats["num_spec_steps"],
        accepted=stats["num_accepted_draft_tokens"],
        adapter=found["adapter"],
    )


def _speed(answers: list[Answered]) -> float:
    """Tokens per second of all of them together."""
    return sum(a.tokens for a in answers) / max(sum(a.seconds for a in answers), 1e-9)


def _print_block(number: int, answers: dict[str, list[Answered]], block: int) -> None:
    parts = []
    for policy, given in answers.items():
        newest = given[-block:]
        length = 1 + sum(a.accepted for a in newest) / max(1, sum(a.rounds for a in newest))
        adapter = newest[-1].adapter or "none"
        parts.append(f"training {policy}: {_speed(newest):.0f} tokens/s, {length:.2f} a round, adapter {adapter}")
    print(f"{number} prompts  " + "  |  ".join(parts), flush=True)


if __name__ == "__main__":
    main()
