"""Runs many clients against one server, some disconnecting early and some sending malformed requests; checks errors,
memory and the log.

    python benchmarks/clients.py --minutes 10
    python benchmarks/clients.py --minutes 5 --clients 32 --distill always

Every request carries a number of its own, by which its record is found. A client waits for a second after the
answer that the queue is full (429). Prints a line a minute and, at the end, the results of every kind of request
and of training. Exits with 1 if a check fails.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil
from served import PATIENCE_S, Served, prompts, served, stream

from adaptive.records.log import Log

# One request in GOES_AWAY is abandoned before its end; one in NONSENSE is malformed.
GOES_AWAY = NONSENSE = 10
# Megabytes for conversation caches: small enough to fill up within the first minute.
CACHE_MB = 100
# The largest growth of memory after the first minute that passes, as a share.
MOST_GROWTH = 0.05
# The HTTP status when the queue is full, and the seconds that a client then waits.
FULL, AGAIN_S = 429, 1.0

BODIES = (
    b"",
    b"{",
    b"[]",
    b"\xff\xfe",
    b'{"prompt": 3.5}',
    b'{"prompt": "a", "temperature": -1}',
    b'{"prompt": "a", "n": 99}',
    b'{"prompt": "a", "logit_bias": {"x": 1}}',
    b'{"prompt": "\\ud800"}',
    b'{"prompt": "' + b"word " * 5000 + b'"}',
)


@dataclass
class Tally:
    """Counts of requests and answers. ``whole`` maps the prompts that were answered to the end to their answers."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    statuses: Counter[tuple[str, int]] = field(default_factory=Counter)
    whole: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def add(self, kind: str, status: int) -> None:
        """Count one request of this kind with this response status (0: the client disconnected)."""
        with self.lock:
            self.statuses[kind, status] += 1


def main() -> None:
    """Run the clients, print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--distill", default="off", help="when to train, as in `adaptive serve`")
    parser.add_argument("--slots", default="auto")
    parser.add_argument("--queue", type=int, default=64, help="requests that may wait")
    options = parser.parse_args()
    tally = Tally()
    settings = {name: getattr(options, name) for name in ("distill", "slots", "queue")}
    with tempfile.TemporaryDirectory() as folder, served(Path(folder), cache_mb=CACHE_MB, **settings) as server:
        until = time.monotonic() + 60 * options.minutes
        clients = [
            threading.Thread(target=_client, args=(server, number, until, tally)) for number in range(options.clients)
        ]
        for client in clients:
            client.start()
        memory = _watch(server, clients, tally)
        wrong = _report(server, tally, memory)
    raise SystemExit(wrong)


def _client(server: Served, number: int, until: float, tally: Tally) -> None:
    """Send requests one after the other, each of a randomly drawn kind, until ``until``."""
    rng = random.Random(number)
    texts = [text for kind in ("math", "tools", "code", "roleplay") for text in prompts(kind, 100)]
    with httpx.Client(base_url=server.url, timeout=PATIENCE_S) as client:
        turn = 0
        while time.monotonic() < until:
            turn += 1
            try:
                _request(client, f"[{number}.{turn}] {rng.choice(texts)}", rng, tally)
            except httpx.HTTPStatusError as error:
                tally.add("refused", error.response.status_code)
                time.sleep(AGAIN_S)
            except Exception as error:
                tally.problems.append(f"{type(error).__name__}: {error}")


def _request(client: httpx.Client, prompt: str, rng: random.Random, tally: Tally) -> None:
    kind = rng.randrange(GOES_AWAY * NONSENSE)
    body = {
        "prompt": prompt,
        "max_tokens": rng.choice((8, 32, 96)),
        "ignore_eos": True,
        "seed": kind,
        "user": prompt.split(".")[0],
    }
    if kind % NONSENSE == 0:
        answer = client.post(
            "/v1/completions", content=rng.choice(BODIES), headers={"Content-Type": "application/json"}
        )
        tally.add("nonsense", answer.status_code)
    elif kind % GOES_AWAY == 1:
        _go_away(client, {**body, "max_tokens": 400}, rng)
        tally.add("went away", 0)
    elif rng.random() < 0.5:
        found = stream(client, body)
        if not found.whole:
            tally.problems.append(f"a stream broke off after {len(found.times)} pieces")
        tally.whole[prompt] = found.text
        tally.add("streamed", 200)
    else:
        answer = client.post("/v1/completions", json=body).raise_for_status()
        tally.whole[prompt] = answer.json()["choices"][0]["text"]
        tally.add("whole", answer.status_code)


def _go_away(client: httpx.Client, body: dict[str, object], rng: random.Random) -> None:
    """Disconnect in the middle of a stream, or while waiting for a whole answer."""
    if rng.random() < 0.5:
        stream(client, body, stop_after=rng.randrange(1, 20))
    else:
        try:
            client.post("/v1/completions", json=body, timeout=rng.uniform(0.05, 1.0))
        except httpx.TimeoutException:
            return


def _watch(server: Served, clients: list[threading.Thread], tally: Tally) -> list[tuple[float, int]]:
    """The server's resident bytes by seconds, sampled until all clients are done. Prints a line a minute."""
    process, began, memory = psutil.Process(server.pid), time.monotonic(), []
    while any(client.is_alive() for client in clients):
        time.sleep(1.0)
        memory.append((time.monotonic() - began, process.memory_info().rss))
        if len(memory) % 60 == 0:
            print(
                f"minute {len(memory) // 60}: {tally.statuses.total()} requests, {memory[-1][1] / 1e6:.0f} MB",
                flush=True,
            )
    return memory


def _report(server: Served, tally: Tally, memory: list[tuple[float, int]]) -> int:
    """Print all results. Returns 1 if a check fails, else 0."""
    with Log(server.state / "records.db") as log:
        logged = [entry.generation for entry in log.generations(with_supervision=False)]
    times = Counter(g.prompt_text for g in logged)
    ended = {g.prompt_text: g.text for g in logged if g.finish_reason != "cancelled"}
    once = sum(times[prompt] == 1 and ended.get(prompt) == text for prompt, text in tally.whole.items())
    minute = [size for when, size in memory if 50 <= when <= 70] or [memory[0][1]]
    growth = max(size for _, size in memory[-30:]) / max(minute) - 1
    for (kind, status), count in sorted(tally.statuses.items()):
        print(f"{kind}: {count} with status {status or 'none, the client had gone'}")
    print(f"answers that came whole: {len(tally.whole)}; in the log exactly once, with that text: {once}")
    print(f"records: {len(logged)}, of which cut short {sum(g.finish_reason == 'cancelled' for g in logged)}")
    print(f"memory: {max(minute) / 1e6:.0f} MB after a minute, {memory[-1][1] / 1e6:.0f} MB at the end ({growth:+.1%})")
    print(f"errors that are not the client's: {len(tally.problems)} {tally.problems[:3]}")
    trainer = server.get("/adaptive/trainer")
    print(f"training runs: {trainer['runs']}, crashes: {trainer['crashes']}; {trainer['reason']}")
    expected = {("nonsense", 400), ("went away", 0), ("streamed", 200), ("whole", 200), ("refused", FULL)}
    right = once == len(tally.whole) and max(times.values()) == 1 and not tally.problems
    return int(
        not (right and growth <= MOST_GROWTH and set(tally.statuses) <= expected and "Traceback" not in server.said)
    )


if __name__ == "__main__":
    main()
