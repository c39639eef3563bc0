"""The time that drafting saved against plain decoding, with its 95% interval, from what the log holds.

In: what each answer and its rounds took (``Log.spent``). Out: ``Saved``.

Plain decoding is never run beside the drafted for a comparison; but a controller decodes some rounds plainly, before,
between and after those that draft. What a token took there, on average, is what the tokens of the other rounds would
have taken. Both are means, since what disturbs a machine disturbs both; and they are **paired in time**: an answer is
held against the plain rounds nearest to it, before and after, since a machine is busier at some hours. A plain round
takes nothing longer than itself: an answer that drafted nothing saves exactly 0.

A round is not all that a token takes: choosing, text, the record. Each answer's time between its rounds is split
evenly over its tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

# Plain rounds that an answer is held against. Fewer leave the mean to chance, more reach into hours when the machine
# was busier or less so.
NEAR = 300
# Plain rounds without which nothing is said.
FEWEST = 20
# Draws of the bootstrap over answers; 1,000 give the ends of a 95% interval to a tenth of its width.
DRAWS = 1000
# Draws computed at once, which bounds the memory: answers times these are numbers held.
AT_ONCE = 50
# Seconds of a unit and its name, the largest first; one is used from two of it on.
UNITS = ((3600, "h"), (60, "min"), (1, "s"))

Numbers = npt.NDArray[np.float64]


class Spent(NamedTuple):
    """What one answer took: its ``tokens`` but the first and their ``seconds``; its ``rounds`` and their ``rounds_s``;
    of them ``plain`` ones that followed no drafting round, each a token, and their ``plain_s``."""

    id: int
    tokens: int
    seconds: float
    rounds: int
    rounds_s: float
    plain: int
    plain_s: float


@dataclass(frozen=True)
class Saved:
    """``seconds`` that plain decoding would have taken longer, negative where drafting lost, with its 95% interval
    from ``low`` to ``high``. ``answers`` are those that drafted; nothing else counts."""

    seconds: float
    low: float
    high: float
    answers: int

    @property
    def text(self) -> str:
        """As people read it: 12 s (9 to 15 s)."""
        if not self.answers:
            return "0 s"
        unit, name = next((u, n) for u, n in UNITS if max(abs(self.low), abs(self.high)) >= 2 * u or u == 1)
        digits = 1 if self.high - self.low < 4 * unit else 0
        mean, low, high = (
            f"{value / unit + 0.0:.{digits}f}".replace("-", "−") for value in (self.seconds, self.low, self.high)
        )
        return f"{mean} {name} ({low} to {high} {name})"


def saved_in_words(saved: Saved | None, training_s: float) -> str:
    """One line of what drafting saved and what training took, which stand beside each other."""
    took = f"training took {training_s:.0f} s" if training_s else "nothing was trained"
    if saved is None:
        return f"time saved is not known: too little was decoded plainly; {took}"
    answers = f"in {saved.answers} answer{'s' * (saved.answers != 1)} that drafted"
    return f"saved {saved.text} against plain decoding, {answers}; {took}"


def time_saved(spent: Sequence[Spent]) -> Saved | None:
    """Over all answers, oldest first; None where too little was decoded plainly to say."""
    answers = _timed(spent)
    drafted = sum(one.plain < one.rounds for one in answers)
    if not drafted:
        return Saved(0.0, 0.0, 0.0, 0)
    paired = _Paired.of(answers)
    if paired is None:
        return None
    took = float(paired.seconds.sum())
    drawn = np.concatenate([paired.plainly(w).sum(axis=1) for w in _weights(paired.with_plain, DRAWS)])
    best = float(paired.plainly(np.ones((1, paired.with_plain))).sum()) - took
    # Around the estimate itself, which a bootstrap's percentiles are not: resampling has a spread of its own.
    half = 1.96 * float(drawn.std())
    return Saved(best, best - half, best + half, drafted)


def speed_change(
    spent: Sequence[Spent], before: Collection[int], after: Collection[int]
) -> tuple[float, float, float] | None:
    """How many times as fast the answers ``after`` (ids) decoded as those ``before``, with its 95% interval.

    Each is held against plain decoding at its own time, so that a machine that has become slower is not an answer that
    has. None where too little was decoded plainly to say.
    """
    answers = _timed(spent)
    paired = _Paired.of(answers)
    if paired is None:
        return None
    plainly = paired.plainly(np.ones((1, paired.with_plain)))[0]
    took = paired.seconds
    chosen = [np.array([one.id in ids for one in answers]) for ids in (before, after)]
    rng = np.random.default_rng(0)
    logs, best = [], 0.0
    for sign, some in zip((-1, 1), chosen, strict=True):
        if not some.any():
            return None
        weights = rng.exponential(size=(DRAWS, int(some.sum())))
        best += sign * float(np.log(plainly[some].sum() / took[some].sum()))
        logs.append(sign * np.log((weights @ plainly[some]) / (weights @ took[some])))
    half = 1.96 * float((logs[0] + logs[1]).std())
    return float(np.exp(best)), float(np.exp(best - half)), float(np.exp(best + half))


@dataclass(frozen=True)
class _Paired:
    """Answers beside the plain rounds of their time. Arrays of all answers, but ``costs`` and ``counts`` of those
    with plain rounds (seconds and number of these), of which each answer looks at ``low`` to ``high``."""

    seconds: Numbers
    plain: Numbers
    plain_seconds: Numbers
    others: Numbers
    counts: Numbers
    costs: Numbers
    low: npt.NDArray[np.int64]
    high: npt.NDArray[np.int64]

    @property
    def with_plain(self) -> int:
        """Answers that have plain rounds."""
        return len(self.counts)

    @classmethod
    def of(cls, answers: Sequence[Spent]) -> _Paired | None:
        """None where too few rounds are plain."""
        at, tokens, seconds, rounds_s, plain, plain_s = (
            np.array([getattr(one, name) for one in answers], dtype=np.float64)
            for name in ("id", "tokens", "seconds", "rounds_s", "plain", "plain_s")
        )
        if plain.sum() < FEWEST:
            return None
        plain_seconds = plain_s + plain * np.maximum(0.0, seconds - rounds_s) / tokens
        # Of an answer without another round all is plain, whatever passed between them.
        whole = np.array([one.plain == one.rounds for one in answers])
        plain_seconds[whole] = seconds[whole]
        some = plain > 0
        low, high = _nearest(at[some], plain[some], at)
        others = np.where(whole, 0.0, tokens - plain)
        return cls(seconds, plain, plain_seconds, others, plain[some], plain_seconds[some], low, high)

    def plainly(self, weights: Numbers) -> Numbers:
        """Seconds that each answer would have taken in plain decoding, for each row of weights of the answers with
        plain rounds: (rows, answers)."""
        counts, costs = (_between(weights * values, self.low, self.high) for values in (self.counts, self.costs))
        return self.plain_seconds + self.others * costs / counts  # type: ignore[no-any-return]


def _timed(spent: Sequence[Spent]) -> list[Spent]:
    return [one for one in spent if one.tokens > 0 and one.seconds > 0]


def _weights(answers: int, draws: int) -> Iterator[Numbers]:
    """How much each answer counts in each draw: (AT_ONCE, answers), never 0, with mean and variance 1."""
    rng = np.random.default_rng(0)
    for _ in range(draws // AT_ONCE):
        yield rng.exponential(size=(AT_ONCE, answers))


def _nearest(at: Numbers, counts: Numbers, wanted: Numbers) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """For each place of ``wanted`` the answers from (included) to (left out) around it whose ``counts`` come to
    about NEAR, or all."""
    before = np.concatenate(([0.0], np.cumsum(counts)))
    half = min(NEAR, before[-1]) / 2
    middle = np.clip(before[np.searchsorted(at, wanted)], half, before[-1] - half)
    low = np.searchsorted(before, middle - half, side="right") - 1
    high = np.searchsorted(before, middle + half, side="left")
    return np.maximum(low, 0), np.minimum(np.maximum(high, low + 1), len(at))


def _between(values: Numbers, low: npt.NDArray[np.int64], high: npt.NDArray[np.int64]) -> Numbers:
    """Sums of each row of ``values`` from ``low`` to ``high``."""
    sums = np.concatenate((np.zeros((len(values), 1)), np.cumsum(values, axis=1)), axis=1)
    return sums[:, high] - sums[:, low]  # type: ignore[no-any-return]
