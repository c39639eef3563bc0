"""Replays every draft-length policy over logged generations, exactly and without models.

In:  the file of ``benchmarks/replay_workloads.py`` and the costs that ``adaptive calibrate --json``
     measured. Out: for every workload each policy's tokens per second against the best fixed length
     in hindsight, the recovery after a switch, and the processor time of the policy's decisions.

The target is greedy, so its text is fixed and a policy only decides how many rounds it takes. A
round's time is computed from the costs. The policy observes that time with noise (10%, and one round
in fifty appears to take four times as long), so that it has to learn costs as in real use.

    python benchmarks/controller.py workloads.npz --costs costs.json

``--noise`` replays the disturbances of a machine that other programs use, from the log of a lived session
(``benchmarks/lived_session.py --out`` keeps the log). For every policy, the true time of a round is then its cost
times the slowdown of the round that the session logged at the same second.

    python benchmarks/controller.py workloads.npz --costs costs.json --noise lived.db
"""

from __future__ import annotations

import argparse
import bisect
import contextlib
import copy
import json
import math
import sqlite3
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from length_policies import AdditiveLength, AverageLength, BanditLength, ThresholdLength
from replay_workloads import DEPTH, Trace, load

from adaptive.control.costs import CostTable
from adaptive.control.goodput import GoodputLength
from adaptive.control.policy import Advice, FixedLength, LengthPolicy, Scope
from adaptive.types import Round

LENGTHS = tuple(range(DEPTH + 1))
# Changes of kind in the middle of a workload: from text that the draft predicts well to text that it does not,
# and back.
SWITCHES = (
    ("code_instructions", "gsm8k_train"),
    ("gsm8k_train", "code_instructions"),
    ("tool_calls", "roleplay"),
    ("gsm8k_train+useless", "code_instructions"),
)
# Kinds in the middle of which the draft receives its adapter.
SWAPPED = ("gsm8k_train", "tool_calls")
# The limit of a round in an answer that ends by itself: more than any draft length.
UNLIMITED = 1000
# Rounds after a change that a policy has to adapt, and tokens after these over which it is then judged.
SETTLED, WINDOW = 60, 150
# Orders of the answers over which the recovery is averaged: the ratio of one window varies by some 15%.
ORDERS = 40


@dataclass(frozen=True)
class Stretch:
    """Consecutive generations under one draft. ``swap``: the draft is swapped before the stretch begins."""

    traces: list[Trace]
    swap: bool = False


@dataclass(frozen=True)
class Run:
    """The result of one policy on a workload: tokens, seconds and drafted tokens at the end of every round (tokens and
    seconds summed up), and the processor seconds that the policy's decisions took."""

    tokens: np.ndarray
    seconds: np.ndarray
    drafted: np.ndarray
    choosing_s: float

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return float(self.tokens[-1] / self.seconds[-1])


class Noise:
    """Multiplies seconds by random factors, as a clock on a busy machine would; reproducible by a seed."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        factors = np.exp(rng.normal(0, 0.1, 8192)) * np.where(rng.random(8192) < 0.02, 4.0, 1.0)
        self.factors: list[float] = factors.tolist()
        self.place = 0

    def __call__(self, seconds: float) -> float:
        self.place = (self.place + 1) % len(self.factors)
        return seconds * self.factors[self.place]


class Recorded:
    """Slowdown of rounds over time on a machine that other programs use, from the log of a session lived on it. Starts
    over at the end of the log. ``begins`` is the second of the recording with which a replay begins."""

    begins = 0.0

    def __init__(self, log: Path, costs: CostTable) -> None:
        with contextlib.closing(sqlite3.connect(f"file:{log}?mode=ro", uri=True)) as connection:
            rows = connection.execute(
                "SELECT drafted, verify_s FROM rounds WHERE verify_s > 0 ORDER BY generation, idx"
            ).fetchall()
        seconds = np.array([seen for _, seen in rows])
        drafted = np.minimum([drafted for drafted, _ in rows], DEPTH)
        # Slowdown: seconds over the fastest tenth of that session's rounds with the same number of drafted tokens.
        fastest = {k: float(np.quantile(seconds[drafted == k], 0.1)) for k in np.unique(drafted)}
        factors = seconds / np.array([fastest[k] for k in drafted])
        self.factors: list[float] = factors.tolist()
        # When each logged round ends, as if it had been a plain step at these costs.
        self.ends: list[float] = np.cumsum(factors * costs.plain_step_s).tolist()

    def at(self, now: float) -> float:
        """The slowdown of a round that begins after ``now`` seconds."""
        place = bisect.bisect_right(self.ends, (self.begins + now) % self.ends[-1])
        return self.factors[min(place, len(self.factors) - 1)]

    def begun(self, share: float) -> Recorded:
        """The same, begun after that ``share`` of the recording."""
        other = copy.copy(self)
        other.begins = share * self.ends[-1]
        return other


class Clock:
    """The replay's own time, which advances between rounds."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


Maker = Callable[[Clock], LengthPolicy]


def replay(
    make: Maker, workload: list[Stretch], costs: CostTable, seed: int = 0, recorded: Recorded | None = None
) -> Run:
    """Run the policy that ``make`` returns over all generations."""
    noise, clock = Noise(seed), Clock()
    policy = make(clock)
    rounds: list[tuple[int, float, int]] = []
    choosing = 0.0
    for stretch in workload:
        before, seen = None, 0
        if stretch.swap:
            policy.swapped()
        for trace in stretch.traces:
            policy.begin(Scope("replay", 0.0))
            lag = trace.prompt - kept(before, seen, trace)
            took, lag = _replay_one(policy, trace, costs, noise, rounds, clock, recorded, lag)
            before, seen = trace, len(trace.text) - 1 - lag
            choosing += took
            policy.ended(len(trace.accepted))
    tokens, seconds, drafted = (np.array(column) for column in zip(*rounds, strict=True))
    return Run(tokens.cumsum(), seconds.cumsum(), drafted, choosing)


def _replay_one(
    policy: LengthPolicy,
    trace: Trace,
    costs: CostTable,
    noise: Callable[[float], float],
    rounds: list[tuple[int, float, int]],
    clock: Clock,
    recorded: Recorded | None,
    lag: int,
) -> tuple[float, int]:
    """Replay one generation round by round; ``lag`` tokens are not in the draft's cache at its beginning. Returns the
    processor seconds that the policy's decisions took, and the tokens that are not in the cache at its end."""
    at, n, choosing = 0, len(trace.accepted), 0.0
    leaves = np.append(np.flatnonzero(~trace.accepted), n).tolist()
    confidence = trace.confidence.tolist()
    nearest, advise = 0, policy.adviser
    while at < n:
        while leaves[nearest] < at:
            nearest += 1
        reject = leaves[nearest]
        began = time.thread_time()
        length = policy.next_length(n - at - 1 if trace.limited else UNLIMITED, lag, trace.prompt + at)
        choosing += time.thread_time() - began
        steps = drafted = 0
        while drafted < length:
            steps += 1
            if advise is not None:
                place = at + steps - 1
                if place <= reject and place < n:
                    sure = confidence[place]
                else:
                    left = min(reject, n - 1)
                    sure = float(trace.beyond[left, min(place - left, DEPTH) - 1])
                began = time.thread_time()
                advice = advise(steps, sure)
                choosing += time.thread_time() - began
                if advice is Advice.DROP:
                    break
                drafted += 1
                if advice is Advice.LAST:
                    break
            else:
                drafted += 1
        accepted = min(drafted, reject - at)
        draft_s = costs.start_s + steps * costs.draft_s + lag * costs.catch_up_s if steps else 0.0
        verify_s = pass_s(costs, drafted)
        if recorded is not None:  # this changes the true time, not only the observed one
            draft_s, verify_s = draft_s * recorded.at(clock.now), verify_s * recorded.at(clock.now)
            noise = _exactly
        began = time.thread_time()
        outcome = Round("model" if drafted else "none", drafted, accepted, noise(draft_s), noise(verify_s))
        policy.observe(outcome)
        choosing += time.thread_time() - began
        committed = min(accepted + 1, n - at)
        between_s = costs.overhead_s + committed * costs.token_s
        rounds.append((committed, draft_s + verify_s + between_s, drafted))
        clock.now += outcome.draft_s + outcome.verify_s + noise(between_s)
        lag = max(0, 1 + accepted - steps) if steps else lag + accepted + 1
        at += accepted + 1
    return choosing, lag


def kept(before: Trace | None, seen: int, trace: Trace) -> int:
    """The number of tokens of the prompt that the draft's cache holds. In a conversation it holds the first ``seen``
    tokens of the text of the answer ``before``, where the prompt has the same; a new conversation has an empty one."""
    if before is None:
        return 0
    held, prompt = before.text[:-1], trace.text[: trace.prompt]
    most = min(len(held), len(prompt))
    differs = np.flatnonzero(held[:most] != prompt[:most])
    common = int(differs[0]) if len(differs) else most
    return min(seen, common) if common >= before.prompt else 0


def _exactly(seconds: float) -> float:
    return seconds


def pass_s(costs: CostTable, drafted: int) -> float:
    """Seconds of the pass of a round. With nothing drafted it is a plain step among plain steps. ``verify_s[0]``, after
    a pass of another length, takes longer: plain decoding would look slow."""
    return costs.verify_s[drafted] if drafted else costs.plain_step_s


def best_per_round(workload: list[Stretch], costs: CostTable) -> float:
    """Tokens per second with the best length in every round, given the number of accepted tokens (no catch-up cost)."""
    tokens, seconds = 0, 0.0
    cost = [(costs.start_s if k else 0.0) + k * costs.draft_s + pass_s(costs, k) + costs.overhead_s for k in LENGTHS]
    for stretch in workload:
        for trace in stretch.traces:
            n = len(trace.accepted)
            least = [0.0] * (n + DEPTH + 2)
            run = 0
            for at in range(n - 1, -1, -1):
                run = run + 1 if trace.accepted[at] else 0
                least[at] = min(cost[k] + least[at + k + 1] for k in range(min(run, DEPTH) + 1))
            tokens, seconds = tokens + n, seconds + least[0] + n * costs.token_s
    return tokens / seconds


def workloads_of(logged: dict[str, list[Trace]]) -> dict[str, list[Stretch]]:
    """Workloads of each kind by itself, and workloads in which the kind or the adapter changes half way."""
    kinds = [name for name in logged if "+" not in name]
    found = {kind: [Stretch(logged[kind])] for kind in kinds}
    found |= {name: [Stretch(logged[name])] for name in logged if name.endswith("+useless")}
    for before, after in SWITCHES:
        if before in logged and after in logged:
            found[f"{before} -> {after}"] = _halves(logged[before], logged[after], swap=False)
    for name in (name for name in logged if name.endswith("+adapter")):
        kind = name.removesuffix("+adapter")
        if kind in SWAPPED:
            found[f"{kind}, adapter swapped in"] = _halves(logged[kind], logged[name], swap=True)
    return found


def _halves(before: list[Trace], after: list[Trace], swap: bool) -> list[Stretch]:
    """The first half of one and the second half of the other."""
    return [Stretch(before[: len(before) // 2]), Stretch(after[len(after) // 2 :], swap)]


@dataclass(frozen=True)
class Row:
    """One workload: the best fixed length and its rate over plain decoding, and every policy's rate
    over that of the best fixed length. ``recovery`` is that of the goodput policy after a change."""

    workload: str
    generations: int
    tokens: int
    best_length: int
    best_speed_up: float
    useless: bool
    policies: dict[str, float]
    per_round: float
    choosing_us: float
    choosing_share: float
    recovery: float | None


def makers(costs: CostTable) -> dict[str, Maker]:
    """Every policy except the fixed lengths. Only the goodput policies start with the measured costs."""
    return {
        "aimd": lambda clock: AdditiveLength(DEPTH),
        "threshold": lambda clock: ThresholdLength(DEPTH),
        "ema": lambda clock: AverageLength(DEPTH),
        "ucb": lambda clock: BanditLength(8),
        "goodput, no confidence": lambda clock: GoodputLength(costs, attentive=False, clock=clock),
        "goodput": lambda clock: GoodputLength(costs, clock=clock),
    }


def judge(name: str, workload: list[Stretch], costs: CostTable, seeds: int, recorded: Recorded | None = None) -> Row:
    """Replay every policy over one workload; rates are means over ``seeds`` seeds of noise, or as many places of the
    recording, evenly spread."""
    noises = [None] if recorded is None else [recorded.begun(place / seeds) for place in range(seeds)]

    def alone(length: int) -> list[float]:
        return [replay(lambda _: FixedLength(length), workload, costs, 0, noise).rate for noise in noises]

    rates_of = {length: alone(length) for length in LENGTHS}
    fixed = {length: float(np.mean(found)) for length, found in rates_of.items()}
    best = max(fixed, key=fixed.__getitem__)
    rates, last = {}, None
    for policy, make in makers(costs).items():
        runs = [replay(make, workload, costs, seed, noises[seed % len(noises)]) for seed in range(seeds)]
        rates[policy] = float(np.mean([run.rate / rates_of[best][n % len(noises)] for n, run in enumerate(runs)]))
        last = runs
    assert last is not None
    seconds = sum(float(run.seconds[-1]) for run in last)
    rounds = sum(len(run.seconds) for run in last)
    choosing = sum(run.choosing_s for run in last)
    return Row(
        workload=name,
        generations=sum(len(s.traces) for s in workload),
        tokens=int(last[0].tokens[-1]),
        best_length=best,
        best_speed_up=fixed[best] / fixed[0],
        useless=name.endswith("+useless"),
        policies=rates,
        per_round=best_per_round(workload, costs) / fixed[best],
        choosing_us=choosing / rounds * 1e6,
        choosing_share=choosing / seconds,
        recovery=recovery(workload, costs, seeds) if len(workload) > 1 and recorded is None else None,
    )


def recovery(workload: list[Stretch], costs: CostTable, orders: int) -> float:
    """The recovery after a change: goodput's rate over the ``WINDOW`` tokens that begin ``SETTLED`` rounds after the
    change, over the rate on the same tokens of the length that is best after the change. The mean over ``orders``
    (at least ``ORDERS``) orders of the answers, since one window is mostly chance."""
    after = Stretch(workload[1].traces)
    fixed = {k: replay(lambda clock, k=k: FixedLength(k), [after], costs).rate for k in LENGTHS}  # type: ignore[misc]
    best = max(fixed, key=fixed.__getitem__)
    ours, theirs = 0.0, 0.0
    for order in range(max(orders, ORDERS)):
        shuffled = [Stretch(_shuffled(s.traces, order), s.swap) for s in workload]
        start = sum(len(t.accepted) for t in shuffled[0].traces)
        run = replay(lambda clock: GoodputLength(costs, clock=clock), shuffled, costs, order)
        other = replay(lambda clock: FixedLength(best), shuffled, costs, order)
        changed = int(np.searchsorted(run.tokens, start, side="right"))
        begin = run.tokens[min(changed + SETTLED, len(run.tokens) - 1)]
        ours += _seconds_between(run, begin, begin + WINDOW)
        theirs += _seconds_between(other, begin, begin + WINDOW)
    return theirs / ours


def _shuffled(traces: list[Trace], seed: int) -> list[Trace]:
    return [traces[i] for i in np.random.default_rng(seed).permutation(len(traces))]


def _seconds_between(run: Run, first: int, last: int) -> float:
    """Seconds from the ``first`` token to the ``last``, linear within a round."""
    begin, end = np.interp([first, last], run.tokens, run.seconds)
    return float(end - begin)


def read_costs(file: Path) -> CostTable:
    """The ``costs`` in the output of ``adaptive calibrate --json``."""
    stored = json.loads(file.read_text(encoding="utf-8"))["costs"]
    return CostTable(**{**stored, "verify_s": tuple(stored["verify_s"])})


def show(rows: list[Row]) -> None:
    """Print one line a workload, the means, and the figures that the docs promise."""
    names = list(rows[0].policies)
    print(
        f"{'workload':38} {'gen':>4} {'tokens':>7} {'best':>4} {'x plain':>7}  "
        + "  ".join(f"{n:>9.9}" for n in names)
        + "  per round"
    )
    for row in rows:
        print(
            f"{row.workload:38} {row.generations:4} {row.tokens:7} {row.best_length:4} {row.best_speed_up:7.3f}  "
            + "  ".join(f"{row.policies[n]:9.3f}" for n in names)
            + f"  {row.per_round:9.3f}"
        )
    means = {n: math.exp(float(np.mean([math.log(r.policies[n]) for r in rows]))) for n in names}
    print(f"{'geometric mean':64}" + "  ".join(f"{means[n]:9.3f}" for n in names))
    worst = min(rows, key=lambda r: r.policies["goodput"])
    print(f"\ngoodput: worst {worst.policies['goodput']:.3f} ({worst.workload}), mean {means['goodput']:.3f}")
    for row in (r for r in rows if r.useless):
        print(f"{row.workload}: {row.policies['goodput'] * row.best_speed_up:.3f} of plain decoding")
    for row in (r for r in rows if r.recovery is not None):
        print(f"{row.workload}: {row.recovery:.3f} of the best length {SETTLED} rounds after the change")
    share = max(row.choosing_share for row in rows)
    print(f"choosing: {np.mean([r.choosing_us for r in rows]):.1f} us a round, at most {share:.2%} of a round's time")


def main() -> None:
    """Read the workloads, replay, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", type=Path, help="the file that replay_workloads.py wrote")
    parser.add_argument("--costs", type=Path, required=True, help="the output of adaptive calibrate --json")
    parser.add_argument(
        "--seeds",
        type=int,
        default=3,
        help="runs of every policy: seeds of noise, or places of the log",
    )
    parser.add_argument("--noise", type=Path, help="log of a lived session whose machine the rounds run on")
    parser.add_argument("--json", type=Path, help="write everything there as well")
    args = parser.parse_args()
    costs = read_costs(args.costs)
    recorded = Recorded(args.noise, costs) if args.noise else None
    rows = [judge(name, w, costs, args.seeds, recorded) for name, w in workloads_of(load(args.workloads)).items()]
    show(rows)
    if args.json:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
