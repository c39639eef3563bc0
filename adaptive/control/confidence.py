"""What the draft's own confidence is worth: from the probability it gives, to that of being accepted.

In: for every drafted position the largest probability of the draft's distribution, and afterwards
how many tokens were accepted. Out: the calibrated probability that a token of such confidence is
accepted, and the one to expect of the token after it.

Confidence falls into bins, with discounted counts of accepted and rejected tokens in each. A bin
that has seen little is believed to be what the draft says itself; bins are kept in order (a more
confident token is not less likely to be accepted) by pooling those that are not.
"""

from __future__ import annotations

import bisect
import itertools

from adaptive.control.isotonic import rising

# Upper edges of the bins but the last, finest where the decision falls and where confident drafts are.
EDGES = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.97)
# The confidence that stands for each bin before anything was observed in it.
CENTRES = tuple((low + high) / 2 for low, high in zip((0.0, *EDGES), (*EDGES, 1.0), strict=True))
# What is left of a bin's count after one later observation in it: a memory of about 150 tokens. Longer
# is late after a change of subject or draft, shorter makes rarely visited bins jump.
KEEP = 0.993
# Imaginary observations of "the draft is right about itself" in each bin. Larger trusts a draft that is
# over-confident for longer, smaller lets single tokens decide.
WEIGHT = 4.0
# What is left at a swap of the draft.
KEEP_AT_SWAP = 0.1
# Least weight of one token in the running mean of what follows a token of some confidence, and tokens
# that the first guess of it counts for.
FOLLOW_STEP, FOLLOW_WEIGHT = 0.02, 8.0
# What is left when the text has become of another kind: confidence means nearly the same there, so more
# than at a swap.
KEEP_AT_CHANGE = 0.3


def bin_of(confidence: float) -> int:
    """The bin that a confidence falls into."""
    return bisect.bisect(EDGES, confidence)


class Calibration:
    """Calibrated acceptance by confidence bin."""

    def __init__(self) -> None:
        self.accepted = [0.0] * len(CENTRES)
        self.rejected = [0.0] * len(CENTRES)
        self.follow = [min(0.9, 0.3 + 0.6 * c) for c in CENTRES]
        self.followed = [0.0] * len(CENTRES)  # tokens in each running mean
        self.table = list(CENTRES)

    def of(self, confidence: float) -> tuple[float, float]:
        """Probability that a token of this confidence is accepted, given that all before it were; and the
        acceptance to expect of the token after it, if it is."""
        b = bin_of(confidence)
        return self.table[b], self.follow[b]

    def observe(self, bins: list[int], drafted: int, accepted: int) -> None:
        """One round: the bin of the confidence at every position that was computed, how many of them were
        proposed, and how many of those accepted. ``calibrate`` makes it count."""
        for i, b in enumerate(bins[: min(drafted, accepted + 1)]):
            hit = 1.0 if i < accepted else 0.0
            self.accepted[b] = self.accepted[b] * KEEP + hit
            self.rejected[b] = self.rejected[b] * KEEP + 1.0 - hit
        # The position after an accepted token shows what follows it, whether it was proposed or not.
        for b, following in itertools.pairwise(bins[: accepted + 1]):
            self.followed[b] += 1
            step = max(FOLLOW_STEP, 1 / (self.followed[b] + FOLLOW_WEIGHT))
            self.follow[b] += step * (self.table[following] - self.follow[b])

    def swapped(self) -> None:
        """The draft is another one."""
        self._forget(KEEP_AT_SWAP)

    def changed(self) -> None:
        """The text is of another kind than it was."""
        self._forget(KEEP_AT_CHANGE)

    def _forget(self, kept: float) -> None:
        self.accepted = [n * kept for n in self.accepted]
        self.rejected = [n * kept for n in self.rejected]
        self.followed = [min(n, 1 / FOLLOW_STEP) * kept for n in self.followed]
        self.calibrate()

    def calibrate(self) -> None:
        """Posterior means of all bins, kept in order."""
        weights = [a + r + WEIGHT for a, r in zip(self.accepted, self.rejected, strict=True)]
        means = [(a + WEIGHT * c) / w for a, c, w in zip(self.accepted, CENTRES, weights, strict=True)]
        self.table = rising(means, weights)
