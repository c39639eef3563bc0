"""Decides who drafts a round (nobody, the model, history, or one after the other) by expected tokens per second.

The text continues anyway at some rate, r tokens per second: a further token in this round saves the time in which later
rounds would produce it (``continuation.py``). So a round that commits n tokens in s seconds is worth n - r * s, and the
option of the highest worth is chosen:

    nobody                    1                                   - r * seconds[0]
    the model                 tokens of its recent rounds         - r * their seconds
    history alone             1 + sum(reach[:k])                  - r * (seconds[k] + token_s * tokens)
    the model behind history  1 + sum(reach[:k]) + reach[k-1] * m - r * (seconds[k + n] + draft_s)
    history behind the model  sure * sum(reach[:k])               - r * (seconds[n + k] - seconds[n])

History's proposal takes no forward of the draft: a round with k of its tokens takes the time of verifying k tokens.
``token_s`` is the time of feeding a token to the draft later. The draft's n tokens take ``draft_s`` and bring ``m``
accepted tokens if they are reached. The last option is considered after the model has drafted, as additional tokens to
verify; ``sure`` is the probability that its whole draft is accepted, from its calibrated confidence or from the
acceptance of tokens that history proposes too.

**Two kinds of rounds are judged separately**: those in which history finds something worth verifying, and those left to
the model. If history finds a long match the text repeats itself, and a model guesses such text better too; if it finds
nothing the text is harder than average. Whether the model drafts at all is decided by the rounds left to it, with the
tries of ``goodput.py`` and its budget, reduced to these rounds' share of the time. If history would draft, a small
share of the time still goes to rounds of the model, so that their result stays known.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from adaptive.control.among import SharedWithHistory
from adaptive.control.continuation import KEEP, Continuation
from adaptive.control.costs import LONGEST, Timed
from adaptive.control.goodput import RATE_WEIGHT, GoodputLength
from adaptive.control.looking import Looking, Looks
from adaptive.control.policy import Adviser, Lead, Scope, SharedLength
from adaptive.control.prices import Terms, best_front, best_length, best_tail, pays
from adaptive.control.stopping import Stopping
from adaptive.control.tries import BUDGET, FEW_WAITING, Rival
from adaptive.types import FREE, MODEL, Round

# Most rounds in a row without a lookup before the policy is asked again. Too high: late when rounds become longer.
MOST_RESTS = 64
# Imaginary tokens for which the draft's confidence is right in rounds left to it.
SURE_WEIGHT = 8.0


@dataclass(slots=True)
class Plan:
    """The decision of ``lead`` about a round: whether history ``found`` something worth more than plain decoding; the
    ``gain`` of its proposal, None if it is not worth verifying; whether the ``model`` drafts first; and the expected
    ``loss`` if the model is tried in history's place."""

    found: bool = False
    gain: float | None = None
    model: bool = False
    loss: float | None = None


class GoodputWithHistory(GoodputLength):
    """The default policy if there is history to draft from: it also decides when history drafts instead of the model,
    before it, or behind it.

    From history's rounds the base policy learns only the seconds of verifications, the elapsed time, and, in a round of
    both, the model's part.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """As ``GoodputLength``."""
        self.continuation, self.rival = Continuation(), Rival()
        self.before, self.behind = Looking(), Looking()  # lookups before a round, and behind its draft
        # By the number of the round since ``next_length``. The model drafts a round without a plan, or it is plain.
        self.plans: dict[int, Plan] = {}
        self.drafts = 0  # of the observed ones of these rounds, those that the model drafted first
        self.beyond: list[Timed] = []  # rounds of which only the costs are to be learned
        # Rounds that were not reported to ``continuation`` yet, and whether something was found for them.
        self.untold: list[tuple[Timed, bool]] = []
        self.after: bool | None = None  # the same for the last reported round of this answer
        self.together = Continuation()  # of shared rounds, in plain rounds
        self.looks_together = Looks()  # of shared rounds
        self.room = 0  # most tokens that the draft could propose at ``next_length``
        # Tokens of recent rounds left to the model: those expected by its confidence, and those accepted.
        self.promised = self.brought = 0.0
        self.token_worth: float | None = None  # the time saved by a token of the model's rounds, in plain rounds
        self.read: list[tuple[list[int], Round]] = []  # bins of drafts behind history's tokens, and their outcomes
        self.stopping_behind: Stopping | None = None
        self.now = False  # whether something was found for the last round given to ``lead``
        # Caches, cleared when estimates change: tokens per second after a round for which something was found or
        # not; seconds of a round of history by its tokens; the draft's acceptance by position; and the terms of rounds
        # for which something was found.
        self.rates: dict[bool, float] = {}
        self.history_s: list[float] | None = None
        self.hope: list[float] | None = None
        self.terms: Terms | None = None
        super().__init__(*args, **kwargs)

    def begin(self, scope: Scope, decoded: int = 0) -> None:
        """See ``LengthPolicy``."""
        super().begin(scope, decoded)
        self.after = None
        self.before.soon = self.behind.soon = True

    def next_length(self, limit: int, waiting: int = 0, context: int = 0) -> int:
        """See ``LengthPolicy``."""
        if self.plans:
            self.plans = {}
        self.drafts, self.room = 0, limit
        length = super().next_length(limit, waiting, context)
        self.steady = min(self.steady, self.batch.rounds)  # so that history's rounds are learned from in time
        return length

    def worth_looking(self, behind: bool = False) -> bool:
        """See ``GraftingPolicy``."""
        return (self.behind if behind else self.before).due(self.elapsed.seconds)

    def look_took(self, seconds: float, behind: bool = False) -> None:
        """See ``GraftingPolicy``."""
        (self.behind if behind else self.before).looked(seconds, self.elapsed.seconds)

    def look_skipped(self) -> None:
        """See ``GraftingPolicy``."""
        self.behind.skipped(self.elapsed.seconds)

    def rests(self, drafting: bool) -> int:
        """See ``GraftingPolicy``."""
        now = self.elapsed.seconds
        wait_s = min(self.before.wait(now), self.behind.wait(now) if drafting else math.inf)
        return min(MOST_RESTS, int(wait_s / (self.costs.round(self.best) if drafting else self.plain_s)))

    def lead(self, reach: Sequence[float], length: int, limit: int, singly: bool = False, passed: int = 0) -> Lead:
        """See ``GraftingPolicy``; by the rule above. Call it at most once per round."""
        plan = self.plans[passed] = Plan()
        lead = self._lead(plan, reach, length, limit, singly, passed)
        plan.model = lead.model > 0 and not lead.history
        self.room -= lead.history
        return lead

    def _lead(self, plan: Plan, reach: Sequence[float], length: int, limit: int, singly: bool, passed: int) -> Lead:
        self.now = False
        if not reach:
            return Lead(0, length)
        seconds, terms = self._seconds(), self.terms or self._terms()
        token_s = terms.token_s if self.room else 0.0
        alone, gain = best_length(reach[: max(0, limit)], seconds, terms.rate, token_s, terms.plain)
        # A proposal that beats plain decoding at this rate also does so at plain decoding's own, which is not higher.
        self.now = plan.found = alone > 0 or pays(reach, seconds)
        if not alone:
            return Lead(0, length)
        lead = Lead(alone, 0)
        if length and self.speculating and reach[0] > terms.sure:
            usual = min(length, self.best)
            fed_s = terms.step_s if singly else terms.fed_s
            most = max(0, min(limit, LONGEST) - usual)
            before, more = best_front(reach[:most], seconds, terms.rate, usual, terms, fed_s)
            if more > gain:
                lead, gain = Lead(before, min(length, limit - before, LONGEST - before)), more
        plan.gain = gain
        self.before.found(max(0.0, gain - (terms.otherwise if length else terms.plain)) / terms.rate)
        if length and self.rival.on_trial and self.tries.on_trial_here > len(self.seen) + passed:
            return Lead(0, length)
        most = min(limit, self.room - passed, self.longest if self.attentive else self.best)
        if most <= 0:
            return lead
        loss = (gain - terms.model) / (terms.rate * self.plain_s)
        self.rival.wins(-loss)
        waiting = self.waiting + passed
        read = waiting <= FEW_WAITING
        if loss <= 0.0 and (read or self._pays_to_read(waiting, limit)):
            return Lead(0, most)
        if not read:
            loss += self.costs.draft(0, waiting) / self.plain_s
        if self.rival.due(max(0.0, loss), seconds[lead.history] / self.plain_s, terms.tries):
            plan.loss = loss
            return Lead(0, most)
        return lead

    def _terms(self) -> Terms:
        """Compute the terms from the current estimates."""
        costs, rate, seconds = self.costs, self._rate_behind(True), self._seconds()
        plain = 1.0 - rate * self.plain_s
        tokens, took = self._model_round()
        there, there_s = self.rival.usual(tokens - 1.0, took / costs.speed)
        usual = min(self.length, self.best)
        hope = sum(itertools.accumulate(self._hope()[:usual], operator.mul))
        draft_s, fed_s = self.marginal * costs.draft(usual), costs.draft(0, 1)
        further_s = min(map(operator.sub, seconds[1 + usual :], seconds[1:]), default=0.0)
        later_s = fed_s + LONGEST * max(0.0, 1.0 - self.marginal) * fed_s  # most that history alone pays more to feed
        self.terms = Terms(
            rate=rate,
            plain=plain,
            otherwise=max(plain, tokens - rate * took) if self.speculating else plain,
            model=1.0 + there - rate * there_s * costs.speed,
            token_s=fed_s if self.speculating else 0.0,
            hope=hope,
            draft_s=draft_s,
            fed_s=self.marginal * fed_s,
            step_s=self.marginal * costs.draft_step(),
            sure=rate * (draft_s + further_s - later_s) / max(hope, 1e-9),
            tries=BUDGET - self._most_budget(),
        )
        return self.terms

    @property
    def rate(self) -> float:
        """Tokens per second of the text after the last round given to ``lead``."""
        return self._prices_now()[0]

    def _prices_now(self) -> tuple[float, float]:
        """That rate, and the later seconds of feeding a token to the draft."""
        return self._rate_behind(self.now), self.costs.draft(0, 1) if self.speculating and self.room else 0.0

    def _rate_behind(self, found: bool) -> float:
        """Tokens per second of the text after a round for which something was ``found`` or not."""
        rate = self.rates.get(found)
        if rate is None:
            speed = self.costs.speed
            plain_s = self.plain_s / speed
            ways = [(1.0, plain_s)]
            if self.room > 0:
                tokens, seconds = self._model_round_fed()
                ways.append((tokens, seconds / speed))
            rate = self.rates[found] = self.continuation.rate(found, plain_s, ways) / speed
        return rate

    @property
    def present_speed_up(self) -> float | None:
        """See ``LengthPolicy``."""
        if not self.costs.measured:
            return None
        if not self.alone:
            return self.together.general(1.0)
        self._tell()
        plain_s = self.plain_s / self.costs.speed
        return self.continuation.general(plain_s) * plain_s

    def _model_round(self) -> tuple[float, float]:
        """Tokens and seconds of a round of the model, for rounds that history would not draft."""
        recent, usual_s = self.recent, self.longer * self.costs.round(self.best)
        seconds = (recent.seconds * self.costs.speed + RATE_WEIGHT * usual_s) / (recent.rounds + RATE_WEIGHT)
        return self.speculative * seconds, seconds

    def _model_round_fed(self) -> tuple[float, float]:
        """The same if feeding the draft history's tokens of the rounds in between is charged to it."""
        tokens, seconds = self._model_round()
        return tokens, seconds + self.costs.draft(0, 1) * self.continuation.free_a_round_left()

    def _saved(self) -> float:
        """Seconds that such a round saves over a plain one."""
        tokens, seconds = self._model_round_fed()
        return (tokens - 1.0) / self._rate_behind(False) - (seconds - self.plain_s)

    def _pays(self) -> bool:
        return self._saved() > 0

    def _rate_ahead(self) -> float:
        return self._rate_behind(False)

    def _worth(self, likely: float, committed: int) -> float:
        # Confidence, which is calibrated on all rounds, may be too high in those left to the model.
        promised, brought = self.promised, self.brought
        self.promised, self.brought = KEEP * promised + likely - 1.0, KEEP * brought + committed - 1.0
        if self.token_worth is None:  # the same for all rounds of a batch
            self.token_worth = 1.0 / (self._rate_behind(False) * self.plain_s)
        return 1.0 + (likely - 1.0) * (brought + SURE_WEIGHT) / (promised + SURE_WEIGHT) * self.token_worth

    def _most_budget(self) -> float:
        return BUDGET * self.continuation.share_left(self.plain_s / self.costs.speed)

    def _worth_catching_up(self, limit: int) -> bool:
        return self._pays_to_read(self.waiting, limit)

    def _pays_to_read(self, waiting: int, limit: int) -> bool:
        """Whether the rest of the answer will save the time in which the draft reads the ``waiting`` tokens that it has
        not seen: in rounds left to it, and in rounds that it takes from history."""
        continuation, tokens = self.continuation, self._tokens_left(limit)
        won_s = continuation.found_a_token() * self.rival.won * self.plain_s
        return tokens * (continuation.left_a_token() * max(0.0, self._saved()) + won_s) > self.costs.draft(0, waiting)

    def adviser_behind(self, tokens: int, sure: float) -> Adviser | None:
        """The model's own thresholds at the costs of the positions that its tokens will have, divided by the
        probability that these are reached."""
        if not self.attentive:
            return None
        if self.stopping_behind is None:
            self.stopping_behind = Stopping(self.longest)
        worth = self.rate * self.marginal * self.costs.speed / max(sure, 1e-9)
        none = [math.inf] * self.longest
        drop, last = ([worth * p for p in prices[tokens:]] + none for prices in (self.prices, self.further))
        behind = self.stopping_behind
        behind.clear()
        behind.decide(self.calibration.table, self.calibration.follow, drop[: self.longest], last[: self.longest - 1])
        return behind

    def sure_of_draft(self, drafted: int, agreed: Sequence[float]) -> float:
        """See ``GraftingPolicy``."""
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
        """See ``GraftingPolicy``."""
        seconds = self._seconds()
        return drafted < LONGEST and sure > self.rate * (seconds[drafted + 1] - seconds[drafted])

    def tail(self, drafted: int, sure: float, reach: Sequence[float], limit: int) -> int:
        """See ``GraftingPolicy``."""
        rate, token_s = self._prices_now()
        most, gain = best_tail(reach[:limit], self._seconds(), rate, token_s, sure, drafted)
        self.behind.found(gain / rate)
        return most

    def observe_free(self, outcome: Round) -> None:
        """Learn from a round of history (or a grammar): the seconds of a verification. It shows nothing about the
        draft, unless that was asked first and proposed nothing."""
        if self._bins():
            self.observe(outcome)
            return
        self._take_costs(Timed(outcome, 0, 0))

    def _bins(self) -> list[int]:
        if not self.attentive or ((plan := self._plan) is not None and not plan.model):
            return []
        return self.stopping.bins_of(self.drafts)

    @property
    def _plan(self) -> Plan | None:
        """The plan of the round being observed, if there is one."""
        return self.plans.get(self.elapsed.rounds) if self.plans else None

    def _take_costs(self, timed: Timed) -> None:
        """Keep a round of which only the costs are to be learned."""
        outcome, tokens = timed.outcome, 1 + timed.outcome.accepted
        self._ended(timed)
        self.elapsed.passed(outcome)
        self.waiting = max(0, tokens - timed.steps) if timed.steps else self.waiting + tokens
        self.beyond.append(timed)
        if len(self.seen) + len(self.beyond) >= self.batch.rounds:
            self.settle()

    def observe(self, outcome: Round) -> None:
        """See ``LengthPolicy``."""
        if outcome.first and (parts := outcome.parts)[0].drafter in FREE:
            bins = [] if self.stopping_behind is None else self.stopping_behind.bins_of()
            if outcome.learned is not None:
                self.read.append((bins, outcome.learned))
            steps, fed = len(bins) or parts[1].drafted, parts[0].drafted
            if parts[1].drafter != MODEL:  # a head reads history's tokens one by one
                self._take_costs(Timed(outcome, steps + fed, self.waiting))
            else:
                self._take_costs(Timed(outcome, steps, self.waiting + fed))
            return
        apart = False
        if (plan := self._plan) is not None and plan.gain is not None:
            steps = len(self._bins()) if self.attentive else outcome.first or outcome.drafted
            if apart := steps > 0:
                self._tried_instead(Timed(outcome, steps, self.waiting), plan.gain, plan.loss)
        self._keep(outcome, apart)

    def _tried_instead(self, timed: Timed, gain: float, expected: float | None) -> None:
        """Learn from a round of the model in history's place; history's proposal was worth ``gain``. ``expected`` is
        the loss that was expected of a try."""
        tokens, seconds = 1 + timed.outcome.accepted, self._believed(timed)
        others, others_s = self._model_round()
        speed = self.costs.speed
        self.rival.observe(tokens - 1.0, seconds / speed, others - 1.0, others_s / speed)
        if expected is not None:
            self.rival.tried(((gain - tokens) / self._rate_behind(True) + seconds) / self.plain_s, expected)

    def _believed(self, timed: Timed) -> float:
        """Seconds of a round by the estimated costs."""
        costs, (outcome, steps, waiting, *_) = self.costs, timed
        if not steps and not outcome.drafted:
            return self.plain_s
        return costs.draft(steps, self._fed(waiting)) + costs.beside_drafting(outcome.drafted)

    def _fed(self, waiting: int) -> int:
        # Tokens of other drafters must be fed to the draft at some time, whoever drafts this round: see ``_saved``.
        return min(waiting, 1)

    def _ended(self, timed: Timed) -> None:
        plan = self._plan
        self.drafts += self.length > 0 if plan is None else plan.model
        self.untold.append((timed, plan is not None and plan.found))

    def _tell(self) -> None:
        """Report the ended rounds to ``continuation``."""
        if not self.untold:
            return
        self.rates, self.terms = {}, None
        untold, self.untold, speed = self.untold, [], self.costs.speed
        self.after = self.continuation.tell(untold, lambda timed: self._believed(timed) / speed, self.after)

    def among(self, scope: Scope) -> SharedLength:
        """See ``GoodputLength``."""
        return SharedWithHistory(self, scope, self.together, self.looks_together, self.clock)

    def settle(self) -> None:
        """Learn from all rounds observed since the last time."""
        self._tell()
        self.decided = self.decided and not self.beyond
        if self.read and self.attentive:
            for bins, outcome in self.read:
                self.calibration.observe(bins, outcome.drafted, outcome.accepted)
            self.calibration.calibrate()
        self.read = []
        self.token_worth = None
        super().settle()

    def _costs_mended(self, seen: Sequence[Timed]) -> bool:
        beyond, self.beyond = self.beyond, []
        mended = bool(beyond) and self.costs.observe(beyond)
        return super()._costs_mended(seen) or mended

    def swapped(self, expected: Sequence[float] | None = None) -> None:
        """See ``LengthPolicy``."""
        super().swapped(expected)
        self.rival.swapped()

    def _rescale(self, factor: float) -> None:
        super()._rescale(factor)
        self.continuation.rescale(factor)
        self.rival.rescale(factor)

    def _decide(self, context: int, waiting: int) -> None:
        self.rates = {}
        super()._decide(context, waiting)
        self.history_s = self.hope = self.terms = None

    def _seconds(self) -> list[float]:
        """Seconds of a round of history, by the number of its tokens that are verified."""
        if self.history_s is None:
            # Without the factor ``longer`` of the model's rounds, which is known from few rounds if history leads.
            self.history_s = [self.plain_s, *map(self.costs.beside_drafting, range(1, LONGEST + 1))]
        return self.history_s

    def _hope(self) -> list[float]:
        """The draft's acceptance by position."""
        if self.hope is None:
            self.hope = self.acceptance.estimate()
        return self.hope
