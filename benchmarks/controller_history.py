"""Replays the choice among the model, history and grafts of both over logged generations, exactly and without models.

In:  the file of ``benchmarks/replay_workloads.py`` and the costs that ``adaptive calibrate --json`` measured. Out: for
     every workload tokens per second and tokens a round of each single drafter, of two fixed precedences, and of the
     controller with history, against the best single choice in hindsight.

The target is greedy, so its text is fixed. History proposes with the same index and drafter that decoding uses; the
draft's tokens and confidence are those logged. One case is approximate: after a wrong token of history the draft's
continuation was not logged, so its continuation of a wrong token of its own is used instead. That affects the costs of
such a round, not what is accepted. Answers are added to the records one after the other, as they would be logged.

    python benchmarks/controller_history.py workloads.npz --costs costs.json
"""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from controller import UNLIMITED, Clock, Noise, Stretch, kept, pass_s, read_costs, workloads_of
from replay_workloads import DEPTH, Trace, load

from adaptive.control.costs import CostTable
from adaptive.control.goodput import GoodputLength
from adaptive.control.matches import Matches
from adaptive.control.policy import Advice, Adviser, FixedLength, Lead, LengthPolicy, Scope
from adaptive.control.sources import GoodputWithHistory
from adaptive.drafting.grafting import Grafting
from adaptive.drafting.history import HistoryDrafter, RunningText
from adaptive.drafting.proposal import Proposal
from adaptive.drafting.suffixes import suffixes
from adaptive.types import FREE, MODEL, Round

# Seconds of one lookup, before a round or behind a draft, including the update of the index and of the statistics.
LOOK_S = 25e-6
# Draft lengths of a single drafter; the best of them in hindsight is the reference for everything else.
LENGTHS = (0, 1, 2, 3, 4, 6, 8, 12, 16)
# Lengths of the model's draft under a fixed precedence; the best of them in hindsight is reported.
PRECEDENCE_LENGTHS = (1, 2, 4, 8)
# Passes over the prompts of the repeating workload, and answers of each kind in it.
PASSES, OF_EACH = 3, 8
TOGETHER = "together"


class Looking(HistoryDrafter):
    """A history drafter whose lookups advance the replay's clock."""

    def __init__(self, *args: Any, clock: Clock) -> None:
        super().__init__(*args)
        self.clock, self.looks = clock, 0

    def look(self, committed: list[int]) -> list[float]:
        """See ``HistoryDrafter.look``."""
        self._passes()
        return super().look(committed)

    def look_behind(self, committed: list[int], drafted: list[int]) -> list[float]:
        """See ``HistoryDrafter.look_behind``."""
        self._passes()
        return super().look_behind(committed, drafted)

    def _passes(self) -> None:
        self.clock.now += LOOK_S
        self.looks += 1


class Logged:
    """The draft of a logged answer: its token and confidence at every position, and the passes of the last proposal."""

    name = MODEL

    def __init__(self, trace: Trace, before: Logged | None = None) -> None:
        """``before``: the draft of the answer before, whose cache it has if that is of the same conversation."""
        self.trace = trace
        self.text: list[int] = trace.text.tolist()
        self.drafts: list[int] = trace.drafts.tolist()
        self.sure: list[float] = trace.confidence.tolist()
        self.rejects = _next_rejected(trace.accepted.tolist())
        self.seen: int = 0 if before is None else kept(before.trace, before.seen, trace)  # tokens in its cache
        self.steps = self.fed = 0  # of the last proposal: passes, and tokens that the first pass took beyond one

    def limit(self, committed: int) -> int:
        """No limit of the context."""
        return UNLIMITED

    def unseen(self, committed: int) -> int:
        """As for a model: committed tokens that are not in the cache yet."""
        return committed - 1 - self.seen

    def propose(self, committed: list[int], length: int, advise: Adviser | None = None) -> Proposal | None:
        """See ``go_on``."""
        return self.go_on(committed, [], length, advise)

    def go_on(
        self, committed: list[int], proposed: list[int], length: int, advise: Adviser | None = None
    ) -> Proposal | None:
        """The logged draft's tokens after ``proposed``, until ``advise`` ends the draft."""
        trace, held, n = self.trace, len(committed), len(self.drafts)
        begin = held + len(proposed) - trace.prompt - 1
        right = begin < n and self.text[held : held + len(proposed)] == proposed
        at = min(begin, n - 1)
        reject = self.rejects[at] if right else at
        tokens: list[int] = []
        self.steps, self.fed = 0, self.unseen(held) + len(proposed)
        while len(tokens) < length:
            self.steps += 1
            place = begin + self.steps - 1
            beyond = place - reject if right else self.steps
            if right and beyond <= 0 and place < n:
                token, sure = self.drafts[place], self.sure[place]
            else:
                left, depth = (reject if right else self.rejects[at]), min(max(beyond, 1), DEPTH) - 1
                left = min(left, n - 1)
                token, sure = int(trace.after[left, depth]), float(trace.beyond[left, depth])
            advice = Advice.MORE if advise is None else advise(self.steps, sure)
            if advice is Advice.DROP:
                break
            tokens.append(token if right else -1)
            if advice is Advice.LAST:
                break
        self.seen = held + len(proposed) + self.steps - 1
        return Proposal(self.name, tokens, None) if tokens else None

    def feed(self, committed: list[int], most: int) -> None:
        """As for a model."""
        self.seen += min(most, self.unseen(len(committed)))

    def reserve(self, length: int) -> None:
        """Nothing to reserve."""

    def rollback(self, length: int) -> None:
        """As for a model."""
        self.seen = min(self.seen, length)


def _next_rejected(accepted: list[bool]) -> list[int]:
    """For each position the first rejected position at or after it; the end of the text if there is none."""
    found, following = [0] * len(accepted), len(accepted)
    for place in range(len(accepted) - 1, -1, -1):
        if not accepted[place]:
            following = place
        found[place] = following
    return found


class HistoryAlone(FixedLength):
    """History alone: a proposal of at most ``length`` tokens wherever it finds anything, else plain decoding."""

    def next_length(self, limit: int, waiting: int = 0, context: int = 0) -> int:
        """Never draft with the model."""
        return 0

    def lead(self, reach: Sequence[float], length: int, limit: int, singly: bool = False, passed: int = 0) -> Lead:
        """All that was found, up to ``length``."""
        return Lead(min(self.length, limit, len(reach)), 0)


class HistoryFirst(FixedLength):
    """A fixed precedence: history wherever it finds anything, else the model's draft of fixed length."""

    def lead(self, reach: Sequence[float], length: int, limit: int, singly: bool = False, passed: int = 0) -> Lead:
        """All that was found, else the model's draft."""
        return Lead(min(DEPTH, limit, len(reach)), 0) if reach else Lead(0, length)


class ModelFirst(FixedLength):
    """The other precedence: the model's draft of fixed length, and history behind it wherever it finds anything."""

    def worth_looking(self, behind: bool = False) -> bool:
        """Before every round and behind every draft."""
        return self.length > 0

    def lead(self, reach: Sequence[float], length: int, limit: int, singly: bool = False, passed: int = 0) -> Lead:
        """Always the model's draft."""
        return Lead(0, length)

    def tail_may_pay(self, drafted: int, sure: float) -> bool:
        """Always, up to the longest draft."""
        return drafted < DEPTH

    def tail(self, drafted: int, sure: float, reach: Sequence[float], limit: int) -> int:
        """All that was found."""
        return min(len(reach), limit, DEPTH - drafted)


class Either(FixedLength):
    """The default behaviour of a fixed draft length: the model's draft, or history where that promises more tokens."""


@dataclass
class Replayed:
    """Totals over a workload: ``committed`` tokens, ``seconds``, ``rounds``, ``looks`` (history lookups), and by
    drafter the tokens drafted and accepted."""

    committed: int
    seconds: float
    rounds: int
    drafted: Counter[str]
    accepted: Counter[str]
    looks: int = 0

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.committed / self.seconds


def replay(make: object, workload: list[Stretch], costs: CostTable, seed: int = 0, model: bool = True) -> Replayed:
    """Run the policy that ``make`` returns for a clock over all generations. Without ``model`` there is no draft.
    Policies that never lead with history make no lookups."""
    noise, clock = Noise(seed), Clock()
    policy: LengthPolicy = make(clock)  # type: ignore[operator]
    looks = type(policy) not in (FixedLength, GoodputLength)
    records, matches, running = suffixes(), Matches(), RunningText()
    found = Replayed(0, 0.0, 0, Counter(), Counter())
    number = 0
    for stretch in workload:
        logged: Logged | None = None
        if stretch.swap:
            policy.swapped()
        for trace in stretch.traces:
            policy.begin(Scope("replay", 0.0))
            history = Looking(running, records, matches, 0.0, clock=clock)
            logged = Logged(trace, logged)
            _replay_one(policy, logged, costs, noise, clock, found, history if looks else None, model)
            policy.ended(len(trace.text) - trace.prompt)
            if looks:
                number += 1
                records.add(number, np.ascontiguousarray(trace.text))
    return found


def _replay_one(
    policy: LengthPolicy,
    logged: Logged,
    costs: CostTable,
    noise: Noise,
    clock: Clock,
    found: Replayed,
    history: Looking | None,
    model: bool,
) -> None:
    trace = logged.trace
    text, end = logged.text, len(trace.text)
    committed = text[: trace.prompt + 1]
    grafting = None if history is None else Grafting(logged if model else None, history, policy)
    while len(committed) < end:
        held = len(committed)
        limit = end - held - 1 if trace.limited else UNLIMITED
        length = policy.next_length(limit if model else 0, logged.unseen(held), held)
        logged.steps = logged.fed = 0
        most = None if grafting is None else grafting.plan(committed, length, limit)
        if grafting is not None and most is not None:
            proposal = grafting.propose(committed, most, policy.adviser) if most else None
        else:
            proposal = logged.propose(committed, length, policy.adviser) if length else None
        tokens: list[int] = [] if proposal is None else proposal.tokens  # type: ignore[assignment]
        right = text[held : held + len(tokens)]
        accepted = next((i for i, (a, b) in enumerate(zip(tokens, right, strict=False)) if a != b), len(right))
        draft_s = 0.0
        if logged.steps:
            draft_s = costs.start_s + logged.steps * costs.draft_s + logged.fed * costs.catch_up_s
        verify_s = pass_s(costs, len(tokens))
        who, first = ("none", 0) if proposal is None else (proposal.drafter, proposal.first)
        outcome = Round(who, len(tokens), min(accepted, len(tokens)), noise(draft_s), noise(verify_s), first)
        said = text[held : held + accepted + 1]
        committed = committed + said
        logged.rollback(held + accepted)
        if grafting is not None and most is not None:
            grafting.observe(said)
        if outcome.drafter in FREE:
            policy.observe_free(outcome)
        else:
            policy.observe(outcome)
        between_s = costs.overhead_s + len(said) * costs.token_s
        clock.now += outcome.draft_s + outcome.verify_s + noise(between_s)
        found.committed += len(said)
        found.seconds += draft_s + verify_s + between_s
        found.rounds += 1
        for part in outcome.parts:
            found.drafted[part.drafter] += part.drafted
            found.accepted[part.drafter] += part.accepted
    if history is not None:
        history.settle()  # as at the end of an answer
        found.seconds += history.looks * LOOK_S
        found.looks += history.looks


def with_history(logged: dict[str, list[Trace]]) -> dict[str, list[Stretch]]:
    """All workloads of ``controller.py``, and two about history: the same prompts several times over, and all kinds
    shuffled without any repetition."""
    found = workloads_of(logged)
    kinds = [name for name in logged if "+" not in name and name not in ("rewrites", "conversation")]
    chance = np.random.default_rng(0)
    some = [trace for kind in kinds for trace in logged[kind][:OF_EACH]]
    again = [some[i] for _ in range(PASSES) for i in chance.permutation(len(some))]
    found["the same prompts three times"] = [Stretch(again)]
    apart = {trace.text.tobytes(): trace for kind in kinds for trace in logged[kind]}
    every = list(apart.values())
    found["all kinds shuffled, none twice"] = [Stretch([every[i] for i in chance.permutation(len(every))[:200]])]
    return found


@dataclass(frozen=True)
class Row:
    """One workload: the tokens per second of each way over those of the best single choice (named by ``best``), tokens
    a round by way, and for the full controller the tokens drafted and accepted by drafter."""

    workload: str
    generations: int
    tokens: int
    best: str
    best_speed_up: float
    ways: dict[str, float]
    per_round: dict[str, float]
    together: dict[str, tuple[int, int]]


def judge(name: str, workload: list[Stretch], costs: CostTable, seeds: int) -> Row:
    """Replay everything over one workload; the policies that decide by themselves run with ``seeds`` seeds of noise."""

    def fixed(kind: type[FixedLength], model: bool, lengths: Sequence[int] = LENGTHS) -> dict[int, Replayed]:
        return {k: replay(lambda clock, k=k: kind(k), workload, costs, 0, model) for k in lengths}

    single = {f"model, {k}": run for k, run in fixed(FixedLength, True).items()}
    single |= {f"history, {k}": run for k, run in fixed(HistoryAlone, False).items()}
    best = max(single, key=lambda way: single[way].rate)
    top, plain = single[best].rate, single["model, 0"].rate
    runs = {
        "best model": [max((run for way, run in single.items() if "model" in way), key=lambda run: run.rate)],
        "best history": [max((run for way, run in single.items() if "history" in way), key=lambda run: run.rate)],
        "history first": [max(fixed(HistoryFirst, True, PRECEDENCE_LENGTHS).values(), key=lambda run: run.rate)],
        "model first": [max(fixed(ModelFirst, True, PRECEDENCE_LENGTHS).values(), key=lambda run: run.rate)],
    }
    runs["either"] = [max(fixed(Either, True, PRECEDENCE_LENGTHS).values(), key=lambda run: run.rate)]
    decided = {
        "model": (lambda clock: GoodputLength(costs, clock=clock), True),
        "history": (lambda clock: GoodputWithHistory(costs, clock=clock), False),
        TOGETHER: (lambda clock: GoodputWithHistory(costs, clock=clock), True),
    }
    for way, (make, model) in decided.items():
        runs[way] = [replay(make, workload, costs, seed, model) for seed in range(seeds)]
    last = runs[TOGETHER][-1]
    return Row(
        workload=name,
        generations=sum(len(stretch.traces) for stretch in workload),
        tokens=last.committed,
        best=best,
        best_speed_up=top / plain,
        ways={way: float(np.mean([run.rate for run in some])) / top for way, some in runs.items()},
        per_round={way: float(np.mean([run.committed / run.rounds for run in some])) for way, some in runs.items()},
        together={who: (n, last.accepted[who]) for who, n in last.drafted.items() if n},
    )


def show(rows: list[Row]) -> None:
    """Print one line a workload and the means."""
    names = list(rows[0].ways)
    heads = "  ".join(f"{name:>13}" for name in names)
    print(f"{'workload':34} {'gen':>4} {'tokens':>6} {'best single':>11} {'x plain':>7}  {heads}")
    for row in rows:
        cells = "  ".join(f"{row.ways[n]:6.3f} {row.per_round[n]:6.2f}" for n in names)
        head = f"{row.workload:34} {row.generations:4} {row.tokens:6} {row.best:>11} {row.best_speed_up:7.3f}"
        print(f"{head}  {cells}  {row.together}")
    means = {n: math.exp(float(np.mean([math.log(r.ways[n]) for r in rows]))) for n in names}
    print(f"{'geometric mean':66}" + "  ".join(f"{means[n]:6.3f} {'':6}" for n in names))
    worst = min(rows, key=lambda row: row.ways[TOGETHER])
    print(f"\n{TOGETHER}: worst {worst.ways[TOGETHER]:.3f} ({worst.workload}), mean {means[TOGETHER]:.3f}")


def main() -> None:
    """Read the workloads, replay, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", type=Path, help="the file that replay_workloads.py wrote")
    parser.add_argument("--costs", type=Path, required=True, help="the output of adaptive calibrate --json")
    parser.add_argument("--seeds", type=int, default=3, help="runs of what decides by itself, under different noise")
    parser.add_argument("--only", nargs="+", help="parts of the names of workloads")
    parser.add_argument("--json", type=Path, help="write everything there as well")
    args = parser.parse_args()
    costs = read_costs(args.costs)
    wanted = with_history(load(args.workloads))
    if args.only:
        wanted = {name: w for name, w in wanted.items() if any(part in name for part in args.only)}
    rows = []
    for name, workload in wanted.items():
        rows.append(judge(name, workload, costs, args.seeds))
        print(json.dumps(asdict(rows[-1])), flush=True)
    show(rows)
    if args.json:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
