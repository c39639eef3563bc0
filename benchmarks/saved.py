"""Checks the figure "time saved". Two real servers answer the same prompts in turn with the same number of tokens, one
by plain decoding and one with a draft; the second one's "time saved" is compared with the difference of their times.

    python benchmarks/saved.py --count 300
    python benchmarks/saved.py --count 300 --home DIR     (with the adapter in use there; only its adapters are read)

Prints the true saving with its interval, and the savings that the two servers report; the plain one's must be 0.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import random
import shutil
import signal
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from served import Served, prompts, served

# Draws of the bootstrap over pairs.
DRAWS = 2000


def main() -> None:
    """Run both servers and print the results."""
    options = _options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the servers end with this process
    texts = itertools.islice(itertools.cycle(prompts(options.kind, 320)), options.count)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        home = Path(folder)
        if options.home is not None:
            for adapters in options.home.glob("*/adapters"):
                shutil.copytree(adapters, home / "drafting" / adapters.parent.name / "adapters")
        lengths = {"plain": "0", "drafting": options.draft_length}
        servers = {
            name: stack.enter_context(served(home / name, ["--draft-length", length, "--threads", "1"], distill="off"))
            for name, length in lengths.items()
        }
        pairs: list[tuple[float, float]] = []
        for number, text in enumerate(texts):
            took = {
                name: _ask(servers[name], text, number, options.tokens)
                for name in sorted(servers, reverse=bool(number % 2))
            }
            pairs.append((took["plain"], took["drafting"]))
        said = {name: server.get("/adaptive/history") for name, server in servers.items()}
        sentence = servers["drafting"].get("/props")["speculation"]["sentence"]
    _report(pairs, said, sentence)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=300, help="prompts")
    parser.add_argument("--tokens", type=int, default=60, help="tokens of every answer")
    parser.add_argument("--kind", default="math", help="a file of the bundled prompts")
    parser.add_argument("--draft-length", default="auto", help="of the server that drafts")
    parser.add_argument("--home", type=Path, help="state folder whose adapters the drafting server uses")
    return parser.parse_args()


def _ask(server: Served, text: str, seed: int, tokens: int) -> float:
    """Seconds of one answer of exactly ``tokens`` tokens, without its first token."""
    body = {
        "messages": [{"role": "user", "content": text}],
        "max_tokens": tokens,
        "temperature": 0.7,
        "seed": seed,
        "ignore_eos": True,
    }
    timings = server.post("/v1/chat/completions", body)["timings"]
    assert timings["predicted_n"] == tokens
    return float(timings["predicted_ms"]) / 1000


def _report(pairs: list[tuple[float, float]], said: dict[str, Any], sentence: str) -> None:
    differences = [plain - drafting for plain, drafting in pairs]
    rng = random.Random(0)
    drawn = sorted(sum(rng.choices(differences, k=len(differences))) for _ in range(DRAWS))
    true = sum(differences)
    plain, drafting = (sum(seconds) for seconds in zip(*pairs, strict=True))
    print(f"{len(pairs)} pairs: plain {plain:.1f} s, with the draft {drafting:.1f} s ({plain / drafting:.2f}x)")
    print(f"truly saved: {true:.2f} s ({drawn[DRAWS // 40]:.2f} to {drawn[-DRAWS // 40]:.2f} s)")
    saved = said["drafting"]["saved"]
    if saved is None:
        print("said to be saved: not known")
    else:
        off = f", {saved['seconds'] / true - 1:+.0%}" if true else ""
        print(f"said to be saved: {saved['text']} in {saved['answers']} answers{off}")
    totals = said["drafting"]["totals"]
    print(f"the drafting server: {totals['tokens_per_round']:.2f} tokens a round; last answer: {sentence}")
    print(f"the plain server says: {said['plain']['saved']['text']}")
    print(f"median pair: {statistics.median(p / d for p, d in pairs):.2f}x")


if __name__ == "__main__":
    main()
