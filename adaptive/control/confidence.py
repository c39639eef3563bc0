"""Calibrates the draft's confidence: from the probability that it gives a token to the probability of acceptance.

In: for every drafted position the largest probability of the draft's distribution, and afterwards the number of
accepted tokens. Out: the calibrated probability that a token of this confidence is accepted, and the expected
acceptance of the token after it.

Confidence falls into bins, with discounted counts of accepted and rejected tokens in each. A bin with few observations
stays near the confidence itself. Bins are kept in order (a more confident token is not less likely to be accepted) by
pooling neighbours that are not.
"""

from __future__ import annotations

import bisect
import itertools

from adaptive.control.isotonic import rising

# Upper edges of all bins but the last: finest where the decision falls, and where the draft is confident.
EDGES = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.97)
# The confidence that a bin stands for before anything is observed in it.
CENTRES = tuple((low + high) / 2 for low, high in zip((0.0, *EDGES), (*EDGES, 1.0), strict=True))
# Factor on a bin's counts at each later observation in it: a memory of about 150 tokens. Too high: late after a change
# of subject or draft. Too low: rarely visited bins jump.
KEEP = 0.993
# Imaginary observations in each bin of a draft whose confidence is right. Too high: an over-confident draft is trusted
# for longer. Too low: single tokens decide.
WEIGHT = 4.0
# Factor on the counts when the draft is swapped.
KEEP_AT_SWAP = 0.1
# Least weight of one token in the running mean of the acceptance that follows a bin, and tokens that its initial value
# counts for.
FOLLOW_STEP, FOLLOW_WEIGHT = 0.02, 8.0
# Factor on the counts when the kind of text has changed: confidence means nearly the same there, so it is higher than
# at a swap.
KEEP_AT_CHANGE = 0.3


def bin_of(confidence: float) -> int:
    """The bin of a confidence."""
    return bisect.bisect(EDGES, confidence)


class Calibration:
    """Calibrated acceptance by confidence bin."""

    def __init__(self) -> None:
        self.accepted = [0.0] * len(CENTRES)
        self.rejected = [0.0] * len(CENTRES)
        self.follow = [min(0.9, 0.3 + 0.6 * c) for c in CENTRES]
        self.followed = [0.0] * len(CENTRES)  # tokens in each running mean
        self.table = list(CENTRES)

    def observe(self, bins: list[int], drafted: int, accepted: int) -> None:
        """Count one round: the bin of the confidence at every computed position, how many of the positions were
        proposed, and how many of those accepted. ``table`` changes at the next ``calibrate``."""
        for i, b in enumerate(bins[: min(drafted, accepted + 1)]):
            hit = 1.0 if i < accepted else 0.0
            self.accepted[b] = self.accepted[b] * KEEP + hit
            self.rejected[b] = self.rejected[b] * KEEP + 1.0 - hit
        # The position after an accepted token shows the acceptance that follows it, proposed or not.
        for b, following in itertools.pairwise(bins[: accepted + 1]):
            self.followed[b] += 1
            step = max(FOLLOW_STEP, 1 / (self.followed[b] + FOLLOW_WEIGHT))
            self.follow[b] += step * (self.table[following] - self.follow[b])

    def swapped(self) -> None:
        """Forget most counts: the draft has changed."""
        self._forget(KEEP_AT_SWAP)

    def changed(self) -> None:
        """Forget some counts: the kind of text has changed."""
        self._forget(KEEP_AT_CHANGE)

    def _forget(self, kept: float) -> None:
        self.accepted = [n * kept for n in self.accepted]
        self.rejected = [n * kept for n in self.rejected]
        self.followed = [min(n, 1 / FOLLOW_STEP) * kept for n in self.followed]
        self.calibrate()

    def calibrate(self) -> None:
        """Compute ``table``: the posterior mean of every bin, kept in order."""
        weights = [a + r + WEIGHT for a, r in zip(self.accepted, self.rejected, strict=True)]
        means = [(a + WEIGHT * c) / w for a, c, w in zip(self.accepted, CENTRES, weights, strict=True)]
        self.table = rising(means, weights)
