"""Calibrates matches in earlier text: from a match's length and the agreement of matches to the probability of
acceptance.

In: for every token that history found, its bin (``LENGTHS`` lengths of match times ``AGREEMENTS`` kinds of agreement,
see drafting/suffixes.py), and afterwards how many of the tokens the target produced, whichever drafter had proposed
them: a token that the target accepts with probability p is also the one that it produces with probability p. Out: for
the tokens of a chain, the probability that each is accepted given that all before it were, and that all up to it are.

The method is that for the model's confidence (``confidence.py``): discounted counts per bin, shrunk towards prior
shares, and kept in order: a longer match with the same agreement is not less likely to be right. Counts are separate by
source (the running text, the records) and by temperature, because a drawn token is less certain than the likeliest.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from adaptive.control.isotonic import rising

# Numbers of bins, for the length of a match and for agreement. Agreement, in order: most matches continue otherwise; at
# least half agree, but not all; there is one match; two or three, all agree; more, all agree.
LENGTHS, AGREEMENTS = 8, 5
# Acceptance of each bin before anything is observed: rounded shares from a run of benchmarks/lived_session.py.
PRIORS: tuple[float, ...] = (
    0.15, 0.20, 0.25, 0.30, 0.35, 0.40, 0.45, 0.45,
    0.25, 0.35, 0.45, 0.50, 0.60, 0.65, 0.70, 0.70,
    0.20, 0.40, 0.55, 0.70, 0.80, 0.85, 0.88, 0.90,
    0.35, 0.55, 0.70, 0.80, 0.85, 0.90, 0.92, 0.95,
    0.50, 0.65, 0.80, 0.85, 0.90, 0.93, 0.95, 0.97,
)  # fmt: skip
# Factor on a bin's counts at each later observation in it (a memory of about 100 tokens), and imaginary observations of
# the prior. A longer memory is late after a change of subject, a shorter one makes rarely visited bins jump.
KEEP, WEIGHT = 0.99, 5.0
# The priors are scaled by the result of all bins together: the tokens accepted, over the number that the priors
# promised for the same tokens. SCALE_WEIGHT imaginary tokens have a scale of 1; MOST_SCALE is the upper bound. Text of
# a high temperature falls short in all bins alike.
SCALE_WEIGHT, MOST_SCALE = 4.0, 1.1
# Rounds until the tables are recomputed: a round changes them by 1%, and computing one takes as long as a lookup.
ANEW_EVERY = 16


class Bins:
    """Counts and calibrated acceptance by bin. ``table`` is the acceptance of every bin, recomputed every
    ``ANEW_EVERY`` rounds.

    ``tally``: the discounted number of accepted tokens, the number that ``PRIORS`` promised of the same tokens, and for
    each agreement 1 if tokens were observed since the table was computed, else 0.
    """

    def __init__(self, accepted: Sequence[float] | None = None, rejected: Sequence[float] | None = None) -> None:
        self.accepted = array("d", accepted or [0.0] * len(PRIORS))
        self.rejected = array("d", rejected or [0.0] * len(PRIORS))
        self.table = array("d", PRIORS)
        self.rounds, self.scale = 0, 0.0
        promised = sum((a + r) * p for a, r, p in zip(self.accepted, self.rejected, PRIORS, strict=True))
        self.tally = array("d", [sum(self.accepted), promised, *[0.0] * AGREEMENTS])
        self._calibrate()

    def shares(self, bins: Sequence[int]) -> list[float]:
        """The acceptance of each of these bins."""
        table = self.table
        return [table[b] for b in bins]

    def observe(self, bins: Sequence[int], accepted: int) -> None:
        """Count tokens of these bins that were found; the target produced the first ``accepted`` of them."""
        tally = self.tally
        for place, b in enumerate(bins[: accepted + 1]):
            hits, misses = self.accepted[b], self.rejected[b]
            hit = 1.0 if place < accepted else 0.0
            self.accepted[b], self.rejected[b] = hits * KEEP + hit, misses * KEEP + 1.0 - hit
            tally[0] += self.accepted[b] - hits
            tally[1] += PRIORS[b] * (self.accepted[b] + self.rejected[b] - hits - misses)
            tally[2 + b // LENGTHS] = 1.0
        self.counted()

    def counted(self) -> None:
        """Note that the tokens of one more round were counted."""
        self.rounds += 1
        if self.rounds % ANEW_EVERY == 0:
            self._calibrate()

    def _calibrate(self) -> None:
        hits, promised, *observed = self.tally
        scale = min(MOST_SCALE, (hits + SCALE_WEIGHT) / (promised + SCALE_WEIGHT))
        for agreement in range(AGREEMENTS):
            if scale == self.scale and not observed[agreement]:
                continue
            of = slice(agreement * LENGTHS, (agreement + 1) * LENGTHS)
            weights = [a + r + WEIGHT for a, r in zip(self.accepted[of], self.rejected[of], strict=True)]
            usual = [min(1.0, scale * prior) for prior in PRIORS[of]]
            means = [(a + WEIGHT * p) / w for a, p, w in zip(self.accepted[of], usual, weights, strict=True)]
            self.table[of] = array("d", rising(means, weights))
        self.scale = scale
        self.tally[2:] = array("d", [0.0] * AGREEMENTS)


class Matches:
    """The calibration of each source at each temperature (to a tenth)."""

    def __init__(self) -> None:
        self.kinds: dict[str, Bins] = {}

    def of(self, source: str, temperature: float) -> Bins:
        """The calibration of one source at a temperature."""
        return self.kinds.setdefault(f"{source}@{temperature:.1f}", Bins())
