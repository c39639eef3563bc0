"""What may be drafted while drafting does not pay, so that it stays known what it would bring.

Two sorts of tries. **Out of a budget**, in time of plain rounds: each of these earns a share of itself, a try spends
what it took longer than plain decoding would have, and one that took less adds to it. **On trial**: a draft that has
just come into use has some tokens judged in each of its first answers, whatever is expected of it and whatever history
has found. What live acceptance is judged by (``service/watch.py``) would else be a try now and then, if the draft is
bad, and it would stay in use for long though nobody drafts with it.

Where history would draft, rounds of the model's have a budget of their own (``Rival``).
"""

from __future__ import annotations

from adaptive.control.ahead import Discounted

# Share of plain decoding's time that tries may spend. More finds a useful draft sooner, and is lost beside a bad one.
SHARE = 0.01
# The most that the budget holds, in plain rounds, and what it begins with: some thirty tries of a small
# draft. Less gives up on a bad beginning, more is spent at every change for the worse.
BUDGET = 4.0
# The most that it may owe: a try behind a long prompt costs as many rounds as the draft takes to catch up with it. Less
# lets such tries cost more than their share, more keeps a draft that has become useful waiting for longer.
DEBT = 16.0
# Of so many tries one verifies its first token however little the draft thinks of it, so that a draft of which nothing
# is expected goes on being judged. Fewer tries find out about a useful draft if more of them do.
JUDGED_EVERY = 4
# Rounds of a new draft on trial, and of these in one answer at most, since tokens of one answer hang together: some
# forty plain rounds' time in all, once. Fewer do not tell an acceptance of 0.11 from one of 0.30. More of them in an
# answer are lost on the first answers of a draft that history does better than.
ON_TRIAL, ON_TRIAL_HERE = 160, 6
# Of the model's rounds where history would have drafted: what is left of one after a later one, and imaginary ones of
# what its others bring.
KEEP_RIVAL, RIVAL_WEIGHT = 0.998, 8.0
# Accepted tokens that the model's other rounds count for at least, or those in history's place would be no multiple.
LEAST_OTHERS = 0.01
# Weight of one round in the mean of what such a round of the model's loses.
LOSS_STEP = 0.05
# Share of the time of history's rounds that such tries may lose. More is lost for as long as history does better, less
# is late to see where the model does.
RIVAL_SHARE = 0.003


class Tries:
    """The budget, what a try costs, and how many rounds are left on trial."""

    def __init__(self) -> None:
        self.budget, self.price = BUDGET, 0.0  # in plain rounds
        self.made = 0
        self.on_trial, self.on_trial_here = 0, 0  # rounds left, and of these in this answer

    @property
    def due(self) -> bool:
        """Whether to draft though it does not pay."""
        return self.on_trial_here > 0 or self.affordable

    @property
    def affordable(self) -> bool:
        """Whether the budget has what a try costs."""
        return self.budget >= self.price

    @property
    def judged(self) -> bool:
        """Whether the next one has its first token judged, however little the draft thinks of it."""
        return self.on_trial_here > 0 or self.made % JUDGED_EVERY == 0

    @property
    def wait(self) -> float:
        """Plain rounds until the budget has what a try costs."""
        return (self.price - self.budget) / SHARE

    def cost(self, price: float, most: float) -> None:
        """What a try costs now; ``most`` is what the budget may hold."""
        self.budget, self.price = min(most, self.budget), min(most, price)

    def earn(self) -> None:
        """A plain round has passed."""
        self.budget = min(BUDGET, self.budget + SHARE)

    def judge(self) -> bool:
        """A token of the draft was judged; whether that was on trial."""
        if not self.on_trial_here:
            return False
        self.on_trial, self.on_trial_here = self.on_trial - 1, self.on_trial_here - 1
        return True

    def spend(self, worth: float, took: float, catching_up: float) -> None:
        """A drafted round took so long, and catching up with the text before it, for what is ``worth`` so much. Below 0
        it goes for catching up alone."""
        left = max(min(0.0, self.budget), self.budget + worth - took)
        self.budget = min(BUDGET, max(-DEBT, left - catching_up))

    def answer(self) -> None:
        """Another answer begins."""
        self.on_trial_here = min(self.on_trial, ON_TRIAL_HERE)

    def swapped(self) -> None:
        """Another draft is in use."""
        self.budget, self.on_trial = BUDGET, ON_TRIAL


class Rival:
    """What the model's rounds bring where history would have drafted, and when to try one.

    Where history finds something the text repeats itself, and a model guesses such text better as well. By how much
    is remembered for longer than how good the model is: it is seen seldom where history does better, and is much the
    same for the model's next adapter.
    """

    def __init__(self) -> None:
        # Tokens drafted and accepted and seconds of such rounds; the same of as many of the model's others.
        self.seen, self.others = Discounted(KEEP_RIVAL), Discounted(KEEP_RIVAL)
        # In plain rounds' time: what tries have lost beyond what they may, and what one is expected to lose.
        self.owed, self.loss = 0.0, 0.0
        self.won = 0.0  # the same that one would save, of all of history's rounds, if it is only made where it saves

    def observe(self, accepted: float, seconds: float, others: float, others_s: float) -> None:
        """Such a round, where others of the model's have so many accepted tokens and take so long."""
        self.seen.observe(accepted, seconds)
        self.others.observe(max(others, LEAST_OTHERS), others_s)

    def usual(self, others: float, others_s: float) -> tuple[float, float]:
        """Accepted tokens and seconds of such a round, where others of the model's have so many."""
        others = max(others, LEAST_OTHERS)
        tokens, seconds = RIVAL_WEIGHT * others, RIVAL_WEIGHT * others_s
        more = (self.seen.tokens + tokens) / (self.others.tokens + tokens)
        longer = (self.seen.seconds + seconds) / (self.others.seconds + seconds)
        return more * others, longer * others_s

    def swapped(self) -> None:
        """The model is another one."""
        self.owed = self.loss = self.won = 0.0

    def wins(self, saved: float) -> None:
        """A round of the model's is expected to save so much where history would draft."""
        self.won += LOSS_STEP * (max(0.0, saved) - self.won)

    def due(self, loss: float, passed: float, most: float) -> bool:
        """Whether this round, which history would draft, is the model's all the same: that is expected to lose so much,
        what history does takes as much as ``passed`` plain rounds, and tries may lose ``most`` at once. Then the loss
        is owed from now on."""
        self.loss = loss if not self.loss else self.loss + LOSS_STEP * (loss - self.loss)
        self.owed = max(0.0, self.owed - RIVAL_SHARE * passed)
        if self.owed + self.loss > most:
            return False
        self.owed += loss
        return True

    def tried(self, loss: float, expected: float) -> None:
        """A try has lost so much, where so much was ``expected``. One that saved something pays for others, so that a
        model of which too little is believed is found out."""
        self.owed = max(0.0, self.owed + loss - expected)
