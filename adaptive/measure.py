"""Measures the costs of a round, with the same rounds that decoding runs.

In: a pair of engines. Out: ``Measured``: a ``CostTable``, the load of other programs meanwhile, and how consistent the
samples are. Some hundreds of rounds run, with the lengths in random order so that a slow moment of the machine affects
all of them. Other programs only make rounds slower, so a low quantile counts for each length, and lengths that the
others contradict are measured again.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
import statistics
import time
from collections import Counter
from collections.abc import Generator, Iterator
from dataclasses import dataclass

import torch

from adaptive.control.bounds import bounded, doubtful, with_neighbours
from adaptive.control.costs import LONGEST, CostTable, from_samples
from adaptive.control.goodput import GoodputLength
from adaptive.engines.cpu.kernels import library
from adaptive.engines.load import Forward, forward_of
from adaptive.machine import Load, LoadMeter
from adaptive.pair import Pair
from adaptive.timed_rounds import CATCH_UP, LENGTHS, PLACES, Kind, Samples, TimedRounds, by_tokens, low, thread_counts
from adaptive.types import Round, SamplingParams

# Tokens of context for the quick measurement, and tokens added to measure the cost of context.
CONTEXT, FURTHER = 64, 448
# LEAST_CATCH_UP: lowest cost of a token to catch up with, as a share of a draft step, if the clock shows none (a GPU):
# a cost of 0 is never corrected later. LEAST_STEP: lowest cost of a step, as a share of a long draft's seconds per
# token.
LEAST_CATCH_UP, LEAST_STEP = 0.001, 0.25
# Most sweeps over all lengths, seconds after which no more are started, and least sweeps: with fewer a quantile is
# chance.
SWEEPS, ENOUGH_S, LEAST_SWEEPS = 15, 3.0, 5
# Least sweeps on every number of threads, even a slower one. A number of threads is given up if a sweep takes HOPELESS
# times as long as the fastest: its threads wait for other programs.
LEAST_OF_EACH, HOPELESS = 2, 6.0
# Sweeps over doubtful lengths at a time, and how many times at most.
SWEEPS_AGAIN, AGAIN = 8, 4
# Relative difference between the two halves of a length's samples up to which they agree.
AGREE = 0.1
# Share of the time between two rounds of plain decoding that is counted per round; the rest is counted per token. Live
# decoding corrects the split (``Between``).
OF_ROUND = 0.75
# Rounds over which choosing is timed together, and repetitions.
CHOICES, CHOICE_REPEATS = 16, 9


@dataclass(frozen=True)
class Measured:
    """Measured costs of rounds.

    ``load``: use of the machine during the measurement (None: it was too short to tell). ``spread``: relative
    difference between two halves of the samples, for verifying 0 to ``LONGEST`` drafted tokens.
    """

    costs: CostTable
    load: Load | None
    spread: tuple[float, ...]

    @property
    def trusted(self) -> bool:
        """Whether these costs hold on an otherwise idle machine: no load meanwhile, and the halves agree."""
        return not (self.load is not None and self.load.busy) and max(self.spread) <= AGREE


def where_it_runs(pair: Pair) -> str:
    """A string of what the costs depend on besides the checkpoints: engines, weights, devices, threads, kernels."""
    engines = [engine for engine in (pair.target, pair.draft) if engine is not None]
    found = library()
    kernels = "torch" if found is None else found.name
    on = f"{torch.get_num_threads()}:{kernels}"
    named = [f"{engine.name}:{engine.weights}:{engine.device}:{on}" for engine in engines]
    return " ".join(named + ([] if pair.remote is None else [f"draft at {pair.remote.url}"]))


def drafts_for_disk(pair: Pair) -> bool:
    """Whether something drafts for a target whose passes take as long as reading its weights from disk, so that
    verifying more tokens is free."""
    drafted = pair.draft is not None or pair.remote is not None
    return drafted and forward_of(pair.target) is Forward.STREAMED


def makes_trees(pair: Pair) -> bool:
    """Whether the draft makes trees and the target verifies them."""
    draft = pair.draft if pair.remote is None else pair.remote.hello
    return draft is not None and draft.trees and pair.target.trees


def attentive_on(pair: Pair) -> bool:
    """Whether reading the draft's confidence at every token is cheap: on the CPU, and on CUDA, where the device itself
    applies the thresholds (``drafting/queued.py``). Elsewhere the program would wait for it before every step."""
    return pair.draft is not None and pair.draft.device.type in ("cpu", "cuda")


def measure(pair: Pair, sampling: SamplingParams, thorough: bool = False) -> Measured:
    """Costs of ``pair`` on this machine now, under these sampling parameters (drawing costs more than an argmax).

    ``thorough`` takes longer and also measures the cost of a longer context.
    """
    rounds = measuring(pair, sampling, thorough)
    while True:
        try:
            next(rounds)
        except StopIteration as ended:
            found: Measured = ended.value
            return found


def measuring(pair: Pair, sampling: SamplingParams, thorough: bool = False) -> Generator[None, None, Measured]:
    """``measure`` as a generator with a step per round (the first is a pass over some tokens of context). Between two
    steps the caller may do other work, use the engines, or close the generator."""
    meter, whole, attentive = LoadMeter(), LoadMeter(), attentive_on(pair)
    context = min(CONTEXT, pair.target.context_length // 4)
    rounds = TimedRounds(pair, sampling, context, attentive)
    yield
    samples, waiting = Samples(), min(CATCH_UP, context - 2)
    enough = ENOUGH_S * (3 if thorough else 1)
    yield from _sweeps(rounds, samples, waiting, thread_counts(pair), SWEEPS * (3 if thorough else 1), enough)
    load = meter.read()
    alone = load is None or not load.busy
    yield from _again(rounds, samples, alone, enough)
    spread = samples.spread(Kind.VERIFY)
    verify_s = samples.costs(Kind.VERIFY, alone)
    if not alone or max(spread.values()) > AGREE:
        # On an idle machine with consistent samples, broken bounds are a property of this engine's kernels, and stay.
        verify_s = {count - 1: seconds for count, seconds in bounded(by_tokens(verify_s)).items()}
    start_s, draft_s, catch_up_s = _drafting(samples, alone, waiting)
    context_s = 0.0
    if thorough and pair.target.context_length > context + FURTHER + PLACES + LONGEST + 2:
        longer = TimedRounds(pair, sampling, context + FURTHER, attentive)
        yield
        context_s = yield from _longer(rounds, longer, samples.usual())
    beside_s = yield from rounds.beside(pair)
    table = CostTable(
        start_s=start_s,
        draft_s=draft_s,
        catch_up_s=catch_up_s,
        verify_s=from_samples(verify_s),
        overhead_s=0.0,
        token_s=max(1e-9, (1.0 - OF_ROUND) * beside_s),
        context_s=context_s,
        context=context,
        plain_s=min(samples.costs(Kind.PLAIN, alone)[0], verify_s[0]),
    )
    overhead_s = yield from _choosing(table, attentive)
    table = dataclasses.replace(table, overhead_s=overhead_s + OF_ROUND * beside_s)
    by_length = (spread[min(k for k in LENGTHS if k >= length)] for length in range(LONGEST + 1))
    return Measured(table, whole.read(), tuple(by_length))


def _sweeps(
    rounds: TimedRounds, samples: Samples, waiting: int, threads: list[int], times: int, enough: float
) -> Iterator[None]:
    """Sweeps over all lengths, with plain decoding between them, each on the number of ``threads`` with the least time
    so far."""
    order, began, abandoned = random.Random(0), time.perf_counter(), Counter[int]()
    while True:
        done = max(samples.sweeps.values(), default=0)
        count = min(threads, key=lambda count: samples.passed[count])
        if done >= times or (done >= LEAST_SWEEPS and time.perf_counter() - began > enough):
            unsure = [c for c in threads if max(samples.sweeps[c], abandoned[c]) < LEAST_OF_EACH]
            if not unsure:
                return
            count = unsure[0]
        limit = HOPELESS * min(map(samples.sweep_s, samples.sweeps), default=float("inf"))
        lengths, before = [*LENGTHS, 0], samples.passed[count]
        for _ in rounds.sweep(samples, order.sample(lengths, len(lengths)), count):
            yield
            if samples.passed[count] - before > limit:
                samples.drop(count)
                abandoned[count] += 1
                break
        else:
            rounds.catch_up(samples, waiting, count)
            samples.sweeps[count] += 1
            yield


def _again(rounds: TimedRounds, samples: Samples, alone: bool, enough: float) -> Iterator[None]:
    """Repeat lengths that other lengths or their own samples contradict, until they agree."""
    order, began = random.Random(1), time.perf_counter()
    for _ in range(AGAIN):
        verify, draft = by_tokens(samples.costs(Kind.VERIFY, alone)), samples.costs(Kind.DRAFT, alone)
        found = {count - 1 for count in doubtful(verify)} | doubtful(draft)
        if found:
            found = with_neighbours(found, list(LENGTHS))
        for kind in (Kind.VERIFY, Kind.DRAFT):
            found |= {length for length, spread in samples.spread(kind).items() if spread > AGREE}
        lengths = [0, *found - {0}]
        for _ in range(SWEEPS_AGAIN if found else 0):
            if time.perf_counter() - began > enough:
                return
            yield from rounds.sweep(samples, order.sample(lengths, len(lengths)), samples.usual())


def _drafting(samples: Samples, alone: bool, waiting: int) -> tuple[float, float, float]:
    """Seconds of starting a draft, of a draft step, and of a token to catch up with."""
    drafts = bounded(samples.costs(Kind.DRAFT, alone))
    start_s, draft_s = line(drafts)
    least = LEAST_STEP * drafts[max(drafts)] / max(drafts)
    if draft_s < least:
        start_s, draft_s = max(0.0, drafts[1] - least), least
    caught_up_s = samples.costs(Kind.CAUGHT_UP, alone)[1] - start_s - draft_s
    return start_s, draft_s, max(LEAST_CATCH_UP * draft_s, caught_up_s / waiting)


def _longer(rounds: TimedRounds, longer: TimedRounds, threads: int) -> Generator[None, None, float]:
    """Seconds that one more token of context adds to a plain step."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(3 * LEAST_SWEEPS):
        for found, timed in zip(times, (rounds, longer), strict=True):
            timed.round(0, threads)  # untimed: the other text has just used the processor's caches
            found.append(timed.round(0, threads).verify_s)
            yield
    return max(0.0, low(times[1]) - low(times[0])) / FURTHER


def line(points: dict[int, float]) -> tuple[float, float]:
    """Intercept (at least 0) and slope of a line through ``points``, by medians (Theil and Sen)."""
    slope = statistics.median((points[b] - points[a]) / (b - a) for a, b in itertools.combinations(points, 2))
    return max(0.0, statistics.median(y - x * slope for x, y in points.items())), slope


def _choosing(costs: CostTable, attentive: bool) -> Generator[None, None, float]:
    """Seconds per round that the default policy takes to choose, with two drafted tokens a round."""
    policy, times = GoodputLength(costs, attentive=attentive), []
    outcome = Round("model", 2, 1, 2 * costs.draft_s, costs.verify_s[2])
    for _ in range(CHOICE_REPEATS):
        began = time.perf_counter()
        for number in range(CHOICES):
            policy.next_length(LONGEST, 0, number)
            if attentive:
                policy.stopping(1, 0.9)
                policy.stopping(2, 0.5)
            policy.observe(outcome)
        times.append((time.perf_counter() - began) / CHOICES)
        yield
    return low(times)
