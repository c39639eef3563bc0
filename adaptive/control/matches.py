"""What a match in earlier text is worth: from its length and how far matches agree, to the probability of acceptance.

In: for every token that history found its bin (``LENGTHS`` lengths of match in each of ``AGREEMENTS`` ways of agreeing,
drafting/suffixes.py), and afterwards how many of them were said, whoever had proposed them: a token that the target
accepts with probability p is the one that it says with probability p. Out: the probability that each of a chain of
tokens is accepted, given that all before it were, and that all up to it are.

As the model's confidence (``confidence.py``): discounted counts by bin, believed to be the usual ones where little was
seen, and kept in order: a longer match that agrees in the same way is not less likely to be right. Apart by source (the
running text, the records) and by temperature, since a token that is drawn is less sure than the likeliest.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from adaptive.control.isotonic import rising

# Bins of the length of a match, and of agreement: most matches say another thing, not all the same, there is only one,
# all of two or three, all of more.
LENGTHS, AGREEMENTS = 8, 5
# What to believe of a bin before anything was seen: shares that were accepted in the lived session's answers, rounded.
PRIORS: tuple[float, ...] = (
    0.15, 0.20, 0.25, 0.30, 0.35, 0.40, 0.45, 0.45,
    0.25, 0.35, 0.45, 0.50, 0.60, 0.65, 0.70, 0.70,
    0.20, 0.40, 0.55, 0.70, 0.80, 0.85, 0.88, 0.90,
    0.35, 0.55, 0.70, 0.80, 0.85, 0.90, 0.92, 0.95,
    0.50, 0.65, 0.80, 0.85, 0.90, 0.93, 0.95, 0.97,
)  # fmt: skip
# What is left of a bin's counts after one later observation in it (a memory of about 100 tokens), and imaginary
# observations of the prior. Longer is late after a change of subject, shorter makes rarely visited bins jump.
KEEP, WEIGHT = 0.99, 5.0
# The usual shares times what all bins together show: accepted over what the usual shares promised of the same tokens,
# between imaginary tokens of which it is 1, and at most. Text of a high temperature disappoints in every bin alike.
SCALE_WEIGHT, MOST_SCALE = 4.0, 1.1
# Rounds until the tables are computed anew: a round moves them by a hundredth, and computing one takes as long as
# finding a match.
ANEW_EVERY = 16


class Bins:
    """Counts and calibrated acceptance by bin. ``table`` is the share of every bin that is accepted, as of the last
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
        """That of these bins."""
        table = self.table
        return [table[b] for b in bins]

    def observe(self, bins: Sequence[int], accepted: int) -> None:
        """Tokens of these bins were found, and so many of them are what was said."""
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
        """Take note that the tokens of one more round were counted."""
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
    """The calibration of every source at every temperature (to a tenth)."""

    def __init__(self) -> None:
        self.kinds: dict[str, Bins] = {}

    def of(self, source: str, temperature: float) -> Bins:
        """That of one source at a temperature."""
        return self.kinds.setdefault(f"{source}@{temperature:.1f}", Bins())
