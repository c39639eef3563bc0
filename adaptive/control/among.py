"""Chooses how many tokens each of several answers drafts when one pass of the target verifies all their proposals.

B answers that draft k tokens each commit B * E[tokens(k)] in f(B) * draft(k) + T(B * (k + 1)) seconds. T(n) is a pass
over n tokens, which reads the target's weights once. f(B) is learned: between 1, if a model drafts for all answers in
one call, and B, if each draft is made separately. For each answer this is a round whose drafting takes
f(B) * draft(k) / B and whose verification takes T(B * (k + 1)) / B seconds, so the decision is that of a lone answer
(``goodput.py``): another token is drafted while it is expected to add more tokens than its time would yield otherwise.
With more answers a pass gets closer to the size at which further tokens cost more time, and drafting brings less.

Whether to draft at all is decided by what drafted rounds brought, those that proposed nothing included: a draft whose
tokens are dropped for low confidence takes time as well. Such confidences are judged now and then all the same, because
they may be too low; without that nothing would ever be learned of them.

All answers wait while the draft reads a text that it has not seen. So it reads one where the rest of the answer saves
more time than that, and tries, whose price includes it, have the same small share of the time as alone (``tries.py``).

If history drafts too, its tokens and the model's have the value they have in a lone round (``sources.py``): the time in
which later rounds would produce them. Grafts, and tries of the model where history leads, are not considered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from adaptive.control.acceptance import Acceptance
from adaptive.control.confidence import Calibration
from adaptive.control.continuation import Continuation, Discounted, Ways
from adaptive.control.costs import SPEED_STEP, CostModel, Steps
from adaptive.control.looking import Looking, Looks
from adaptive.control.policy import Adviser, Lead, Scope, SharedLength
from adaptive.control.prices import best_length, pays, prices
from adaptive.control.stopping import Stopping
from adaptive.control.tries import BUDGET, DEBT, FEW_WAITING, SHARE, tokens_left
from adaptive.records.stats import asked
from adaptive.types import Round

# Rounds of an answer after which its draft length is updated.
BATCH = 8
# If drafting is not expected to pay, at most one round out of this many of all answers still drafts one token. Too low:
# costs more for as long as drafting does not pay. Too high: it notices late that drafting has begun to pay.
TRY_EVERY = 50
# If drafting pays, the rounds of all answers in which the draft was dropped before the next one verifies its first
# token. Too low: more tokens are verified in vain. Too high: it is noticed late that low confidences are too low.
JUDGE_EVERY = 4
# Weight left of a drafted round after one later round: of a hundred while drafting pays, of ten tries while it does
# not. If tries weighed less, drafting would stay given up for what it brought long before, perhaps by chance or before
# confidence was calibrated.
KEEP, KEEP_AT_TRY = 0.99, 0.9
# Imaginary rounds in what drafted rounds brought, as predicted by acceptance at each position.
WEIGHT = 4.0
# Bounds of the learned factors on a joint pass and on joint drafts, against a clock that stood still or a minute in
# which another program ran.
LEAST, MOST = 0.2, 32.0


class Learned:
    """A factor on expected seconds, learned from observed seconds."""

    def __init__(self, value: float = 1.0) -> None:
        self.value = value
        self._steps = Steps(SPEED_STEP)

    def observe(self, ratio: float) -> None:
        """Update by the ratio of observed to expected seconds, the latter with the current factor."""
        self.value = min(max(self.value * self._steps.factor(ratio), LEAST), MOST)


class JointCosts:
    """The seconds of a pass over several answers' tokens, derived from those of a lone pass over as many tokens, and of
    their drafts, derived from those of a lone draft."""

    def __init__(self) -> None:
        self._pass = Learned()
        self._drafts: dict[int, Learned] = {}  # by the number of answers

    def seconds(self, costs: CostModel, tokens: int) -> float:
        """Seconds of a pass over ``tokens`` tokens."""
        return self._pass.value * costs.verify(tokens - 1)

    def observe(self, costs: CostModel, tokens: int, seconds: float) -> None:
        """Learn from a pass over ``tokens`` tokens."""
        self._pass.observe(seconds / self.seconds(costs, tokens))

    def share(self, answers: int) -> float:
        """The ratio of an answer's part of the drafting time to a lone draft's time, with ``answers`` answers."""
        known = self._drafts
        if not known:
            return 1 / answers
        return known[min(known, key=lambda count: abs(count - answers))].value / answers

    def drafted(self, costs: CostModel, answers: int, tokens: int, seconds: float) -> None:
        """Learn from the drafts of ``answers`` answers, ``tokens`` in all, that took ``seconds``. They are compared
        with a draft of their mean length, because that is what each answer counts: a joint call takes as long as its
        longest draft."""
        factor = self._drafts.setdefault(answers, Learned(min(MOST, self.share(answers) * answers)))
        factor.observe(seconds / (factor.value * costs.draft(tokens / answers)))


class Drafting:
    """What drafted rounds brought, also those that proposed nothing, how many rounds were not judged, and the time that
    tries may take while drafting does not pay: of all answers with one drafter and temperature, while as many answers
    share the passes."""

    def __init__(self) -> None:
        self._brought = Discounted(KEEP)  # tokens and the time of plain rounds
        self.dropped = 0  # rounds since a token was judged at any confidence
        # In an answer's plain rounds: what tries may take, and how much of the last one's price may come back.
        self._budget = self._returned = 0.0

    def earn(self) -> None:
        """Add the share of one plain round."""
        self._budget = min(BUDGET, self._budget + SHARE)

    def affords(self, price: float, owed: float) -> bool:
        """Whether to try, at a price in an answer's plain rounds, which is then spent. A long text that the draft has
        to read may cost more than the budget holds: at most ``owed`` is owed then."""
        least = SHARE * TRY_EVERY
        price = max(price, least)
        if self._budget < min(price, BUDGET):
            return False
        self._budget, self._returned = max(-owed, self._budget - price), price - least
        return True

    def brought(self, accepted: int) -> None:
        """Add the time that the accepted tokens of a try saved, so far as it cost more than any other round."""
        self._budget = min(BUDGET, self._budget + min(accepted, self._returned))

    def observe(self, tokens: int, plain_rounds: float, trying: bool) -> None:
        """Add a round that took the time of so many plain ones; ``trying``: drafting is not expected to pay."""
        self._brought.keep = KEEP_AT_TRY if trying else KEEP
        self._brought.observe(tokens, plain_rounds)

    def mean(self, tokens: float, plain_rounds: float) -> tuple[float, float]:
        """Tokens and time of a drafted round, shrunk towards what is predicted of both."""
        seen, count = self._brought, self._brought.rounds + WEIGHT
        return (seen.tokens + WEIGHT * tokens) / count, (seen.seconds + WEIGHT * plain_rounds) / count


class Draftings:
    """``Drafting`` by drafter and temperature, and by the number of answers that share the passes."""

    def __init__(self) -> None:
        self.speed_up: float | None = None  # of drafted rounds over plain ones, in the last decision
        self._known: dict[tuple[str, int], Drafting] = {}

    def of(self, kind: str, answers: int) -> Drafting:
        """That of ``answers`` answers, for a ``kind`` of ``Acceptance``."""
        return self._known.setdefault((kind, answers), Drafting())

    def swapped(self) -> None:
        """Forget all: the draft was replaced."""
        self.__init__()  # type: ignore[misc]


class Known(Protocol):
    """The state of the policy that the answers of shared rounds use and update."""

    costs: CostModel
    joint: JointCosts
    draftings: Draftings
    acceptance: Acceptance
    calibration: Calibration
    longest: int
    attentive: bool
    answer_tokens: float


class SharedGoodput(SharedLength):
    """Maximises the expected tokens per second of all answers that share the passes."""

    def __init__(self, known: Known, scope: Scope) -> None:
        self._known = known
        self._acceptance = known.acceptance.beside(scope.session, scope.drafter, scope.temperature)
        self._stopping = Stopping(known.longest)
        self._answers = self._age = self._limit = 0
        self._length = 0  # tokens that the draft may propose in the current round
        self._trying = False  # whether a try is under way
        self._drafting = Drafting()
        self._share = 1.0  # ratio of an answer's draft time to a lone draft's
        self.best = 0  # the length with the most tokens per second by acceptance at each position; 0: none pays
        self._round = (1.0, 1.0)  # tokens and seconds of a drafted round if drafting pays, else of a plain one
        self._verify: list[float] = []  # an answer's share of a pass in seconds, by the tokens that each answer drafts

    @property
    def adviser(self) -> Adviser | None:
        """The thresholds."""
        return self._stopping if self._known.attentive else None

    @property
    def steps(self) -> int:
        """See ``SharedLength``."""
        return len(self._stopping.bins_of())

    def next_length(self, limit: int, answers: int, waiting: int = 0) -> int:
        """See ``SharedLength``."""
        self._length = self._next_length(limit, answers, waiting)
        return self._length

    def reads(self) -> None:
        """See ``SharedLength``. The seconds of reading are not those of a draft that came too late."""
        self._length = 0

    def _next_length(self, limit: int, answers: int, waiting: int) -> int:
        self._limit = limit
        if answers != self._answers or not self._age:
            self._decide(answers)
        self._age = (self._age + 1) % BATCH
        self._stopping.clear()
        known, drafting = self._known, self._drafting
        if limit <= 0:
            return 0
        if self.best and (waiting <= FEW_WAITING or self._worth_catching_up(waiting)):
            if not known.attentive:
                return min(limit, self.best)
            if drafting.dropped < JUDGE_EVERY:
                return min(limit, known.longest)
        elif not self._trying:
            drafting.earn()
            if not drafting.affords(self._price(waiting), DEBT * answers):
                return 0
            self._trying = True  # until a token was drafted: a long text is read in several rounds
        drafting.dropped = 0
        self._stopping.exactly(1)
        self._age = 0  # decide again before the next round
        return 1

    def _price(self, waiting: int) -> float:
        """The cost of one drafted token that is rejected, in an answer's plain rounds. All answers wait for it."""
        known, costs, answers = self._known, self._known.costs, self._answers
        verify_s = known.joint.seconds(costs, answers + 1) - known.joint.seconds(costs, answers)
        return (costs.draft(1, waiting) + verify_s) / self._verify[0]

    def _worth_catching_up(self, waiting: int) -> bool:
        """Whether the rest of the answer will save the time in which the draft reads the ``waiting`` tokens."""
        tokens, seconds = self._round
        left = tokens_left(self._limit, self._known.answer_tokens, self.decoded)
        return left * (self._verify[0] - seconds / tokens) > self._known.costs.draft(0, waiting)

    def _decide(self, answers: int) -> None:
        known, costs = self._known, self._known.costs
        hope = self._acceptance.estimate()[: known.longest]
        self._answers = answers
        self._verify = [
            known.joint.seconds(costs, answers * (k + 1)) / answers + costs.speed * costs.overhead_s
            for k in range(known.longest + 1)
        ]
        self._share, plain_s = known.joint.share(answers), self._verify[0]
        self._drafting = known.draftings.of(self._acceptance.kind, answers)
        reach, tokens, rounds = 1.0, 1.0, []
        for length, accepted in enumerate(hope, 1):
            reach *= accepted
            tokens += reach
            rounds.append((tokens, self._share * costs.draft(length) + self._verify[length]))
        rates = [tokens / seconds for tokens, seconds in rounds]
        best = rates.index(max(rates))
        tokens, seconds = rounds[best]
        tokens, plain_rounds = self._drafting.mean(tokens, seconds / plain_s)
        known.draftings.speed_up = tokens / plain_rounds
        seconds = plain_rounds * plain_s
        rate = self._rate_ahead(tokens, plain_rounds)
        pays = tokens - 1.0 > rate * (seconds - plain_s)
        self.best = 1 + best if pays else 0
        self._round = (tokens, seconds) if pays else (1.0, plain_s)
        self.expected = self._round[0] / self._round[1] / answers
        if known.attentive:
            known.calibration.calibrate()
            least, further = prices(self._verify, self._share * costs.draft_step(), hope)
            self._stopping.decide(
                known.calibration.table,
                known.calibration.follow,
                [rate * seconds for seconds in least],
                [rate * seconds for seconds in further],
            )

    def _rate_ahead(self, tokens: float, plain_rounds: float) -> float:
        """Tokens per second of an answer's time at which the tokens of a draft would be produced otherwise, if a
        drafted round produces ``tokens`` in the time of ``plain_rounds``."""
        return max(1.0, tokens / plain_rounds) / self._verify[0]

    def observe(self, outcome: Round) -> None:
        """See ``SharedLength``. Nothing is learned about the costs of lone rounds."""
        known = self._known
        if outcome.drafted:  # at once, because an answer may end after any round
            self._acceptance.observe([outcome])
        if bins := self._stopping.bins_of():
            known.calibration.observe(bins, outcome.drafted, outcome.accepted)
            self._drafting.dropped += not outcome.drafted
        if draft_s := self._draft_s(outcome):
            seconds = draft_s + self._verify[min(outcome.drafted, len(self._verify) - 1)]
            self._drafting.observe(1 + outcome.accepted, seconds / self._verify[0], not self.best)
            if self._trying:
                self._drafting.brought(outcome.accepted)
                self._trying = False

    def _draft_s(self, outcome: Round) -> float:
        """An answer's share of the seconds of its draft, whose tokens may all have been dropped; of a draft on another
        machine that came too late, the seconds for which all answers waited."""
        if steps := self.steps or outcome.drafted:
            return self._share * self._known.costs.draft(steps)
        return outcome.draft_s if self._length and not self._known.attentive and asked(outcome) else 0.0


class SharedWithHistory(SharedGoodput):
    """The same if there is history to draft from."""

    def __init__(
        self, known: Known, scope: Scope, continuation: Continuation, looks: Looks, clock: Callable[[], float]
    ) -> None:
        """Of all answers that share rounds: ``continuation`` has the rate at which they continue, in units of their
        plain rounds; ``looks`` has the seconds that lookups take and save, by ``clock``."""
        super().__init__(known, scope)
        self._continuation = continuation
        self._looking, self._passed_s = Looking(looks), 0.0  # of this answer; its share of the time
        self.clock = clock
        # Tokens and time, in plain rounds, of a plain and of a drafted round.
        self._ways: Ways = ((1.0, 1.0),)
        self._found = False  # whether something was found for the current round
        self._after: bool | None = None  # the same for the previous round

    def _rate_ahead(self, tokens: float, plain_rounds: float) -> float:
        self._ways = ((1.0, 1.0), (tokens, plain_rounds)) if self._limit > 0 else ((1.0, 1.0),)
        return self._rate_behind(False)

    def _rate_behind(self, found: bool) -> float:
        """Tokens per second of an answer's time after a round for which something was ``found`` or not."""
        return self._continuation.rate(found, 1.0, self._ways) / self._verify[0]

    def worth_looking(self, behind: bool = False) -> bool:
        """See ``GraftingPolicy``."""
        return not behind and self._looking.due(self._passed_s)

    def look_took(self, seconds: float, behind: bool = False) -> None:
        """See ``GraftingPolicy``."""
        self._looking.looked(seconds, self._passed_s)

    def lead(self, reach: Sequence[float], length: int, limit: int, singly: bool = False, passed: int = 0) -> Lead:
        """See ``GraftingPolicy``."""
        verify = self._verify
        self._found = pays(reach, verify)
        if not self._found:
            return Lead(0, length)
        rate = self._rate_behind(True)
        tokens, seconds = self._round if length else (1.0, verify[0])
        # Tokens that the draft did not draft are fed to it later.
        fed_s = self._share * self._known.costs.draft(0, 1) if self.best else 0.0
        otherwise = tokens - rate * seconds
        most, gain = best_length(reach[: max(0, limit)], verify, rate, fed_s, otherwise)
        self._looking.found((gain - otherwise) / rate)
        return Lead(most, 0) if most else Lead(0, length)

    def observe(self, outcome: Round) -> None:
        """See ``SharedLength``."""
        self._went_on(outcome, self._draft_s(outcome))
        super().observe(outcome)

    def observe_free(self, outcome: Round) -> None:
        """See ``SharedLength``."""
        self._went_on(outcome, 0.0)

    def _went_on(self, outcome: Round, draft_s: float) -> None:
        seconds = draft_s + self._verify[min(outcome.drafted, len(self._verify) - 1)]
        self._passed_s += seconds
        self._continuation.observe(
            self._found, [1 + outcome.accepted], [seconds / self._verify[0]], self._after, self._found
        )
        self._after, self._found = self._found, False
