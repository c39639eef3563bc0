"""Replays answers that share rounds and draft from history, over logged generations and without models.

In:  the file of ``benchmarks/replay_workloads.py`` and the costs that ``adaptive calibrate --json`` measured. Out: for
     every workload tokens per second of ``--answers`` answers at a time, without history and with history where its
     use is worth the time, against history wherever it finds anything, of the best fixed length in hindsight.

A joint pass costs as much as a lone pass over the same number of tokens; beyond the longest verification each further
token costs as much as the last ones. All drafts are made together, in the time of the longest. Everything else is as in
``controller_history.py``.

    python benchmarks/joint_history.py workloads.npz --costs costs.json --answers 4
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from controller import UNLIMITED, Clock, Noise, Stretch, read_costs
from controller_history import LENGTHS, Logged, Looking, with_history
from replay_workloads import Trace, load

from adaptive.control.among import JointCosts
from adaptive.control.costs import CostModel, CostTable
from adaptive.control.goodput import GoodputLength
from adaptive.control.matches import Matches
from adaptive.control.policy import FixedLength, Lead, LengthPolicy, Scope, SharedLength
from adaptive.control.sources import GoodputWithHistory
from adaptive.drafting.grafting import Grafting
from adaptive.drafting.history import RunningText
from adaptive.drafting.suffixes import Suffixes, suffixes
from adaptive.types import FREE, Round


class SharedFound(SharedLength):
    """History wherever it finds anything, at most ``length`` tokens."""

    def __init__(self, length: int) -> None:
        self.length = length

    def lead(self, reach: Sequence[float], length: int, limit: int, singly: bool = False, passed: int = 0) -> Lead:
        """All that was found, up to ``length``."""
        return Lead(min(self.length, limit, len(reach)), 0)


class Found(FixedLength):
    """The policy that uses ``SharedFound`` in shared rounds."""

    def among(self, scope: Scope) -> SharedLength:
        """See ``SharedFound``."""
        return SharedFound(self.length)


class Answer:
    """One answer in progress."""

    def __init__(self, trace: Trace, policy: LengthPolicy, history: Looking | None) -> None:
        self.trace, self.logged = trace, Logged(trace)
        self.committed = self.logged.text[: trace.prompt + 1]
        self.beside = policy.among(Scope("replay", 0.0))
        self.history, self.looked = history, False
        self.grafting = None if history is None else Grafting(self.logged, history, self.beside)

    def propose(self, answers: int) -> tuple[str, list[int]]:
        """The drafter of the next round ("none" for no proposal) and the tokens that it proposes."""
        held, logged = len(self.committed), self.logged
        limit = len(logged.text) - held - 1 if self.trace.limited else UNLIMITED
        length = self.beside.next_length(limit, answers, logged.unseen(held))
        logged.steps = logged.fed = 0
        if self.grafting is None:
            proposal = logged.propose(self.committed, length, self.beside.adviser) if length else None
        else:
            most = self.grafting.plan(self.committed, length, limit)
            self.looked = most is not None
            drafter, most = (self.grafting, most) if most is not None else (logged, length)
            proposal = drafter.propose(self.committed, most, self.beside.adviser) if most else None
        return ("none", []) if proposal is None else (proposal.drafter, list(proposal.tokens))  # type: ignore[arg-type]

    def judge(self, who: str, tokens: list[int], draft_s: float, verify_s: float) -> int:
        """Judge the proposal and commit the round. Returns the number of tokens committed."""
        held = len(self.committed)
        right = self.logged.text[held : held + len(tokens)]
        accepted = next((i for i, (a, b) in enumerate(zip(tokens, right, strict=False)) if a != b), len(right))
        said = self.logged.text[held : held + accepted + 1]
        outcome = Round(who, len(tokens), min(accepted, len(tokens)), draft_s, verify_s)
        self.committed = self.committed + said
        self.beside.decoded += len(said)
        self.logged.rollback(held + accepted)
        if self.grafting is not None and self.looked:
            self.grafting.observe(said)
        (self.beside.observe_free if who in FREE else self.beside.observe)(outcome)
        return len(said)


def fixed_at(length: int) -> Callable[[Clock], LengthPolicy]:
    """Makes ``Found`` of this length."""
    return lambda clock: Found(length)


def deciding(kind: type[GoodputLength], costs: CostTable) -> Callable[[Clock], LengthPolicy]:
    """Makes a policy that decides by itself."""
    return lambda clock: kind(costs, clock=clock)


def replay(
    make: Callable[[Clock], LengthPolicy],
    workload: list[Stretch],
    costs: CostTable,
    answers: int,
    seed: int,
    looks: bool,
) -> float:
    """Tokens per second of all answers, ``answers`` at a time. ``looks``: with history lookups."""
    noise, clock = Noise(seed), Clock()
    policy = make(clock)
    true, joint = CostModel(costs), JointCosts()
    records, matches = suffixes(), Matches()
    waiting = iter([trace for stretch in workload for trace in stretch.traces])
    under_way: list[Answer] = []
    texts = [RunningText() for _ in range(answers)]
    committed, number = 0, 0
    while True:
        under_way += _begin(waiting, answers - len(under_way), policy, texts, records, matches, clock, looks)
        if not under_way:
            return committed / clock.now
        said = [answer.propose(len(under_way)) for answer in under_way]
        drafts = [a.logged.steps * costs.draft_s + a.logged.fed * costs.catch_up_s for a in under_way if a.logged.steps]
        draft_s = costs.start_s + max(drafts) if drafts else 0.0
        rows = sum(1 + len(tokens) for _, tokens in said)
        verify_s = joint.seconds(true, rows)
        share_s = noise(verify_s) / len(under_way)
        if drafts:
            policy.drafted(len(drafts), sum(a.logged.steps for a in under_way), noise(draft_s))
        policy.shared(rows, share_s * len(under_way))
        clock.now += draft_s + verify_s + costs.overhead_s * len(under_way)
        for answer, (who, tokens) in zip(under_way, said, strict=True):
            count = answer.judge(who, tokens, draft_s / max(1, len(drafts)), share_s)
            committed += count
            clock.now += costs.token_s * count
        for answer in [a for a in under_way if len(a.committed) >= len(a.logged.text)]:
            under_way.remove(answer)
            if answer.history is not None:
                answer.history.settle()  # as at the end of an answer
                number += 1
                records.add(number, np.ascontiguousarray(answer.trace.text))
                texts.append(answer.history.text)


def _begin(
    waiting: Iterator[Trace],
    room: int,
    policy: LengthPolicy,
    texts: list[RunningText],
    records: Suffixes,
    matches: Matches,
    clock: Clock,
    looks: bool,
) -> Iterator[Answer]:
    for _, trace in zip(range(room), waiting, strict=False):
        history = Looking(texts.pop(0), records, matches, 0.0, clock=clock) if looks else None
        yield Answer(trace, policy, history)


def main() -> None:
    """Read the workloads, replay, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", type=Path, help="the file that replay_workloads.py wrote")
    parser.add_argument("--costs", type=Path, required=True, help="the output of adaptive calibrate --json")
    parser.add_argument("--answers", type=int, default=4, help="at a time")
    parser.add_argument("--seeds", type=int, default=2, help="runs of what decides by itself, under different noise")
    parser.add_argument("--only", nargs="+", help="parts of the names of workloads")
    args = parser.parse_args()
    costs = read_costs(args.costs)
    for name, workload in with_history(load(args.workloads)).items():
        if args.only and not any(part in name for part in args.only):
            continue
        seeds = range(args.seeds)
        fixed = {k: replay(fixed_at(k), workload, costs, args.answers, 0, k > 0) for k in LENGTHS}
        best = max(fixed, key=lambda k: fixed[k])
        model, both = (
            float(
                np.mean([replay(deciding(kind, costs), workload, costs, args.answers, seed, looks) for seed in seeds])
            )
            for kind, looks in ((GoodputLength, False), (GoodputWithHistory, True))
        )
        print(json.dumps({
            "workload": name, "best_fixed": best, "best_fixed_over_plain": fixed[best] / fixed[0],
            "model_over_plain": model / fixed[0], "both_over_plain": both / fixed[0],
            "both_over_best": both / max(model, fixed[best]),
        }), flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
