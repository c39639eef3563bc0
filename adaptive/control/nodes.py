"""Chooses which nodes a drafted tree has, for targets whose passes are slow and hardly slower for more tokens.

As in ``sizes.py``. The probability that the target's text leads through a node is the draft's own, raised to a power
that is learned: it is moved until as many tokens are accepted as the probabilities of the nodes sum to. The curve that
all numbers of nodes share is b * log2(1 + n): doubling the nodes of a best-first tree adds about the same each time.

The nodes of one depth are extended by one pass of the draft. It is made if the target's text leads through one of them
with a probability of at least its seconds times the tokens per second of rounds: a pass brings at most about as many
accepted tokens. So a tree is as deep as the draft is sure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from adaptive.control.policy import TreeAdviser
from adaptive.control.sizes import Means, SizeByCost
from adaptive.types import Round

# Numbers of nodes to choose from. Larger trees bring hardly more accepted tokens, and their arithmetic becomes visible
# beside the reading of weights.
NODES = (0, 4, 8, 16, 32, 64, 128)
FIRST_TRIES = (16, 64, 16, 32)
# Numbers of nodes from which more of them may cost more.
BENDS = (8, 16, 24, 32, 48, 64, 80, 88, 96, 104, 112)
# Rounds that the common curve counts for at each number of nodes. Too low: the estimates follow chance. Too high: they
# follow a curve that is not theirs.
COMMON = 4.0
# Change of the logarithm of the power by a round that commits twice as many tokens as expected, and the power's bounds.
# Too low: a new draft's trees have a poor shape for long. Too high: the shape follows chance.
SHARPER, SHARPNESS = 0.05, (0.5, 4.0)
# The probability above which nodes are extended before the seconds of a pass of the draft are known.
FIRST_REACH = 0.05


class NodesByCost(SizeByCost[TreeAdviser]):
    """Drafts trees of the nodes that maximise the expected tokens per second."""

    name, tree = "nodes", True
    sizes, bends, first_tries, common = NODES, BENDS, FIRST_TRIES, COMMON

    def __init__(self) -> None:
        super().__init__()
        # The learned power, for greedy answers and for sampled ones.
        self.sharpness = {True: 1.0, False: 1.0}
        self.pass_s = Means()  # seconds of a pass of the draft

    def new_adviser(self) -> TreeAdviser:
        """See the base."""
        return TreeAdviser()

    def prepare(self, adviser: TreeAdviser, greedy: bool, least: Sequence[float], rate: float) -> None:
        """See the base."""
        adviser.sharpness, adviser.least, adviser.expected = self.sharpness[greedy], least, None
        adviser.reach = min(1.0, rate * self.pass_s.value) if self.pass_s.weight else FIRST_REACH
        adviser.passes, adviser.passes_s = 0, 0.0

    def asked(self, adviser: TreeAdviser, greedy: bool, outcome: Round) -> bool:
        """See the base. Moves the power, and learns what a pass takes."""
        if adviser.expected is None:
            return False
        if adviser.passes:
            self.pass_s.fade()
            self.pass_s.observe(outcome.drafted, adviser.passes_s / adviser.passes)
        surprise = (outcome.accepted - adviser.expected) / (1.0 + adviser.expected)
        power = self.sharpness[greedy] * math.exp(SHARPER * surprise)
        self.sharpness[greedy] = min(max(power, SHARPNESS[0]), SHARPNESS[1])
        adviser.expected = None
        return True

    def curve(self, size: int) -> float:
        """See the base."""
        known = sum(w * math.log2(1 + n) for w, n in zip(self.weight, self.sizes, strict=True))
        return sum(self.accepted) / known * math.log2(1 + size) if known else 0.0
