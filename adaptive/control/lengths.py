"""Chooses where drafted chains end, for targets whose passes are slow and hardly slower for more tokens.

As in ``sizes.py``. The probability that all tokens up to one are accepted follows from the draft's confidence in each,
calibrated on observed acceptance (``confidence.py``). The curve that all lengths share is that of tokens each of which
is accepted with the same probability if those before it are.
"""

from __future__ import annotations

from collections.abc import Sequence

from adaptive.control.confidence import Calibration
from adaptive.control.sizes import KEEP, SizeByCost
from adaptive.control.stopping import Stopping
from adaptive.types import Round

# Lengths to choose from.
LENGTHS = (0, 2, 4, 8, 16, 32)
FIRST_TRIES = (8, 16, 4, 8)
# Lengths from which more tokens may cost more.
BENDS = (2, 4, 8, 12, 16, 20, 24)
# Rounds that the common curve counts for at each length. Too low: the estimates follow chance. Too high: they follow a
# curve that is not theirs.
COMMON = 30.0


class LengthByCost(SizeByCost[Stopping]):
    """Drafts chains of the tokens that maximise the expected tokens per second."""

    name = "length"
    sizes, bends, first_tries, common = LENGTHS, BENDS, FIRST_TRIES, COMMON

    def __init__(self) -> None:
        super().__init__()
        # Of greedy answers, whose tokens are accepted or not by themselves, and of sampled ones.
        self.calibration = {True: Calibration(), False: Calibration()}
        self.rejected = 0.0  # discounted rounds with a rejected token

    def new_adviser(self) -> Stopping:
        """See the base."""
        return Stopping(LENGTHS[-1])

    def prepare(self, adviser: Stopping, greedy: bool, least: Sequence[float], rate: float) -> None:
        """See the base. A token whose successor is to be left out is the last, so that the draft computes no more."""
        adviser.clear()
        known = self.calibration[greedy]
        drop_below = least or [0.0] * adviser.longest
        adviser.decide(known.table, known.follow, drop_below, [*least[1:]] or [-1.0] * adviser.longest)

    def asked(self, adviser: Stopping, greedy: bool, outcome: Round) -> bool:
        """See the base. Calibrates the confidence."""
        bins = adviser.bins_of()
        adviser.clear()
        if bins:
            self.calibration[greedy].observe(bins, outcome.drafted, outcome.accepted)
            self.calibration[greedy].calibrate()
        return bool(bins)

    def curve(self, size: int) -> float:
        """See the base."""
        kept = sum(self.accepted)
        each = kept / (kept + self.rejected + 1.0)
        return each * (1.0 - each**size) / (1.0 - each)

    def accept(self, outcome: Round, adviser: Stopping, greedy: bool) -> None:
        """See the base."""
        super().accept(outcome, adviser, greedy)
        if outcome.drafted:
            self.rejected = KEEP * self.rejected + (outcome.accepted < outcome.drafted)

    def swapped(self, expected: Sequence[float] | None = None) -> None:
        """See the base."""
        before = sum(self.weight)
        super().swapped(expected)
        self.rejected *= sum(self.weight) / before if before else 1.0
        for known in self.calibration.values():
            known.swapped()
