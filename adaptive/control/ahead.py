"""Estimates the rate, in tokens per second, at which the text continues if earlier text supplies some proposals.

In: rounds in order: the tokens they committed, their seconds, and whether history found a proposal for them. Out: the
tokens per second of the rounds *after* a round. A further token committed now saves the time in which later rounds
would produce it, and those are not plain rounds: the round after one with a match usually has a match too, and a match
may begin after a round without one. So the rate is that of the rounds that followed, separately for rounds after a
match and rounds after none.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

# Weight left of a round after one later round: for the general rate, and for the rate after rounds of one kind, where
# only rounds of that kind count (about 100 and 50 rounds). A longer memory reacts late to a change of subject, a
# shorter one takes chance for a change.
KEEP, KEEP_BEHIND = 0.99, 0.98
# Imaginary rounds that each rate starts from: plain ones for the general rate, ones at the general rate for the others.
WEIGHT = 4.0


class Discounted:
    """Tokens and seconds of rounds. Older rounds weigh less."""

    def __init__(self, keep: float) -> None:
        """``keep`` is the weight left of a round after one later round."""
        self.keep = keep
        self.tokens = self.seconds = self.rounds = 0.0

    def observe(self, tokens: float, seconds: float) -> None:
        """Add one round."""
        self.tokens = self.keep * self.tokens + tokens
        self.seconds = self.keep * self.seconds + seconds
        self.rounds = self.keep * self.rounds + 1.0

    def observe_all(self, tokens: Iterable[float], seconds: Iterable[float]) -> None:
        """Add rounds, oldest first."""
        keep, all_tokens, all_seconds, rounds = self.keep, self.tokens, self.seconds, self.rounds
        for more, took in zip(tokens, seconds, strict=False):
            all_tokens = keep * all_tokens + more
            all_seconds = keep * all_seconds + took
            rounds = keep * rounds + 1.0
        self.tokens, self.seconds, self.rounds = all_tokens, all_seconds, rounds

    def rate(self, usual: float, seconds: float) -> float:
        """Tokens per second, with ``seconds`` imaginary seconds at the ``usual`` rate."""
        return (self.tokens + usual * seconds) / (self.seconds + seconds)

    def rescale(self, factor: float) -> None:
        """Multiply the seconds of all rounds by ``factor``, for costs in another unit."""
        self.seconds *= factor


class Ahead:
    """The rates, and the part of the text in rounds for which nothing was found. All seconds are in the same unit, at
    whatever speed the machine runs now."""

    def __init__(self) -> None:
        self.all, self.left = Discounted(KEEP), Discounted(KEEP)  # in ``left`` rounds with a match count 0
        self.free = 0.0  # tokens of rounds with a match and without the draft, discounted as ``all``
        self.behind = {False: Discounted(KEEP_BEHIND), True: Discounted(KEEP_BEHIND)}

    def observe(
        self, found: bool, tokens: Sequence[int], seconds: Sequence[float], after: bool | None, free: bool
    ) -> None:
        """Add rounds of one text that followed each other, with the tokens that each committed. ``found``: a proposal
        from earlier text was worth verifying in each of them; ``after``: the same of the round before the first, None
        if there was none. ``free``: something was found, and the draft took no part."""
        self.all.observe_all(tokens, seconds)
        for more in tokens:
            self.free = KEEP * self.free + (more if free else 0.0)
        self.left.observe_all(
            itertools.repeat(0.0 if found else 1.0), itertools.repeat(0.0, len(seconds)) if found else seconds
        )
        if after is not None:
            self.behind[after].observe(tokens[0], seconds[0])
        self.behind[found].observe_all(tokens[1:], seconds[1:])

    def rescale(self, factor: float) -> None:
        """Multiply the seconds of all rounds by ``factor``."""
        for rounds in (self.all, self.left, *self.behind.values()):
            rounds.rescale(factor)

    def rate(self, found: bool, plain_s: float) -> float:
        """Tokens per second of the rounds after one for which something was ``found`` or not. At least the rate of
        plain decoding, whose rounds take ``plain_s`` seconds, because it is always possible."""
        return max(self.behind[found].rate(self.general(plain_s), WEIGHT * plain_s), 1 / plain_s)

    def general(self, plain_s: float) -> float:
        """Tokens per second of all rounds."""
        return self.all.rate(1 / plain_s, WEIGHT * plain_s)

    def share_left(self, plain_s: float) -> float:
        """The share of the time spent in rounds for which nothing is found."""
        imaginary = WEIGHT * plain_s
        return (self.left.seconds + imaginary) / (self.all.seconds + imaginary)

    def left_a_token(self) -> float:
        """Rounds for which nothing is found, per token of all rounds."""
        return (self.left.tokens + WEIGHT) / (self.all.tokens + WEIGHT)

    def found_a_token(self) -> float:
        """Rounds for which something is found, per token of all rounds."""
        return (self.all.rounds - self.left.tokens) / (self.all.tokens + WEIGHT)

    def free_a_round_left(self) -> float:
        """Tokens of rounds with a match and without the draft, per round for which nothing is found."""
        return self.free / (self.left.tokens + WEIGHT)
