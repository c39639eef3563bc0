"""Measuring what a round costs, with the very round that decoding runs.

In: a pair of engines. Out: ``Measured``: a ``CostTable``, what else used the machine meanwhile, and how far the figures
are to be trusted. Some hundreds of rounds, the lengths in random order so that a slow moment of the machine falls on
all of them. Whatever a machine does besides only makes rounds slower: of each length a low quantile counts, and what
the other lengths contradict is measured again.
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

# Tokens of context at the quick measurement, and how many more for the share that context has.
CONTEXT, FURTHER = 64, 448
# Share of a draft step that one token to catch up with takes at least, where the clock shows none (a GPU): what is 0 is
# never learned. And the share of a long draft's seconds, by its tokens, that a step takes at least.
LEAST_CATCH_UP, LEAST_STEP = 0.001, 0.25
# Sweeps over all lengths, and seconds after which no further ones are started. Fewer than 5 leave a quantile to chance.
SWEEPS, ENOUGH_S, LEAST_SWEEPS = 15, 3.0, 5
# Sweeps at least on a number of threads that takes longer than another. One that takes so many times as long is given
# up: its threads wait for other programs.
LEAST_OF_EACH, HOPELESS = 2, 6.0
# Sweeps over what is in doubt, and how often at most that is done.
SWEEPS_AGAIN, AGAIN = 8, 4
# Relative difference between the two halves of a pass's samples up to which they agree.
AGREE = 0.1
# Share of what comes between two rounds of plain decoding that is of the round, whatever it commits. What is lived with
# tells the two apart (``Between``).
OF_ROUND = 0.75
# Rounds over which choosing is timed at once, and how often.
CHOICES, CHOICE_REPEATS = 16, 9


@dataclass(frozen=True)
class Measured:
    """What rounds cost.

    ``load`` is what else used the machine meanwhile (None: it was over before that could be said). ``spread`` is by how
    much two halves of the samples differ, as a share, for verifying 0 to ``LONGEST`` drafted tokens.
    """

    costs: CostTable
    load: Load | None
    spread: tuple[float, ...]

    @property
    def trusted(self) -> bool:
        """Whether these costs hold when nothing else runs: others left the machine alone, and the halves agree."""
        return not (self.load is not None and self.load.busy) and max(self.spread) <= AGREE


def where_it_runs(pair: Pair) -> str:
    """Names what the costs depend on besides the checkpoints: how both models run, on what."""
    engines = [engine for engine in (pair.target, pair.draft) if engine is not None]
    found = library()
    kernels = "torch" if found is None else found.name
    on = f"{torch.get_num_threads()}:{kernels}"
    named = [f"{engine.name}:{engine.weights}:{engine.device}:{on}" for engine in engines]
    return " ".join(named + ([] if pair.remote is None else [f"draft at {pair.remote.url}"]))


def trees_pay(pair: Pair) -> bool:
    """Whether the target's passes take what reading its weights takes, so that trees may be verified for nothing."""
    draft = pair.draft if pair.remote is None else pair.remote.hello
    can = draft is not None and draft.trees and pair.target.trees
    return can and forward_of(pair.target) is Forward.STREAMED


def attentive_on(pair: Pair) -> bool:
    """Whether asking the draft for its confidence at every token is cheap: on the processor, and where a device asks
    itself (``drafting/queued.py``); elsewhere it is waited for before the next step is queued."""
    return pair.draft is not None and pair.draft.device.type in ("cpu", "cuda")


def measure(pair: Pair, sampling: SamplingParams, thorough: bool = False) -> Measured:
    """Costs of ``pair`` here and now, under these sampling parameters (drawing costs more than an argmax).

    ``thorough`` takes longer and also measures what a longer context adds.
    """
    rounds = measuring(pair, sampling, thorough)
    while True:
        try:
            next(rounds)
        except StopIteration as ended:
            found: Measured = ended.value
            return found


def measuring(pair: Pair, sampling: SamplingParams, thorough: bool = False) -> Generator[None, None, Measured]:
    """``measure`` in steps of a round each (the first is a pass over some tokens of context): whoever has something
    else to do does it between two steps, or gives the generator up. Engines may be used meanwhile."""
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
        # Else what breaks a bound time and again with nothing in the way is how this engine's kernels are.
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
    """All lengths, plain decoding between them, on the number of ``threads`` that has had the least time so far."""
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
    """Measure what the other lengths contradict, and what its own samples do, until they agree."""
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
    """Seconds of starting a draft, of a step, and of a token to catch up with."""
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
            timed.round(0, threads)  # the other's has just used the caches
            found.append(timed.round(0, threads).verify_s)
            yield
    return max(0.0, low(times[1]) - low(times[0])) / FURTHER


def line(points: dict[int, float]) -> tuple[float, float]:
    """Intercept (at least 0) and slope of a line through ``points``, by medians (Theil and Sen)."""
    slope = statistics.median((points[b] - points[a]) / (b - a) for a, b in itertools.combinations(points, 2))
    return max(0.0, statistics.median(y - x * slope for x, y in points.items())), slope


def _choosing(costs: CostTable, attentive: bool) -> Generator[None, None, float]:
    """Seconds a round that the default policy takes for its choice, two drafted tokens a round."""
    policy, times = GoodputLength(costs, attentive=attentive), []
    outcome = Round("model", 2, 1, 2 * costs.draft_s, costs.verify_s[2])
    for _ in range(CHOICE_REPEATS):
        began = time.perf_counter()
        for number in range(CHOICES):
            policy.next_length(LONGEST, 0, number)
            if attentive:
                policy.advise(1, 0.9)
                policy.advise(2, 0.5)
            policy.observe(outcome)
        times.append((time.perf_counter() - began) / CHOICES)
        yield
    return low(times)
