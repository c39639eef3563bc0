"""Tokens per second that speculation reaches, over a memory that is long until something changes."""

from __future__ import annotations

import math

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

    def forget(self) -> None:
        """Start anew."""
        self.__init__()  # type: ignore[misc]
