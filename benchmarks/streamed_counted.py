"""Counts what chains and trees bring on a streamed target, over more prompts than can be decoded from disk.

    python benchmarks/streamed_counted.py --draft HEAD [--kind math] [--held-out 0] [--prompts 60] [--tokens 80]
        [--seconds 1:0.746 16:0.709 64:0.78 128:0.897] [--chain-token 0.00085] [--tree-pass 0.0025]

Decodes with the bundled target in memory, whose choices are those of the same target made larger by ``inflate.py``. A
round counts, for the policies too, as the seconds of its passes on disk: of the target by its number of tokens (as
``streamed.py passes`` measures them, in between by a line), and of the draft, by token of a chain or by pass over nodes
of a tree.
"""

from __future__ import annotations

import argparse
import itertools
import random

from streamed import said

from adaptive.assistant import Assistant
from adaptive.control.lengths import LengthByCost
from adaptive.control.nodes import NodesByCost
from adaptive.control.policy import FixedLength, LengthPolicy, TreeAdviser
from adaptive.pair import BUNDLED, load_pair
from adaptive.settings import load_settings
from adaptive.types import Message, Round, SamplingParams, StopParams

# Tokens of a pass and its seconds, and the seconds of a head of 19 million parameters, on two cores of an AMD EPYC
# (Zen 4); the target has 1.08 billion parameters, a quarter of them in memory.
SECONDS = ["1:0.746", "2:0.75", "4:0.731", "8:0.742", "16:0.709", "32:0.706", "64:0.78", "128:0.897"]
CHAIN_TOKEN, TREE_PASS = 0.00085, 0.0025
# Share of a pass by which its seconds vary, at most.
NOISE = 0.05


class Counted:
    """The tokens, rounds and seconds of a policy, whose rounds are given the seconds that they would take on disk."""

    def __init__(self, policy: LengthPolicy, passes: list[tuple[int, float]], token_s: float, pass_s: float) -> None:
        self.policy, self.passes, self.token_s, self.pass_s = policy, passes, token_s, pass_s
        self.tokens, self.rounds, self.seconds = 0, 0, 0.0
        self.noise, self.observe = random.Random(1), policy.observe
        setattr(policy, "observe", self.take)  # noqa: B010  # a method of this object alone

    def take(self, outcome: Round) -> None:
        """Count a finished round, and let the policy learn from it."""
        adviser, draft_s = self.policy.adviser, self.token_s * outcome.drafted
        if isinstance(adviser, TreeAdviser) and outcome.drafted:
            adviser.passes_s = self.pass_s * adviser.passes
            draft_s = self.pass_s + adviser.passes_s  # one more pass is over the text
        verify_s = self.verification(1 + outcome.drafted)
        self.tokens += 1 + outcome.accepted
        self.rounds += 1
        self.seconds += draft_s + verify_s
        self.observe(outcome._replace(draft_s=draft_s, verify_s=verify_s * (1 + NOISE * self.noise.random())))

    def verification(self, tokens: int) -> float:
        """Seconds of a pass of the target over these tokens."""
        for (few, less_s), (many, more_s) in itertools.pairwise(self.passes):
            if tokens <= many:
                return less_s + (more_s - less_s) * (tokens - few) / (many - few)
        return self.passes[-1][1]


def main() -> None:
    """Decode the same prompts with every policy."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default=str(BUNDLED / "target"))
    parser.add_argument("--draft", required=True)
    parser.add_argument("--kind", default="math")
    parser.add_argument("--held-out", type=int, metavar="SEED", help="as in streamed.py")
    parser.add_argument("--prompts", type=int, default=60)
    parser.add_argument("--tokens", type=int, default=80)
    parser.add_argument("--temperatures", type=float, nargs="*", default=[0.7, 0.0])
    parser.add_argument("--chains", type=int, nargs="*", default=[8, 16])
    parser.add_argument("--seconds", nargs="*", default=SECONDS, metavar="TOKENS:SECONDS")
    parser.add_argument("--chain-token", type=float, default=CHAIN_TOKEN, help="the draft's seconds for one token")
    parser.add_argument("--tree-pass", type=float, default=TREE_PASS, help="its seconds for a pass over nodes")
    args = parser.parse_args()
    passes = [(int(tokens), float(seconds)) for tokens, _, seconds in (one.partition(":") for one in args.seconds)]
    pair = load_pair(load_settings({"target": args.target, "draft": args.draft, "history": "off"}))
    prompts = list(said(args.kind, 0, args.prompts, args.held_out))
    for temperature in args.temperatures:
        policies: dict[str, LengthPolicy] = {"plain": FixedLength(0)}
        policies |= {f"chain of {n}": FixedLength(n) for n in args.chains}
        policies |= {"controller, chains": LengthByCost(), "controller": NodesByCost()}
        counted = {name: Counted(policy, passes, args.chain_token, args.tree_pass) for name, policy in policies.items()}
        for number, prompt in enumerate(prompts):
            for name, policy in policies.items():
                assistant = Assistant(pair, policy, None)
                assistant.chance = random.Random(number)
                stop = StopParams(12 if name == "plain" else args.tokens)
                for _ in assistant.chat([Message("user", prompt)], SamplingParams(temperature=temperature), stop):
                    pass
        print(f"temperature {temperature}, {args.kind}, {len(prompts)} prompts of at most {args.tokens} tokens:")
        plain = counted["plain"].tokens / counted["plain"].seconds
        for name, one in counted.items():
            speed = one.tokens / one.seconds / plain
            print(f"  {name:<20} {speed:5.2f} times plain  {one.tokens / one.rounds:5.2f} a pass")


if __name__ == "__main__":
    main()
