"""What background training costs the person at the keyboard: a request in the middle of a round, against one without.

    python benchmarks/training_cost.py --requests 60

Two servers. One has a training process that is in the middle of its round when the request comes and is told
to pause; the other has none, and is asked when that process has long paused. Prints time to first token and,
the first 100 ms after the request apart, tokens per second of both.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import httpx
from served import PATIENCE_S, Served, Stream, prompts, served, stream

# Seconds after an answer until training goes on: longer than the request to the other server takes.
IDLE_S = 2.0
# Answers before the first round; as soon as one round is over, one more answer begins the next.
ANSWERS = 120
# Seconds in which nothing is asked before either request, so that both come to a server that was at rest.
REST_S = 0.3
# Seconds of a request that are set apart: a pass through the draft that had begun ends in them.
APART_S = 0.1


def main() -> None:
    """Run it, print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=60, help="requests of each kind")
    parser.add_argument("--tokens", type=int, default=200, help="tokens of an answer")
    options = parser.parse_args()
    # Both decode plainly: a draft that has learned meanwhile would hide what training costs.
    plain = ["--draft-length", "0"]
    with (
        tempfile.TemporaryDirectory() as folder,
        served(Path(folder) / "idle", plain, distill="idle", distill_after=1, distill_idle_seconds=IDLE_S) as busy,
        served(Path(folder) / "off", plain, distill="off") as calm,
    ):
        _fill(busy, ANSWERS)
        pairs = [_pair(busy, calm, number, options.tokens) for number in range(options.requests)]
    _report(pairs)


def _fill(server: Served, answers: int) -> None:
    for number, text in enumerate(prompts("math", answers)):
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": 60, "seed": number}
        server.post("/v1/chat/completions", body)


def _pair(busy: Served, calm: Served, number: int, tokens: int) -> tuple[Stream, Stream]:
    """The same request in the middle of training, and without any."""
    while not _in_the_middle(busy):
        time.sleep(0.02)
    time.sleep(random.Random(number).uniform(0.0, 0.4))  # at any moment of a step
    body = {
        "prompt": f"{number} " + " ".join(prompts("code", 12))[:1200],
        "max_tokens": tokens,
        "ignore_eos": True,
        "seed": number,
        "temperature": 0.7,
        "store": False,
    }
    answers = []
    for server in (busy, calm):
        time.sleep(REST_S)
        with httpx.Client(base_url=server.url, timeout=PATIENCE_S) as client:
            client.get("/health")  # the connection is there
            answers.append(stream(client, body))
    return answers[0], answers[1]


def _in_the_middle(server: Served) -> bool:
    status = server.get("/adaptive/trainer")
    if status["activity"] == "waiting" and not status["new_generations"]:
        _fill(server, 1)
    return bool(status["activity"] == "training" and status["acceptance"] is not None)


def _report(pairs: list[tuple[Stream, Stream]]) -> None:
    figures: tuple[tuple[str, str, Callable[[Stream], float]], ...] = (
        ("time to first token", " ms", lambda answer: 1000 * (answer.times[0] - answer.asked)),
        ("tokens per second", "", _per_second),
    )
    for name, unit, figure in figures:
        busy, calm = ([figure(pair[side]) for pair in pairs] for side in (0, 1))
        ratios = sorted(a / b for a, b in zip(busy, calm, strict=True))
        low, high = ratios[len(ratios) // 20], ratios[-1 - len(ratios) // 20]
        middles = [f"{statistics.median(side):.1f}{unit}" for side in (busy, calm)]
        print(f"{name}: {middles[0]} in the middle of a round, {middles[1]} without")
        print(f"  ratio of pairs: median {statistics.median(ratios):.3f}, 90% of them within {low:.2f} to {high:.2f}")


def _per_second(answer: Stream) -> float:
    times = [t for t in answer.times if t - answer.asked > APART_S]
    return (len(times) - 1) / (times[-1] - times[0])


if __name__ == "__main__":
    main()
