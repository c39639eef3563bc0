"""Measures tokens a round of chains and of trees, and processor time a token, by kind of text.

    python benchmarks/trees.py [--target T --draft D] [--prompts 6] [--tokens 60] [--adapter FOLDER]

The counts are the same on every machine with the same kernels. The times, of one thread, depend on the machine.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path

import torch

from adaptive.assistant import Assistant
from adaptive.control.policy import FixedLength
from adaptive.decoding.loop import Decoding
from adaptive.pair import load_pair
from adaptive.settings import load_settings
from adaptive.types import Message, SamplingParams, StopParams

PROMPTS = Path(__file__).resolve().parent.parent / "checkpoints" / "bundled" / "prompts"
KINDS = ("math", "code", "roleplay")
CHAINS, TREES = (0, 2, 4, 8), (4, 8, 16, 32, 64)


def main() -> None:
    """Run every policy on the same prompts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target")
    parser.add_argument("--draft")
    parser.add_argument("--adapter", type=Path)
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=60)
    args = parser.parse_args()
    torch.set_num_threads(1)
    named = {name: getattr(args, name) for name in ("target", "draft") if getattr(args, name)}
    pair = load_pair(load_settings(named))
    if pair.draft is not None and args.adapter is not None:
        pair.draft.apply_adapter(args.adapter)
    Decoding.clock = staticmethod(time.thread_time)
    policies = [*(FixedLength(n) for n in CHAINS), *(FixedLength(n, tree=True) for n in TREES)]
    for temperature in (0.0, 0.7):
        for kind in KINDS:
            lines = (PROMPTS / f"{kind}.jsonl").read_text(encoding="utf-8").splitlines()[: args.prompts]
            prompts = [json.loads(line)["prompt"] for line in lines]
            print(f"temperature {temperature}, {kind}:")
            for policy in policies:
                assistant = Assistant(pair, policy, None)
                tokens = rounds = 0
                seconds = 0.0
                for number, prompt in enumerate(prompts):
                    assistant.chance = random.Random(number)
                    sampling, stop = SamplingParams(temperature=temperature), StopParams(args.tokens, ignore_eos=True)
                    tokens += sum(1 for _ in assistant.chat([Message("user", prompt)], sampling, stop)) - 1
                    assert assistant.last is not None
                    rounds += len(assistant.last.rounds)
                    seconds += assistant.last.timings.predicted_s
                a_round, a_token = tokens / rounds, 1e3 * seconds / tokens
                print(f"  {policy.name:>8}  {a_round:5.2f} tokens a round  {a_token:6.2f} ms a token")


if __name__ == "__main__":
    main()
