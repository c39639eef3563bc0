"""What a round takes by its number of drafted tokens: a line that bends upwards at one place.

Beside the reading of weights the first tokens of a pass cost next to nothing. From some number on, arithmetic is the
limit, and each token costs its share of it. Where that is depends on machine, model and memory, and rounds vary too
much to tell one place from the next. So a line is fitted for each of some places, and the result is the mean of these
lines, weighted by how well each explains the rounds (Bayesian model averaging: Hoeting et al. 1999). Compared in
docs/notes/2026-11-streamed.md.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

# Factor on a round at each later one. Too low: chance bends the line. Too high: a machine that has become slower is
# noticed late.
KEEP = 0.97
# Weights of a round that says that tokens cost nothing, and of one that says that they cost no more beyond the bend,
# with as many more of them as the last bend. Too low: chance makes slopes and bends, and a line bends where no round
# tells. Too high: tokens seem to be free, or the last ones as cheap as the first.
FREE, STRAIGHT = 0.0005, 0.005
# Rounds before one place of the bend is believed more than another.
ENOUGH = 3.0


class BentLine:
    """Seconds of a round by its drafted tokens. ``bends`` are the numbers from which they may begin to cost more. No
    slope is below 0, and the second one not below the first."""

    def __init__(self, bends: Sequence[int]) -> None:
        self._bends = np.array(bends, np.float64)
        self._free, self._straight = FREE * bends[-1] ** 2, STRAIGHT * bends[-1] ** 2
        # Weighted sums over rounds: of 1, n, n * n, seconds, n * seconds and seconds squared; and, for each bend, of
        # the tokens beyond it, their squares, and their products with n and with the seconds.
        self._sums = np.zeros(6)
        self._beyond = np.zeros((4, len(bends)))
        # Of the lines: the seconds of a plain round, those of a token, and those that it costs more beyond each bend.
        self._plain, self._token, self._more = 0.0, 0.0, np.zeros(len(bends))

    def __bool__(self) -> bool:
        """Whether a round was observed."""
        return bool(self._sums[0])

    def observe(self, n: int, seconds: float) -> None:
        """Take in a round of ``n`` drafted tokens."""
        beyond = np.maximum(0.0, n - self._bends)
        self._sums = KEEP * self._sums + (1.0, n, n * n, seconds, n * seconds, seconds * seconds)
        self._beyond = KEEP * self._beyond + np.stack([beyond, beyond * beyond, n * beyond, seconds * beyond])
        self._fit()

    def __call__(self, n: float) -> float:
        """Expected seconds of a round of ``n`` drafted tokens; 0 before any was observed."""
        return self._plain + self._token * n + float(self._more @ np.maximum(0.0, n - self._bends))

    def steps(self, count: int) -> list[float]:
        """What each of the first ``count`` tokens adds; none more than the one after it."""
        places = np.arange(1.0, count + 1.0)
        found: list[float] = (self._token + self._more @ (places > self._bends[:, None])).tolist()
        return found

    def _fit(self) -> None:
        """Take the mean of the least-squares lines with each bend. Of two slopes whose best values are not both at
        least 0, one is 0: the one without which the rounds are explained better."""
        count, total, squares, seconds, products, square_seconds = self._sums
        sum_beyond, square_beyond, product_beyond, second_beyond = self._beyond
        # Variances and covariances of the tokens, those beyond a bend, and the seconds, times the weight of all rounds.
        ours, theirs = squares - total**2 / count + self._free, square_beyond - sum_beyond**2 / count + self._straight
        both = product_beyond - sum_beyond * total / count
        first = np.full_like(both, products - total * seconds / count)
        second = second_beyond - sum_beyond * seconds / count
        slopes = np.stack([theirs * first - both * second, ours * second - both * first]) / (ours * theirs - both**2)
        alone = np.maximum(0.0, [first / ours, second / theirs])
        explained = alone * (first, second)
        slopes = np.where((slopes >= 0.0).all(0), slopes, alone * (explained >= explained.max(0)))
        left = np.maximum(0.0, square_seconds - seconds**2 / count - slopes[0] * first - slopes[1] * second)
        weights = np.ones_like(left)
        if count >= ENOUGH:
            weights = np.exp((left.min() - left) * count / (2.0 * max(left.min(), 1e-9 * square_seconds)))
        weights /= weights.sum()
        self._token, self._more = float(weights @ slopes[0]), weights * slopes[1]
        self._plain = max(float(seconds - self._token * total - self._more @ sum_beyond) / float(count), 1e-9)
