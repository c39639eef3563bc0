"""Limits the drafting that is done while drafting does not pay, so that its acceptance stays known.

There are two kinds of tries. **Out of a budget**, counted in the time of plain rounds: each plain round earns a share
of its own time, a try spends the time that it took longer than plain decoding, and a try that took less adds to the
budget. **On trial**: a new draft has some tokens judged in each of its first answers, whatever is expected of it and
whatever history has found. Otherwise a bad draft would be judged (``service/watch.py``) by occasional tries only, and
would stay in use for long although it hardly drafts.

If history would draft a round, tries of the model in its place have a budget of their own (``Rival``).
"""

from __future__ import annotations

from adaptive.control.continuation import Discounted

# Share of plain decoding's time that tries may spend. Too low: a useful draft is found late. Too high: more is lost
# with a bad one.
SHARE = 0.01
# The most that the budget holds, in plain rounds, and its initial value: some thirty tries of a small draft. Too low:
# a bad beginning ends the tries. Too high: more is spent at every change for the worse.
BUDGET = 4.0
# The most that the budget may owe: a try after a long prompt costs the rounds in which the draft catches up with it.
# Too low: such tries cost more than their share. Too high: a draft that has become useful is used late.
DEBT = 16.0
# Tokens to catch up with whose time is ignored in decisions.
FEW_WAITING = 8
# One out of this many tries verifies its first token at any confidence, so that a draft with low confidence is still
# judged. Too low: fewer tries are left to discover a useful draft.
JUDGED_EVERY = 4
# Rounds of a new draft on trial: in total (they cost about forty plain rounds, once), and per answer, since the tokens
# of one answer are correlated. A lower total cannot tell an acceptance of 0.11 from one of 0.30. More per answer are
# lost in the first answers of a draft that history outperforms.
ON_TRIAL, ON_TRIAL_HERE = 160, 6
# For rounds of the model that history would have drafted: the weight left of one after a later one, and imaginary ones
# with the result of the model's other rounds.
KEEP_RIVAL, RIVAL_WEIGHT = 0.998, 8.0
# Least accepted tokens of the model's other rounds, so that the ratio to them is defined.
LEAST_OTHERS = 0.01
# Weight of one round in the running means of the loss and gain of such rounds.
LOSS_STEP = 0.05
# Share of the time of history's rounds that such tries may lose. Too high: more is lost while history is better. Too
# low: it is noticed late that the model is better.
RIVAL_SHARE = 0.003
# Rounds of history in which a new draft is tried, whatever is expected of it. More: some percent of the first 2,000
# tokens are lost with a draft that history outperforms. Fewer do not show whether it does.
RIVAL_ON_TRIAL = 40


def tokens_left(limit: int, usual: float, decoded: int) -> float:
    """The expected number of tokens until an answer ends that has ``decoded`` tokens and room for drafts of ``limit``;
    ``usual`` is the mean length of answers."""
    return min(limit + 1, max(usual - decoded, usual / 2))


class Tries:
    """The budget, the price of a try, and the rounds left on trial."""

    def __init__(self) -> None:
        self.budget, self.price = BUDGET, 0.0  # in plain rounds
        self.made = 0
        self.on_trial, self.on_trial_here = 0, 0  # rounds left in all, and in this answer

    @property
    def due(self) -> bool:
        """Whether to draft although it does not pay."""
        return self.on_trial_here > 0 or self.affordable

    @property
    def affordable(self) -> bool:
        """Whether the budget covers a try."""
        return self.budget >= self.price

    @property
    def judged(self) -> bool:
        """Whether the next try verifies its first token at any confidence."""
        return self.on_trial_here > 0 or self.made % JUDGED_EVERY == 0

    @property
    def wait(self) -> float:
        """Plain rounds until the budget covers a try."""
        return (self.price - self.budget) / SHARE

    def cost(self, price: float, most: float) -> None:
        """Set the price of a try and the most that the budget may hold."""
        self.budget, self.price = min(most, self.budget), min(most, price)

    def earn(self) -> None:
        """Add the share of one plain round."""
        self.budget = min(BUDGET, self.budget + SHARE)

    def judge(self) -> bool:
        """Count a round in which a token of the draft was judged. Returns whether the round was on trial."""
        if not self.on_trial_here:
            return False
        self.on_trial, self.on_trial_here = self.on_trial - 1, self.on_trial_here - 1
        return True

    def spend(self, worth: float, took: float, catching_up: float) -> None:
        """Charge a drafted round: it took ``took``, its tokens are ``worth`` that much time, and before it the draft
        spent ``catching_up`` with the text (all in plain rounds). Only catching up can take the budget below 0."""
        left = max(min(0.0, self.budget), self.budget + worth - took)
        self.budget = min(BUDGET, max(-DEBT, left - catching_up))

    def answer(self) -> None:
        """Start an answer."""
        self.on_trial_here = min(self.on_trial, ON_TRIAL_HERE)

    def swapped(self) -> None:
        """Start the trial of a new draft."""
        self.budget, self.on_trial = BUDGET, ON_TRIAL


class Rival:
    """The result of the model's rounds if history would have drafted them, and when to try one.

    If history finds something the text repeats itself, and a model guesses such text better as well. The ratio to the
    model's other rounds is remembered for longer than the model's own acceptance: it is observed rarely while history
    is better, and is about the same for the model's next adapter.
    """

    def __init__(self) -> None:
        # Accepted tokens and seconds of such rounds; and those expected of the model's other rounds, as many.
        self.seen, self.others = Discounted(KEEP_RIVAL), Discounted(KEEP_RIVAL)
        # In plain rounds: the loss of tries beyond their share, and the expected loss of a try.
        self.owed, self.loss = 0.0, 0.0
        self.won = 0.0  # mean gain per round of history if the model takes the rounds in which it is expected to gain
        self.on_trial = 0  # rounds of history that a new draft takes yet, whatever is expected of it

    def observe(self, accepted: float, seconds: float, others: float, others_s: float) -> None:
        """Add such a round; ``others`` and ``others_s`` are tokens and seconds of the model's other rounds now."""
        self.on_trial = max(0, self.on_trial - 1)
        self.seen.observe(accepted, seconds)
        self.others.observe(max(others, LEAST_OTHERS), others_s)

    def usual(self, others: float, others_s: float) -> tuple[float, float]:
        """Expected accepted tokens and seconds of such a round, given those of the model's other rounds."""
        others = max(others, LEAST_OTHERS)
        tokens, seconds = RIVAL_WEIGHT * others, RIVAL_WEIGHT * others_s
        more = (self.seen.tokens + tokens) / (self.others.tokens + tokens)
        longer = (self.seen.seconds + seconds) / (self.others.seconds + seconds)
        return more * others, longer * others_s

    def rescale(self, factor: float) -> None:
        """Multiply the seconds of all rounds by ``factor``."""
        self.seen.rescale(factor)
        self.others.rescale(factor)

    def swapped(self) -> None:
        """Drop gains and losses of the old draft; the ratio to other rounds stays."""
        self.owed = self.loss = self.won = 0.0
        self.on_trial = RIVAL_ON_TRIAL

    def wins(self, saved: float) -> None:
        """Take in the time, in plain rounds, that the model's round is expected to save in place of history's."""
        self.won += LOSS_STEP * (max(0.0, saved) - self.won)

    def due(self, loss: float, passed: float, most: float) -> bool:
        """Whether to try the model in this round, which history would draft. ``loss`` is the expected loss of the try,
        ``passed`` the time of history's round, and ``most`` what tries may lose at once, all in plain rounds. If so,
        ``loss`` is owed from now on."""
        self.loss = loss if not self.loss else self.loss + LOSS_STEP * (loss - self.loss)
        self.owed = max(0.0, self.owed - RIVAL_SHARE * passed)
        if self.owed + self.loss > most:
            return False
        self.owed += loss
        return True

    def tried(self, loss: float, expected: float) -> None:
        """Correct the debt by the observed ``loss`` of a try of which ``expected`` was owed. A try that saved time pays
        for others, so that a model that is underestimated is discovered."""
        self.owed = max(0.0, self.owed + loss - expected)
