"""Decides when some rounds draft a length that is not in use, so that its cost becomes known.

In: the costs, and how many rounds passed. Out: the length to draft until the next decision, or 0.
"""

from __future__ import annotations

from adaptive.control.costs import CostModel

# Rounds before the first exploration, and between two of them at most; the distance doubles each time. Too low: time is
# lost, since that length is longer or shorter than the best by all that is known. Too high: a length that is better
# stays out of use.
FIRST, MOST_BETWEEN = 64, 1600


class Exploring:
    """``length`` is the length that is explored now, 0 if none is."""

    def __init__(self) -> None:
        self.length = 0
        self._since, self._between = 0, FIRST  # rounds since the last exploration, and until the next one

    def decide(self, costs: CostModel, longest: int, drafting: bool) -> int:
        """The length to explore until the next decision: one of at most ``longest`` tokens, next to a length in use,
        whose cost was not seen recently; or 0, as always without ``drafting``."""
        due = drafting and self._since >= self._between
        self.length = costs.doubtful_length(longest) if due else 0
        if self.length:
            self._since, self._between = 0, min(2 * self._between, MOST_BETWEEN)
        return self.length

    def passed(self, rounds: int) -> None:
        """Count rounds."""
        self._since += rounds

    def postpone(self) -> None:
        """Count rounds from now on again."""
        self._since = 0
