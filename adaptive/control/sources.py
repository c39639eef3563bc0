"""Who drafts a round: the model, or history in its place, by expected tokens per second.

History's proposal takes no forward of the draft: its round of k tokens takes what a verification of k takes. With
``r`` the tokens per second of what would be done otherwise, it is worth what it commits beyond what its time would:

    tokens - r * (seconds[k] + token_s * tokens), tokens = 1 + sum(reach[:k])

and the k with the most of that is verified where it is above 0 (``token_s``: what feeding a token to the draft later
takes). ``r`` is not the model's rate in general: where history finds a long match the text repeats itself, and a model
guesses such text better too. So a few of these rounds are the model's, and what they brought is the rate that history
has to beat (``Rival``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from adaptive.control.costs import LONGEST, Timed
from adaptive.control.goodput import BATCH, GoodputLength
from adaptive.types import Round

# Where history promises more, the model drafts one round of so many all the same: until some were seen, and after it.
# More often costs what history would have brought, more seldom is late to see that the model has become better.
TRY_FIRST, TRIED, TRY_LATER = 8, 6, 50
# What is left of the rival's tokens and seconds after one later round, and its imaginary rounds at the general rate.
KEEP, WEIGHT = 0.97, 2.0


def best_length(reach: Sequence[float], seconds: Sequence[float], rate: float, token_s: float = 0.0) -> int:
    """How many tokens of a proposal to verify, 0 for none. ``reach`` is of each the probability that all up to it are
    accepted, ``seconds[k]`` what a round takes that verifies k, and ``token_s`` what each of its tokens takes later;
    ``rate`` tokens per second otherwise."""
    best, most, tokens = 0, 0.0, 1.0
    for k, sure in enumerate(reach[: len(seconds) - 1], 1):
        tokens += sure
        gain = tokens - rate * (seconds[k] + token_s * tokens)
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
    """The default policy where there is history to draft from: it also says when history drafts in the model's place.

    It tells the policy below nothing but what that has not seen: what verifications take, and that time has passed.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """As ``GoodputLength``."""
        # What the model does where history would draft, and whether each round since ``next_length`` was asked is a try
        # of that.
        self.rival, self.tries_of_rival = Rival(), list[bool]()
        self.beyond: list[Timed] = []  # rounds of history's that costs have not been learned from yet
        self.history_s: list[float] | None = None  # a round of history's by its tokens; None until it is asked for
        super().__init__(*args, **kwargs)

    def next_length(self, limit: int, waiting: int = 0, context: int = 0) -> int:
        """See ``LengthPolicy``."""
        length = super().next_length(limit, waiting, context)
        self.tries_of_rival.clear()
        return length

    def worth(self, reach: Sequence[float], limit: int) -> int:
        """By the rule above, for the next round; to be asked once for each."""
        self.tries_of_rival.append(False)
        if not reach:
            return 0
        costs, plain_s = self.costs, self.plain_s
        if self.history_s is None:
            beside = (costs.beside_drafting(k) for k in range(LONGEST + 1))
            self.history_s = [plain_s + self.marginal * (seconds - plain_s) for seconds in beside]
        rate, token_s, speed = 1 / plain_s, 0.0, costs.speed
        if self.speculating:
            # The draft has to be fed later what it does not draft itself.
            token_s = costs.draft(0, 1)
            rate = max(rate, self.rival.rate(self.speculative * speed, costs.round(self.best) / speed) / speed)
        length = best_length(reach[: max(0, limit)], self.history_s, rate, token_s)
        if length and self.speculating and self.rival.due():
            self.tries_of_rival[-1] = True
            return 0
        return length

    def passed(self, outcome: Round) -> None:
        """A round of history's: it shows what a verification takes, and says nothing of the draft."""
        self.rounds += 1
        self.rounds_s += outcome.draft_s + outcome.verify_s
        self.committed += 1 + outcome.accepted
        self.this_answer += 1 + outcome.accepted
        self.beyond.append(Timed(outcome, 0, 0))
        if len(self.seen) + len(self.beyond) >= BATCH:
            self.settle()

    def observe(self, outcome: Round) -> None:
        """See ``LengthPolicy``."""
        if self.rounds < len(self.tries_of_rival) and self.tries_of_rival[self.rounds]:
            took = self.costs.draft(outcome.drafted, 0) + self.costs.beside_drafting(outcome.drafted)
            self.rival.observe(1 + outcome.accepted, took / self.costs.speed)
        super().observe(outcome)

    def settle(self) -> None:
        """Learn from all rounds seen since the last time."""
        if self.beyond:
            beyond, self.beyond = self.beyond, []
            self.costs.observe(beyond)
            self.decided = False
        super().settle()

    def swapped(self, expected: Sequence[float] | None = None) -> None:
        """See ``LengthPolicy``."""
        super().swapped(expected)
        self.rival = Rival()

    def _decide(self, context: int, waiting: int) -> None:
        super()._decide(context, waiting)
        self.history_s = None
