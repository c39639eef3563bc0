"""Measures the cost of logging: tokens per second with the log on and off, interleaved on the same prompts.

    python benchmarks/logging_cost.py [--prompts FILE] [--count 40] [--target DIR --draft DIR]

Prints the median of the paired ratios and its quartiles. Each pair is the same prompt, seed and
length, once with and once without the log, in alternating order.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

from adaptive.assistant import Assistant
from adaptive.control.policy import FixedLength
from adaptive.pair import BUNDLED, load_pair
from adaptive.records.writer import LogWriter
from adaptive.settings import load_settings
from adaptive.types import SamplingParams, StopParams
from cli.prompts import read_prompts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, default=BUNDLED / "prompts" / "roleplay.jsonl")
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=150)
    parser.add_argument("--target")
    parser.add_argument("--draft")
    args = parser.parse_args()

    named = {name: value for name in ("target", "draft") if (value := getattr(args, name))}
    pair = load_pair(load_settings(named))
    stop = StopParams(max_new_tokens=args.tokens, ignore_eos=True)
    ratios, speeds = [], []
    with tempfile.TemporaryDirectory() as folder, LogWriter(Path(folder) / "records.db") as log:
        assistant = Assistant(pair, FixedLength(4), log)
        for number, prompt in enumerate(read_prompts(args.prompts)[: args.count]):
            speed = {}
            sampling = SamplingParams(temperature=0.7, seed=number)  # else a pair would be two different texts
            for record in (True, False) if number % 2 else (False, True):
                for _ in assistant.chat(prompt.messages, sampling, stop, record=record):
                    pass
                assert assistant.last is not None
                speed[record] = assistant.last.timings.per_second
            ratios.append(speed[True] / speed[False])
            speeds.append(speed[False])
    low, middle, high = statistics.quantiles(ratios, n=4)
    print(f"{len(ratios)} pairs of {args.tokens} tokens, {statistics.median(speeds):.0f} tokens/s without the log")
    print(f"tokens/s with the log / without: median {middle:.3f}, quartiles {low:.3f} to {high:.3f}")


if __name__ == "__main__":
    main()
