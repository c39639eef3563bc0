"""Runs forty rounds of training with nothing to learn, to see what the gate promotes and whether it does harm.

    python benchmarks/no_learning.py --cache DIR --records self       # the draft's own output, under other seeds
    python benchmarks/no_learning.py --cache DIR --records shuffled   # the target's, its distributions shuffled

Both are a stream of ``adaptation.py`` with training after every 25 generations, by the real trainer, store
and gate. ``self``: the draft is also the target, so it is already right. ``shuffled``: the stored distributions
are permuted among all positions, so that they carry no information about the text at their positions (overall
token frequencies can still be learned from them). Acceptance is measured on held-out prompts, unshuffled.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from adaptation import Rounds, follow
from streams import Stream, answers_of, stream

from adaptive.pair import BUNDLED
from adaptive.settings import Settings
from adaptive.types import Generation
from trainers.recipe import Recipe

ROUNDS, NEW = 40, 25
SET_ASIDE = 60
KINDS = ("tools", "math")
# Generations retained for a round: enough to see a gain of 0.03, few enough that forty rounds take minutes.
BUFFER = 200


def shuffled(generations: list[Generation], seed: int) -> list[Generation]:
    """The same texts, each position with the stored distribution of another position, of any generation."""
    held = [g.supervision for g in generations if g.supervision is not None]
    order = np.random.default_rng(seed).permutation(sum(len(s.rest) for s in held))
    ids, logprobs, rest = (
        np.concatenate([getattr(s, name) for s in held])[order] for name in ("ids", "logprobs", "rest")
    )
    made, at = [], 0
    for generation, s in zip(generations, held, strict=True):
        here = slice(at, at + len(s.rest))
        at += len(s.rest)
        mixed = replace(s, ids=ids[here], logprobs=logprobs[here], rest=rest[here])
        made.append(replace(generation, supervision=mixed))
    return made


def main() -> None:
    """Run the rounds; print each round's status and the change of acceptance on held-out prompts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, required=True, help="folder for the answers, made once")
    parser.add_argument("--records", choices=("self", "shuffled"), required=True)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    settings = Settings(device="cpu", max_new_tokens=200)
    speaker = settings
    if args.records == "self":
        speaker = settings.model_copy(update={"target": str(BUNDLED / "draft"), "draft": str(BUNDLED / "draft")})
    cache = args.cache / "self" if args.records == "self" else args.cache
    answers = {kind: answers_of(kind, speaker, BUNDLED / "prompts", cache, 0.7, 2) for kind in KINDS}
    given = stream(f"mixture:{','.join(KINDS)}", answers, (ROUNDS + 1) * NEW, SET_ASIDE, args.seed)
    if args.records == "shuffled":
        given = Stream(shuffled(given.generations, args.seed), given.held_out)
    rounds = [NEW * n for n in range(2, ROUNDS + 2)]  # the first round has 2 * NEW: 25 generations are too few to split
    promotions, worst = 0, 0.0
    with tempfile.TemporaryDirectory() as folder:
        learner = Rounds(Path(folder), settings, Recipe(buffer=BUFFER, seed=args.seed))
        for before, after in pairwise(follow(learner, given, rounds, 6)):
            change = after.all.acceptance - before.all.acceptance
            worst = min(worst, change)
            promotions += after.status == "promoted"
            print(
                f"{after.generations:5} generations  {after.status:14}  {after.all.acceptance:.4f} ({change:+.4f})",
                flush=True,
            )
    print(f"{len(rounds)} rounds, {promotions} promotions, worst change of held-out acceptance {worst:+.4f}")


if __name__ == "__main__":
    main()
