"""What history drafting costs and brings: the index by its size, and speed with it and without.

python benchmarks/history_drafting.py index --tokens 10000000
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import numpy as np

from adaptive.drafting.suffixes import suffixes

TEXT = 700  # tokens of a record, about what the lived session's had


def texts(tokens: int, vocab: int = 32_000) -> np.ndarray:
    """Token ids as of text: by Zipf's law, and a third of the pieces of 50 tokens repeat one of the 1,000 before."""
    chance = np.random.default_rng(0)
    made = (chance.zipf(1.2, tokens) % vocab).astype(np.int32)
    for start in np.flatnonzero(chance.random(tokens // 50) < 1 / 3) * 50:
        back = int(chance.integers(1, 1000)) * 50
        if back <= start:
            made[start : start + 50] = made[start - back : start - back + 50]
    return made


def spread(seconds: list[float]) -> dict[str, float]:
    """Median, 99th percentile and mean in microseconds."""
    us = sorted(1e6 * s for s in seconds)
    return {"median": statistics.median(us), "p99": us[int(0.99 * len(us))], "mean": statistics.fmean(us)}


def measure_index(tokens: int, rounds: int = 20_000) -> dict[str, object]:
    """Loading, memory and, among other work that empties the processor's caches, lookups and updates."""
    made = texts(tokens)
    index = suffixes()
    began = time.perf_counter()
    for number, start in enumerate(range(0, tokens, TEXT)):
        index.add(number, made[start : start + TEXT])
    load_s = time.perf_counter() - began
    running, dirt = suffixes(), np.zeros(1 << 23)
    running.begin(0)
    chance = np.random.default_rng(1)
    looked, cold = [], []
    found = 0
    for number in range(rounds):
        start = int(chance.integers(0, tokens - 100))
        context, new = made[start : start + 32].tolist(), made[start + 32 : start + 35].tolist()
        if number % 40 == 0:
            dirt += 1  # 64 MB
        began = time.perf_counter()
        running.append(new)
        found += bool(index.follow(context)[0])
        (cold if number % 40 == 0 else looked).append(time.perf_counter() - began)
    return {
        "tokens": tokens,
        "load_tokens_per_s": tokens / load_s,
        "bytes_per_token": index.nbytes / tokens,
        "lookup_and_update_us": spread(looked),
        "behind_64_MB_us": spread(cold),
        "found": found / rounds,
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["index"])
    parser.add_argument("--tokens", type=int, nargs="+", default=[10_000, 1_000_000, 10_000_000])
    args = parser.parse_args()
    for tokens in args.tokens:
        print(json.dumps(measure_index(tokens)), flush=True)


if __name__ == "__main__":
    main()
