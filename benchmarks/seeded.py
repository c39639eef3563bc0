"""Measures the acceptance that a seed costs: the usual acceptance rule against the seeded one, on the bundled pair.

python benchmarks/seeded.py [--prompts 40] [--tokens 60] [--length 4]
"""

from __future__ import annotations

import argparse
import random

from adaptive.assistant import Assistant
from adaptive.control.policy import FixedLength
from adaptive.pair import BUNDLED, load_pair
from adaptive.settings import load_settings
from adaptive.types import SamplingParams, StopParams
from cli.prompts import read_prompts


def main() -> None:
    """Print acceptance and tokens a round, by temperature and rule."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--prompts", type=int, default=40, help="of all kinds together, at least one of each")
    for name, default in (("--tokens", 60), ("--length", 4)):
        parser.add_argument(name, type=int, default=default)
    args = parser.parse_args()
    pair = load_pair(load_settings({"device": "cpu"}))
    files = sorted((BUNDLED / "prompts").glob("*.jsonl"))
    prompts = [prompt for file in files for prompt in read_prompts(file)[: max(1, args.prompts // len(files))]]
    assistant = Assistant(pair, FixedLength(args.length), None)
    assistant.chance = random.Random(1)
    for temperature in (0.7, 1.0):
        for rule in ("usual", "seeded"):
            drafted = accepted = rounds = 0
            for number, prompt in enumerate(prompts):
                sampling = SamplingParams(temperature, seed=number if rule == "seeded" else None)
                for _ in assistant.chat(prompt.messages, sampling, StopParams(args.tokens)):
                    pass
                done = assistant.last
                assert done is not None
                drafted, accepted, rounds = drafted + done.drafted, accepted + done.accepted, rounds + len(done.rounds)
            rate, each = accepted / drafted, 1 + accepted / rounds
            print(
                f"T {temperature} {rule:7} acceptance {rate:.3f}  {each:.2f} tokens a round ({rounds} rounds)",
                flush=True,
            )


if __name__ == "__main__":
    main()
