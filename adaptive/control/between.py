"""What comes between two passes: text, record, the next choice. Some of it is of the round, some of each token.

In: the seconds between some rounds, and how many tokens these committed. Out: seconds of a round, and of a token.
What is of the round counts for a draft that makes one round of three; what is of its tokens comes with them anyway.
"""

from __future__ import annotations

# What is left of a round after a later one (about 2,000 are remembered), and rounds that the first belief counts for.
# What took longer than so many times what is believed counts as that. The least share of a round, and of a token.
KEEP_BETWEEN, BELIEVED, MOST_BETWEEN, LEAST_SHARE = 0.9995, 100.0, 3.0, 0.05


class Between:
    """What comes between two passes, by least squares over the rounds of late: so many seconds for a
    round, and for a token that it commits. The two are told apart by bursts whose rounds commit more or fewer."""

    def __init__(self, of_round: float, of_token: float) -> None:
        self.of_round, self.of_token = of_round, of_token
        # Sums over bursts of so many rounds and tokens, each by its rounds, as if it had been as is believed before.
        self._rounds, self._tokens, self._squares = BELIEVED, 2 * BELIEVED, 4 * BELIEVED + BELIEVED
        self._seconds = self._rounds * of_round + self._tokens * of_token
        self._products = self._tokens * of_round + self._squares * of_token

    def observe(self, rounds: int, tokens: int, seconds: float) -> None:
        """A burst of rounds, with so much between them. A process that was stopped meanwhile says nothing."""
        seconds = min(seconds, MOST_BETWEEN * (rounds * self.of_round + tokens * self.of_token))
        keep, each = KEEP_BETWEEN**rounds, tokens / rounds
        self._rounds = keep * self._rounds + rounds
        self._tokens = keep * self._tokens + tokens
        self._squares = keep * self._squares + tokens * each
        self._seconds = keep * self._seconds + seconds
        self._products = keep * self._products + seconds * each
        spread = self._rounds * self._squares - self._tokens * self._tokens
        slope = (self._rounds * self._products - self._tokens * self._seconds) / max(spread, 1e-9)
        usual = self._seconds / self._rounds
        self.of_token = min(max(slope, LEAST_SHARE * usual), usual * self._rounds / self._tokens)
        self.of_round = max((self._seconds - self.of_token * self._tokens) / self._rounds, LEAST_SHARE * usual)
