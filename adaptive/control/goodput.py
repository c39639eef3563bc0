"""The default policy: drafts the number of tokens that maximises the expected tokens per second.

A round of length K commits 1 + (accepted) tokens and takes draft(K) + verify(K) + overhead seconds. Over many rounds
the rate is E[tokens] / E[seconds]. K = 0, plain decoding, is one of the choices.

**Within a round.** Let r be the current rate. Another token is worth drafting if the tokens it is expected to add
exceed what its time would yield at rate r:

    P(all before it accepted) * P(it is accepted) > r * (draft step + longer verification).

Both probabilities come from the draft's own confidence, calibrated on observed acceptance. A draft that stops by this
rule adapts to every sentence and needs no best length. If the confidence is not available (``attentive`` is off), the
fixed length of the highest rate is drafted, from acceptance by position.

**Whether to speculate at all.** Yes, if the recent rate of speculation is above that of plain decoding. If not, tries
continue out of a budget of time (``tries.py``). So a useless draft costs at most 1% of the time plus the budget's
initial content, while a draft that has become useful pays for its own tries from the first one on.

**Both modes as they are in use.** A single drafted round among plain ones, or a plain one among drafted ones, does not
take the time of such rounds in a row: threads sleep, weights have left the caches. So from time to time a block of
rounds is decoded in the mode not in use (``Blocks``), and only settled rounds are learned from and compared
(``SeenTimes``).
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence

from adaptive.control.acceptance import Acceptance
from adaptive.control.among import Draftings, JointCosts, SharedGoodput
from adaptive.control.batches import LONGEST_BATCH, BatchSize
from adaptive.control.between import Elapsed
from adaptive.control.blocks import BLOCK_SHARE, Blocks
from adaptive.control.confidence import Calibration
from adaptive.control.costs import LONGEST, CostModel, CostTable, Timed
from adaptive.control.exploring import Exploring
from adaptive.control.policy import Adviser, LengthPolicy, Scope, SharedLength
from adaptive.control.prices import best_fixed, prices
from adaptive.control.rate import RecentRate, SeenTimes
from adaptive.control.stopping import Stopping
from adaptive.control.tries import BUDGET, FEW_WAITING, Tries, tokens_left
from adaptive.machine import LoadWatch
from adaptive.records.stats import asked
from adaptive.types import Round

# Imaginary rounds in the rate of speculation, at the rate that acceptance by position predicts.
RATE_WEIGHT = 4.0
# Ratio of expected to observed seconds up to which a try is charged the expected ones, so that the clock's noise does
# not pay for tries. Beyond it the try is charged this multiple of the observed seconds.
FAR_LESS = 1.25
# Threshold of a first token's probability of acceptance above which tries verify their first token at any confidence,
# until the cost of verification is reliable. Otherwise hardly any token would be verified, and the cost never learned.
DEAR = 0.5
# Bounds of the learned cost of a second beyond a plain round's.
LEAST_MARGINAL, MOST_MARGINAL = 0.05, 4.0
# The draft length by which drafting and plain decoding are compared, since rounds of several lengths are timed.
COMPARED = 3
# Decisions for which the best length by acceptance at each position is kept: its inputs change by a percent per round.
REFRESH = 4
# Weight of one decision in the running mean of what a decision takes, and the times that a try takes as long: it is
# decided about before, learned from, and decided about after. Next to passes of half a millisecond that is not little.
DECIDING_STEP, DECISIONS = 0.05, 3.0
# Weight of one answer in the running mean of answer lengths, and its initial value (tokens).
ANSWER_STEP, ANSWER_TOKENS = 0.1, 100.0


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
        watch: LoadWatch | None = None,
    ) -> None:
        """``attentive``: whether the draft's confidence is available, so that it ends drafts. ``watch`` detects whether
        other programs use the machine; the costs of the busy machine are kept separately. ``clock`` gives the seconds
        of the observed rounds; it may stand still while other programs have the processor."""
        self.costs = CostModel(costs)
        self.acceptance = acceptance or Acceptance()
        self.calibration = calibration or Calibration()
        self.longest = min(longest, LONGEST)
        self.attentive = attentive
        self.clock = clock
        self.watch = watch
        self.busy = False
        self._other: tuple[CostModel, SeenTimes] | None = None  # of the machine's other state, quiet or busy
        self.recent = RecentRate()  # of speculative rounds, in seconds at speed 1
        self.times = SeenTimes()
        self.joint, self.draftings = JointCosts(), Draftings()  # of shared rounds
        self.alone = True  # whether the last rounds were those of one answer
        self.answer_tokens = ANSWER_TOKENS
        self.exploring = Exploring()
        self.tries, self.trying = Tries(), False  # whether the current draft is a try
        self.blocks = Blocks()
        # Since the last decision: rounds, and the bins of the draft's confidence in each.
        self.seen: list[Timed] = []
        self.sure: list[list[int]] = []
        self.elapsed = Elapsed()  # rounds of this answer and the time between them; ``next_length`` is its question
        self.decided, self.waiting, self.context = False, 0, 0  # ``context`` is that of the last decision
        self.deciding_s = 0.0  # mean seconds of a decision
        self.age = 0  # decisions since the best length by position was computed; 0 to compute it
        self.batch = BatchSize()
        self.stopping = Stopping(self.longest, LONGEST_BATCH)
        self.best, self.speculating, self.longer = 1, False, 1.0
        self.length = 0  # tokens that the draft may propose in the current rounds
        self._decide(0, 0)

    def next_length(self, limit: int, waiting: int = 0, context: int = 0) -> int:
        """The most tokens to draft; the ``adviser`` may end the draft earlier."""
        self.length = self._next_length(limit, waiting, context)
        return self.length

    def _next_length(self, limit: int, waiting: int, context: int) -> int:
        self.elapsed.ask(self.clock())
        self.alone = True
        if self.watch is not None and self.watch.look():
            self.machine(self.watch.busy)
        self.waiting = waiting
        self.stopping.clear()
        if not self.decided:
            began = self.clock()
            self._decide(context, waiting)
            took = min(self.clock() - began, self.plain_s)  # in case the process was stopped meanwhile
            self.deciding_s += DECIDING_STEP * (took - self.deciding_s)
        if not self.blocks.left and limit > 0 and self._block_is_due(waiting):
            self.settle()
            self.blocks.begin()
            self.batch.restart()
            self._decide(context, waiting)
        block = self.blocks.left
        self.expected, self.steady, self.trying = self.expected_plain, 1, not self.speculating and not block
        if block and self.speculating:
            self.steady = block
            return 0
        if not block and not self.drafting:
            # Plain rounds change nothing until the budget covers a try or a block is due.
            self.steady = max(1, int(min(self.tries.wait, self.blocks.until_next)))
            return 0
        if limit <= 0:
            return 0
        if self.speculating and waiting > FEW_WAITING and not self._worth_catching_up(limit):
            if not self.tries.due:  # the tokens to catch up with only grow in this answer
                self.steady = max(1, min(self.batch.rounds - len(self.seen), int(self.tries.wait)))
                return 0
            self.trying = True  # else a draft is never observed if answers are too short for it to catch up
        elif self.speculating or block:
            self.steady = min(self.batch.rounds - len(self.seen), block or self.batch.rounds)
        else:  # tries are learned from one by one, those on trial together
            self.steady = max(1, self.tries.on_trial_here - len(self.seen))
        self.expected = self.expected_speculative
        return min(limit, self.longest if self.attentive else self.best)

    def _block_is_due(self, waiting: int) -> bool:
        """Whether enough rounds have passed since the last block, also to pay for the draft's catching up."""
        over = -self.blocks.until_next
        if over < 0 or self.speculating or waiting <= FEW_WAITING:
            return over >= 0
        return over >= self.costs.draft(0, waiting) / (BLOCK_SHARE * self.plain_s)

    def _decide(self, context: int, waiting: int) -> None:
        """Decide from the current estimates whether to draft in the coming rounds, and the adviser's thresholds."""
        costs, self.context = self.costs, context
        costs.at(context)
        self.plain_s = costs.round(0)
        longer, self.longer = self.longer, self.times.ratio(costs.round(COMPARED) / self.plain_s)
        self.recent.rescale(self.longer / longer)
        self.marginal = self._marginal()
        if self.age == 0 or not self.attentive:
            hope = self.acceptance.estimate()[: self.longest]
            self.best, self.predicted = best_fixed(hope, costs.round, self.plain_s, self.marginal)
            if self.attentive:
                self.prices, self.further = self._prices()
        self.age = (self.age + 1) % REFRESH
        self.speculative = self._speculative_rate()
        speculating, self.speculating = self.speculating, self._pays()
        if self.speculating is not speculating:
            self.blocks.cancel()
        rate = self._rate_ahead()
        # A token is dropped if verifying it costs more tokens at the current rate than it brings, together with the
        # best continuation. It is the last one if that holds for the next token, which has to be drafted as well.
        if self.attentive:
            worth = rate * costs.speed * self.marginal
            drop_below, last_below = ([worth * p for p in prices] for prices in (self.prices, self.further))
            unsure = drop_below[0] > DEAR and not costs.sure_of_verifying()
            if not self.speculating and (self.blocks.left or unsure or self.tries.judged):
                drop_below[0] = 0.0
            self.stopping.decide(self.calibration.table, self.calibration.follow, drop_below, last_below)
            if length := self.exploring.decide(costs, self.longest, self.speculating and not self.blocks.left):
                self.batch.restart()
                self.stopping.exactly(length)
        self.tries.cost(self._cost_of_trying(waiting), self._most_budget())
        self.drafting = self.speculating or self.tries.due
        drafted_s = costs.round(self.best)
        self.blocks.plan(self.speculating, self.plain_s, drafted_s, self.speculative, costs.draft(0, 1))
        self.expected_plain = costs.with_tokens(1 / self.plain_s)
        self.expected_speculative = costs.with_tokens(self.speculative)
        self.decided = True

    def _pays(self) -> bool:
        """Whether drafting is worth its time."""
        return self.speculative * self.plain_s > 1

    def _rate_ahead(self) -> float:
        """Tokens per second at which the tokens of a draft would be produced otherwise."""
        return max(1 / self.plain_s, self.speculative)

    def _worth(self, likely: float, committed: int) -> float:
        """The value of a try in plain rounds: the time in which its tokens would be produced otherwise. It brought
        ``committed`` tokens; ``likely`` were expected, given the draft's confidence."""
        return likely

    def _most_budget(self) -> float:
        """The most that the budget of tries may hold, in plain rounds."""
        return BUDGET

    def _fed(self, waiting: int) -> int:
        """Of the tokens that the draft had to catch up with, those whose time counts as the round's."""
        return waiting if waiting <= FEW_WAITING else 0

    def _prices(self) -> tuple[list[float], list[float]]:
        """The seconds of a sure token at speed 1 (see ``prices``)."""
        costs = self.costs
        verify = [costs.verify(k) for k in range(self.longest + 1)]
        known, further = prices(verify, costs.draft_step(), self.acceptance.estimate())
        return [seconds / costs.speed for seconds in known], [seconds / costs.speed for seconds in further]

    def _cost_of_trying(self, waiting: int) -> float:
        """The cost of one drafted token that is rejected, in plain rounds."""
        costs = self.costs
        return (costs.draft(1, waiting) + costs.verify(1) - costs.plain() + self._going_back()) / self.plain_s

    def _going_back(self) -> float:
        """The additional seconds of the first plain step after another round, over the next plain step, and of the
        decisions that only a try makes necessary."""
        return self.costs.verify(0) - self.costs.plain() + DECISIONS * self.deciding_s

    def _marginal(self) -> float:
        """The real cost of a second of drafting and verifying beyond a plain round's, relative to plain rounds: less
        than 1 if the additional time of drafted rounds comes with every pass, whatever its length."""
        beyond = self.costs.round(self.best) / self.plain_s - 1.0
        if beyond <= 0:
            return 1.0
        return min(max((self.longer * (1.0 + beyond) - 1.0) / beyond, LEAST_MARGINAL), MOST_MARGINAL)

    def _speculative_rate(self) -> float:
        """Tokens per second of recent speculation, shrunk towards the prediction."""
        speed = self.costs.speed
        weight = RATE_WEIGHT * self.costs.round(self.best) / speed
        return self.recent.rate(self.predicted * speed / self.longer, weight * self.longer) / speed

    def _worth_catching_up(self, limit: int) -> bool:
        """Whether the rest of the answer will save the time of feeding the draft the tokens that it has not seen."""
        return self._tokens_left(limit) * (self.plain_s - 1 / self.speculative) > self.costs.draft(0, self.waiting)

    def _tokens_left(self, limit: int) -> float:
        """The expected number of tokens until the answer ends."""
        return tokens_left(limit, self.answer_tokens, self.elapsed.tokens)

    @property
    def expected_speed_up(self) -> float | None:
        """From the recent rate of speculation and the costs, of shared rounds while answers share them; None before
        anything was measured."""
        if not self.costs.measured:
            return None
        return self.speculative * self.plain_s if self.alone else self.draftings.speed_up

    @property
    def adviser(self) -> Adviser | None:
        """The thresholds, if the policy is attentive: they drop a token whose verification is not worth its time, and
        continue while a further token is."""
        return self.stopping if self.attentive else None

    def observe(self, outcome: Round) -> None:
        """Keep a finished round. Rounds are learned from in batches; a try at once; those on trial together."""
        self._keep(outcome)

    def _keep(self, outcome: Round, apart: bool = False) -> None:
        """A round ``apart`` teaches only costs and confidence: it is of another kind than the rounds being decided
        about."""
        bins = self._bins()
        steps = len(bins) if self.attentive else outcome.first or outcome.drafted
        # A draft on another machine may come too late, or refuse. The wait is a price of drafting, and shows nothing of
        # the time that drafts take.
        late = not (self.attentive or steps) and self.length > 0 and asked(outcome)
        steps += late
        tokens, drafted = 1 + outcome.accepted, steps > 0
        tried = drafted and not apart and self.trying
        settled, again = self.blocks.passed(drafted)
        apart = apart or self.exploring.length > 0
        timed = Timed(
            outcome, steps, 0 if late else self.waiting, again and not drafted, settled and not late, tried, apart
        )
        self._ended(timed)
        self.elapsed.passed(outcome)
        self.seen.append(timed)
        self.sure.append(bins)
        self.waiting = max(0, tokens - steps) if steps and not late else self.waiting + tokens
        if len(self.seen) >= (self.tries.on_trial_here if drafted and self.trying else self.batch.rounds):
            self.settle()

    def _bins(self) -> list[int]:
        """The bins of the draft's confidence at each position of the round being observed."""
        return self.stopping.bins_of(self.elapsed.rounds) if self.attentive else []

    def _ended(self, timed: Timed) -> None:
        """Hook: a round has ended. It is learned from later."""

    def settle(self) -> None:
        """Learn costs, acceptance and calibration from the rounds observed since the last time."""
        seen, sure = self.seen, self.sure
        if (between := self.elapsed.take())[0]:
            self.costs.observe_between(*between)
        if self.exploring.length:
            self.costs.explored(self.exploring.length, seen)
        mended = self._costs_mended(seen)
        if mended or self.blocks.left or not self.costs.as_expected:
            self.batch.restart()
        else:
            self.batch.grow(self.plain_s)
        if mended:  # the rate of speculation was computed with the old costs
            self.recent.forget()
            self.times = SeenTimes()
            self.age = 0
        plain_s = self.costs.round(0)
        compared = self.costs.round(COMPARED) / plain_s
        overhead_s = self.costs.speed * self.costs.overhead_s
        for timed, bins in zip(seen, sure, strict=True):
            if timed.steps:
                self._learn(timed, bins, compared)
                continue
            self.tries.earn()
            if timed.settled and timed.again:
                took = timed.outcome.draft_s + timed.outcome.verify_s + overhead_s
                self.times.observe(False, took, plain_s, compared)
        self.acceptance.observe([timed.own for timed in seen if timed.outcome.drafted and not timed.apart])
        if any(sure):
            self.calibration.calibrate()
        # Plain rounds show nothing new about the draft: while the budget does not cover a try, the decision stays.
        plain = not self.speculating and not any(timed.steps for timed in seen)
        self.decided = self.decided and plain and not self.tries.affordable
        self.exploring.passed(len(seen))
        self.seen, self.sure = [], []

    def _costs_mended(self, seen: Sequence[Timed]) -> bool:
        """Learn costs from rounds. Returns whether one that was far too high is right now."""
        return bool(seen) and self.costs.observe(seen)

    def _learn(self, timed: Timed, bins: list[int], compared: float) -> None:
        """Update rate, budget and calibration by one round that drafted; ``compared`` as in ``SeenTimes``."""
        costs, own, (outcome, steps, waiting, _, settled, tried, apart) = self.costs, timed.own, timed
        took = outcome.draft_s + outcome.verify_s + costs.speed * costs.overhead_s
        whole = costs.draft(steps, waiting) + costs.beside_drafting(outcome.drafted)
        if settled and outcome.drafted:
            self.times.observe(True, took, whole, compared)
        late = not (self.attentive or outcome.drafted)
        seconds = took if late else costs.draft(steps, self._fed(waiting)) + costs.beside_drafting(own.drafted)
        tokens = 1.0 + own.accepted
        if self.attentive:
            judged = bins[: min(own.drafted, own.accepted + 1)]
            # The sum of calibrated probabilities estimates the accepted tokens with less noise than their count.
            tokens = 1.0 + sum(self.calibration.table[b] for b in judged)
            self.calibration.observe(bins, own.drafted, own.accepted)
        on_trial = own.drafted > 0 and self.tries.judge()
        if apart:
            return
        longer = self.longer if own.drafted else 1.0  # a round whose draft was dropped takes a plain step's time
        if self.recent.observe(1 + own.accepted, longer * seconds / costs.speed):
            self.acceptance.changed()
            self.calibration.changed()
            self.age = 0
            self.batch.restart()
        if on_trial and tried:
            return
        if not tried and not self.speculating:  # a round of a block; blocks have their own share of the time
            return
        catching_up = costs.draft(0, waiting) if waiting > FEW_WAITING and tried else 0.0
        # Charge the observed time if it was far less, so that tries reveal costs that are estimated too high.
        catching_up = min(catching_up, FAR_LESS * took)
        seconds = min(longer * seconds, FAR_LESS * took - catching_up)
        if tried:
            seconds += self._going_back()
            self.tries.made += 1
        worth = self._worth(tokens, 1 + own.accepted)
        self.tries.spend(worth, seconds / self.plain_s, catching_up / self.plain_s)

    def machine(self, busy: bool) -> None:
        """Switch to the costs of the machine with or without other programs (``busy``), which are kept separately. The
        first switch copies the costs known so far."""
        if busy is self.busy:
            return
        self.settle()
        present = self.costs, self.times
        self._use(*(self._other or (copy.deepcopy(self.costs), SeenTimes())))
        self._other, self.busy = present, busy

    def remeasured(self, table: CostTable, busy: bool) -> None:
        """Use newly measured costs, of a machine that was ``busy`` with other programs or not."""
        self.settle()
        measured = CostModel(table), SeenTimes()
        self.exploring = Exploring()
        if busy is self.busy or not self.costs.measured:  # measured on a busy machine is better than a guess
            self._use(*measured)
        else:
            self._other = measured

    def _use(self, costs: CostModel, times: SeenTimes) -> None:
        """Switch to other costs. The seconds of recent rounds are at speed 1, which is another speed in each model, so
        they are converted by the time of the same round in both."""
        before = self.costs
        costs.at(self.context)
        self._rescale(costs.round(self.best) / costs.speed / (before.round(self.best) / before.speed))
        self.costs, self.times = costs, times
        self.decided, self.age = False, 0

    def _rescale(self, factor: float) -> None:
        """Multiply the seconds of all earlier rounds by ``factor``."""
        self.recent.rescale(factor)

    @property
    def quiet_costs(self) -> CostModel:
        """Costs of the machine without other programs, as far as they are known."""
        return self.costs if not self.busy or self._other is None else self._other[0]

    def among(self, scope: Scope) -> SharedLength:
        """A chooser with the same costs and acceptance; see ``among.py``."""
        return SharedGoodput(self, scope)

    def shared(self, rows: int, seconds: float) -> None:
        """Learn from a pass shared by several answers. It shows nothing about the time of a lone round."""
        self.alone = False
        self.joint.observe(self.costs, rows, seconds)

    def drafted(self, answers: int, tokens: int, seconds: float) -> None:
        """The same for the drafts of several answers."""
        self.joint.drafted(self.costs, answers, tokens, seconds)

    def begin(self, scope: Scope, decoded: int = 0) -> None:
        """Start an answer, or go on with one; estimates of a new session or temperature start from the general
        ones."""
        self.settle()
        self.decided, self.age = False, 0
        self.acceptance.begin(scope.session, scope.drafter, scope.temperature)
        if not decoded:
            self.tries.answer()
        self.blocks.answer()
        self.elapsed.begin(decoded)
        if self.watch is not None and self.watch.look(0.0):
            self.machine(self.watch.busy)

    def ended(self, tokens: int) -> None:
        """Learn how long answers are."""
        self.answer_tokens += ANSWER_STEP * (tokens - self.answer_tokens)

    def observe_free(self, outcome: Round) -> None:
        """Take in the time and the tokens of a round that a grammar made. It shows nothing about the draft."""
        self.elapsed.passed(outcome)
        self.waiting += 1 + outcome.accepted

    def swapped(self, expected: Sequence[float] | None = None) -> None:
        """Discount what was learned about the old draft, start from ``expected``, and make a block of rounds due."""
        self.settle()
        self.decided, self.age = False, 0
        self.acceptance.swapped(expected)
        self.calibration.swapped()
        self.recent.forget()
        self.draftings.swapped()
        self.exploring.postpone()
        self.tries.swapped()
        self.batch.restart()
        self.blocks.hurry()  # drafted rounds in a row, in the next answer
