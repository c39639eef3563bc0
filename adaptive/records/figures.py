"""The figures of every generation of a log, as columns: the history is computed from them without reading the rounds.

In: rows of the table ``figures``, one a generation. Out: sums over groups of generations. A log of a million rounds has
some 20,000 such rows, which numpy sums up in milliseconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from adaptive.records.stats import RoundCount

# Storage format of a generation's rounds: the number of rounds with exactly these counts (RoundCount).
COUNTS = np.dtype([("drafted", "<u2"), ("accepted", "<u2"), ("rounds", "<u4")])
# Most tokens that a round can draft; a higher number is damage, which could ask for tables of billions of entries.
LONGEST_DRAFT = 4096
# Most entries of a dense table of sums; if the table had more, the keys are sorted instead. Too high costs memory, too
# low costs time.
WHOLE = 1 << 24

Numbers = npt.NDArray[np.float64]
Places = npt.NDArray[np.int64]


@dataclass(frozen=True)
class GenerationFigures:
    """The figures of one generation: no text, no tokens. ``seconds`` is the time of ``tokens - 1``
    output tokens, since the prompt's pass gives the first one; ``expected`` is the draft-length policy's forecast of
    that time (0: no forecast). ``own`` are the rounds reduced to the trained drafter's tokens (``Round.learned``);
    None if they equal ``rounds``."""

    id: int
    session: str
    created: float
    adapter: str | None
    tokens: int
    seconds: float
    expected: float
    rounds: tuple[RoundCount, ...]
    own: tuple[RoundCount, ...] | None = None

    @property
    def drafted(self) -> bool:
        """Whether the trained drafter drafted anything."""
        return any(count.drafted for count in (self.rounds if self.own is None else self.own))


@dataclass(frozen=True)
class Sums:
    """Sums over a group of generations. Both token counts leave out the first token of each generation: ``timed`` is
    the number of tokens that took ``seconds``, ``forecast`` the number for which ``expected`` seconds were forecast.
    ``own`` are the rounds reduced to the trained drafter's tokens."""

    generations: int
    tokens: int
    timed: int
    seconds: float
    forecast: int
    expected: float
    first: float | None
    last: float | None
    rounds: tuple[RoundCount, ...]
    own: tuple[RoundCount, ...]


def is_packed(value: object) -> bool:
    """Whether ``value`` can be the packed rounds of a generation."""
    return isinstance(value, bytes) and len(value) % COUNTS.itemsize == 0


def packed(counts: Iterable[RoundCount]) -> bytes:
    """The rounds of one generation in the log's storage format."""
    return np.array([(c.drafted, c.accepted, c.rounds) for c in counts], COUNTS).tobytes()


class Counts:
    """The packed rounds of all generations in one array."""

    def __init__(self, blobs: Sequence[bytes]) -> None:
        """``blobs`` has the packed rounds of each generation. Raises TypeError or ValueError if one is not packed
        rounds. Implausible counts become 0."""
        if any(len(one) % COUNTS.itemsize for one in blobs):
            raise ValueError("the rounds of a generation are no whole number of counts")
        self.all = np.frombuffer(b"".join(blobs), COUNTS)
        wrong = (self.all["accepted"] > self.all["drafted"]) | (self.all["drafted"] > LONGEST_DRAFT)
        if wrong.any():
            self.all = np.where(wrong, np.zeros(1, COUNTS), self.all)
        self.ends: Places = np.cumsum([len(one) // COUNTS.itemsize for one in blobs], dtype=np.int64)

    def __getitem__(self, place: int) -> tuple[RoundCount, ...]:
        counts = self.all[self.ends[place - 1] if place else 0 : self.ends[place]]
        return tuple(RoundCount(*map(int, count)) for count in counts if count["rounds"])

    def owners(self) -> Places:
        """For each count the place of its generation."""
        lengths = np.diff(self.ends, prepend=0) if len(self.ends) else self.ends
        return np.repeat(np.arange(len(self.ends), dtype=np.int64), lengths)

    def summed(self, group: Places, groups: int) -> list[tuple[RoundCount, ...]]:
        """The sums of each of ``groups`` groups; ``group`` holds each generation's group, -1 for none."""
        owner = group[self.owners()] if len(self.ends) else np.zeros(0, np.int64)
        kept = owner >= 0
        base = 1 + int(self.all["drafted"].max(initial=0))  # of the keys, which combine group, drafted and accepted
        keys = (owner[kept] * base + self.all["drafted"][kept]) * base + self.all["accepted"][kept]
        rounds = self.all["rounds"][kept].astype(np.float64)
        if groups * base**2 <= WHOLE:
            summed = np.bincount(keys, rounds, groups * base**2)
            known = np.flatnonzero(summed)
            summed = summed[known]
        else:
            known, inverse = np.unique(keys, return_inverse=True)
            summed = np.bincount(inverse, rounds, len(known))
        found: list[list[RoundCount]] = [[] for _ in range(groups)]
        for key, number in zip(known.tolist(), summed.tolist(), strict=True):
            found[key // base**2].append(RoundCount(key // base % base, key % base, int(number)))
        return [tuple(counts) for counts in found]


class FiguresTable(Sequence[GenerationFigures]):
    """Generations in the order of their ids, stored as columns; a ``GenerationFigures`` is made on access only."""

    def __init__(self, rows: Sequence[tuple[Any, ...]]) -> None:
        """``rows`` are (id, session, created, adapter, tokens, seconds, expected, packed rounds, packed own rounds).

        Raises TypeError or ValueError if a row holds something else. Implausible counts become 0.
        """
        columns: Sequence[Sequence[Any]] = list(zip(*rows, strict=True)) if rows else [()] * 9
        self.ids, self.sessions, created, self.adapters, tokens, seconds, expected, rounds, own = columns
        self.created = np.array(created, np.float64)
        self.tokens = np.array(tokens, np.int64)
        self.seconds = np.array(seconds, np.float64)
        self.expected = np.array(expected, np.float64)
        self.counts = self.own = Counts(rounds)
        self.apart = [one is not None for one in own]  # generations whose own rounds differ from all rounds
        if any(self.apart):
            self.own = Counts([whole if one is None else one for whole, one in zip(rounds, own, strict=True)])

    @classmethod
    def of(cls, generations: Sequence[GenerationFigures]) -> FiguresTable:
        """``generations`` as a table; a table is returned unchanged."""
        if isinstance(generations, cls):
            return generations
        return cls(
            [
                (g.id, g.session, g.created, g.adapter, g.tokens, g.seconds, g.expected, packed(g.rounds), own)
                for g in generations
                for own in (None if g.own is None else packed(g.own),)
            ]
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    __hash__ = None  # type: ignore[assignment]  # as for any mutable sequence that compares by content

    def __len__(self) -> int:
        return len(self.ids)

    @overload
    def __getitem__(self, place: int) -> GenerationFigures: ...

    @overload
    def __getitem__(self, place: slice) -> Sequence[GenerationFigures]: ...

    def __getitem__(self, place: int | slice) -> GenerationFigures | Sequence[GenerationFigures]:
        if isinstance(place, slice):
            return [self[one] for one in range(*place.indices(len(self)))]
        place = range(len(self))[place]
        return GenerationFigures(
            self.ids[place], self.sessions[place], float(self.created[place]), self.adapters[place],
            int(self.tokens[place]), float(self.seconds[place]), float(self.expected[place]),
            self.counts[place], self.own[place] if self.apart[place] else None,
        )  # fmt: skip

    def plausible(self, most: float) -> bool:
        """Whether every number lies between 0 and ``most``."""
        columns = (self.created, self.tokens, self.seconds, self.expected)
        return all(bool(((column >= 0) & (column < most)).all()) for column in columns)

    def drafted(self) -> npt.NDArray[np.bool_]:
        """For each generation, whether the trained drafter drafted anything."""
        found = np.zeros(len(self), bool)
        found[self.own.owners()[self.own.all["drafted"] > 0]] = True
        return found

    def sums(self, group: Places, groups: int) -> list[Sums]:
        """The sums of each of ``groups`` groups; ``group`` holds each generation's group, -1 for none."""
        inside = group >= 0
        of = group[inside]

        def total(values: npt.NDArray[Any], which: npt.NDArray[np.bool_] | None = None) -> list[float]:
            weights = values[inside] if which is None else np.where(which, values, 0)[inside]
            return np.bincount(of, weights, groups).tolist()  # type: ignore[no-any-return]

        first, last = np.full(groups, np.inf), np.full(groups, -np.inf)
        np.minimum.at(first, of, self.created[inside])
        np.maximum.at(last, of, self.created[inside])
        timed, forecast = self.seconds > 0, self.expected > 0
        rounds = self.counts.summed(group, groups)
        own = rounds if self.own is self.counts else self.own.summed(group, groups)
        columns = zip(
            np.bincount(of, minlength=groups).tolist(), total(self.tokens), total(self.tokens - 1, timed),
            total(self.seconds, timed), total(self.tokens - 1, forecast), total(self.expected, forecast),
            first.tolist(), last.tolist(), rounds, own, strict=True,
        )  # fmt: skip
        return [
            Sums(n, int(tokens), int(of_timed), seconds, int(of_forecast), expected, begin, end, of_all, of_draft)
            if n
            else Sums(0, 0, 0, 0.0, 0, 0.0, None, None, (), ())
            for n, tokens, of_timed, seconds, of_forecast, expected, begin, end, of_all, of_draft in columns
        ]
