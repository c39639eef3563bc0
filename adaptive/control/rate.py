"""The tokens per second of speculation, over a memory that is long until something changes."""

from __future__ import annotations

import math
from dataclasses import dataclass

# Weight left of a round after one later round, in the long and in the short memory (about 200 and 16 rounds). The long
# memory gives the rate; if it were shorter, it would take chance for a trend.
KEEP_LONG, KEEP_SHORT = 0.995, 0.94
# Standard deviations between the two memories that count as a change. Too low: chance counts as a change more often,
# and valid estimates are forgotten. Too high: a true change is noticed late.
CHANGE = 2.5
# Rounds in the short memory before it can show a change.
ENOUGH = 6.0


class RecentRate:
    """Discounted tokens and seconds; ``rate`` is their ratio, shrunk towards a prediction."""

    def __init__(self) -> None:
        self.tokens = self.seconds = 0.0
        self.short_tokens = self.short_seconds = 0.0
        self.rounds = self.short_rounds = self.short_squares = 0.0
        self.variance = 1.0  # of a round's tokens around the number expected for its seconds

    def observe(self, tokens: float, seconds: float) -> bool:
        """Add one round. Returns True if the recent past differs from the longer one, which is then forgotten."""
        expected = self.tokens / self.seconds * seconds if self.rounds else tokens
        self.variance += (1 - KEEP_SHORT) * 0.5 * ((tokens - expected) ** 2 - self.variance)
        self.tokens = self.tokens * KEEP_LONG + tokens
        self.seconds = self.seconds * KEEP_LONG + seconds
        self.rounds = self.rounds * KEEP_LONG + 1
        self.short_tokens = self.short_tokens * KEEP_SHORT + tokens
        self.short_seconds = self.short_seconds * KEEP_SHORT + seconds
        self.short_rounds = self.short_rounds * KEEP_SHORT + 1
        self.short_squares = self.short_squares * KEEP_SHORT**2 + 1
        surprise = self.short_tokens - self.tokens / self.seconds * self.short_seconds
        spread = math.sqrt(max(self.variance, 0.05) * self.short_squares)
        if self.short_rounds < ENOUGH or abs(surprise) < CHANGE * spread:
            return False
        self.tokens, self.seconds, self.rounds = self.short_tokens, self.short_seconds, self.short_rounds
        return True

    def rate(self, predicted: float, weight_s: float) -> float:
        """Tokens per second, with ``weight_s`` imaginary seconds at the ``predicted`` rate."""
        return (self.tokens + predicted * weight_s) / (self.seconds + weight_s)

    def rescale(self, factor: float) -> None:
        """Multiply the seconds of all rounds by ``factor``, after their estimate has changed."""
        self.seconds *= factor
        self.short_seconds *= factor

    def forget(self) -> None:
        """Drop all rounds."""
        self.__init__()  # type: ignore[misc]


# Weight left of a pair of blocks after one later pair. Too high: a load that has ended still counts. Too low: chance
# decides.
KEEP_PAIR = 0.985
# Rounds in a block's mean, at most, so that both blocks of a pair are from the same time.
LONGEST_BLOCK = 200
# Upper bound on a round's ratio of seen to expected seconds: the process may have been stopped for a second.
MOST_SEEN = 30.0
# Standard errors that count as chance. Too low: the noise of the clock decides if drafting is nearly as fast as plain
# decoding. Too high: more tries are needed, for which plain decoding on a busy machine pays.
SURE = 2.0
# Deviations below this (as a logarithm) are ignored: costs are always off by that much, and get corrected.
LEAST_OFF = 0.03
# Pairs of blocks before the ratio is used.
FEWEST_PAIRS = 3.0


@dataclass
class Block:
    """Rounds of one mode in a row: the sum of their ratios of seen to believed seconds, and their number."""

    total: float = 0.0
    rounds: int = 0

    def add(self, share: float) -> None:
        """Add one round with this ratio."""
        if self.rounds >= LONGEST_BLOCK:
            self.total, self.rounds = self.total / 2, self.rounds // 2
        self.total += min(share, MOST_SEEN)
        self.rounds += 1


class SeenTimes:
    """The mean factor by which drafted rounds take longer than believed, relative to the plain rounds next to them.

    Costs follow observations by small steps and so estimate the usual time of a round. On a machine that others use, a
    round occasionally takes ten times as long because another program had a core. Such rounds determine the real speed,
    and a drafted round yields more tokens in that time. So adjacent blocks of plain and of drafted rounds are compared
    by their mean times, each divided by the believed time. The result is the ratio of the two means over recent pairs
    of blocks, as far as it is not chance (shrunk by its own standard error, as James and Stein shrink a mean).
    """

    def __init__(self) -> None:
        self.drafted, self.plain = Block(), Block()
        self.last: Block | None = None
        # Discounted sums over the pairs: their number, the two means, and the squares and product of these.
        self.pairs = self.d = self.p = self.dd = self.dp = self.pp = 0.0

    def observe(self, drafted: bool, seen: float, believed: float, compared: float) -> None:
        """Add one round that took ``seen`` seconds; ``believed`` were expected. ``compared`` is the believed time of a
        drafted round of one fixed length, in plain rounds. Beliefs change, so the ratio is stored relative to it and
        can be converted to the current beliefs."""
        block = self.drafted if drafted else self.plain
        if block is not self.last:  # another block begins; the two before it are a pair
            self._pair(compared)
            block.total, block.rounds = 0.0, 0
            self.last = block
        block.add(seen / max(believed, 1e-9))

    def _pair(self, compared: float) -> None:
        if not self.drafted.rounds or not self.plain.rounds:
            return
        d, p = compared * self.drafted.total / self.drafted.rounds, self.plain.total / self.plain.rounds
        keep, squared = KEEP_PAIR, KEEP_PAIR * KEEP_PAIR
        self.pairs, self.d, self.p = keep * self.pairs + 1, keep * self.d + d, keep * self.p + p
        self.dd, self.dp, self.pp = squared * self.dd + d * d, squared * self.dp + d * p, squared * self.pp + p * p

    def ratio(self, compared: float) -> float:
        """The ratio of seen to believed seconds of drafted rounds over that of plain ones, with the current value of
        ``compared``; 1 as far as it may be chance."""
        if self.pairs < FEWEST_PAIRS:
            return 1.0
        ratio = self.d / self.p
        # The relative variance of a ratio of two means, to first order.
        variance = max(0.0, self.dd - 2 * ratio * self.dp + ratio * ratio * self.pp) / (self.d * self.d)
        off = math.log(ratio / compared)
        if abs(off) < LEAST_OFF:
            return 1.0
        return math.exp(off * max(0.0, 1.0 - SURE * SURE * variance / (off * off)))
