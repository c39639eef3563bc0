"""Chooses the number of nodes of a drafted tree, or the length of a chain if the draft makes no trees, for targets
whose passes are slow and hardly slower for more tokens.

A round of n nodes takes about c0 + c1 * n seconds and commits one token more than are accepted. c0 and c1 are learned
by least squares over discounted rounds. Nothing is measured before: a few rounds are enough.

A draft that asks about each node (``TreeAdviser``) drafts it if the target's text leads through it with a probability
of at least the node's seconds times the tokens per second of such rounds: one more node pays if it brings tokens faster
than rounds do. What a node takes is known by its place: beside the reading of weights the first ones are nearly free.
The probabilities are the draft's own, raised to a power that is learned: it is moved until as many tokens are accepted
as they sum to.

For other drafts (chains; a draft server) the accepted tokens are learned as a running mean at each number of nodes,
shrunk towards b * log2(1 + n) with one b for all: doubling the nodes of a best-first tree adds about the same each
time. The number with the most expected tokens per second is chosen, among them 0, plain decoding. From time to time a
neighbour of it is tried.

Earlier text that is expected to bring more than the best tree is proposed in its place.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from adaptive.control.policy import Adviser, Lead, LengthPolicy, Scope, SharedLength, TreeAdviser
from adaptive.types import Round

# Numbers of nodes to choose from. Larger trees bring hardly more accepted tokens, and their arithmetic becomes visible
# beside the reading of weights.
NODES = (0, 4, 8, 16, 32, 64, 128)
# Lengths of a chain to choose from.
LENGTHS = (0, 2, 4, 8, 16, 32)
# Factor on an observation at each later round. Too low: it forgets the draft's acceptance from one answer to the next.
# Too high: it is late to notice other text.
KEEP = 0.97
# Rounds that the line for all numbers of nodes counts for in what a node takes at its place. Too low: that follows
# chance. Too high: the first nodes seem as dear as the last.
COMMON_LINE = 4.0
# Rounds that the common curve counts for at each number of nodes, and at each length of a chain, whose curve is nearer
# to the truth. Too low: the estimates follow chance. Too high: they follow a curve that is not theirs.
COMMON, COMMON_CHAIN = 4.0, 30.0
# Rounds between two tries of a neighbour of the best number. Too low: more is lost while the best number is known. Too
# high: a change of the best number is noticed late.
TRY_EVERY = 12
# The numbers tried one after the other in the first rounds, of trees and of chains.
FIRST_TRIES, FIRST_LENGTHS = (16, 64, 16, 32), (8, 16, 4, 8)
# Multiple of the expected seconds above which a round counts as disturbed (a disk that wakes up, another program), and
# disturbed rounds in a row from which on the machine has changed. Before, such a round counts as that multiple.
FAR, PATIENCE = 2.0, 3
# Accepted tokens expected of earlier text below which it is not verified.
LEAST_REACH = 0.1
# Factor on the least probability of a node, or its inverse, in a round that tries other numbers of nodes. Too low: the
# costs of a node become uncertain. Too high: more is lost in these rounds.
OTHER_LEAST = 2.0
# Change of the logarithm of the power by a round that commits twice as many tokens as expected, and the power's bounds.
# Too low: a new draft's trees have a poor shape for long. Too high: the shape follows chance.
SHARPER, SHARPNESS = 0.05, (0.5, 4.0)


class NodesByCost(LengthPolicy):
    """Drafts trees with the number of nodes that maximises the expected tokens per second."""

    name, tree = "nodes", True
    nodes: tuple[int, ...] = NODES
    first_tries, common = FIRST_TRIES, COMMON

    def __init__(self) -> None:
        self.rounds = 0
        self.weight = [0.0] * len(self.nodes)
        # Accepted tokens of rounds of about that many nodes, times their weight.
        self.accepted = [0.0] * len(self.nodes)
        # The seconds of these rounds, and of plain ones.
        self.took = [Means() for _ in self.nodes]
        # Weighted sums over rounds of 1, n, n * n, seconds, n * seconds.
        self.sums = [0.0] * 5
        self.disturbed = 0  # disturbed rounds in a row
        # The committed tokens of rounds whose nodes were chosen by their probability.
        self.chosen = Means()
        # The learned power, for greedy answers and for sampled ones.
        self.sharpness = {True: 1.0, False: 1.0}
        self.greedy = False  # the current answer
        self._adviser = TreeAdviser()

    @property
    def adviser(self) -> Adviser | None:
        """See ``GraftingPolicy``. None for chains, which end where they were asked to."""
        return self._adviser if self.tree else None

    def begin(self, scope: Scope, decoded: int = 0) -> None:
        """See ``LengthPolicy``."""
        self.greedy = not scope.temperature

    def next_length(self, limit: int, waiting: int = 0, context: int = 0) -> int:
        """The number of nodes of the next tree, or the most if the draft asks about each."""
        place = self.advise(self._adviser, self.greedy)
        self.expected = self._best_rate()
        return min(self.nodes[place], limit)

    def advise(self, adviser: TreeAdviser, greedy: bool, answers: int = 1) -> int:
        """Prepare ``adviser`` for the next round of a ``greedy`` or a sampled answer, whose pass ``answers`` answers
        share. Returns the place of the largest number of nodes; 0, for plain decoding, if no tree pays and no try is
        due. In the first rounds, for a draft that does not ask, or if rounds do not tell what a node takes, that is a
        number to try, or the best one, and no node is left out."""
        adviser.sharpness, adviser.least, adviser.expected = self.sharpness[greedy], [], None
        if not self.sums[0] or (answers == 1 and self.rounds < len(self.first_tries)):
            return self._first_try()
        if not self.chosen.weight or self._seconds(1) <= self._seconds(0):
            return self._next()
        due = self.rounds % TRY_EVERY == TRY_EVERY - 1
        if not due and self.chosen.value / self._seconds(self.chosen.nodes) < 1.0 / self._seconds(0):
            return 0
        together = self._seconds(0) + answers * (self._seconds(self.chosen.nodes) - self._seconds(0))
        rate = answers * self.chosen.value / together
        if due:
            rate *= OTHER_LEAST if self.rounds // TRY_EVERY % 2 else 1.0 / OTHER_LEAST
        steps = self._node_seconds()
        adviser.least = [rate * steps[min(answers * place, len(steps)) - 1] for place in range(1, len(steps) + 1)]
        return len(self.nodes) - 1

    def _node_seconds(self) -> list[float]:
        """What each node adds to the seconds of a round, by its place; no node more than the one after it. What the
        first ones add is not told from plain rounds, in which no draft is made."""
        common = self._seconds(1) - self._seconds(0)
        steps = [common]
        for before, after in itertools.pairwise(self.took[1:]):
            weight, apart = min(before.weight, after.weight), after.nodes - before.nodes
            own = max(0.0, (after.value - before.value) / apart) if weight and apart > 0.5 else common
            steps.append((weight * own + COMMON_LINE * common) / (weight + COMMON_LINE))
        least, found = math.inf, list[float]()
        for step, (begin, end) in zip(reversed(steps), reversed([*itertools.pairwise(self.nodes)]), strict=True):
            least = min(least, step)
            found = [least] * (end - begin) + found
        return found

    def worth_looking(self, behind: bool = False) -> bool:
        """Before every round, since rounds are long; not behind a tree."""
        return not behind

    def lead(self, reach: Sequence[float], length: int, limit: int, singly: bool = False, passed: int = 0) -> Lead:
        """As many tokens of the other proposal as bring the most expected tokens per second, if these are more than
        those of the best tree."""
        found, best, accepted = 0, self._best_rate() if length else self._rate(0), 0.0
        for count, each in enumerate(reach[: max(0, limit)], 1):
            accepted += each
            rate = (1.0 + accepted) / (self._seconds(count) or 1.0)
            if accepted > LEAST_REACH and rate > best:
                found, best = count, rate
        return Lead(found, 0) if found else Lead(0, length)

    def _first_try(self) -> int:
        return self.nodes.index(self.first_tries[self.rounds % len(self.first_tries)])

    def _next(self) -> int:
        """The best number, or one of its neighbours, but not 0, if a try is due."""
        place = self._best()
        if self.rounds % TRY_EVERY < TRY_EVERY - 1:
            return place
        up = self.rounds // TRY_EVERY % 2 == 0
        return min(max(place + (1 if up else -1), 1), len(self.nodes) - 1)

    def _best(self) -> int:
        return max(range(len(self.nodes)), key=self._rate)

    def _place(self, n: int) -> int:
        """The place of the number that is nearest to ``n``; 0 only for 0."""
        return min(range(1, len(self.nodes)), key=lambda i: abs(math.log(n / self.nodes[i]))) if n else 0

    def _best_rate(self) -> float:
        """Expected tokens per second of the rounds that are chosen; 0 before any round was observed."""
        if not (self.chosen.weight and self.sums[0]):
            return self._rate(self._best())
        return max(self.chosen.value / self._seconds(self.chosen.nodes), self._rate(0))

    def _rate(self, place: int) -> float:
        """Expected tokens per second at this number of nodes; 0 before any round was observed."""
        seconds = self._seconds(self.nodes[place])
        return (1.0 + self._accepted(place)) / seconds if seconds else 0.0

    def _accepted(self, place: int) -> float:
        """Expected accepted tokens: the mean observed at this number, shrunk towards the common curve."""
        if not self.nodes[place]:
            return 0.0
        curve = self._curve(self.nodes[place])
        return (self.accepted[place] + self.common * curve) / (self.weight[place] + self.common)

    def _curve(self, nodes: int) -> float:
        """Expected accepted tokens of a number of nodes by what was observed at all numbers."""
        known = sum(w * math.log2(1 + n) for w, n in zip(self.weight, self.nodes, strict=True))
        return sum(self.accepted) / known * math.log2(1 + nodes) if known else 0.0

    def _seconds(self, nodes: float) -> float:
        """Seconds of a round, by a line fitted to observed rounds whose slope is at least 0."""
        count, n, squares, seconds, products = self.sums
        if not count:
            return 0.0
        spread = squares - n * n / count
        slope = max(0.0, (products - n * seconds / count) / spread) if spread > 1e-9 else 0.0
        return max(seconds / count + slope * (nodes - n / count), 1e-9)

    def observe(self, outcome: Round) -> None:
        """Learn the seconds and the accepted tokens of a round."""
        self.observe_free(outcome)
        self.accept(outcome, self._adviser, self.greedy)

    def observe_free(self, outcome: Round) -> None:
        """Learn the seconds of a round."""
        n, seconds = outcome.drafted, outcome.draft_s + outcome.verify_s
        usual = FAR * self._seconds(n)
        self.disturbed = self.disturbed + 1 if 0.0 < usual < seconds else 0
        if 0 < self.disturbed < PATIENCE:
            seconds = usual
        for means in self.took:
            means.fade()
        self.took[self._place(n)].observe(n, seconds)
        seen = (1.0, n, n * n, seconds, n * seconds)
        self.sums = [KEEP * old + new for old, new in zip(self.sums, seen, strict=True)]

    def accept(self, outcome: Round, adviser: TreeAdviser, greedy: bool) -> None:
        """Learn the accepted tokens of a round of a ``greedy`` or a sampled answer, whose draft asked ``adviser`` if it
        asks."""
        self.rounds += 1
        n = outcome.drafted
        if adviser.expected is not None:
            self.chosen.fade()
            self.chosen.observe(n, 1 + outcome.accepted)
            surprise = (outcome.accepted - adviser.expected) / (1.0 + adviser.expected)
            power = self.sharpness[greedy] * math.exp(SHARPER * surprise)
            self.sharpness[greedy] = min(max(power, SHARPNESS[0]), SHARPNESS[1])
            adviser.expected = None
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
        return _SharedNodes(self, not scope.temperature)

    def swapped(self, expected: Sequence[float] | None = None) -> None:
        """Reduce the acceptance learned of the old draft to the weight of a few rounds. If there was no draft so far
        (a head that is not trained yet), begin with the first tries."""
        total = sum(self.weight)
        if not total:
            self.rounds = 0
        self.chosen.weight = min(self.chosen.weight, COMMON)
        if total > COMMON:
            self.weight = [w * COMMON / total for w in self.weight]
            self.accepted = [a * COMMON / total for a in self.accepted]


class Means:
    """Discounted means over rounds: of their nodes, and of a value."""

    def __init__(self) -> None:
        self.weight = self.nodes = self.value = 0.0

    def fade(self) -> None:
        """Let the rounds so far count for less; once in each round."""
        self.weight *= KEEP

    def observe(self, nodes: int, value: float) -> None:
        """Take in a round."""
        self.weight += 1.0
        self.nodes += (nodes - self.nodes) / self.weight
        self.value += (value - self.value) / self.weight


class LengthByCost(NodesByCost):
    """The same with chains, of whose tokens each is accepted with about the same probability if those before it are."""

    name, tree = "length", False
    nodes = LENGTHS
    first_tries, common = FIRST_LENGTHS, COMMON_CHAIN

    def __init__(self) -> None:
        super().__init__()
        self.rejected = 0.0  # discounted rounds with a rejected token

    def _curve(self, nodes: int) -> float:
        kept = sum(self.accepted)
        each = kept / (kept + self.rejected + 1.0)
        return each * (1.0 - each**nodes) / (1.0 - each)

    def accept(self, outcome: Round, adviser: TreeAdviser, greedy: bool) -> None:
        """See the base."""
        super().accept(outcome, adviser, greedy)
        if outcome.drafted:
            self.rejected = KEEP * self.rejected + (outcome.accepted < outcome.drafted)

    def swapped(self, expected: Sequence[float] | None = None) -> None:
        """See the base."""
        before = sum(self.weight)
        super().swapped(expected)
        self.rejected *= sum(self.weight) / before if before else 1.0


class _SharedNodes(SharedLength):
    """The same if several answers share a pass. Of such rounds only the accepted tokens are learned."""

    def __init__(self, policy: NodesByCost, greedy: bool) -> None:
        self._policy, self._asked, self._greedy = policy, TreeAdviser(), greedy

    @property
    def adviser(self) -> Adviser | None:
        """See ``GraftingPolicy``."""
        return self._asked if self._policy.tree else None

    def next_length(self, limit: int, answers: int, waiting: int = 0) -> int:
        """The best number of nodes alone with its tries, or before any lone round those tried first, divided among the
        answers. For a draft that asks about each node, the most of them."""
        place = self._policy.advise(self._asked, self._greedy, answers)
        return min(limit, max(1, self._policy.nodes[place] // answers)) if place else 0

    def lead(self, reach: Sequence[float], length: int, limit: int, singly: bool = False, passed: int = 0) -> Lead:
        """As alone."""
        return self._policy.lead(reach, length, limit, singly)

    def observe(self, outcome: Round) -> None:
        """Learn the accepted tokens."""
        self._policy.accept(outcome, self._asked, self._greedy)
