"""Estimates the time between two passes (text, record, the next decision): a part per round and a part per token.

In: the seconds between some rounds, and the tokens that these rounds committed. Out: seconds per round and per token.
The part per round matters to the choice of a draft length: a draft that makes one round of three saves two of them. The
part per token does not, since every token costs it.
"""

from __future__ import annotations

from adaptive.types import Round

# Weight left of a round after one later round (about 2,000 are remembered), and rounds that the initial estimates count
# for. A longer time than MOST_BETWEEN times the estimate counts as that. Each part is at least LEAST_SHARE of the mean
# time per round.
KEEP_BETWEEN, BELIEVED, MOST_BETWEEN, LEAST_SHARE = 0.9995, 100.0, 3.0, 0.05


class Between:
    """The two parts, by least squares over recent rounds. Bursts whose rounds commit more or fewer tokens tell them
    apart."""

    def __init__(self, of_round: float, of_token: float) -> None:
        self.of_round, self.of_token = of_round, of_token
        # Sums over bursts, weighted by their rounds. They begin as BELIEVED rounds at the initial estimates, with 2
        # tokens on average and variance 1.
        self._rounds, self._tokens, self._squares = BELIEVED, 2 * BELIEVED, 4 * BELIEVED + BELIEVED
        self._seconds = self._rounds * of_round + self._tokens * of_token
        self._products = self._tokens * of_round + self._squares * of_token

    def observe(self, rounds: int, tokens: int, seconds: float) -> None:
        """Add a burst of rounds, with ``seconds`` between them; limited, in case the process was stopped meanwhile."""
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


class Elapsed:
    """Counts the rounds and the tokens of an answer, and measures the time between its rounds: what passes from one
    question about the draft length to the next, less the seconds of the rounds."""

    def __init__(self) -> None:
        self.tokens = 0  # of this answer
        self.seconds = 0.0  # of all rounds
        self.rounds = 0  # since the last question
        self._asked: float | None = None  # the time of that question, and ``seconds`` and ``tokens`` then
        self._seconds, self._tokens = 0.0, 0
        self._between, self._between_s, self._between_tokens = 0, 0.0, 0

    def begin(self, decoded: int = 0) -> None:
        """Start an answer of which ``decoded`` tokens are there; its first question ends no time between rounds."""
        self._asked, self.tokens, self._tokens = None, decoded, decoded

    def ask(self, now: float) -> None:
        """Note a question at the time ``now``, in seconds."""
        if self._asked is not None and self.rounds:
            self._between += self.rounds
            self._between_s += max(0.0, now - self._asked - (self.seconds - self._seconds))
            self._between_tokens += self.tokens - self._tokens
        self._asked, self.rounds, self._seconds, self._tokens = now, 0, self.seconds, self.tokens

    def passed(self, outcome: Round) -> None:
        """Add a finished round."""
        self.rounds += 1
        self.seconds += outcome.draft_s + outcome.verify_s
        self.tokens += 1 + outcome.accepted

    def take(self) -> tuple[int, float, int]:
        """The rounds before the last question, the seconds between them, and their tokens, since the last call."""
        taken = self._between, self._between_s, self._between_tokens
        self._between, self._between_s, self._between_tokens = 0, 0.0, 0
        return taken
