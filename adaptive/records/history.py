"""The history of acceptance and speed, over time and by adapter: pure functions of ``Log.figures()``.

Imported records (``merge.py``) count as generations, but have no rounds, adapter or seconds. So they are left out of
the latest figures, the time series and the changes of adapter.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from adaptive.records.figures import FiguresTable, GenerationFigures, Sums
from adaptive.records.stats import (
    PositionAcceptance,
    SpeculativeStats,
    acceptance_by_position,
    rounds_by_length,
    stats_of_counts,
    tokens_per_round,
)

By = Literal["adapter", "day", "session"]

# Number of generations in the "latest" figures. Too low: they show the noise of single answers. Too high: they hide
# recent changes.
LATEST = 20

# Points of a time series. Too high: more than a terminal has columns. Too low: adapter changes are hidden.
POINTS = 60

# Names of rows without an adapter: the draft without one, and the target alone (nothing was drafted).
BASE_DRAFT = "no adapter"
NO_DRAFT = "no draft"


@dataclass(frozen=True)
class Figures:
    """The figures of several generations. ``first`` and ``last`` are seconds since the epoch (None
    without generations). ``tokens_per_second`` is None if nothing was timed,
    ``expected_tokens_per_second`` if nothing was forecast. ``mean_draft_length`` (tokens drafted a
    round, plain rounds counted as 0) and ``tokens_per_round`` (over all rounds) are None without a round. These two
    cover all drafters together; ``speculation`` covers only the trained drafter, since only that changes with an
    adapter: tokens that history or a grammar proposed are left out of it."""

    key: str
    generations: int
    tokens: int
    tokens_per_second: float | None
    expected_tokens_per_second: float | None
    mean_draft_length: float | None
    tokens_per_round: float | None
    first: float | None
    last: float | None
    speculation: SpeculativeStats


@dataclass(frozen=True)
class Point:
    """One point of the time series: ``generations`` of the ids ``first_id`` to ``last_id``, all under one adapter.

    Acceptance is None if nothing was drafted.
    """

    first_id: int
    last_id: int
    created: float
    generations: int
    adapter: str | None
    acceptance_rate: float | None
    mean_acceptance_length: float | None
    tokens_per_second: float | None
    expected_tokens_per_second: float | None
    mean_draft_length: float | None
    tokens_per_round: float | None


@dataclass(frozen=True)
class Swap:
    """A change of adapter: ``generation`` is the id of the first one under ``after`` (None: the draft without one)."""

    generation: int
    created: float
    before: str | None
    after: str | None


@dataclass(frozen=True)
class History:
    """The output of ``adaptive history``. ``lengths[k]`` counts the rounds that drafted k tokens; ``latest`` are the
    figures of the last LATEST generations that are not imported, together."""

    totals: Figures
    latest: Figures
    rows: tuple[Figures, ...]
    positions: tuple[PositionAcceptance, ...]
    lengths: tuple[int, ...]
    series: tuple[Point, ...]
    swaps: tuple[Swap, ...]


def history(generations: Sequence[GenerationFigures], by: By = "adapter", points: int = POINTS) -> History:
    """The history of ``generations``, which are in the order of their ids."""
    table = FiguresTable.of(generations)
    everything = np.zeros(len(table), np.int64)
    (whole,) = table.sums(everything, 1)
    at_end = np.full(len(table), -1, np.int64)
    at_end[np.flatnonzero(_measured(table))[-LATEST:]] = 0
    (newest,) = table.sums(at_end, 1)
    return History(
        totals=_figures("all", whole),
        latest=_figures("latest", newest),
        rows=grouped(table, by),
        positions=acceptance_by_position(whole.own),
        lengths=rounds_by_length(whole.rounds),
        series=series(table, points),
        swaps=swaps(table),
    )


def as_object(found: History) -> dict[str, Any]:
    """The history as plain JSON values, for ``adaptive history --json`` and the server."""
    return {
        "totals": _figures_object(found.totals),
        "latest": _figures_object(found.latest),
        "rows": [_figures_object(row) for row in found.rows],
        "positions": [
            {**asdict(p), "acceptance": p.acceptance, "rounds": found.lengths[p.position]} for p in found.positions
        ],
        "lengths": found.lengths,
        "series": [asdict(point) for point in found.series],
        "swaps": [asdict(swap) for swap in found.swaps],
    }


def _figures_object(row: Figures) -> dict[str, Any]:
    values = asdict(row)
    values["speculative_decoding"] = values.pop("speculation")
    return values


def _figures(key: str, sums: Sums) -> Figures:
    rounds = sum(count.rounds for count in sums.rounds)
    drafted = sum(count.drafted * count.rounds for count in sums.rounds)
    return Figures(
        key=key,
        generations=sums.generations,
        tokens=sums.tokens,
        tokens_per_second=sums.timed / sums.seconds if sums.timed and sums.seconds else None,
        expected_tokens_per_second=sums.forecast / sums.expected if sums.expected else None,
        mean_draft_length=drafted / rounds if rounds else None,
        tokens_per_round=tokens_per_round(sums.rounds),
        first=sums.first,
        last=sums.last,
        speculation=stats_of_counts(sums.own),
    )


def grouped(generations: Sequence[GenerationFigures], by: By) -> tuple[Figures, ...]:
    """One row per adapter, day (local time) or session, ordered by their first generations."""
    table = FiguresTable.of(generations)
    numbers: dict[str, int] = {}
    group = [numbers.setdefault(key, len(numbers)) for key in KEYS[by](table)]
    sums = table.sums(np.array(group, np.int64), len(numbers))
    return tuple(_figures(key, one) for key, one in zip(numbers, sums, strict=True))


def series(generations: Sequence[GenerationFigures], points: int = POINTS) -> tuple[Point, ...]:
    """Acceptance and speed over time, in about ``points`` buckets of equally many generations; imported ones are left
    out.

    A change of adapter ends all buckets early, and no point mixes two adapters; there can then be more points.
    """
    table = FiguresTable.of(generations)
    places, changes = _begun(table, _measured(table)), _changes(table)
    size = max(1, -(-len(places) // points))
    buckets: list[list[int]] = []
    filling: dict[str | None, list[int]] = {}  # by adapter, since answers under two may alternate
    for place in places:
        adapter = table.adapters[place]
        if place in changes:
            filling.clear()
        if adapter not in filling or len(filling[adapter]) == size:
            filling[adapter] = []
            buckets.append(filling[adapter])
        filling[adapter].append(place)
    buckets.sort(key=max)
    group = np.full(len(table), -1, np.int64)
    for number, bucket in enumerate(buckets):
        group[bucket] = number
    sums = table.sums(group, len(buckets))
    return tuple(_point(table, min(bucket), max(bucket), one) for bucket, one in zip(buckets, sums, strict=True))


def swaps(generations: Sequence[GenerationFigures]) -> tuple[Swap, ...]:
    """The changes of adapter, without those that another server answered and imported ones."""
    table = FiguresTable.of(generations)
    return tuple(
        Swap(table.ids[place], float(table.created[place]), before, table.adapters[place])
        for place, before in _changes(table).items()
    )


def _begun(table: FiguresTable, which: npt.NDArray[np.bool_]) -> list[int]:
    """The places of these generations in the order in which they began. Their ids are in the order of their ends."""
    places = np.flatnonzero(which)
    return places[np.argsort(table.created[places], kind="stable")].tolist()  # type: ignore[no-any-return]


def _changes(table: FiguresTable) -> dict[int, str | None]:
    """The place of the first generation after each change of adapter, with the adapter before.

    A session that continues under its adapter shows no change: its process may not have swapped, as ``generate`` beside
    a server."""
    found: dict[int, str | None] = {}
    sessions: dict[str, str | None] = {}
    current: str | None = None
    for place in _begun(table, _decoded(table)):
        session, adapter = table.sessions[place], table.adapters[place]
        if session in sessions and sessions[session] == adapter:
            continue
        if sessions and adapter != current:
            found[place] = current
        sessions[session] = current = adapter
    return found


def _decoded(table: FiguresTable) -> npt.NDArray[np.bool_]:
    """For each generation, whether it was decoded here: it has rounds, or an adapter."""
    found = np.array([adapter is not None for adapter in table.adapters], bool)
    found[table.counts.owners()] = True
    return found


def _measured(table: FiguresTable) -> npt.NDArray[np.bool_]:
    """For each generation, whether it was decoded here or timed by the proxy; no imported one was."""
    return _decoded(table) | (table.seconds > 0)


def _adapter_names(table: FiguresTable) -> list[str]:
    named = zip(table.adapters, table.drafted().tolist(), strict=True)
    return [adapter or (BASE_DRAFT if drafted else NO_DRAFT) for adapter, drafted in named]


def _days(table: FiguresTable) -> list[str]:
    return [time.strftime("%Y-%m-%d", time.localtime(created)) for created in table.created.tolist()]


KEYS: dict[By, Callable[[FiguresTable], Sequence[str]]] = {
    "adapter": _adapter_names,
    "day": _days,
    "session": lambda table: table.sessions,
}


def _point(table: FiguresTable, first: int, last: int, sums: Sums) -> Point:
    figures = _figures("", sums)
    stats = figures.speculation
    return Point(
        first_id=table.ids[first],
        last_id=table.ids[last],
        created=float(table.created[last]),
        generations=sums.generations,
        adapter=table.adapters[first],
        acceptance_rate=stats.draft_acceptance_rate if stats.num_spec_steps else None,
        mean_acceptance_length=stats.mean_acceptance_length if stats.num_spec_steps else None,
        tokens_per_second=figures.tokens_per_second,
        expected_tokens_per_second=figures.expected_tokens_per_second,
        mean_draft_length=figures.mean_draft_length,
        tokens_per_round=figures.tokens_per_round,
    )
