"""How many tokens each of several answers drafts, when one pass of the target verifies what all of them propose.

B answers that draft k tokens each commit B * E[tokens(k)] in B * draft(k) + T(B * (k + 1)) seconds, where T(n) is a
pass over n tokens: the drafts are made one after the other, the weights of the target are read once. For each of them
that is a round whose verification takes T(B * (k + 1)) / B, so that it is decided as for a lone one (``goodput.py``):
another token is worth it while it is expected to add more than what its time would yield otherwise. The more answers,
the nearer a pass comes to where more tokens take longer, and the less drafting brings.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from adaptive.control.acceptance import Acceptance
from adaptive.control.confidence import Calibration
from adaptive.control.costs import LONGEST, SPEED_STEP, CostModel, Steps
from adaptive.control.policy import Adviser, Beside, Lead, Scope
from adaptive.control.prices import best_length, prices
from adaptive.control.stopping import Stopping
from adaptive.types import Round

# Rounds of an answer after which its lengths are decided anew, and learned from.
BATCH = 8
# Where no drafting is expected to pay, one round of so many drafts a token all the same. More often costs more for as
# long as that is right, more seldom is late to see that it no longer is.
TRY_EVERY = 50
# Bounds of what a joint pass may take of what is expected: a clock that stood still, or another program's minute.
LEAST, MOST = 0.2, 5.0


class JointCosts:
    """What a pass over several answers' tokens takes, from what a lone one takes over as many."""

    def __init__(self) -> None:
        self.factor = 1.0
        self._steps = Steps(SPEED_STEP)

    def seconds(self, costs: CostModel, tokens: int) -> float:
        """Of a pass over so many tokens. Beyond those of the longest verification each takes what the last ones do."""
        if tokens <= LONGEST + 1:
            return self.factor * costs.verify(tokens - 1)
        half, longest = costs.verify(LONGEST // 2), costs.verify(LONGEST)
        return self.factor * (longest + (longest - half) / (LONGEST - LONGEST // 2) * (tokens - LONGEST - 1))

    def observe(self, costs: CostModel, tokens: int, seconds: float) -> None:
        """One took so long."""
        step = self._steps.factor([seconds / self.seconds(costs, tokens)])
        self.factor = min(max(self.factor * step, LEAST), MOST)


class Known(Protocol):
    """What the policy has learned, of which the answers that share rounds have their part."""

    costs: CostModel
    joint: JointCosts
    acceptance: Acceptance
    calibration: Calibration
    longest: int
    attentive: bool


class GoodputBeside(Beside):
    """Maximises the expected tokens per second of all answers that share the passes."""

    def __init__(self, known: Known, scope: Scope) -> None:
        self._known = known
        self._acceptance = known.acceptance.beside(scope.session, scope.drafter, scope.temperature)
        self._stopping = Stopping(known.longest)
        self._answers = self._age = self._plain = 0
        self._seen: list[Round] = []
        self._trying = False
        self._rate = 0.0  # tokens per second of all answers
        self.best = 0  # the length of most tokens per second by acceptance at each position
        self._verify: list[float] = []  # an answer's share of a pass, by the tokens that each drafts

    @property
    def adviser(self) -> Adviser | None:
        """The thresholds; a try proposes its token whatever they say."""
        return self._stopping if self._known.attentive and not self._trying else None

    def next_length(self, limit: int, answers: int) -> int:
        """See ``Beside``."""
        if answers != self._answers or not self._age:
            self._decide(answers)
        self._age = (self._age + 1) % BATCH
        self._stopping.clear()
        self._trying = False
        if limit <= 0:
            return 0
        if self.best:
            return min(limit, self._known.longest if self._known.attentive else self.best)
        self._plain += 1
        self._trying = self._plain % TRY_EVERY == 0
        return int(self._trying)

    def _decide(self, answers: int) -> None:
        known, costs = self._known, self._known.costs
        hope = self._acceptance.estimate()[: known.longest]
        self._answers = answers
        self._verify = [
            known.joint.seconds(costs, answers * (k + 1)) / answers + costs.speed * costs.overhead_s
            for k in range(known.longest + 1)
        ]
        self.best, rate, reach, tokens = 0, 1 / self._verify[0], 1.0, 1.0
        for length, accepted in enumerate(hope, 1):
            reach *= accepted
            tokens += reach
            here = tokens / (costs.draft(length) + self._verify[length])
            if here > rate:
                self.best, rate = length, here
        self._rate, self.expected = rate, rate / answers
        if known.attentive:
            least, further = prices(self._verify, costs.draft_step(), hope)
            self._stopping.decide(
                known.calibration.table,
                known.calibration.follow,
                [rate * seconds for seconds in least],
                [rate * seconds for seconds in further],
            )

    def lead(self, reach: Sequence[float], length: int, limit: int, singly: bool = False) -> Lead:
        """See ``LengthPolicy``: history where it brings more than an answer's time yields with the model's drafts. One
        behind the other is not considered here."""
        later_s = self._known.costs.draft(0, 1) if self.best else 0.0  # the draft is fed what it did not draft
        most, _ = best_length(reach[: max(0, limit)], self._verify, self._rate, later_s)
        return Lead(most, 0) if most else Lead(0, length)

    def observe(self, outcome: Round) -> None:
        """See ``Beside``. Of what lone rounds cost it says nothing."""
        known = self._known
        if outcome.drafted:
            self._seen.append(outcome)
        if (bins := self._stopping.bins_of()) and not self._trying:
            known.calibration.observe(bins, outcome.drafted, outcome.accepted)
        if self._seen and not self._age:
            self._acceptance.observe(self._seen)
            known.calibration.calibrate()
            self._seen = []
