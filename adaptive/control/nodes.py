"""How many nodes a drafted tree has where passes of the target take long and hardly longer for more tokens.

A round of n nodes takes about c0 + c1 * n seconds and commits one token more than of the tree is accepted. Both are
learned from rounds: c0 and c1 by least squares, in which the past counts less and less; what is accepted as a running
mean at each number of nodes, drawn towards b * log2(1 + n), with one b for all of them: twice the nodes of a best-first
tree add about as much each time. The number with the most expected tokens a second is taken, 0, plain decoding, among
them. Now and then a neighbour of it is tried.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from adaptive.control.policy import Beside, LengthPolicy, Scope
from adaptive.types import Round

# Numbers of nodes that are chosen among. More than these find hardly more, and arithmetic shows beside reading.
NODES = (0, 4, 8, 16, 32, 64, 128)
# What is left of an observation after one later round. Less forgets what a draft is good for from one answer to the
# next, more is late to see that the text is another.
KEEP = 0.97
# Rounds that the common b counts for at each number of nodes. Fewer follow chance, more a curve that is not theirs.
COMMON = 4.0
# Every so many rounds a neighbour of the best number is tried. More often loses more of what is known to be best, less
# often is late to see that another has become so.
TRY_EVERY = 12
# Rounds at the beginning that are tries of one number after the other.
FIRST_TRIES = (16, 64, 16, 32)


class NodesByCost(LengthPolicy):
    """Trees of as many nodes as make the most expected tokens a second."""

    name, tree = "nodes", True

    def __init__(self) -> None:
        self.rounds = 0
        self.weight = [0.0] * len(NODES)
        self.accepted = [0.0] * len(NODES)  # of rounds of about so many nodes, each times its weight
        # Sums over rounds, by weight, of 1, n, n * n, seconds, n * seconds.
        self.sums = [0.0] * 5

    def next_length(self, limit: int, waiting: int = 0, context: int = 0) -> int:
        """The nodes of the next tree."""
        place = self._best()
        if self.rounds < len(FIRST_TRIES):
            place = NODES.index(FIRST_TRIES[self.rounds])
        elif self.rounds % TRY_EVERY == TRY_EVERY - 1:
            up = self.rounds // TRY_EVERY % 2 == 0
            place = min(max(place + (1 if up else -1), 1), len(NODES) - 1)
        self.expected = self._rate(place)
        return min(NODES[place], limit)

    def _best(self) -> int:
        return max(range(len(NODES)), key=self._rate)

    def _rate(self, place: int) -> float:
        """Expected tokens a second at this number of nodes; 0 where no round has been seen."""
        seconds = self._seconds(NODES[place])
        return (1.0 + self._accepted(place)) / seconds if seconds else 0.0

    def _accepted(self, place: int) -> float:
        """Expected accepted tokens: what was seen there, and what all say of it."""
        if not NODES[place]:
            return 0.0
        basis = [math.log2(1 + n) for n in NODES]
        known = sum(w * b for w, b in zip(self.weight, basis, strict=True))
        common = sum(self.accepted) / known * basis[place] if known else 0.0
        return (self.accepted[place] + COMMON * common) / (self.weight[place] + COMMON)

    def _seconds(self, nodes: int) -> float:
        """What a round takes by the line through what rounds took, which does not fall."""
        count, n, squares, seconds, products = self.sums
        if not count:
            return 0.0
        spread = squares - n * n / count
        slope = max(0.0, (products - n * seconds / count) / spread) if spread > 1e-9 else 0.0
        return max(seconds / count + slope * (nodes - n / count), 1e-9)

    def observe(self, outcome: Round) -> None:
        """Learn what a round took and brought."""
        self.rounds += 1
        n, seconds = outcome.drafted, outcome.draft_s + outcome.verify_s
        seen = (1.0, n, n * n, seconds, n * seconds)
        self.sums = [KEEP * old + new for old, new in zip(self.sums, seen, strict=True)]
        if n:
            place = min(range(1, len(NODES)), key=lambda i: abs(math.log(n / NODES[i])))
            self.weight, self.accepted = [KEEP * w for w in self.weight], [KEEP * a for a in self.accepted]
            self.weight[place] += 1.0
            self.accepted[place] += outcome.accepted

    @property
    def expected_speed_up(self) -> float | None:
        """Of the best number of nodes over plain decoding."""
        plain = self._rate(0)
        return self._rate(self._best()) / plain if plain else None

    def among(self, scope: Scope) -> Beside:
        """The number that is best alone."""
        return _NodesBeside(self)

    def swapped(self, expected: Sequence[float] | None = None) -> None:
        """What was accepted of the draft before counts as a few rounds."""
        total = sum(self.weight)
        if total > COMMON:
            self.weight = [w * COMMON / total for w in self.weight]
            self.accepted = [a * COMMON / total for a in self.accepted]


class _NodesBeside(Beside):
    """The same where several answers share a pass, of which nothing is learned."""

    def __init__(self, policy: NodesByCost) -> None:
        self._policy = policy

    def next_length(self, limit: int, answers: int) -> int:
        """As many nodes as are best, divided among the answers."""
        return min(limit, NODES[self._policy._best()] // answers)
