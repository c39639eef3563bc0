"""Tokens per second that speculation reaches, over a memory that is long until something changes."""

from __future__ import annotations

import math
from dataclasses import dataclass

# What is left of a round after one later round in the long and in the short memory: about 200 and 16
# rounds. The long one decides; a shorter long memory mistakes chance for a trend.
KEEP_LONG, KEEP_SHORT = 0.995, 0.94
# Standard deviations between the two memories that count as a change. Lower sees changes in chance
# more often, and forgets what was right; higher is late after a true one.
CHANGE = 2.5
# Rounds in the short memory before it may speak of a change.
ENOUGH = 6.0


class RecentRate:
    """Discounted tokens and seconds; ``rate`` is their ratio, shrunk towards a prediction."""

    def __init__(self) -> None:
        self.tokens = self.seconds = 0.0
        self.short_tokens = self.short_seconds = 0.0
        self.rounds = self.short_rounds = self.short_squares = 0.0
        self.variance = 1.0  # of a round's tokens about what its seconds promised

    def observe(self, tokens: float, seconds: float) -> bool:
        """One round; True if the recent past differs from the longer one, which is then forgotten."""
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
        """All these rounds took so many times what they were believed to take."""
        self.seconds *= factor
        self.short_seconds *= factor

    def forget(self) -> None:
        """Start anew."""
        self.__init__()  # type: ignore[misc]


# What is left of a pair of blocks after one later pair. Longer remembers a load that is over; shorter is chance.
KEEP_PAIR = 0.985
# Rounds whose mean a block is at the most, so that both blocks of a pair are of one time.
LONGEST_BLOCK = 200
# Times what was expected that a round counts at most: a process that was stopped for a second says nothing.
MOST_SEEN = 30.0
# Standard errors that count as chance. Fewer let the noise of a clock decide where drafting is nearly as fast as plain
# decoding; more need more of the tries that a busy machine's plain decoding pays for.
SURE = 2.0
# A logarithm below this is what costs are wrong by at any time, and mend.
LEAST_OFF = 0.03
# Pairs of blocks before anything is said.
FEWEST_PAIRS = 3.0


@dataclass
class Block:
    """Rounds of one sort in a row: the sum of what they took over what was believed, and their number."""

    total: float = 0.0
    rounds: int = 0

    def add(self, share: float) -> None:
        """One more round."""
        if self.rounds >= LONGEST_BLOCK:
            self.total, self.rounds = self.total / 2, self.rounds // 2
        self.total += min(share, MOST_SEEN)
        self.rounds += 1


class SeenTimes:
    """By how much drafted rounds take longer than is believed of them, on average, than plain rounds next to them do.

    Costs are followed by small steps, which find what a round usually takes. On a machine that others use, a round now
    and then takes ten times as long, because a core was theirs, and such rounds decide how fast it really goes: a
    drafted round has more tokens to show for them. So blocks of plain and of drafted rounds that follow each other are
    compared by their mean times, each over what was believed. The answer is the ratio of the two means over the recent
    pairs of blocks, as far as it is not chance (shrunk by its own standard error, as James and Stein shrink a mean).
    """

    def __init__(self) -> None:
        self.drafted, self.plain = Block(), Block()
        self.last: Block | None = None
        # Over the pairs, discounted: their number, the two means, and squares and product of these.
        self.pairs = self.d = self.p = self.dd = self.dp = self.pp = 0.0

    def observe(self, drafted: bool, seen: float, believed: float, compared: float) -> None:
        """One round took ``seen`` seconds where ``believed`` were. ``compared`` is what a drafted round of one length
        is believed to take, in plain rounds: beliefs change, and what was seen over what was believed then is to say
        by how much longer it takes than is believed now."""
        block = self.drafted if drafted else self.plain
        if block is not self.last:  # another block begins, and the two before it are a pair
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
        """Seen over believed of drafted rounds, over that of plain ones, where ``compared`` is believed now; 1 as far
        as it may be chance."""
        if self.pairs < FEWEST_PAIRS:
            return 1.0
        ratio = self.d / self.p
        # The variance of a ratio of two means to first order, relative to it.
        variance = max(0.0, self.dd - 2 * ratio * self.dp + ratio * ratio * self.pp) / (self.d * self.d)
        off = math.log(ratio / compared)
        if abs(off) < LEAST_OFF:
            return 1.0
        return math.exp(off * max(0.0, 1.0 - SURE * SURE * variance / (off * off)))
