"""At what rate text is said anyway, where some of its rounds are drafted by what was found in earlier text.

In: rounds in their order, with what they committed, what they took, and whether such a proposal was found for them.
Out: tokens per second of the tokens *behind* a round. A token more that a round commits saves the time in which the
rounds after it would say it, and those are not plain ones: where a match was found the next round usually has one too,
and behind a round without any there may begin one. So the rate is that of the rounds that followed, apart by whether
the round before had a match.
"""

from __future__ import annotations

# What is left of a round after one later one: in general and, of what follows a round of one sort, after one later of
# that sort (about 100 and 50 rounds). Longer is late after a change of subject, shorter takes chance for one.
KEEP, KEEP_BEHIND = 0.99, 0.98
# Imaginary rounds of plain decoding in the general rate, and at that in the others.
WEIGHT = 4.0


class Discounted:
    """Tokens and seconds of some rounds, the older the less."""

    def __init__(self, keep: float) -> None:
        """``keep`` is what is left of a round after one later."""
        self.keep = keep
        self.tokens = self.seconds = self.rounds = 0.0

    def observe(self, tokens: float, seconds: float) -> None:
        """One more round."""
        self.tokens = self.keep * self.tokens + tokens
        self.seconds = self.keep * self.seconds + seconds
        self.rounds = self.keep * self.rounds + 1.0

    def rate(self, usual: float, seconds: float) -> float:
        """Tokens per second, with so many imaginary seconds at the ``usual`` rate."""
        return (self.tokens + usual * seconds) / (self.seconds + seconds)


class Ahead:
    """The rates, and how much of the text is left to rounds for which nothing was found. All seconds are of one unit,
    whatever the machine does just now."""

    def __init__(self) -> None:
        self.all, self.left = Discounted(KEEP), Discounted(KEEP)  # of ``left`` the other rounds are nought
        self.free = 0.0  # tokens that were said without the draft where something was found, as of ``all``
        self.behind = {False: Discounted(KEEP_BEHIND), True: Discounted(KEEP_BEHIND)}

    def observe(self, found: bool, tokens: float, seconds: float, after: bool | None, free: bool) -> None:
        """A round has committed so many tokens; ``found``: a proposal of earlier text was worth verifying in it, and
        ``after``: in the round of the same text before it, None where there was none. ``free``: something was
        found, and the draft took no part."""
        self.all.observe(tokens, seconds)
        self.free = KEEP * self.free + (tokens if free else 0.0)
        self.left.observe(0.0 if found else 1.0, 0.0 if found else seconds)
        if after is not None:
            self.behind[after].observe(tokens, seconds)

    def rate(self, found: bool, plain_s: float) -> float:
        """Tokens per second of what follows a round for which something was ``found`` or not; plain decoding, whose
        rounds take ``plain_s``, is always possible."""
        return max(self.behind[found].rate(self.general(plain_s), WEIGHT * plain_s), 1 / plain_s)

    def general(self, plain_s: float) -> float:
        """Tokens per second of all rounds."""
        return self.all.rate(1 / plain_s, WEIGHT * plain_s)

    def share_left(self, plain_s: float) -> float:
        """Share of the time in rounds for which nothing is found."""
        imaginary = WEIGHT * plain_s
        return (self.left.seconds + imaginary) / (self.all.seconds + imaginary)

    def left_a_token(self) -> float:
        """Rounds for which nothing is found, by the tokens of all."""
        return (self.left.tokens + WEIGHT) / (self.all.tokens + WEIGHT)

    def found_a_token(self) -> float:
        """Rounds for which something is found, by the tokens of all."""
        return (self.all.rounds - self.left.tokens) / (self.all.tokens + WEIGHT)

    def free_a_round_left(self) -> float:
        """Tokens that are said without the draft where something is found, by the rounds for which nothing is."""
        return self.free / (self.left.tokens + WEIGHT)
