"""What a round costs, in seconds: measured before the run, and followed while it runs.

In: a ``CostTable`` (from ``measure.py`` or an earlier session) and the seconds of finished rounds.
Out: the seconds of a draft of k tokens and of verifying k tokens, for every k.

Online the estimates are medians, followed by small multiplicative steps: a step's size does not
depend on how far off an observation is, so a round during which the machine did something else
moves them no further than any other. Steps grow while observations stay far off on one side, so that
a cost that was measured in a bad moment is mended in a dozen rounds. One common factor follows the
machine's speed; what is particular to one length moves more slowly beside it, unless that length
alone takes far less than was believed: it was then measured in a bad moment, and those that were never seen with it.
"""

from __future__ import annotations

import bisect
import math
import operator
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from adaptive.control.between import Between
from adaptive.control.isotonic import rising
from adaptive.types import Round

# Relative step of the common factor at one observation. Larger follows a machine that slows down
# sooner, and shakes: the factor's noise is about its own size, and it is common to all lengths.
SPEED_STEP = 0.02
# Relative step of one length's own cost where it is seen to be right: larger shakes the comparison between lengths,
# which the choice rests on. How many times more, at most, where all that is seen of it is off on one side, as where it
# was measured in a bad moment; the weight of one observation in how far that is so, and the share off that is most.
LENGTH_STEP, MORE, LEAN_STEP, FAR = 0.003, 20.0, 0.1, 0.3
# What is left of how often a pass was seen after one later round, where shares are asked for; and the share of a pass
# from which on it says as much of the machine's speed as any. Of one that is seen less, what is seen is its own.
KEEP_SHARE, SELDOM = 0.99, 0.2
# Relative step of what drafting takes, with which nothing else is compared.
DRAFT_STEP = 0.01
# What is left of how often a pass was seen after one later batch of rounds, what one that was never seen counts, and
# how much of verification is enough to be sure of its costs.
KEEP_SEEN, UNSEEN, ENOUGH_SEEN = 0.98, 0.01, 2.5
# Observations far off on the same side after which steps grow (batches, after which a pass alone is mended), by how
# much each, and their largest relative size. Sooner, and a few slow rounds in a row carry an estimate away.
PATIENCE, GROWTH, LARGEST_STEP = 3, 1.6, 0.4
# Share of what was expected that a pass takes where it was measured in a bad moment; the least that it is set to at
# once (a clock that stands still is wrong). Nearer to 1, and a noisy clock finds such moments where none were; what is
# less far off mends by small steps.
TOO_HIGH, LEAST = 0.7, 0.05
# How many others, of so many passes of late, must have taken what was expected: else it is the machine.
WITNESSES, LATELY = 3, 16
# Share of the latest passes that may be far off although nothing has changed: other programs delay single passes at any
# time. Too low: batches of rounds stay short. Too high: a change of the machine is noticed late.
STRAY = 0.25
# Rounds of a batch that are all learned from: of longer ones, in which nothing changes, every second is.
FEW = 23
# Draft tokens beyond which no length is considered anywhere.
LONGEST = 16


@dataclass(frozen=True)
class CostTable:
    """Seconds, for one pair on one machine at one dtype.

    ``start_s`` is what drafting takes once a round, ``draft_s`` one draft step, ``catch_up_s`` what each
    further token costs that the first step has to feed (after plain rounds), ``verify_s[k]`` a
    verification of k drafted tokens (k + 1 rows; 0 is a plain step), ``overhead_s`` the rest of a round,
    ``token_s`` what each committed token takes beside (its text, its record, handing it over), and
    ``context_s`` what each token of context beyond ``context`` adds to a verification. ``plain_s`` is a plain
    step after another one (as ``verify_s[0]`` where None): llama.cpp builds its graph anew when a pass has
    another number of tokens than the last, which is a third of a small model's pass.
    """

    start_s: float
    draft_s: float
    catch_up_s: float
    verify_s: tuple[float, ...]
    overhead_s: float
    token_s: float
    context_s: float
    context: int
    plain_s: float | None = None

    @property
    def plain_step_s(self) -> float:
        """A plain step among plain steps."""
        return self.verify_s[0] if self.plain_s is None else self.plain_s


# What to believe of a pair that was never measured: shares of a plain step, typical of a draft of a
# twentieth of the target. Online they are replaced within some rounds; the first ones are guesses.
UNMEASURED = CostTable(
    start_s=0.02,
    draft_s=0.1,
    catch_up_s=0.01,
    verify_s=tuple(1.0 + 0.03 * k for k in range(LONGEST + 1)),
    overhead_s=0.01,
    token_s=0.01,
    context_s=0.0,
    context=0,
)


def from_samples(samples: dict[int, float]) -> tuple[float, ...]:
    """Verification seconds for 0 to ``LONGEST`` tokens from those measured: never falling, linear between.

    ``samples`` maps drafted tokens to the median of their seconds. A longer verification cannot be
    cheaper than a shorter one in truth; where it was measured so, both take their mean.
    Beyond the last sample the last slope goes on.
    """
    lengths = sorted(samples)
    level = rising([samples[k] for k in lengths], [1.0] * len(lengths))
    return tuple(_between(lengths, level, k) for k in range(LONGEST + 1))


def _between(xs: list[int], ys: list[float], x: int) -> float:
    """Piecewise linear through (xs, ys); the last slope goes on at the right, the first value at the left."""
    if len(xs) == 1 or x <= xs[0]:
        return ys[0]
    i = min(bisect.bisect_left(xs, x), len(xs) - 1)
    return ys[i] + (ys[i] - ys[i - 1]) * (x - xs[i]) / (xs[i] - xs[i - 1])


class Timed(NamedTuple):
    """A finished round, the forwards that the draft made, and the extra tokens that the first of them was fed.

    ``again`` is a plain step after a plain step. ``settled`` follows so many of its sort, drafted or plain, that it
    took what they take in a row. ``tried`` is a single drafted round among plain ones. ``apart``: of
    acceptance and of the rate of drafting it says nothing.
    """

    outcome: Round
    steps: int
    waiting: int
    again: bool = False
    settled: bool = True
    tried: bool = False
    apart: bool = False

    @property
    def own(self) -> Round:
        """Of the outcome what the draft drafted, without what others added to it."""
        return self.outcome.learned or Round("none", 0, 0, self.outcome.draft_s, self.outcome.verify_s)


class Steps:
    """The size of the steps by which one estimate follows what is seen."""

    def __init__(self, size: float) -> None:
        self.size = size
        self.streak = 0.0  # observations far off on one side in a row, with their sign

    def factor(self, ratio: float) -> float:
        """What to multiply the estimate by after one observation, of seen / expected. Where they nearly agree a step
        shrinks, so that the estimate can rest."""
        off = _off(ratio)
        far = not 0.8 < ratio < 1.25
        self.streak = (self.streak if self.streak * off > 0 else 0.0) + off if far else 0.0
        grown = GROWTH ** (abs(self.streak) - PATIENCE) if abs(self.streak) > PATIENCE else 1.0
        return math.exp(off * min(self.size * grown, LARGEST_STEP))


def _off(ratio: float) -> float:
    """By how much of a step an observation moves an estimate."""
    return max(-1.0, min(1.0, (ratio - 1.0) * 10.0))


def _pass_of(timed: Timed) -> int:
    """The number of a round's pass, as ``CostModel`` numbers them."""
    return 0 if timed.again else 1 + timed.outcome.drafted


class CostModel:
    """Costs as they are now. ``observe`` takes every round; the rest are questions.

    What a pass takes is the product of three: the table's seconds for its length, what is ``own`` to that length, and
    the machine's ``speed``. Passes are numbered from 0, a plain step after another one; 1 + k verifies k tokens.
    """

    def __init__(self, table: CostTable | None) -> None:
        self.measured = table is not None
        table = table or UNMEASURED
        self.start_s, self.draft_s, self.catch_up_s = table.start_s, table.draft_s, table.catch_up_s
        self.overhead_s, self.token_s = table.overhead_s, table.token_s
        self.context_s, self.context = table.context_s, table.context
        self.passes_s = (table.plain_step_s, *table.verify_s)
        self.own = [1.0] * len(self.passes_s)
        self.seen = [UNSEEN] * len(self.passes_s)  # how often each pass was seen of late
        self.counts = [0.0] * len(self.passes_s)  # how often, over fewer rounds
        self.lean = [0.0] * len(self.passes_s)  # to which side of what was expected each pass was of late, -1 to 1
        self.rising = list(self.passes_s)  # seconds at speed 1, never falling
        self.too_high: dict[int, list[float]] = {}  # by pass its shares, in the last batches in a row
        self.guessed: set[int] = set()  # passes that were never seen, and followed one that was mended
        self.lately: list[tuple[int, float]] = []  # the last passes, and their seconds as a share of what was expected
        self.speed = 1.0
        self.speed_steps, self.draft_steps = Steps(SPEED_STEP), Steps(DRAFT_STEP)
        self.between = Between(self.overhead_s, self.token_s)
        self.now = 0.0  # seconds that the present context adds to a verification

    def at(self, context: int) -> None:
        """The committed text now has ``context`` tokens."""
        self.now = self.context_s * (context - self.context)

    def draft(self, length: int, waiting: int = 0) -> float:
        """Seconds of drafting ``length`` tokens when the draft has ``waiting`` tokens to catch up with."""
        start_s = self.start_s if length else 0.0
        return self.speed * (start_s + length * self.draft_s + waiting * self.catch_up_s)

    def draft_step(self) -> float:
        """Seconds of one more drafted token."""
        return self.speed * self.draft_s

    def verify(self, length: int) -> float:
        """Seconds of verifying ``length`` drafted tokens; 0 is a plain step among other rounds. Of more than
        ``LONGEST``, which only a grammar and several answers together have, each takes what the last ones do."""
        if length > LONGEST:
            half, longest = self.verify(LONGEST // 2), self.verify(LONGEST)
            return longest + (longest - half) / (LONGEST - LONGEST // 2) * (length - LONGEST)
        return self.speed * max(self.rising[1 + length] + self.now, 1e-9)

    def plain(self) -> float:
        """Seconds of a plain step after another one."""
        return self.speed * max(self.rising[0] + self.now, 1e-9)

    def round(self, length: int, waiting: int = 0) -> float:
        """Seconds of a whole round of ``length`` drafted tokens, apart from what its committed tokens take; 0 is a
        round of plain decoding."""
        if not length:
            return self.plain() + self.speed * self.overhead_s
        return self.draft(length, waiting) + self.beside_drafting(length)

    def beside_drafting(self, length: int) -> float:
        """Seconds of a round of ``length`` drafted tokens apart from drafting them."""
        return self.verify(length) + self.speed * self.overhead_s

    def observe(self, rounds: Sequence[Timed]) -> bool:
        """Learn from finished rounds. Returns whether a cost that was far too high has just been mended."""
        if rounds and not self.measured:
            self._first(rounds[0].outcome)
        rounds = rounds[:: 1 if len(rounds) <= FEW else 2]
        passes: list[tuple[int, float]] = []
        shares = self._shares(rounds)
        for timed in rounds:
            outcome, steps, waiting, _, settled, *_ = timed
            if outcome.drafted > LONGEST:  # nothing is known of those by themselves
                continue
            i = _pass_of(timed)
            ratio = outcome.verify_s / (self.speed * max(self.passes_s[i] * self.own[i] + self.now, 1e-9))
            if i in self.guessed:  # what is seen of it first is worth more than the guess
                self.guessed.remove(i)
                self.own[i] *= max(TOO_HIGH, min(1 / LEAST, ratio))
                ratio = 1.0
            passes.append((i, ratio))
            if steps and (settled or waiting > steps):
                factor = self.draft_steps.factor(outcome.draft_s / self.draft(steps, waiting))
                if waiting > steps:  # mostly that
                    self.catch_up_s *= factor
                else:
                    self.start_s, self.draft_s = self.start_s * factor, self.draft_s * factor
            if settled:
                self._follow(i, ratio, 1.0 - shares[i])
                self.speed *= self.speed_steps.factor(ratio) ** min(1.0, shares[i] / SELDOM)
        self.lately = [*self.lately, *passes][-LATELY:]
        least = min((ratio for _, ratio in passes), default=1.0)
        mended = bool(self.too_high or least < TOO_HIGH) and self._mend(passes)
        self._rise()
        return mended

    def _shares(self, rounds: Sequence[Timed]) -> list[float]:
        """Of each pass the share that it has of those of late, with these rounds."""
        keep = KEEP_SHARE ** len(rounds)
        self.counts = [keep * n for n in self.counts]
        for timed in rounds:
            if timed.outcome.drafted <= LONGEST:
                self.counts[_pass_of(timed)] += 1.0
        whole = sum(self.counts) or 1.0
        return [n / whole for n in self.counts]

    def _follow(self, i: int, ratio: float, others: float) -> None:
        """Move what is own to pass ``i`` towards what was seen of it, as a share of what was expected.

        ``others`` is the share of other passes lately. Where there were none it stays where it is: only its product
        with the speed is seen, and that it is the machine which has become slower cannot be told from this pass alone.
        Were it to follow, whatever the machine does would move the passes that are in use away from those that are not.
        """
        off = _off(ratio)
        lean = self.lean[i] = self.lean[i] + LEAN_STEP * (max(-FAR, min(FAR, ratio - 1.0)) / FAR - self.lean[i])
        self.own[i] *= math.exp(others * LENGTH_STEP * (1.0 + MORE * lean * lean) * off)
        self.seen[i] += 1.0

    def _mend(self, passes: Sequence[tuple[int, float]]) -> bool:
        """Believe no longer what was measured in a bad moment: a pass that takes far less than expected in some batches
        in a row, while the others do not, is set to the most that was seen of it. Those of other numbers of drafted
        tokens that were never seen, or were found too dear as well, were measured in that moment too, and go with it.
        Whether there was one.

        Small steps would take hundreds of rounds of that length, which costs that are far too high do not allow.
        """
        mended = False
        for i in {i for i, _ in passes}:
            witnesses = [ratio for j, ratio in self.lately if j != i]
            if len(witnesses) < WITNESSES or not 0.8 < statistics.median(witnesses) < 1.25:
                continue
            shares = [*self.too_high.pop(i, ()), max(ratio for j, ratio in passes if j == i)]
            if shares[-1] >= TOO_HIGH:
                continue
            if len(shares) < PATIENCE:
                self.too_high[i] = shares
                continue
            mended = True
            drafted = range(2, len(self.own)) if i > 1 else ()
            others = [j for j in drafted if j != i and (self.seen[j] <= UNSEEN or j in self.too_high)]
            for j in (i, *others):
                self.own[j] *= max(LEAST, *shares)
                self.too_high.pop(j, None)
            self.guessed |= {j for j in others if self.seen[j] <= UNSEEN}
        return mended

    def _rise(self) -> None:
        """A longer verification is never cheaper, and plain decoding no dearer than any: passes that were seen
        otherwise take their mean, by how often each was of late."""
        self.seen = [UNSEEN + KEEP_SEEN * (n - UNSEEN) for n in self.seen]
        self.rising = rising(map(operator.mul, self.passes_s, self.own), self.seen)

    def with_tokens(self, rate: float) -> float:
        """Tokens per second where rounds alone would give ``rate``: what every token takes beside comes on top.

        The same is added to every way of decoding, so it never changes which one is best.
        """
        return 1 / (1 / rate + self.speed * self.token_s)

    def observe_between(self, times: int, seconds: float, tokens: int) -> None:
        """Learn from the ``seconds`` between some rounds, in which the caller had ``tokens`` tokens to deal with."""
        self.between.observe(times, tokens, seconds / self.speed)
        self.overhead_s, self.token_s = self.between.of_round, self.between.of_token

    def _first(self, outcome: Round) -> None:
        """Scale the typical shares to the first round seen, so that steps start near the truth."""
        self.measured = True
        self.speed = outcome.verify_s / self.passes_s[1 + min(outcome.drafted, LONGEST)]

    @property
    def as_expected(self) -> bool:
        """Whether most of the latest passes took about the expected time (all but ``STRAY``)."""
        off = sum(not TOO_HIGH < ratio < 1 / TOO_HIGH for _, ratio in self.lately)
        return off <= STRAY * len(self.lately)

    def sure_of_verifying(self) -> bool:
        """Whether verifications of drafted tokens were seen a few times of late."""
        return sum(self.seen[2:]) > ENOUGH_SEEN

    def table(self) -> CostTable:
        """The present costs, to be kept for the next session."""
        return CostTable(
            start_s=self.start_s * self.speed,
            draft_s=self.draft_s * self.speed,
            catch_up_s=self.catch_up_s * self.speed,
            verify_s=tuple(v * self.speed for v in self.rising[1:]),
            overhead_s=self.overhead_s * self.speed,
            token_s=self.token_s * self.speed,
            context_s=self.context_s * self.speed,
            context=self.context,
            plain_s=self.rising[0] * self.speed,
        )
