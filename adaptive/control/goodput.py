"""The default policy: as many drafted tokens as make the most expected tokens per second.

A round of length K commits 1 + (accepted) tokens and takes draft(K) + verify(K) + overhead seconds.
Over many rounds the rate is E[tokens] / E[seconds], and K = 0, plain decoding, is one of the choices.

**Within a round.** Let r be the rate in use. Another token is worth drafting when the tokens it is
expected to add exceed what its time would yield at rate r:

    P(all before it accepted) * P(it is accepted) > r * (draft step + longer verification).

Both probabilities come from the draft's own confidence, calibrated on what was accepted. A draft
that stops by this rule adapts to every sentence, and needs no best length. Where confidence is not
to be had (``attentive`` is off), the length of the best fixed rate is drafted, from acceptance by
position.

**Whether to speculate at all.** If the rate that speculation reached lately is above that of plain
decoding, yes. If not, it goes on being tried out of a budget of time: every plain round earns a
hundredth of its time, a try spends what it took longer than plain decoding would have, and a try
that took less adds to the budget. So a useless draft costs at most that hundredth and what the
budget held, while a draft that has become useful pays for its own tries from the first one on.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from adaptive.control.acceptance import Acceptance
from adaptive.control.confidence import Calibration
from adaptive.control.costs import LONGEST, CostModel, CostTable
from adaptive.control.policy import Advice, LengthPolicy, Scope
from adaptive.control.rate import RecentRate
from adaptive.records.types import Round

# Imaginary rounds, at the rate that acceptance by position predicts, in the rate of speculation.
RATE_WEIGHT = 4.0
# Share of plain decoding's time that tries may spend. More finds a useful draft sooner, and is lost
# for as long as the draft stays useless.
TRY_SHARE = 0.01
# The most that the budget holds, in plain rounds, and what it begins with: some thirty tries of a small
# draft. Less gives up on a bad beginning, more is spent at every change for the worse.
BUDGET = 4.0
# Rounds without a plain one after which one is decoded plainly, so that its cost stays known: it is
# what speculation is compared with. Too often costs the speed-up of those rounds.
PLAIN_EVERY = 200
# Rounds for which the best length by position is kept: its inputs move by a percent a round. Fewer cost
# time at every round, more are late.
REFRESH = 6
# Weight of one answer in the running mean of their lengths, and the mean to begin with (tokens).
ANSWER_STEP, ANSWER_TOKENS = 0.1, 100.0
# Tokens to catch up with that are not worth a thought.
FEW_WAITING = 8


class GoodputLength(LengthPolicy):
    """Maximises expected tokens per second from measured costs and observed acceptance."""

    name = "goodput"

    def __init__(
        self,
        costs: CostTable | None = None,
        acceptance: Acceptance | None = None,
        calibration: Calibration | None = None,
        *,
        longest: int = LONGEST,
        attentive: bool = True,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.costs = CostModel(costs)
        self.acceptance = acceptance or Acceptance()
        self.calibration = calibration or Calibration()
        self.longest = min(longest, LONGEST)
        self.attentive = attentive
        self.clock = clock
        self.recent = RecentRate()  # of speculative rounds, in seconds at speed 1
        self.speculating = True
        self.rate = 0.0  # tokens per second of rounds to be expected now, at best
        self.best, self.predicted = 1, 0.0  # by acceptance at each position: length, tokens per second
        self.age = 0  # rounds since these were computed
        self.plain_s = 1.0  # seconds of a plain round now
        self.answer_tokens = ANSWER_TOKENS
        self.this_answer = 0
        self.budget = BUDGET  # plain rounds' time that tries may spend
        self.since_plain = 0
        self.finished: float | None = None  # when the last round of this answer came to its end
        self.committed = 0  # tokens that it committed
        self._start_round(0)

    def _start_round(self, waiting: int) -> None:
        self.waiting = waiting
        self.confidences: list[float] = []
        self.reach = 1.0  # probability that everything drafted so far is accepted

    def next_length(self, limit: int, waiting: int = 0, context: int = 0) -> int:
        """The most tokens to draft; ``advise`` ends the draft before that where the policy is attentive."""
        self._start_round(waiting)
        costs = self.costs
        if self.finished is not None:
            costs.observe_between(self.clock() - self.finished, self.committed)
        costs.at(context)
        self.plain_s = costs.round(0)
        self.expected = costs.with_tokens(1 / self.plain_s)
        if limit <= 0:
            return 0
        if self.age == 0:
            self.best, self.predicted = self._best_fixed()
        self.age = (self.age + 1) % REFRESH
        speculative = self._speculative_rate()
        self.rate = max(1 / self.plain_s, speculative)
        self.speculating = speculative > 1 / self.plain_s and self._worth_catching_up(speculative, limit)
        if self.speculating:
            self.since_plain += 1
            if self.since_plain > PLAIN_EVERY:
                return 0
        elif self.budget < min(BUDGET, self._cost_of_trying()):
            return 0
        self.expected = costs.with_tokens(speculative)
        return min(limit, self.longest if self.attentive else self.best)

    def _cost_of_trying(self) -> float:
        """What one drafted token costs if it is rejected, in plain rounds."""
        costs = self.costs
        return (costs.draft(1, self.waiting) + costs.verify(1) - costs.verify(0)) / self.plain_s

    def _best_fixed(self) -> tuple[int, float]:
        """The length, at least 1, of the highest rate by acceptance at each position, and that rate."""
        costs = self.costs
        best, rate, reach, tokens = 1, 0.0, 1.0, 1.0
        for length, accepted in enumerate(self.acceptance.estimate()[: self.longest], 1):
            reach *= accepted
            tokens += reach
            here = tokens / costs.round(length)
            if here > rate:
                best, rate = length, here
            elif length > best + 2:
                break
        return best, rate

    def _speculative_rate(self) -> float:
        """Tokens per second of speculation lately, shrunk towards the prediction."""
        speed = self.costs.speed
        weight = RATE_WEIGHT * self.costs.round(self.best) / speed
        return self.recent.rate(self.predicted * speed, weight) / speed

    def _worth_catching_up(self, rate: float, limit: int) -> bool:
        """Whether the rest of the answer will save the time of feeding the draft what it has not seen."""
        if self.waiting <= FEW_WAITING:
            return True
        left = min(limit + 1, max(self.answer_tokens - self.this_answer, self.answer_tokens / 2))
        return left * (self.plain_s - 1 / rate) > self.costs.draft(0, self.waiting)

    def advise(self, position: int, confidence: float) -> Advice:
        """Drop a token whose verification is not worth its time; go on while a further one is."""
        costs = self.costs
        self.confidences.append(confidence)
        self.reach *= self.calibration.accept(confidence)
        if self.reach < self.rate * (costs.verify(position) - costs.verify(position - 1)):
            return Advice.DROP
        if position >= self.longest:
            return Advice.LAST
        more = costs.verify(position + 1) - costs.verify(position) + costs.draft(1)
        follows = self.reach * self.calibration.next(confidence)
        return Advice.MORE if follows > self.rate * more else Advice.LAST

    def observe(self, outcome: Round) -> None:
        """Learn costs, acceptance and calibration from a finished round."""
        self.finished, self.committed = self.clock(), 1 + outcome.accepted
        steps = len(self.confidences) if self.attentive else outcome.drafted
        costs = self.costs
        costs.observe(outcome, steps, self.waiting)
        self.this_answer += 1 + outcome.accepted
        if steps:
            seconds = costs.draft(steps, self.waiting if self.waiting <= FEW_WAITING else 0)
            seconds += costs.plain(outcome.drafted)
            tokens = 1.0 + outcome.accepted
            if self.attentive:
                judged = self.confidences[: min(outcome.drafted, outcome.accepted + 1)]
                # How likely the judged tokens were says the same as what came of them, with less chance in it.
                tokens = 1.0 + sum(self.calibration.accept(c) for c in judged)
                self.calibration.observe(self.confidences, outcome.drafted, outcome.accepted)
            if outcome.drafted:
                self.acceptance.observe(outcome.drafted, outcome.accepted)
            if self.recent.observe(1 + outcome.accepted, seconds / costs.speed):
                self.acceptance.changed()
                self.calibration.changed()
                self.age = 0
            if self.waiting > FEW_WAITING and not self.speculating:
                seconds += costs.draft(0, self.waiting)
            # What it really took, if that was less: costs that are believed too high are found out by tries.
            seconds = min(seconds, outcome.draft_s + outcome.verify_s + costs.speed * costs.overhead_s)
            self.budget = min(BUDGET, max(0.0, self.budget + tokens - seconds / self.plain_s))
        else:
            self.budget = min(BUDGET, self.budget + TRY_SHARE)
        if not outcome.drafted:
            self.since_plain = 0

    def begin(self, scope: Scope) -> None:
        """Estimates of another session or temperature start from the general ones."""
        self.acceptance.begin(scope.session, "model", scope.temperature)
        if self.this_answer:
            self.answer_tokens += ANSWER_STEP * (self.this_answer - self.answer_tokens)
        self.this_answer = self.age = 0
        self.finished = None

    def swapped(self) -> None:
        """Doubt what was learned of the draft, and look again at once."""
        self.acceptance.swapped()
        self.calibration.swapped()
        self.recent.forget()
        self.age = 0
        self.budget = BUDGET
        self.finished = None  # the time since the last round is the swap's, not a round's overhead
