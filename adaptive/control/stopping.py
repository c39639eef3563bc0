"""Decides when a draft ends by its own confidence, with numbers that compiled code reads as well as Python.

``GoodputLength`` sets the thresholds. An engine that makes a whole proposal in one call applies them itself: a call
into Python at each position takes 12 us, between passes of 100 us.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence

from adaptive.control.confidence import CENTRES, EDGES, bin_of
from adaptive.control.policy import Advice
from adaptive.engines.protocol import Thresholds


class Stopping(Thresholds):
    """Decides about each position (from 1) of a draft by the confidence there. Call it for the positions in order."""

    def __init__(self, longest: int, kept: int = 1) -> None:
        """For drafts of at most ``longest`` tokens, which do not end earlier until thresholds are set by ``decide``.
        The bins of the last ``kept`` drafts are stored."""
        self.longest, self.kept = longest, kept
        super().__init__(
            edges=array("d", EDGES),
            accepted=array("d", CENTRES),
            follow=array("d", CENTRES),
            drop_below=array("d", [0.0] * longest),
            last_below=array("d", [-1.0] * longest),
            bins=array("i", [0] * (kept * longest)),
            asked=array("i", [0] * kept),
            drafts=array("i", [0]),
            reach=array("d", [1.0]),
        )

    def decide(
        self,
        accepted: Sequence[float],
        follow: Sequence[float],
        drop_below: Sequence[float],
        last_below: Sequence[float],
    ) -> None:
        """Set the thresholds. By bin of confidence: the probability that a token is accepted, and that the one after it
        is. By position: a token is dropped if the probability that all up to it are accepted is below ``drop_below``,
        and is the last one if that probability for the next token is at most ``last_below``."""
        self.accepted[:] = array("d", accepted)
        self.follow[:] = array("d", follow)
        self.drop_below[:] = array("d", drop_below)
        self.last_below[: len(last_below)] = array("d", last_below)

    def exactly(self, length: int) -> None:
        """Until the next ``decide``, draft ``length`` tokens whatever their confidence."""
        self.drop_below[:length] = array("d", [0.0] * length)
        self.last_below[:length] = array("d", [-1.0] * (length - 1) + [math.inf])

    def bins_of(self, number: int = 0) -> list[int]:
        """The bins of the confidences in a draft, by its number since ``clear``; empty if there was no such draft."""
        if number >= self.drafts[0]:
            return []
        row = number % self.kept
        return self.bins[row * self.longest : row * self.longest + self.asked[row]].tolist()

    def clear(self) -> None:
        """Restart the numbering of drafts."""
        self.drafts[0] = 0

    def __call__(self, position: int, confidence: float) -> Advice:
        """See ``Adviser``."""
        b = bin_of(confidence)
        if position == 1:
            self.drafts[0] += 1
        row = (self.drafts[0] - 1) % self.kept
        self.bins[row * self.longest + position - 1] = b
        self.asked[row] = position
        # The probability that all tokens up to here are accepted.
        reach = self.reach[0] = (self.reach[0] if position > 1 else 1.0) * self.accepted[b]
        if reach < self.drop_below[position - 1]:
            return Advice.DROP
        if position >= self.longest or reach * self.follow[b] <= self.last_below[position - 1]:
            return Advice.LAST
        return Advice.MORE
