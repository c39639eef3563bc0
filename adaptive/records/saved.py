"""Estimates from the log how much time drafting saved against plain decoding, with a 95% interval.

In: tokens, rounds and seconds of each answer (``Log.spent``). Out: ``Saved``.

Plain decoding is never run just for this comparison. But a controller decodes some rounds plainly, before, between
and after those that draft, and their mean seconds a token are what the tokens of the other rounds would have taken.
Means are compared, since disturbances of the machine affect both kinds of rounds. The comparison is **paired in
time**: an answer is compared with the plain rounds nearest to it, before and after, since the load of a machine
changes over the day. A plain round is compared with itself, so an answer that drafted nothing saves exactly 0.

Passes at the start of an answer take longer, in plain decoding as well. So that is left out of all seconds
(``records.rows``): tries of the draft, and so plain rounds, are often there.

A token takes more time than its round: sampling, text, the record. Each answer's time between its rounds is split
evenly over its tokens. An answer that shared passes with others is left out: most of its time belonged to them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

# Plain rounds that an answer is compared with. Too low: their mean is noisy. Too high: they include hours when the load
# of the machine was different.
NEAR = 200
# Largest ratio between the seconds a round of an answer and those of the answers with its plain rounds, in either
# direction. Beyond it the machine was not in the same state, and the answer is left out. Too high: such answers count.
# Too low: answers with longer drafts are left out too.
OTHER_PACE = 2.0
# Fewest plain rounds for an estimate.
FEWEST = 10
# Draws of the bootstrap over answers; 1,000 give the ends of a 95% interval to a tenth of its width.
DRAWS = 1000
# Most units that the bootstrap draws. In a longer log several neighbouring answers form one unit, which bounds the
# time.
MOST = 1000
# Draws computed at once. This bounds the memory: AT_ONCE times the number of answers are held.
AT_ONCE = 50
# Seconds and names of the units, largest first. A unit is used if a time is two units or more.
UNITS = ((3600, "h"), (60, "min"), (1, "s"))

Numbers = npt.NDArray[np.float64]


class Spent(NamedTuple):
    """Tokens, rounds and times of one answer: its ``tokens`` without the first and their ``seconds``; its ``rounds``
    and their ``rounds_s``; the number of ``plain`` rounds that neither followed a drafting round nor were at the start
    (one token each) and their ``plain_s``; the number of rounds in passes ``shared`` with other answers. All seconds
    are without what passes at the start of the answer took longer than later ones."""

    id: int
    tokens: int
    seconds: float
    rounds: int
    rounds_s: float
    plain: int
    plain_s: float
    shared: int = 0

    @property
    def drafted(self) -> bool:
        """Whether the answer was timed and had rounds other than plain ones."""
        return self.tokens > 0 and self.seconds > 0 and self.plain < self.rounds


@dataclass(frozen=True)
class Saved:
    """``seconds`` is how much longer plain decoding would have taken (negative if drafting lost time), with the 95%
    interval from ``low`` to ``high``. ``drafted`` is the number of answers that drafted, ``answers`` the number of
    those that could be compared: the others shared passes, or have no plain rounds near them from a time when the
    machine was equally fast."""

    seconds: float
    low: float
    high: float
    answers: int
    drafted: int

    @property
    def text(self) -> str:
        """For people: 12 s (9 to 15 s)."""
        if not self.answers:
            return "0 s"
        unit, name = _unit(max(abs(self.low), abs(self.high)))
        digits = 1 if self.high - self.low < 4 * unit else 0
        mean, low, high = (
            f"{value / unit + 0.0:.{digits}f}".replace("-", "−") for value in (self.seconds, self.low, self.high)
        )
        return f"{mean} {name} ({low} to {high} {name})"


def saved_in_words(saved: Saved | None, training_s: float) -> str:
    """One line with the time that drafting saved and the time that training took."""
    unit, name = _unit(training_s)
    took = f"training took {training_s / unit:.0f} {name}" if training_s else "nothing was trained"
    if saved is None:
        return f"time saved is not known: no answer can be compared with enough plain decoding; {took}"
    known = f"{saved.answers} of " * (saved.answers < saved.drafted)
    answers = f"in {known}{saved.drafted} answer{'s' * (saved.drafted != 1)} that drafted"
    return f"saved {saved.text} against plain decoding, {answers}; {took}"


def _unit(seconds: float) -> tuple[int, str]:
    """The largest unit of which these are two or more: its seconds and its name."""
    return next((unit, name) for unit, name in UNITS if seconds >= 2 * unit or unit == 1)


def time_saved(spent: Sequence[Spent]) -> Saved | None:
    """The time saved over all answers (``spent`` is oldest first); None if there are too few plain rounds to compare
    with."""
    drafted = sum(one.drafted for one in spent)
    if not drafted:
        return Saved(0.0, 0.0, 0.0, 0, 0)
    at, tokens, seconds, plain, plain_seconds, rounds = _columns(spent)
    others, has_plain = plain < rounds, plain > 0
    if not others.any() or plain.sum() < FEWEST:
        return None
    counted = _merged(plain[has_plain]), _merged(plain_seconds[has_plain])
    of_others = [_merged(values[others]) for values in (tokens - plain, seconds - plain_seconds)]
    low, high = _nearest(_firsts(at[has_plain]), counted[0], _firsts(at[others]))
    there, here = ([_merged(values[some]) for values in (seconds, rounds)] for some in (has_plain, others))
    alike = _alike(here[0] / here[1], np.divide(*(_between(values[None], low, high)[0] for values in there)))
    if not alike.any():
        return None
    of_others, low, high = [values[alike] for values in of_others], low[alike], high[alike]
    answers = int(_merged(others[others].astype(np.float64))[alike].sum())

    def saved(weights: Numbers) -> Numbers:
        """The seconds saved for each row of ``weights`` (draws, answers with plain rounds)."""
        counts, costs = (_between(weights * values, low, high) for values in counted)
        return (of_others[0] * costs / counts).sum(axis=1) - of_others[1].sum()  # type: ignore[no-any-return]

    drawn = np.concatenate([saved(weights) for weights in _weights(len(counted[0]))])
    best = float(saved(np.ones((1, len(counted[0]))))[0])
    # The interval is centred on the estimate, which bootstrap percentiles are not.
    half = 1.96 * float(drawn.std())
    return Saved(best, best - half, best + half, answers, drafted)


def speed_change(
    spent: Sequence[Spent], before: Collection[int], after: Collection[int]
) -> tuple[float, float, float] | None:
    """The ratio of the decoding speed of the answers ``after`` (ids) to that of the answers ``before``, and the ends of
    its 95% interval.

    Each answer is compared with plain decoding at its own time, so that a slower machine does not count as slower
    decoding. Answers that shared passes, or from a time when the machine was in another state (OTHER_PACE), are left
    out. None if these are more than half of either group, or if there are too few plain rounds to compare with.
    """
    at, tokens, seconds, plain, plain_seconds, rounds = _columns(spent)
    if plain.sum() < FEWEST:
        return None
    has_plain = plain > 0
    low, high = _nearest(at[has_plain], plain[has_plain], at)
    counts, costs = (_between(values[None, has_plain], low, high)[0] for values in (plain, plain_seconds))
    plainly = plain_seconds + (tokens - plain) * costs / counts
    there = (_between(values[None, has_plain], low, high)[0] for values in (seconds, rounds))
    alike = _alike(seconds / rounds, np.divide(*there))
    rng = np.random.default_rng(0)
    drawn, best = np.zeros(DRAWS), 0.0
    for sign, ids in ((-1, before), (1, after)):
        chosen = np.isin(at, list(ids)) & alike
        if 2 * chosen.sum() < max(1, len(ids)):
            return None
        weights = rng.exponential(size=(DRAWS, int(chosen.sum())))
        best += sign * float(np.log(plainly[chosen].sum() / seconds[chosen].sum()))
        drawn += sign * np.log((weights @ plainly[chosen]) / (weights @ seconds[chosen]))
    half = 1.96 * float(drawn.std())
    return float(np.exp(best)), float(np.exp(best - half)), float(np.exp(best + half))


def _alike(here: Numbers, there: Numbers) -> npt.NDArray[np.bool_]:
    """Whether the machine was in the same state, judged by the seconds a round."""
    return (here < OTHER_PACE * there) & (there < OTHER_PACE * here)


def _columns(spent: Sequence[Spent]) -> tuple[Numbers, Numbers, Numbers, Numbers, Numbers, Numbers]:
    """Columns of the answers that were timed and shared no pass: id, tokens, seconds, plain rounds, seconds of the
    plain rounds with their share of the time between rounds, and all rounds."""
    columns = np.array(spent, dtype=np.float64).reshape(-1, len(Spent._fields)).T
    usable = (columns[1] > 0) & (columns[2] > 0) & (columns[-1] == 0)
    at, tokens, seconds, rounds, rounds_s, plain, plain_s, _ = columns[:, usable]
    plain_seconds = plain_s + plain * np.maximum(0.0, seconds - rounds_s) / tokens
    return at, tokens, seconds, plain, plain_seconds, rounds


def _merged(values: Numbers) -> Numbers:
    """``values``, one an answer, with neighbours summed up so that at most MOST are left."""
    return np.add.reduceat(values, np.arange(0, len(values), _each(values))) if len(values) else values


def _firsts(at: Numbers) -> Numbers:
    """The id of the first answer in each sum of ``_merged``."""
    return at[:: _each(at)]


def _each(values: Numbers) -> int:
    return max(1, -(-len(values) // MOST))


def _weights(answers: int) -> Iterator[Numbers]:
    """The weight of each answer in each draw: (AT_ONCE, answers), above 0, with mean and variance 1."""
    rng = np.random.default_rng(0)
    for _ in range(DRAWS // AT_ONCE):
        yield rng.exponential(size=(AT_ONCE, answers))


def _nearest(at: Numbers, counts: Numbers, wanted: Numbers) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """For each id of ``wanted`` the range of answers around it, first (included) and last (excluded), whose ``counts``
    add up to about NEAR, or all answers."""
    before = np.concatenate(([0.0], np.cumsum(counts)))
    half = min(NEAR, before[-1]) / 2
    middle = np.clip(before[np.searchsorted(at, wanted)], half, before[-1] - half)
    low = np.searchsorted(before, middle - half, side="right") - 1
    high = np.searchsorted(before, middle + half, side="left")
    return np.maximum(low, 0), np.minimum(np.maximum(high, low + 1), len(at))


def _between(values: Numbers, low: npt.NDArray[np.int64], high: npt.NDArray[np.int64]) -> Numbers:
    """Sums of each row of ``values`` from ``low`` (included) to ``high`` (excluded)."""
    sums = np.concatenate((np.zeros((len(values), 1)), np.cumsum(values, axis=1)), axis=1)
    return sums[:, high] - sums[:, low]  # type: ignore[no-any-return]
