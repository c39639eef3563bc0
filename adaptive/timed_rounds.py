"""Rounds that are run to be timed, and then undone, and the evaluation of their times.

In: a pair of engines. Out: seconds of drafting and of verifying by draft length, stored by the number of threads that
the passes used. Their cost is a low quantile of these seconds.

Rounds use real text, at another place in every sweep: the tokens decide which experts a mixture reads, and how many
experts several tokens share.
"""

from __future__ import annotations

import enum
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from pathlib import Path

import torch

from adaptive.control.costs import LONGEST
from adaptive.control.policy import FixedLength
from adaptive.control.stopping import Stopping
from adaptive.decoding.loop import Decoding, Request
from adaptive.decoding.round import speculative_round
from adaptive.decoding.supervision import BATCH
from adaptive.decoding.text import TextStream
from adaptive.decoding.verifier import Verifier
from adaptive.drafting.model import ModelDrafter, prepare
from adaptive.engines.protocol import sequences
from adaptive.pair import Pair
from adaptive.sampling import LogitsProcessor
from adaptive.types import Round, SamplingParams, StopParams

# Measured lengths; costs between them are interpolated linearly. Kernels switch methods at a few rows, so all short
# lengths are included.
LENGTHS = (0, 1, 2, 3, 4, 6, 8, 12, 16)
# Tokens that the draft catches up with, to measure the cost of one. With more the pass would be like a prompt's.
CATCH_UP = 16
# Quantile of a pass's times that counts as its cost. Disturbances make a pass slower, and a few of the fastest times
# are luck (a moment of a higher clock). Too high: a program that runs every second moment distorts the cost.
LOW = 0.2
# Used in place of a number of threads if the engines do not choose one: all their threads.
ALL = 0
# Seconds for which rounds of a length are repeated before the one that counts: after other work, also after rounds of
# another length, a small model's passes take a fifth longer than among their like. Too low: plain decoding seems slower
# than it is, and speculation better. Too high: fewer samples.
SETTLING_S = 0.005
# Seconds after a round from which the next one is run once untimed: other work has used caches and threads.
PAUSE_S = 0.005
# Tokens of the short generation that measures the time per token outside of the models (supervision is reduced in
# batches, and this makes two), repetitions, and seconds of rounds after which it is not repeated.
TOKENS, GENERATIONS, GENERATED_S = 2 * BATCH + 1, 3, 2.0
# Tokens after the context among which rounds are placed, and the distance between the places of two sweeps.
PLACES, STRIDE = 32, 5


class Kind(enum.Enum):
    """The timed part of a round: drafting, also with tokens to catch up with; verifying; a plain step after another
    plain step."""

    DRAFT = "draft"
    CAUGHT_UP = "caught up"
    VERIFY = "verify"
    PLAIN = "plain"


def thread_counts(pair: Pair) -> list[int]:
    """The numbers of threads that a pair's engines choose from; only ``ALL`` if they do not choose."""
    most = [engine.threads.most for engine in (pair.target, pair.draft) if engine is not None and engine.threads]
    return sorted({1, *most}) if most else [ALL]


def low(seconds: Collection[float]) -> float:
    """The cost of a pass that took ``seconds`` at several times."""
    ordered = sorted(seconds)
    return ordered[int(LOW * (len(ordered) - 1))]


class Samples:
    """Seconds, by the timed part, the number of threads and the draft length."""

    def __init__(self) -> None:
        self._taken: dict[Kind, dict[int, dict[int, list[float]]]] = {
            kind: defaultdict(lambda: defaultdict(list)) for kind in Kind
        }
        self.passed: dict[int, float] = defaultdict(float)  # by number of threads: wall-clock seconds of timed rounds
        self.sweeps: Counter[int] = Counter()

    def add(self, kind: Kind, length: int, threads: int, seconds: float) -> None:
        """Add one sample."""
        self._taken[kind][threads][length].append(seconds)

    def drop(self, threads: int) -> None:
        """Forget the samples of a number of threads, but keep the time that they took."""
        for by_threads in self._taken.values():
            by_threads.pop(threads, None)
        self.sweeps.pop(threads, None)

    def usual(self) -> int:
        """The number of threads with the shortest sweeps, including waiting for other programs."""
        return min(self.sweeps, key=self.sweep_s)

    def sweep_s(self, threads: int) -> float:
        """Wall-clock seconds of a sweep over all lengths."""
        return self.passed[threads] / self.sweeps[threads]

    def costs(self, kind: Kind, alone: bool) -> dict[int, float]:
        """Seconds by draft length. On an idle machine (``alone``) an engine finds the better number of threads for each
        length, so the minimum counts. Beside other programs the better number changes all the time, so only ``usual``
        counts."""
        taken, usual = self._taken[kind], self.usual()
        by_threads = [taken[threads] for threads in taken if alone or threads == usual]
        return {length: min(low(taken[length]) for taken in by_threads) for length in sorted(by_threads[0])}

    def spread(self, kind: Kind) -> dict[int, float]:
        """The relative difference between the costs by two halves of the samples, by draft length."""
        taken = self._taken[kind][self.usual()]
        return {length: abs(low(some[::2]) / low(some[1::2] or some) - 1) for length, some in taken.items()}


class TimedRounds:
    """A text in the caches of both models, on which rounds are run and undone."""

    def __init__(self, pair: Pair, params: SamplingParams, context: int, attentive: bool) -> None:
        assert pair.draft is not None
        processor = LogitsProcessor(params, pair.target.vocab_size, pair.target.device)
        self._context, self._places = context, min(PLACES, context // 2)
        self._text = real_text(pair, context + self._places)
        self.committed = self._text[:context]
        self.target, draft = sequences(pair.target, pair.draft)
        assert draft is not None
        self.draft = draft
        for sequence in (self.target, self.draft):
            sequence.reserve(len(self._text) + LONGEST + 2)
        generator = torch.Generator(pair.draft.device)
        self.drafter = ModelDrafter(
            self.draft, pair.draft, pair.target.vocab_size, params, processor, generator, untrained=True
        )
        self._processor = processor
        self.verifier = Verifier(params, processor, torch.Generator(pair.target.device))
        self.advise = Stopping(LONGEST) if attentive else None  # computes confidences, but never stops
        self._prepare()
        self._choices = [engine.threads for engine in (pair.target, pair.draft) if engine.threads is not None]
        self._own_clock, self._given = pair.own_clock, torch.get_num_threads()
        self._threads, self._ended = ALL, 0.0
        self._move(context)

    def _move(self, length: int) -> None:
        """Use the first ``length`` tokens of the text, and bring both caches up to them."""
        self.committed = self._text[:length]
        self._processor.start(torch.tensor(self.committed))
        self._round(1, 0, time.perf_counter)

    def round(self, length: int, threads: int, waiting: int = 0) -> Round:
        """Run a round of ``length`` drafted tokens on ``threads`` threads, and undo it."""
        clock = self._own_clock if threads == 1 else time.perf_counter
        self._prepare()  # another text may have taken the recorded passes meanwhile
        self._hold(threads)
        try:
            if threads != self._threads or time.perf_counter() - self._ended > PAUSE_S:
                self._round(length, 0, clock)  # untimed: wakes the threads
            return self._round(length, waiting, clock)
        finally:
            self._hold(None)
            self._threads, self._ended = threads, time.perf_counter()

    def _prepare(self) -> None:
        prepare(self.target, self.drafter, len(self.committed), LONGEST + 2, self.advise)

    def _hold(self, threads: int | None) -> None:
        """Fix the number of threads of passes and of all other operations; None lets the engines choose again."""
        if self._choices:
            torch.set_num_threads(threads or self._given)
        for choice in self._choices:
            choice.held = threads

    def _round(self, length: int, waiting: int, clock: Callable[[], float]) -> Round:
        held, committed = len(self.committed), list(self.committed)
        self.target.rollback(held - 1)
        self.draft.rollback(held - 1 - waiting)
        return speculative_round(self.target, self.drafter, self.verifier, committed, length, self.advise, clock)[0]

    def sweep(self, samples: Samples, lengths: Collection[int], threads: int) -> Iterator[None]:
        """Time a round of each of the ``lengths`` among its like, in order, at the next place of the text; and a plain
        round right after one of another length."""
        self._move(self._context + (len(self.committed) - self._context + STRIDE) % max(1, self._places))
        for length in lengths:
            if not length:
                samples.add(Kind.VERIFY, 0, threads, self.round(0, threads).verify_s)
            outcome, took = self._among_its_like(length, threads)
            if length:
                samples.add(Kind.VERIFY, length, threads, outcome.verify_s)
                samples.add(Kind.DRAFT, length, threads, outcome.draft_s)
            else:
                samples.add(Kind.PLAIN, 0, threads, outcome.verify_s)
            samples.passed[threads] += took
            yield

    def _among_its_like(self, length: int, threads: int) -> tuple[Round, float]:
        """A round of a length behind some others of it, unless a single one takes longer than they should, and its
        wall-clock seconds."""
        began = time.perf_counter()
        until = began + SETTLING_S
        while True:
            outcome = self.round(length, threads)
            ended = time.perf_counter()
            if ended >= until:
                return outcome, ended - began
            began = ended

    def catch_up(self, samples: Samples, tokens: int, threads: int) -> None:
        """Time a round in which the draft has ``tokens`` tokens to catch up with."""
        samples.add(Kind.CAUGHT_UP, 1, threads, self.round(1, threads, tokens).draft_s)

    def beside(self, pair: Pair) -> Generator[None, None, float]:
        """Seconds of a plain round outside of its pass: text, supervision, delivery of its token."""
        request = Request(self.committed, self.verifier.params, StopParams(TOKENS), frozenset())
        found: list[float] = []
        clock, began = self._own_clock, time.perf_counter()
        while not found or (len(found) < GENERATIONS and time.perf_counter() - began < GENERATED_S):
            self.target.rollback(len(self.committed) - 1)
            stream, length = TextStream(pair.tokenizer), pair.target.context_length
            plain = Decoding(request, self.target, length, None, self.verifier, FixedLength(0), stream)
            plain.clock = plain.policy.clock = clock
            steps, spent, ended = plain.steps(), 0.0, False
            next(steps)  # the prompt's token
            while not ended:
                self._hold(1 if self._choices else None)
                try:
                    before = now = clock()
                    while not ended and now - before < SETTLING_S:  # a step alone, after other work, takes longer
                        ended = next(steps, None) is None
                        now = clock()
                    spent += now - before
                finally:
                    self._hold(None)
                yield
            spent -= sum(outcome.draft_s + outcome.verify_s for outcome in plain.rounds)
            found.append(max(0.0, spent) / max(1, len(plain.rounds)))
        return min(found)


def real_text(pair: Pair, length: int) -> list[int]:
    """``length`` tokens of text by people: this file, prose and code."""
    written = Path(__file__).read_text(encoding="utf-8")
    tokens = [int(token) for token in pair.tokenizer.encode(written, add_special_tokens=False, verbose=False)]
    return (tokens * (1 + length // max(1, len(tokens))))[:length]


def by_tokens(verify_s: Mapping[int, float]) -> dict[int, float]:
    """Verification seconds by the number of tokens in the pass, which is one more than were drafted."""
    return {1 + drafted: seconds for drafted, seconds in verify_s.items()}
