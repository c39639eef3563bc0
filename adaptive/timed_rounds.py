"""Rounds that are run to be timed, and undone; and what their times say.

In: a pair of engines. Out: seconds of drafting and of verifying by draft length, kept by the number of threads that
the passes used, of which a low quantile is what they cost.

Rounds are run over real text, and over another place of it in every sweep: which experts a mixture reads, and how many
several tokens read together, depends on the tokens.
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

# Lengths that are measured; between them costs are taken as linear. Kernels change their ways at a
# few rows, so the short ones are all there.
LENGTHS = (0, 1, 2, 3, 4, 6, 8, 12, 16)
# Tokens that the draft is made to catch up with, to see what one of them costs: more, and it is a prompt's pass.
CATCH_UP = 16
# Share of the times of a pass that are below what it costs: whatever disturbs a pass makes it slower, and a few of the
# fastest are luck (a moment of a higher clock). Higher, and a program that takes every second moment shows.
LOW = 0.2
# In place of a number of threads: all that the engines have, which do not choose.
ALL = 0
# Seconds between two rounds after which the next one is not timed: something else has used caches and threads.
PAUSE_S = 0.005
# Tokens of the short generation that shows what a token takes beside the models: supervision is digested in batches,
# of which this makes two. How often it is run, and seconds of rounds after which it is not run again.
TOKENS, GENERATIONS, GENERATED_S = 2 * BATCH + 1, 3, 2.0
# Tokens behind the context among which rounds are run, and how many lie between one sweep's place and the next one's.
PLACES, STRIDE = 32, 5


class Kind(enum.Enum):
    """What is timed of a round: drafting, also with tokens to catch up with; verifying, and a plain step after another
    plain step."""

    DRAFT = "draft"
    CAUGHT_UP = "caught up"
    VERIFY = "verify"
    PLAIN = "plain"


def thread_counts(pair: Pair) -> list[int]:
    """The numbers of threads that a pair's engines choose from while they run; ``ALL`` alone where they do not."""
    most = [engine.threads.most for engine in (pair.target, pair.draft) if engine is not None and engine.threads]
    return sorted({1, *most}) if most else [ALL]


def low(seconds: Collection[float]) -> float:
    """What a pass costs that took so many ``seconds`` at several times."""
    ordered = sorted(seconds)
    return ordered[int(LOW * (len(ordered) - 1))]


class Samples:
    """Seconds by what was timed, number of threads and draft length."""

    def __init__(self) -> None:
        self._taken: dict[Kind, dict[int, dict[int, list[float]]]] = {
            kind: defaultdict(lambda: defaultdict(list)) for kind in Kind
        }
        self.passed: dict[int, float] = defaultdict(float)  # by number of threads: seconds by the clock on the wall
        self.sweeps: Counter[int] = Counter()

    def add(self, kind: Kind, length: int, threads: int, seconds: float) -> None:
        """One more."""
        self._taken[kind][threads][length].append(seconds)

    def drop(self, threads: int) -> None:
        """Forget what was timed on so many threads, but for the time it took."""
        for by_threads in self._taken.values():
            by_threads.pop(threads, None)
        self.sweeps.pop(threads, None)

    def usual(self) -> int:
        """The number of threads on which rounds took the least time, waiting for other programs included."""
        return min(self.sweeps, key=self.sweep_s)

    def sweep_s(self, threads: int) -> float:
        """Seconds that a sweep over all lengths takes."""
        return self.passed[threads] / self.sweeps[threads]

    def costs(self, kind: Kind, alone: bool) -> dict[int, float]:
        """Seconds by draft length. On an idle machine (``alone``) an engine finds the better number of threads for
        each; beside other programs which one is better changes by the moment, so all are taken of one number."""
        taken, usual = self._taken[kind], self.usual()
        by_threads = [taken[threads] for threads in taken if alone or threads == usual]
        return {length: min(low(taken[length]) for taken in by_threads) for length in sorted(by_threads[0])}

    def spread(self, kind: Kind) -> dict[int, float]:
        """By how much what two halves of the samples say differs, as a share, by draft length."""
        taken = self._taken[kind][self.usual()]
        return {length: abs(low(some[::2]) / low(some[1::2] or some) - 1) for length, some in taken.items()}


class TimedRounds:
    """One text in both caches, on which rounds are run and undone."""

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
        self.advise = Stopping(LONGEST) if attentive else None  # which never stops
        self._prepare()
        self._choices = [engine.threads for engine in (pair.target, pair.draft) if engine.threads is not None]
        self._own_clock, self._given = pair.own_clock, torch.get_num_threads()
        self._threads, self._ended = ALL, 0.0
        self._move(context)

    def _move(self, length: int) -> None:
        """Go on with so many tokens of the text, which both caches get."""
        self.committed = self._text[:length]
        self._processor.start(torch.tensor(self.committed))
        self._round(1, 0, time.perf_counter)

    def round(self, length: int, threads: int, waiting: int = 0) -> Round:
        """A round of ``length`` drafted tokens on so many ``threads``, undone again."""
        clock = self._own_clock if threads == 1 else time.perf_counter
        self._prepare()  # what was recorded may have gone to another text meanwhile
        self._hold(threads)
        try:
            if threads != self._threads or time.perf_counter() - self._ended > PAUSE_S:
                self._round(length, 0, clock)  # wakes the threads
            return self._round(length, waiting, clock)
        finally:
            self._hold(None)
            self._threads, self._ended = threads, time.perf_counter()

    def _prepare(self) -> None:
        prepare(self.target, self.drafter, len(self.committed), LONGEST + 2, self.advise)

    def _hold(self, threads: int | None) -> None:
        """Have passes use so many threads, and all other operations with them; None lets them choose again."""
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
        """One round of each of the ``lengths``, in their order, at another place of the text each time; plain ones
        are followed by another."""
        self._move(self._context + (len(self.committed) - self._context + STRIDE) % max(1, self._places))
        for length in lengths:
            began = time.perf_counter()
            outcome = self.round(length, threads)
            samples.add(Kind.VERIFY, length, threads, outcome.verify_s)
            if length:
                samples.add(Kind.DRAFT, length, threads, outcome.draft_s)
            else:
                samples.add(Kind.PLAIN, 0, threads, self.round(0, threads).verify_s)
            samples.passed[threads] += time.perf_counter() - began
            yield

    def catch_up(self, samples: Samples, tokens: int, threads: int) -> None:
        """A round in which the draft has so many tokens to catch up with."""
        samples.add(Kind.CAUGHT_UP, 1, threads, self.round(1, threads, tokens).draft_s)

    def beside(self, pair: Pair) -> Generator[None, None, float]:
        """Seconds that a plain round takes beside its pass, with its token: text, record, handing it over."""
        request = Request(self.committed, self.verifier.params, StopParams(TOKENS), frozenset())
        found: list[float] = []
        clock, began = self._own_clock, time.perf_counter()
        while not found or (len(found) < GENERATIONS and time.perf_counter() - began < GENERATED_S):
            self.target.rollback(len(self.committed) - 1)
            stream, length = TextStream(pair.tokenizer), pair.target.context_length
            plain = Decoding(request, self.target, length, None, self.verifier, FixedLength(0), stream)
            plain.clock = plain.policy.clock = clock
            steps, spent, ended = plain.steps(), 0.0, False
            next(steps)  # the prompt's
            while not ended:
                self._hold(1 if self._choices else None)
                before = clock()
                ended = next(steps, None) is None
                spent += clock() - before
                self._hold(None)
                yield
            spent -= sum(outcome.draft_s + outcome.verify_s for outcome in plain.rounds)
            found.append(max(0.0, spent) / max(1, len(plain.rounds)))
        return min(found)


def real_text(pair: Pair, length: int) -> list[int]:
    """So many tokens of what people write: this file, prose and code."""
    written = Path(__file__).read_text(encoding="utf-8")
    tokens = [int(token) for token in pair.tokenizer.encode(written, add_special_tokens=False, verbose=False)]
    return (tokens * (1 + length // max(1, len(tokens))))[:length]


def by_tokens(verify_s: Mapping[int, float]) -> dict[int, float]:
    """Verification seconds by the tokens that a pass is over, one more than were drafted."""
    return {1 + drafted: seconds for drafted, seconds in verify_s.items()}
