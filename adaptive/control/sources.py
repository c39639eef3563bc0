"""Who drafts a round: the model, history, or one behind the other, by expected tokens per second.

History's proposal takes no forward of the draft: its round of k tokens takes what a verification of k takes. With
``r`` the tokens per second of what would be done otherwise, a way to draft is worth what it commits beyond what its
time would, and the way with the most of that is taken where it is above 0:

    history alone             1 + sum(reach[:k])                  - r * (seconds[k] + token_s * tokens)
    the model behind history  1 + sum(reach[:k]) + reach[k-1] * m - r * (seconds[k + n] + draft_s)
    history behind the model  sure * sum(reach[:k])               - r * (seconds[n + k] - seconds[n])

``token_s``: what feeding a token to the draft later takes; the draft's n tokens take ``draft_s`` and bring ``m`` where
they are reached. The last is asked once the model has drafted, as what more to verify; ``sure`` is the probability that
all of its draft is accepted: its own confidence, calibrated, or what is known of tokens that both name.

``r`` is not the model's rate in general: where history finds a long match the text repeats itself, and a model
guesses such text better too. So a few of these rounds are the model's, and what they brought is the rate that history
has to beat (``Rival``).
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Sequence
from typing import Any

from adaptive.control.costs import LONGEST, Timed
from adaptive.control.goodput import BATCH, GoodputLength
from adaptive.control.policy import Adviser, Lead
from adaptive.control.prices import best_length
from adaptive.control.stopping import Stopping
from adaptive.types import FREE, MODEL, Round

# Where history promises more, the model drafts one round of so many all the same: until some were seen, and after it.
# More often costs what history would have brought, more seldom is late to see that the model has become better.
TRY_FIRST, TRIED, TRY_LATER = 8, 6, 50
# What is left of the rival's tokens and seconds after one later round, and its imaginary rounds at the general rate.
KEEP, WEIGHT = 0.97, 2.0


def best_tail(
    reach: Sequence[float], seconds: Sequence[float], rate: float, token_s: float, sure: float, before: int
) -> int:
    """As ``best_length`` behind ``before`` tokens that are verified anyway, and are all accepted with probability
    ``sure``: only what comes on top counts."""
    best, most, tokens = 0, 0.0, 0.0
    for k, there in enumerate(reach[: len(seconds) - 1 - before], 1):
        tokens += sure * there
        gain = tokens - rate * (seconds[before + k] - seconds[before] + token_s * tokens)
        if gain > most:
            best, most = k, gain
    return best


class Rival:
    """What the model's rounds bring where history would have drafted."""

    def __init__(self) -> None:
        self.tokens = self.seconds = 0.0
        self.rounds = self.passed = 0

    def due(self) -> bool:
        """Whether this round, which history would draft, is the model's all the same."""
        self.passed += 1
        if self.passed < (TRY_FIRST if self.rounds < TRIED else TRY_LATER):
            return False
        self.passed = 0
        return True

    def observe(self, tokens: int, seconds: float) -> None:
        """A round of the model's, in seconds at speed 1."""
        self.tokens, self.seconds = KEEP * self.tokens + tokens, KEEP * self.seconds + seconds
        self.rounds += 1

    def rate(self, general: float, round_s: float) -> float:
        """Tokens per second, between what was seen and the ``general`` rate, of rounds of ``round_s``."""
        weight = WEIGHT * round_s
        return (self.tokens + weight * general) / (self.seconds + weight)


class GoodputWithHistory(GoodputLength):
    """The default policy where there is history to draft from: it also says when history drafts in the model's place,
    before it, or behind it.

    It tells the policy below nothing but what that has not seen: what verifications take, that time has passed, and of
    a round of both what the model did of it.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """As ``GoodputLength``."""
        # What the model does where history would draft, and whether each round since ``next_length`` was asked is a try
        # of that.
        self.rival, self.tries_of_rival = Rival(), list[bool]()
        self.beyond: list[Timed] = []  # rounds that costs have not been learned from yet and others nothing
        self.able = True  # whether there is a draft that could be asked now
        self.read: list[tuple[list[int], Round]] = []  # how sure the draft was behind history, and what became of it
        self.stopping_behind: Stopping | None = None
        # Known anew with every decision, and only where it is asked for: seconds of a round of history's by its tokens;
        # the rate otherwise and ``token_s``; the draft's acceptance by position.
        self.history_s: list[float] | None = None
        self.otherwise: tuple[float, float] | None = None
        self.hope: list[float] | None = None
        super().__init__(*args, **kwargs)

    def next_length(self, limit: int, waiting: int = 0, context: int = 0) -> int:
        """See ``LengthPolicy``."""
        length = super().next_length(limit, waiting, context)
        self.tries_of_rival.clear()
        if self.able != (limit > 0):
            self.able, self.otherwise = limit > 0, None
        return length

    def lead(self, reach: Sequence[float], length: int, limit: int, singly: bool = False) -> Lead:
        """By the rule above, for the next round; to be asked once for each."""
        self.tries_of_rival.append(False)
        if not reach:
            return Lead(0, length)
        seconds, (rate, token_s) = self._seconds(), self._otherwise()
        alone, gain = best_length(reach[: max(0, limit)], seconds, rate, token_s)
        lead = Lead(alone, 0)
        if length and self.speculating:
            before, more = self._best_before_model(reach, length, limit, singly)
            if more > gain:
                lead, gain = Lead(before, min(length, limit - before, LONGEST - before)), more
        if gain <= 0.0:
            return Lead(0, length)
        if self.speculating and self.able and self.rival.due():
            self.tries_of_rival[-1] = True
            return Lead(0, length)
        return lead

    def _best_before_model(self, reach: Sequence[float], length: int, limit: int, singly: bool) -> tuple[int, float]:
        """How many tokens of history's to go on behind with a draft of the usual length, and what that is worth."""
        seconds, (rate, _), costs = self._seconds(), self._otherwise(), self.costs
        usual = min(length, self.best)
        hope = sum(itertools.accumulate(self._hope()[:usual], operator.mul))
        draft_s = self.marginal * costs.draft(usual)
        fed_s = self.marginal * (costs.draft_step() if singly else costs.draft(0, 1))
        best, most, tokens = 0, 0.0, 1.0
        for k, sure in enumerate(reach[: max(0, min(limit, LONGEST) - usual)], 1):
            tokens += sure
            gain = tokens + sure * hope - rate * (seconds[k + usual] + draft_s + k * fed_s)
            if gain > most:
                best, most = k, gain
        return best, most

    def adviser_behind(self, tokens: int, sure: float) -> Adviser | None:
        """Thresholds as the model's own, at the costs of the positions that its tokens will have, and so much lower as
        it is less likely that they are reached."""
        if not self.attentive:
            return None
        if self.stopping_behind is None:
            self.stopping_behind = Stopping(self.longest)
        worth = self._otherwise()[0] * self.marginal * self.costs.speed / max(sure, 1e-9)
        none = [math.inf] * self.longest
        drop, last = ([worth * p for p in prices[tokens:]] + none for prices in (self.prices, self.further))
        behind = self.stopping_behind
        behind.clear()
        behind.decide(self.calibration.table, self.calibration.follow, drop[: self.longest], last[: self.longest - 1])
        return behind

    def sure_of_draft(self, drafted: int, agreed: Sequence[float]) -> float:
        """See ``LengthPolicy``."""
        if not drafted:
            return 1.0
        stopping = self.stopping
        if self.attentive and stopping.drafts[0]:
            likely = [self.calibration.table[b] for b in stopping.bins_of(stopping.drafts[0] - 1)[:drafted]]
        else:
            likely = self._hope()[:drafted]
        both = itertools.zip_longest(likely, agreed, fillvalue=0.0)
        return math.prod(max(alone, together) for alone, together in both)

    def tail_may_pay(self, drafted: int, sure: float) -> bool:
        """See ``LengthPolicy``."""
        seconds, (rate, _) = self._seconds(), self._otherwise()
        return drafted < LONGEST and sure > rate * (seconds[drafted + 1] - seconds[drafted])

    def tail(self, drafted: int, sure: float, reach: Sequence[float], limit: int) -> int:
        """See ``LengthPolicy``."""
        return best_tail(reach[:limit], self._seconds(), *self._otherwise(), sure, drafted)

    def passed(self, outcome: Round) -> None:
        """A round of history's: it shows what a verification takes, and says nothing of the draft, unless that was
        asked first and had nothing to propose."""
        if self.attentive and self.stopping.bins_of(self.rounds):
            self.observe(outcome)
            return
        self._beside(Timed(outcome, 0, 0))

    def _beside(self, timed: Timed) -> None:
        outcome = timed.outcome
        self.rounds += 1
        self.rounds_s += outcome.draft_s + outcome.verify_s
        self.committed += 1 + outcome.accepted
        self.this_answer += 1 + outcome.accepted
        self.beyond.append(timed)
        if len(self.seen) + len(self.beyond) >= BATCH:
            self.settle()

    def observe(self, outcome: Round) -> None:
        """See ``LengthPolicy``."""
        parts = outcome.parts
        if len(parts) > 1 and parts[0].drafter in FREE:
            bins = [] if self.stopping_behind is None else self.stopping_behind.bins_of()
            if outcome.learned is not None:
                self.read.append((bins, outcome.learned))
            steps, fed = len(bins) or parts[1].drafted, parts[0].drafted
            if parts[1].drafter != MODEL:  # a head reads them one by one
                self._beside(Timed(outcome, steps + fed, self.waiting))
            else:
                self._beside(Timed(outcome, steps, self.waiting + fed))
            return
        if self.rounds < len(self.tries_of_rival) and self.tries_of_rival[self.rounds]:
            drafted = 1 if outcome.learned is None else outcome.learned.drafted
            took = self.costs.draft(drafted, 0) + self.costs.beside_drafting(outcome.drafted)
            self.rival.observe(1 + outcome.accepted, took / self.costs.speed)
        super().observe(outcome)

    def settle(self) -> None:
        """Learn from all rounds seen since the last time."""
        if self.beyond:
            beyond, self.beyond = self.beyond, []
            self.costs.observe(beyond)
            self.decided = False
        if self.read and self.attentive:
            for bins, outcome in self.read:
                self.calibration.observe(bins, outcome.drafted, outcome.accepted)
            self.calibration.calibrate()
        self.read = []
        super().settle()

    def swapped(self, expected: Sequence[float] | None = None) -> None:
        """See ``LengthPolicy``."""
        super().swapped(expected)
        self.rival = Rival()

    def _decide(self, context: int, waiting: int) -> None:
        super()._decide(context, waiting)
        self.history_s = self.otherwise = self.hope = None

    def _seconds(self) -> list[float]:
        """Seconds of a round of history's, by how many of its tokens are verified."""
        if self.history_s is None:
            plain_s, beside = self.plain_s, (self.costs.beside_drafting(k) for k in range(LONGEST + 1))
            self.history_s = [plain_s + self.marginal * (seconds - plain_s) for seconds in beside]
        return self.history_s

    def _otherwise(self) -> tuple[float, float]:
        """Tokens per second where history does not lead, and what a token takes that the draft is fed later."""
        if self.otherwise is not None:
            return self.otherwise
        costs, speed = self.costs, self.costs.speed
        rate, token_s = 1 / self.plain_s, 0.0
        if self.speculating and self.able:
            # The draft has to be fed later what it does not draft itself.
            token_s = costs.draft(0, 1)
            rate = max(rate, self.rival.rate(self.speculative * speed, costs.round(self.best) / speed) / speed)
        self.otherwise = rate, token_s
        return self.otherwise

    def _hope(self) -> list[float]:
        """The draft's acceptance by position."""
        if self.hope is None:
            self.hope = self.acceptance.estimate()
        return self.hope
