"""Measuring what a round costs, with the very round that decoding runs.

In: a pair of engines. Out: a ``CostTable``. Some hundred rounds, interleaved over the lengths so that
a slow moment of the machine falls on all of them; of each length the median counts.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import time

import torch

from adaptive.control.costs import LONGEST, CostTable, from_samples
from adaptive.control.goodput import GoodputLength
from adaptive.control.policy import FixedLength
from adaptive.control.stopping import Stopping
from adaptive.decoding.loop import Decoding, Request, TargetSampler, speculative_round
from adaptive.decoding.supervision import BATCH
from adaptive.decoding.text import TextStream
from adaptive.drafting.model import ModelDrafter
from adaptive.engines.cpu.kernels import library
from adaptive.pair import Pair
from adaptive.sampling import Penalties
from adaptive.types import Round, SamplingParams, StopParams

# Lengths that are measured; between them costs are taken as linear. Kernels change their ways at a
# few rows, so the short ones are all there.
LENGTHS = (0, 1, 2, 3, 4, 6, 8, 12, 16)
# Tokens of context at the quick measurement, and how many more for the share that context has.
CONTEXT, FURTHER = 64, 448
# Tokens that the draft is made to catch up with, to see what one of them costs.
CATCH_UP = 32
# Share of a draft step that one of them takes at least, where the clock shows none (a GPU): what is 0 is never learned.
LEAST_CATCH_UP = 0.001
# Rounds of each length and seconds after which no further ones are started. Fewer than 5 rounds leave
# the median to chance.
REPEATS, ENOUGH_S, LEAST_REPEATS = 15, 3.0, 5
# Seconds of rounds of one length in which an engine finds out how many threads they should use; what it tries meanwhile
# is not what they cost. Where a round takes more than a tenth of it, the measurement is over before anything is tried.
SETTLED_S = 0.08
# Tokens of the short generation that shows what a token takes beside the models: supervision is digested
# in batches, of which this makes two.
TOKENS = 2 * BATCH + 1
# Rounds over which choosing is timed.
CHOICES = 50


def where_it_runs(pair: Pair) -> str:
    """Names what the costs depend on besides the checkpoints: how both models run, on what."""
    engines = [engine for engine in (pair.target, pair.draft) if engine is not None]
    found = library()
    kernels = "torch" if found is None else found.name
    return " ".join(
        f"{engine.name}:{engine.weights}:{engine.device}:{torch.get_num_threads()}:{kernels}" for engine in engines
    )


def attentive_on(pair: Pair) -> bool:
    """Whether asking the draft for its confidence at every token is cheap: it waits for the device, which
    on a GPU keeps the next step from being queued."""
    return pair.draft is not None and pair.draft.device.type == "cpu"


class Bench:
    """One text in both caches, on which rounds are run and undone."""

    def __init__(self, pair: Pair, params: SamplingParams, context: int, attentive: bool) -> None:
        assert pair.draft is not None
        penalties = Penalties(params, pair.target.vocab_size, pair.target.device)
        self.committed = [1 + i * 7919 % (pair.target.vocab_size - 1) for i in range(context)]
        self.target, self.draft = pair.target.sequence(), pair.draft.sequence()
        for sequence in (self.target, self.draft):
            sequence.reserve(context + LONGEST + 2)
        generator = torch.Generator(pair.draft.device)
        self.drafter = ModelDrafter(self.draft, pair.draft, pair.target.vocab_size, params, penalties, generator)
        penalties.start(torch.tensor(self.committed))
        self.sampler = TargetSampler(params, penalties, torch.Generator(pair.target.device))
        self.advise = Stopping(LONGEST) if attentive else None  # which never stops
        self.round(1)

    def round(self, length: int, waiting: int = 0) -> Round:
        """A round of ``length`` drafted tokens, undone again."""
        held = len(self.committed)
        self.target.rollback(held - 1)
        self.draft.rollback(held - 1 - waiting)
        return speculative_round(self.target, self.drafter, self.sampler, list(self.committed), length, self.advise)[0]

    def settle(self, length: int) -> None:
        """Rounds of one length that are not measured."""
        began = time.perf_counter()
        self.round(length)
        if time.perf_counter() - began < SETTLED_S / 10:
            while time.perf_counter() - began < SETTLED_S:
                self.round(length)

    def beside(self, pair: Pair) -> float:
        """Seconds that one token of a plain generation takes beside its round: text, record, handing it over."""
        request = Request(self.committed, self.sampler.params, StopParams(TOKENS), frozenset())
        self.target.rollback(len(self.committed) - 1)
        stream = TextStream(pair.tokenizer)
        plain = Decoding(request, self.target, pair.target.context_length, None, self.sampler, FixedLength(0), stream)
        for _ in plain.steps():
            pass
        spent = sum(r.draft_s + r.verify_s for r in plain.rounds)
        return (plain.predicted_s - spent) / max(1, len(plain.rounds))


def measure(pair: Pair, sampling: SamplingParams, thorough: bool = False) -> CostTable:
    """Costs of ``pair`` here and now, under these sampling parameters (drawing costs more than an argmax).

    ``thorough`` takes longer and also measures what a longer context adds.
    """
    attentive = attentive_on(pair)
    context = min(CONTEXT, pair.target.context_length // 4)
    bench = Bench(pair, sampling, context, attentive)
    verify: dict[int, list[float]] = {k: [] for k in LENGTHS}
    drafts: dict[int, list[float]] = {k: [] for k in LENGTHS if k}
    caught_up: list[float] = []
    plain: list[float] = []
    for length in LENGTHS:
        bench.settle(length)
    began = time.perf_counter()
    for repeat in range(REPEATS * (3 if thorough else 1)):
        if repeat >= LEAST_REPEATS and time.perf_counter() - began > ENOUGH_S * (3 if thorough else 1):
            break
        for length in LENGTHS:
            outcome = bench.round(length)
            verify[length].append(outcome.verify_s)
            if length:
                drafts[length].append(outcome.draft_s)
            else:
                plain.append(bench.round(0).verify_s)
        caught_up.append(bench.round(1, waiting=min(CATCH_UP, context - 2)).draft_s)
    start_s, draft_s = line({length: statistics.median(seconds) for length, seconds in drafts.items()})
    medians = {length: statistics.median(seconds) for length, seconds in verify.items()}
    context_s = 0.0
    if thorough and pair.target.context_length > context + FURTHER + LONGEST + 2:
        longer = Bench(pair, sampling, context + FURTHER, attentive)
        slower = statistics.median(longer.round(0).verify_s for _ in range(LEAST_REPEATS * 3))
        context_s = max(0.0, slower - medians[0]) / FURTHER
    table = CostTable(
        start_s=start_s,
        draft_s=draft_s,
        catch_up_s=max(
            LEAST_CATCH_UP * draft_s,
            (statistics.median(caught_up) - start_s - draft_s) / min(CATCH_UP, context - 2),
        ),
        verify_s=from_samples(medians),
        overhead_s=0.0,
        token_s=max(1e-9, statistics.median(bench.beside(pair) for _ in range(3))),
        context_s=context_s,
        context=context,
        plain_s=min(statistics.median(plain), medians[0]),
    )
    return dataclasses.replace(table, overhead_s=choosing(table, attentive))


def line(points: dict[int, float]) -> tuple[float, float]:
    """Intercept (at least 0) and slope of a line through ``points``, by medians (Theil and Sen)."""
    slope = statistics.median((points[b] - points[a]) / (b - a) for a, b in itertools.combinations(points, 2))
    return max(0.0, statistics.median(y - x * slope for x, y in points.items())), slope


def choosing(costs: CostTable, attentive: bool) -> float:
    """Seconds a round that the default policy takes for its choice, two drafted tokens a round."""
    policy = GoodputLength(costs, attentive=attentive)
    outcome = Round("model", 2, 1, 2 * costs.draft_s, costs.verify_s[2])
    began = time.perf_counter()
    for number in range(CHOICES):
        policy.next_length(LONGEST, 0, number)
        if attentive:
            policy.advise(1, 0.9)
            policy.advise(2, 0.5)
        policy.observe(outcome)
    return (time.perf_counter() - began) / CHOICES
