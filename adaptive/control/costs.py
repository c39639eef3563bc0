"""Estimates the seconds of a round: measured before the run, and updated while it runs.

In: a ``CostTable`` (from ``measure.py`` or an earlier session) and the seconds of finished rounds. Out: the seconds of
drafting k tokens and of verifying k tokens, for every k.

Online the estimates are medians, followed by small multiplicative steps. The size of a step is limited however far off
an observation is, so a round during which the machine did other work moves them no further than any other. Steps grow
while observations stay far off on one side, so a cost that was measured at a bad moment is corrected in a dozen rounds.
One common factor follows the machine's speed. A factor per length moves more slowly, except when that length alone
takes far less than expected: then it was measured at a bad moment, and so were the lengths that were never seen.
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

# Relative step of the common factor per observation. Too low: late when the machine slows down. Too high: the factor
# is noisy, by about its own size, for all lengths at once.
SPEED_STEP = 0.02
# Relative step of one length's own factor while it is right. Too high: noise in the comparison of lengths, on which the
# choice rests. The step is up to 1 + MORE times as large while all observations are off on one side, as after a
# measurement at a bad moment. LEAN_STEP is the weight of one observation in the running mean of how far off they are,
# in which a relative deviation of FAR counts as 1.
LENGTH_STEP, MORE, LEAN_STEP, FAR = 0.003, 20.0, 0.1, 0.3
# Factor on the count of a pass at each later round, for the shares of passes; and the share of a pass from which on it
# has full weight in the machine's speed. Observations of a rarer pass are attributed to its own factor.
KEEP_SHARE, SELDOM = 0.99, 0.2
# Relative step of the drafting costs, which are compared with nothing else.
DRAFT_STEP = 0.01
# Factor on how often a pass was seen at each later batch of rounds, the count of a pass that was never seen, and the
# total count of verifications of drafted tokens above which their costs are reliable.
KEEP_SEEN, UNSEEN, ENOUGH_SEEN = 0.98, 0.01, 2.5
# Observations far off on one side after which steps grow (batches, after which a single pass is corrected), the growth
# factor per further observation, and the largest relative step. Too low a PATIENCE: a few slow rounds in a row carry an
# estimate away.
PATIENCE, GROWTH, LARGEST_STEP = 3, 1.6, 0.4
# Ratio of seen to expected seconds below which a pass was measured at a bad moment, and the lowest ratio by which it is
# corrected at once (a clock that stands still is wrong). TOO_HIGH nearer to 1: a noisy clock finds such moments where
# there were none. Smaller errors are corrected by small steps.
TOO_HIGH, LEAST = 0.7, 0.05
# Other passes that are needed among the LATELY latest ones, with a median as expected, for such a correction: else the
# machine has changed.
WITNESSES, LATELY = 3, 16
# Share of the latest passes that may be far off although nothing has changed: other programs delay single passes at any
# time. Too low: batches of rounds stay short. Too high: a change of the machine is noticed late.
STRAY = 0.25
# Rounds of an explored length whose median is believed. Fewer: a single stray pass decides.
FEWEST_EXPLORED = 3
# Rounds of a batch up to which all are learned from. Of a longer batch, during which nothing changes, so many are.
FEW = 23
# The longest draft that is considered anywhere, in tokens.
LONGEST = 16


@dataclass(frozen=True)
class CostTable:
    """Seconds, for one pair on one machine at one dtype.

    ``start_s`` is the part of drafting once per round, ``draft_s`` one draft step, ``catch_up_s`` each further token
    that the first step has to feed (after plain rounds). ``verify_s[k]`` is a verification of k drafted tokens (k + 1
    rows; 0 is a plain step), ``overhead_s`` the rest of a round, ``token_s`` the additional time of each committed
    token (its text, its record, handing it over). ``context_s`` is added to a verification for each token of context
    beyond ``context``. ``plain_s`` is a plain step after another one (None: as ``verify_s[0]``). They differ in
    llama.cpp, which rebuilds its graph when a pass has another number of tokens than the last: a third of a small
    model's pass.
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


# Costs of a pair that was never measured: shares of a plain step, typical of a draft of a twentieth of the target.
# Online they are replaced within some rounds; the first rounds depend on these guesses.
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
    """Verification seconds for 0 to ``LONGEST`` tokens from the measured ones: non-decreasing, linear in between.

    ``samples`` maps drafted tokens to the median of their seconds. A longer verification cannot really be cheaper than
    a shorter one; if it was measured so, both get their mean. Beyond the last sample the last slope continues.
    """
    lengths = sorted(samples)
    level = rising([samples[k] for k in lengths], [1.0] * len(lengths))
    return tuple(_between(lengths, level, k) for k in range(LONGEST + 1))


def _between(xs: list[int], ys: list[float], x: int) -> float:
    """Piecewise linear through (xs, ys): the last slope continues on the right, the first value on the left."""
    if len(xs) == 1 or x <= xs[0]:
        return ys[0]
    i = min(bisect.bisect_left(xs, x), len(xs) - 1)
    return ys[i] + (ys[i] - ys[i - 1]) * (x - xs[i]) / (xs[i] - xs[i - 1])


class Timed(NamedTuple):
    """A finished round: the draft made ``steps`` forwards, the first of which also fed ``waiting`` extra tokens.

    ``again``: a plain step after a plain step. ``settled``: enough rounds of its mode, drafted or plain, came before
    it, so its time is that of rounds in a row. ``tried``: a single drafted round among plain ones. ``apart``: not used
    to learn acceptance or the rate of drafting.
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
        """The part of the outcome that the draft drafted, without other drafters' tokens."""
        return self.outcome.learned or Round("none", 0, 0, self.outcome.draft_s, self.outcome.verify_s)


class Steps:
    """The size of the steps by which one estimate follows its observations."""

    def __init__(self, size: float) -> None:
        self.size = size
        self.streak = 0.0  # signed number of observations in a row that were far off on one side

    def factor(self, ratio: float) -> float:
        """The factor to apply to the estimate after an observation with this ratio of seen to expected. The step is
        smaller if they nearly agree, so that the estimate can come to rest."""
        off = _off(ratio)
        far = not 0.8 < ratio < 1.25
        self.streak = (self.streak if self.streak * off > 0 else 0.0) + off if far else 0.0
        grown = GROWTH ** (abs(self.streak) - PATIENCE) if abs(self.streak) > PATIENCE else 1.0
        return math.exp(off * min(self.size * grown, LARGEST_STEP))


def _off(ratio: float) -> float:
    """The share of a step, from -1 to 1, by which an observation moves an estimate."""
    return max(-1.0, min(1.0, (ratio - 1.0) * 10.0))


def _pass_of(timed: Timed) -> int:
    """The number of a round's pass in ``CostModel``."""
    return 0 if timed.again else 1 + timed.outcome.drafted


class CostModel:
    """The current costs. ``observe`` takes every round; most other methods return estimates.

    The seconds of a pass are the product of three: the table's seconds for its length, the factor ``own`` of that
    length, and the machine's ``speed`` (1 at the table's speed, higher if slower). Passes are numbered: 0 is a plain
    step after another one, 1 + k verifies k tokens.
    """

    def __init__(self, table: CostTable | None) -> None:
        self.measured = table is not None
        table = table or UNMEASURED
        self.start_s, self.draft_s, self.catch_up_s = table.start_s, table.draft_s, table.catch_up_s
        self.overhead_s, self.token_s = table.overhead_s, table.token_s
        self.context_s, self.context = table.context_s, table.context
        self.passes_s = (table.plain_step_s, *table.verify_s)
        self.own = [1.0] * len(self.passes_s)
        self.seen = [UNSEEN] * len(self.passes_s)  # how often each pass was seen recently
        self.counts = [0.0] * len(self.passes_s)  # the same over fewer rounds
        self.lean = [0.0] * len(self.passes_s)  # mean sign and size of recent deviations of each pass, -1 to 1
        self.rising = list(self.passes_s)  # seconds at speed 1, non-decreasing
        self.too_high: dict[int, list[float]] = {}  # ratios by pass in the last batches in a row, all below TOO_HIGH
        self.guessed: set[int] = set()  # passes never seen that were corrected together with another one
        self.lately: list[tuple[int, float]] = []  # the last passes, with their ratios of seen to expected seconds
        self.speed = 1.0
        self.speed_steps, self.draft_steps = Steps(SPEED_STEP), Steps(DRAFT_STEP)
        self.between = Between(self.overhead_s, self.token_s)
        self.now = 0.0  # seconds that the current context adds to a verification

    def at(self, context: int) -> None:
        """Set the length of the committed text to ``context`` tokens."""
        self.now = self.context_s * (context - self.context)

    def draft(self, length: float, waiting: int = 0) -> float:
        """Seconds of drafting ``length`` tokens, which may be a mean, if the draft has ``waiting`` tokens to catch up
        with."""
        start_s = self.start_s if length else 0.0
        return self.speed * (start_s + length * self.draft_s + waiting * self.catch_up_s)

    def draft_step(self) -> float:
        """Seconds of one more drafted token."""
        return self.speed * self.draft_s

    def verify(self, length: int) -> float:
        """Seconds of verifying ``length`` drafted tokens; 0 is a plain step among other rounds. Beyond ``LONGEST``,
        which only a grammar and joint passes of several answers reach, the slope of the last lengths continues."""
        if length > LONGEST:
            half, longest = self.verify(LONGEST // 2), self.verify(LONGEST)
            return longest + (longest - half) / (LONGEST - LONGEST // 2) * (length - LONGEST)
        return self.speed * max(self.rising[1 + length] + self.now, 1e-9)

    def plain(self) -> float:
        """Seconds of a plain step after another one."""
        return self.speed * max(self.rising[0] + self.now, 1e-9)

    def round(self, length: int) -> float:
        """Seconds of a whole round of ``length`` drafted tokens, without the time per committed token; 0 is a round of
        plain decoding."""
        if not length:
            return self.plain() + self.speed * self.overhead_s
        return self.draft(length) + self.beside_drafting(length)

    def beside_drafting(self, length: int) -> float:
        """Seconds of a round of ``length`` drafted tokens without the drafting."""
        return self.verify(length) + self.speed * self.overhead_s

    def observe(self, rounds: Sequence[Timed]) -> bool:
        """Learn from finished rounds. Returns whether a cost that was far too high has just been corrected."""
        if rounds and not self.measured:
            self._first(rounds[0].outcome)
        rounds = rounds[:: math.ceil(len(rounds) / FEW) or 1]
        passes: list[tuple[int, float]] = []
        shares = self._shares(rounds)
        common = 0.0
        for timed in rounds:
            outcome, steps, waiting, _, settled, *_ = timed
            if outcome.drafted > LONGEST:  # their costs are extrapolated
                continue
            i = _pass_of(timed)
            ratio = outcome.verify_s / (self.speed * max(self.passes_s[i] * self.own[i] + self.now, 1e-9))
            if i in self.guessed:  # the first observation replaces the guess
                self.guessed.remove(i)
                self.own[i] *= max(TOO_HIGH, min(1 / LEAST, ratio))
                ratio = 1.0
            passes.append((i, ratio))
            if steps and (settled or waiting > steps):
                factor = self.draft_steps.factor(outcome.draft_s / self.draft(steps, waiting))
                if waiting > steps:  # most of the time was catching up
                    self.catch_up_s *= factor
                else:
                    self.start_s, self.draft_s = self.start_s * factor, self.draft_s * factor
            if settled:
                common += shares[i] * self._follow(i, ratio, 1.0 - shares[i])
                self.speed *= self.speed_steps.factor(ratio) ** min(1.0, shares[i] / SELDOM)
        self._to_speed(common, shares)
        self.lately = [*self.lately, *passes][-LATELY:]
        least = min((ratio for _, ratio in passes), default=1.0)
        mended = bool(self.too_high or least < TOO_HIGH) and self._mend(passes)
        self._rise()
        return mended

    def explored(self, length: int, rounds: Sequence[Timed]) -> None:
        """Set the own factor of verifying ``length`` drafted tokens, which was not seen recently, to the median of
        those among ``rounds``."""
        i = 1 + length
        expected = self.speed * max(self.passes_s[i] * self.own[i] + self.now, 1e-9)
        ratios = [timed.outcome.verify_s / expected for timed in rounds if _pass_of(timed) == i]
        if len(ratios) >= FEWEST_EXPLORED:
            self.own[i] *= max(LEAST, statistics.median(ratios))

    def _shares(self, rounds: Sequence[Timed]) -> list[float]:
        """The share of each pass among recent ones, including these rounds."""
        keep = KEEP_SHARE ** len(rounds)
        self.counts = [keep * n for n in self.counts]
        for timed in rounds:
            if timed.outcome.drafted <= LONGEST:
                self.counts[_pass_of(timed)] += 1.0
        whole = sum(self.counts) or 1.0
        return [n / whole for n in self.counts]

    def _follow(self, i: int, ratio: float, others: float) -> float:
        """Move the own factor of pass ``i`` by an observation of this ``ratio`` of seen to expected seconds; return
        the logarithm of the step.

        ``others`` is the share of other passes recently. If there were none the factor stays: only its product with the
        speed is observed, and this pass alone cannot show whether the whole machine has become slower. If the factor
        moved, any change of the machine would move the passes in use away from those not in use.
        """
        off = _off(ratio)
        lean = self.lean[i] = self.lean[i] + LEAN_STEP * (max(-FAR, min(FAR, ratio - 1.0)) / FAR - self.lean[i])
        step = others * LENGTH_STEP * (1.0 + MORE * lean * lean) * off
        self.own[i] *= math.exp(step)
        self.seen[i] += 1.0
        return step

    def _to_speed(self, common: float, shares: Sequence[float]) -> None:
        """Attribute to the machine's speed the step that the own factors of the passes in use have in common.

        ``common`` is its logarithm, weighted by the passes' ``shares``. The seconds of these passes stay the same.
        Without this, changes of the machine move their own factors to one side and the speed to the other; passes that
        are not in use then seem ever dearer, and stay out of use.
        """
        if not common:  # one pass alone is in use
            return
        self.speed *= math.exp(common)
        self.own = [
            own * math.exp(-common * min(1.0, share / SELDOM)) for own, share in zip(self.own, shares, strict=True)
        ]

    def _mend(self, passes: Sequence[tuple[int, float]]) -> bool:
        """Correct costs that were measured at a bad moment. A pass that takes far less than expected in ``PATIENCE``
        batches in a row, while the others do not, is set to the highest ratio seen. If it verifies drafted tokens, so
        are the passes of other numbers of drafted tokens that were never seen or were found too high as well, since
        they were measured at the same moment. Returns whether any was corrected.

        Small steps would take hundreds of rounds of that length, and costs that are far too high prevent such rounds.
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
        """Update ``rising``: a longer verification is never cheaper, and plain decoding is the cheapest. Passes that
        were observed otherwise get their mean, weighted by how often each was seen recently."""
        self.seen = [UNSEEN + KEEP_SEEN * (n - UNSEEN) for n in self.seen]
        self.rising = rising(map(operator.mul, self.passes_s, self.own), self.seen)

    def with_tokens(self, rate: float) -> float:
        """Tokens per second including the time per token, if rounds alone would give ``rate``.

        The same time is added in every mode of decoding, so it never changes which one is best.
        """
        return 1 / (1 / rate + self.speed * self.token_s)

    def observe_between(self, times: int, seconds: float, tokens: int) -> None:
        """Learn from the ``seconds`` between ``times`` rounds, in which the caller handled ``tokens`` tokens."""
        self.between.observe(times, tokens, seconds / self.speed)
        self.overhead_s, self.token_s = self.between.of_round, self.between.of_token

    def _first(self, outcome: Round) -> None:
        """Scale the typical shares to the first round seen, so that the steps start near the true costs."""
        self.measured = True
        self.speed = outcome.verify_s / self.passes_s[1 + min(outcome.drafted, LONGEST)]

    @property
    def as_expected(self) -> bool:
        """Whether most of the latest passes took about the expected time (all but ``STRAY``)."""
        off = sum(not TOO_HIGH < ratio < 1 / TOO_HIGH for _, ratio in self.lately)
        return off <= STRAY * len(self.lately)

    def doubtful_length(self, longest: int) -> int:
        """A number of drafted tokens next to one in use, at most ``longest``, whose verification was not seen recently;
        0 if there is none."""
        whole = sum(self.counts) or 1.0
        used = [k for k in range(1, longest + 1) if self.counts[1 + k] >= SELDOM * whole]
        beside = [k for k in (*(k + 1 for k in used), *(k - 1 for k in used)) if 1 <= k <= longest]
        return min((k for k in beside if self.seen[1 + k] <= ENOUGH_SEEN), key=lambda k: self.seen[1 + k], default=0)

    def sure_of_verifying(self) -> bool:
        """Whether verifications of drafted tokens were seen a few times recently."""
        return sum(self.seen[2:]) > ENOUGH_SEEN

    def table(self) -> CostTable:
        """The current costs, to be stored for the next session."""
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
