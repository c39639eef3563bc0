"""What is common to choosing a number of nodes (``nodes.py``) and a length (``lengths.py``) for targets whose passes
are slow and hardly slower for more tokens. Both are the size of a draft.

A round of n drafted tokens takes the seconds of a line that bends upwards (``bend.py``) and commits one token more than
are accepted. Nothing is measured before: a few rounds are enough.

A draft that asks about each token makes those that the target's text contains with a probability of at least their
seconds times the tokens per second of such rounds: one more token pays if it brings text faster than rounds do.

For other drafts (a draft server's) the accepted tokens are learned as a running mean at each size, shrunk towards a
curve that all sizes share. The size with the most expected tokens per second is chosen, among them 0, plain decoding.
From time to time a neighbour of it is tried.

Earlier text that is expected to bring more than the best draft is proposed in its place.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import Generic, TypeVar

from adaptive.control.bend import BentLine
from adaptive.control.policy import Adviser, Lead, LengthPolicy, Scope, SharedLength
from adaptive.types import Round

# Factor on an observation at each later round. Too low: it forgets the draft's acceptance from one answer to the next.
# Too high: it is late to notice other text.
KEEP = 0.97
# Rounds that what was learned of a draft's acceptance counts for when another draft takes its place. Too low: the first
# rounds are left to chance. Too high: what the other draft can do is noticed late.
KEPT_AT_SWAP = 4.0
# Rounds between two tries of a neighbour of the best size. Too low: more is lost while the best size is known. Too
# high: a change of the best size is noticed late.
TRY_EVERY = 12
# Multiple of the expected seconds above which a round counts as disturbed (a disk that wakes up, another program), and
# disturbed rounds in a row from which on the machine has changed. Before, such a round counts as that multiple.
FAR, PATIENCE = 2.0, 3
# Accepted tokens expected of earlier text below which it is not verified.
LEAST_REACH = 0.1
# Factor on the least probability of a token, or its inverse, in a round that tries other sizes. Too low: the costs of a
# token become uncertain. Too high: more is lost in these rounds.
OTHER_LEAST = 2.0

Asking = TypeVar("Asking", bound=Adviser)


class SizeByCost(LengthPolicy, Generic[Asking]):
    """Drafts the size that maximises the expected tokens per second. ``Asking`` is what a draft asks about each token.

    ``sizes`` are those to choose from, from 0 on; ``first_tries`` those tried one after the other in the first rounds.
    ``common``: the rounds that the common curve counts for at each size. ``bends``: the numbers of tokens from which
    more of them may cost more.
    """

    sizes: tuple[int, ...]
    bends: tuple[int, ...]
    first_tries: tuple[int, ...]
    common: float

    def __init__(self) -> None:
        self.rounds = 0
        self.weight = [0.0] * len(self.sizes)
        # Accepted tokens of rounds of about that size, times their weight.
        self.accepted = [0.0] * len(self.sizes)
        self.seconds = BentLine(self.bends)
        self.disturbed = 0  # disturbed rounds in a row
        # The committed tokens of rounds whose draft asked about its tokens.
        self.chosen = Means()
        self.greedy = False  # the current answer
        self._adviser = self.new_adviser()

    @abstractmethod
    def new_adviser(self) -> Asking:
        """What the draft of one answer asks."""

    @abstractmethod
    def prepare(self, adviser: Asking, greedy: bool, least: Sequence[float], rate: float) -> None:
        """Prepare ``adviser`` for the next round of a ``greedy`` or a sampled answer. ``least`` is the probability
        below which a token is left out, by its place; if it is empty, none is. ``rate``: the expected tokens per second
        of such rounds, 0 if nothing is known."""

    @abstractmethod
    def asked(self, adviser: Asking, greedy: bool, outcome: Round) -> bool:
        """Learn from a finished round how likely drafted tokens are. Returns whether its draft asked ``adviser``."""

    @abstractmethod
    def curve(self, size: int) -> float:
        """Expected accepted tokens of a size by what was observed at all sizes."""

    @property
    def adviser(self) -> Adviser | None:
        """See ``GraftingPolicy``."""
        return self._adviser

    def begin(self, scope: Scope, decoded: int = 0) -> None:
        """See ``LengthPolicy``."""
        self.greedy = not scope.temperature

    def next_length(self, limit: int, waiting: int = 0, context: int = 0) -> int:
        """The size of the next draft, or the most if the draft asks about each token."""
        place = self.advise(self._adviser, self.greedy)
        self.expected = self._best_rate()
        return min(self.sizes[place], limit)

    def advise(self, adviser: Asking, greedy: bool, answers: int = 1) -> int:
        """Prepare ``adviser`` for the next round of a ``greedy`` or a sampled answer, whose pass ``answers`` answers
        share. Returns the place of the largest size; 0, for plain decoding, if no draft pays and no try is due."""
        place, least, rate = self._plan(answers)
        self.prepare(adviser, greedy, least, rate)
        return place

    def _plan(self, answers: int) -> tuple[int, Sequence[float], float]:
        """The place of the largest size, and ``prepare``'s ``least`` and ``rate``. In the first rounds, for a draft
        that does not ask, or if rounds do not tell what a token takes, that is a size to try, or the best one, and no
        token is left out."""
        if not self.seconds or (answers == 1 and self.rounds < len(self.first_tries)):
            return self._first_try(), (), self._best_rate()
        if not self.chosen.weight or self.seconds(self.sizes[-1]) <= self.seconds(0):
            return self._next(), (), self._best_rate()
        due = self.rounds % TRY_EVERY == TRY_EVERY - 1
        if not due and self.chosen.value / self.seconds(self.chosen.size) < 1.0 / self.seconds(0):
            return 0, (), self._best_rate()
        together = self.seconds(0) + answers * (self.seconds(self.chosen.size) - self.seconds(0))
        rate = answers * self.chosen.value / together
        price = rate
        if due:
            price *= OTHER_LEAST if self.rounds // TRY_EVERY % 2 else 1.0 / OTHER_LEAST
        steps = self.seconds.steps(self.sizes[-1])
        least = [price * steps[min(answers * place, len(steps)) - 1] for place in range(1, len(steps) + 1)]
        return len(self.sizes) - 1, least, rate

    def worth_looking(self, behind: bool = False) -> bool:
        """Before every round, since rounds are long; not behind a draft."""
        return not behind

    def lead(self, reach: Sequence[float], length: int, limit: int, singly: bool = False, passed: int = 0) -> Lead:
        """As many tokens of the other proposal as bring the most expected tokens per second, if these are more than
        those of the best draft."""
        found, best, accepted = 0, self._best_rate() if length else self._rate(0), 0.0
        for count, each in enumerate(reach[: max(0, limit)], 1):
            accepted += each
            rate = (1.0 + accepted) / (self.seconds(count) or 1.0)
            if accepted > LEAST_REACH and rate > best:
                found, best = count, rate
        return Lead(found, 0) if found else Lead(0, length)

    def _first_try(self) -> int:
        return self.sizes.index(self.first_tries[self.rounds % len(self.first_tries)])

    def _next(self) -> int:
        """The best size, or one of its neighbours, but not 0, if a try is due."""
        place = self._best()
        if self.rounds % TRY_EVERY < TRY_EVERY - 1:
            return place
        up = self.rounds // TRY_EVERY % 2 == 0
        return min(max(place + (1 if up else -1), 1), len(self.sizes) - 1)

    def _best(self) -> int:
        return max(range(len(self.sizes)), key=self._rate)

    def _place(self, n: int) -> int:
        """The place of the size that is nearest to ``n``; 0 only for 0."""
        return min(range(1, len(self.sizes)), key=lambda i: abs(math.log(n / self.sizes[i]))) if n else 0

    def _best_rate(self) -> float:
        """Expected tokens per second of the rounds that are chosen; 0 before any round was observed."""
        if not (self.chosen.weight and self.seconds):
            return self._rate(self._best())
        return max(self.chosen.value / self.seconds(self.chosen.size), self._rate(0))

    def _rate(self, place: int) -> float:
        """Expected tokens per second at this size; 0 before any round was observed."""
        seconds = self.seconds(self.sizes[place])
        return (1.0 + self._accepted(place)) / seconds if seconds else 0.0

    def _accepted(self, place: int) -> float:
        """Expected accepted tokens: the mean observed at this size, shrunk towards the common curve."""
        if not self.sizes[place]:
            return 0.0
        curve = self.curve(self.sizes[place])
        return (self.accepted[place] + self.common * curve) / (self.weight[place] + self.common)

    def observe(self, outcome: Round) -> None:
        """Learn the seconds and the accepted tokens of a round."""
        self.observe_free(outcome)
        self.accept(outcome, self._adviser, self.greedy)

    def observe_free(self, outcome: Round) -> None:
        """Learn the seconds of a round."""
        n, seconds = outcome.drafted, outcome.draft_s + outcome.verify_s
        usual = FAR * self.seconds(n)
        self.disturbed = self.disturbed + 1 if 0.0 < usual < seconds else 0
        if 0 < self.disturbed < PATIENCE:
            seconds = usual
        self.seconds.observe(n, seconds)

    def accept(self, outcome: Round, adviser: Asking, greedy: bool) -> None:
        """Learn the accepted tokens of a round of a ``greedy`` or a sampled answer, whose draft asked ``adviser`` if it
        asks."""
        self.rounds += 1
        n = outcome.drafted
        if self.asked(adviser, greedy, outcome):
            self.chosen.fade()
            self.chosen.observe(n, 1 + outcome.accepted)
        if n:
            place = self._place(n)
            self.weight, self.accepted = [KEEP * w for w in self.weight], [KEEP * a for a in self.accepted]
            self.weight[place] += 1.0
            self.accepted[place] += outcome.accepted

    @property
    def expected_speed_up(self) -> float | None:
        """The speed of the rounds that are chosen, relative to plain decoding."""
        plain = self._rate(0)
        return self._best_rate() / plain if plain else None

    def among(self, scope: Scope) -> SharedLength:
        """A chooser that uses what is known of rounds alone."""
        return _SharedSize(self, not scope.temperature)

    def swapped(self, expected: Sequence[float] | None = None) -> None:
        """Reduce the acceptance learned of the old draft to the weight of a few rounds. If there was no draft so far
        (a head that is not trained yet), begin with the first tries."""
        total = sum(self.weight)
        if not total:
            self.rounds = 0
        self.chosen.weight = min(self.chosen.weight, KEPT_AT_SWAP)
        if total > KEPT_AT_SWAP:
            self.weight = [w * KEPT_AT_SWAP / total for w in self.weight]
            self.accepted = [a * KEPT_AT_SWAP / total for a in self.accepted]


class Means:
    """Discounted means over rounds: of their sizes, and of a value."""

    def __init__(self) -> None:
        self.weight = self.size = self.value = 0.0

    def fade(self) -> None:
        """Let the rounds so far count for less; once in each round."""
        self.weight *= KEEP

    def observe(self, size: int, value: float) -> None:
        """Take in a round."""
        self.weight += 1.0
        self.size += (size - self.size) / self.weight
        self.value += (value - self.value) / self.weight


class _SharedSize(SharedLength, Generic[Asking]):
    """The same if several answers share a pass. Of such rounds only the accepted tokens are learned."""

    def __init__(self, policy: SizeByCost[Asking], greedy: bool) -> None:
        self._policy, self._asked, self._greedy = policy, policy.new_adviser(), greedy

    @property
    def adviser(self) -> Adviser | None:
        """See ``GraftingPolicy``."""
        return self._asked

    def next_length(self, limit: int, answers: int, waiting: int = 0) -> int:
        """The best size alone with its tries, or before any lone round those tried first, divided among the answers.
        For a draft that asks about each token, the most of them."""
        place = self._policy.advise(self._asked, self._greedy, answers)
        return min(limit, max(1, self._policy.sizes[place] // answers)) if place else 0

    def lead(self, reach: Sequence[float], length: int, limit: int, singly: bool = False, passed: int = 0) -> Lead:
        """As alone."""
        return self._policy.lead(reach, length, limit, singly)

    def observe(self, outcome: Round) -> None:
        """Learn the accepted tokens."""
        self._policy.accept(outcome, self._asked, self._greedy)
