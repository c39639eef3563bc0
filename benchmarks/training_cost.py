"""Measures how background training slows down a request: one in the middle of a training run against one without.

    python benchmarks/training_cost.py --requests 60

Two servers. The first has a training process in the middle of its run when the request arrives, which makes the
process pause. The second has none, and gets its request when that process has long paused. Prints for both the time
to the first token and tokens per second, the latter without the first 100 ms after the request.
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

# Seconds from an answer until training continues: longer than the request to the other server takes.
IDLE_S = 2.0
# Answers before the first training run; when a run is over, one more answer starts the next.
ANSWERS = 120
# Seconds without requests before either request, so that both reach an idle server.
REST_S = 0.3
# Seconds at the beginning of a request that do not count for its speed: a training step in progress ends in them.
APART_S = 0.1


def main() -> None:
    """Run the benchmark, print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=60, help="requests of each kind")
    parser.add_argument("--tokens", type=int, default=200, help="tokens of an answer")
    options = parser.parse_args()
    # Both decode plainly: a draft that improves during the benchmark would hide the cost of training.
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
    """The streams of the same request in the middle of training, and without training."""
    while not _in_the_middle(busy):
        time.sleep(0.02)
    time.sleep(random.Random(number).uniform(0.0, 0.4))  # a random moment of a training step
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
            client.get("/health")  # opens the connection
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
