"""What acceptance and speed did over time, and under which adapter: pure functions of ``Log.figures()``."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from adaptive.records.stats import (
    PositionAcceptance,
    RoundCount,
    SpeculativeStats,
    acceptance_by_position,
    rounds_by_length,
    stats_of_counts,
    tokens_per_round,
)

By = Literal["adapter", "day", "session"]

# Generations that are "the latest": fewer show one answer's chance, more hide what has just changed.
LATEST = 20

# Points of a time series: more than a terminal has columns for shows nothing new, fewer hides swaps.
POINTS = 60

# Names of rows without an adapter: the draft as it came, and the target alone (nothing was drafted).
BASE_DRAFT = "base draft"
NO_DRAFT = "no draft"


@dataclass(frozen=True)
class GenerationFigures:
    """The figures of one generation: no text, no tokens. ``seconds`` is the time of ``tokens - 1``
    output tokens, the first one coming out of the prompt's own pass; ``expected`` what the draft-length
    policy expected it to be (0: no forecast)."""

    id: int
    session: str
    created: float
    adapter: str | None
    tokens: int
    seconds: float
    expected: float
    rounds: tuple[RoundCount, ...]

    @property
    def drafted(self) -> bool:
        """Whether anything was drafted."""
        return any(count.drafted for count in self.rounds)


@dataclass(frozen=True)
class Figures:
    """The figures of several generations. ``first`` and ``last`` are seconds since the epoch (None
    without generations); ``tokens_per_second`` is None where nothing was timed,
    ``expected_tokens_per_second`` where nothing was forecast, ``mean_draft_length`` (tokens drafted a
    round, plain rounds counted as 0) and ``tokens_per_round`` (a pass of the target, over all rounds) where there
    was no round."""

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
    """One point of the time series: generations ``first_id`` to ``last_id``, all under one adapter.

    Acceptance is None where nothing was drafted.
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
    """The adapter changed: ``generation`` is the first one under ``after`` (None is the base draft)."""

    generation: int
    created: float
    before: str | None
    after: str | None


@dataclass(frozen=True)
class History:
    """Everything ``adaptive history`` shows. ``lengths[k]`` counts the rounds that drafted k tokens; ``latest`` are the
    figures of the last LATEST generations together."""

    totals: Figures
    latest: Figures
    rows: tuple[Figures, ...]
    positions: tuple[PositionAcceptance, ...]
    lengths: tuple[int, ...]
    series: tuple[Point, ...]
    swaps: tuple[Swap, ...]


def history(generations: Sequence[GenerationFigures], by: By = "adapter", points: int = POINTS) -> History:
    """All of it, for generations in the order of their ids."""
    return History(
        totals=summed("all", generations),
        latest=summed("latest", generations[-LATEST:]),
        rows=grouped(generations, by),
        positions=acceptance_by_position(count for g in generations for count in g.rounds),
        lengths=rounds_by_length(count for g in generations for count in g.rounds),
        series=series(generations, points),
        swaps=swaps(generations),
    )


def as_object(found: History) -> dict[str, Any]:
    """As ``adaptive history --json`` and the server show it."""
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


def summed(key: str, generations: Sequence[GenerationFigures]) -> Figures:
    """The figures of ``generations`` together, under the name ``key``."""
    return Figures(
        key=key,
        generations=len(generations),
        tokens=sum(g.tokens for g in generations),
        tokens_per_second=_tokens_per_second(generations),
        expected_tokens_per_second=_expected(generations),
        mean_draft_length=_mean_draft_length(generations),
        tokens_per_round=tokens_per_round(count for g in generations for count in g.rounds),
        first=min((g.created for g in generations), default=None),
        last=max((g.created for g in generations), default=None),
        speculation=stats_of_counts(count for g in generations for count in g.rounds),
    )


def grouped(generations: Iterable[GenerationFigures], by: By) -> tuple[Figures, ...]:
    """One row per adapter, day (local time) or session, in the order of their first generation."""
    groups: dict[str, list[GenerationFigures]] = {}
    for g in generations:
        groups.setdefault(KEYS[by](g), []).append(g)
    return tuple(summed(key, members) for key, members in groups.items())


def series(generations: Sequence[GenerationFigures], points: int = POINTS) -> tuple[Point, ...]:
    """Acceptance and speed over time, in buckets of as many generations as give about ``points``.

    A swap ends a bucket early, so that no point mixes two adapters; there can be more points then.
    """
    size = max(1, -(-len(generations) // points))
    buckets: list[list[GenerationFigures]] = []
    for g in generations:
        if not buckets or len(buckets[-1]) == size or buckets[-1][-1].adapter != g.adapter:
            buckets.append([])
        buckets[-1].append(g)
    return tuple(_point(bucket) for bucket in buckets)


def swaps(generations: Sequence[GenerationFigures]) -> tuple[Swap, ...]:
    """Where a generation ran under another adapter than the one before it."""
    return tuple(
        Swap(after.id, after.created, before.adapter, after.adapter)
        for before, after in itertools.pairwise(generations)
        if before.adapter != after.adapter
    )


def _adapter_name(g: GenerationFigures) -> str:
    return g.adapter or (BASE_DRAFT if g.drafted else NO_DRAFT)


def _day(g: GenerationFigures) -> str:
    return time.strftime("%Y-%m-%d", time.localtime(g.created))


KEYS: dict[By, Callable[[GenerationFigures], str]] = {
    "adapter": _adapter_name,
    "day": _day,
    "session": lambda g: g.session,
}


def _tokens_per_second(generations: Sequence[GenerationFigures]) -> float | None:
    timed = [g for g in generations if g.seconds > 0]
    return sum(g.tokens - 1 for g in timed) / sum(g.seconds for g in timed) if timed else None


def _expected(generations: Sequence[GenerationFigures]) -> float | None:
    forecast = [g for g in generations if g.expected > 0]
    return sum(g.tokens - 1 for g in forecast) / sum(g.expected for g in forecast) if forecast else None


def _mean_draft_length(generations: Sequence[GenerationFigures]) -> float | None:
    counts = [count for g in generations for count in g.rounds]
    rounds = sum(count.rounds for count in counts)
    return sum(count.drafted * count.rounds for count in counts) / rounds if rounds else None


def _point(bucket: Sequence[GenerationFigures]) -> Point:
    stats = stats_of_counts(count for g in bucket for count in g.rounds)
    return Point(
        first_id=bucket[0].id,
        last_id=bucket[-1].id,
        created=bucket[-1].created,
        generations=len(bucket),
        adapter=bucket[0].adapter,
        acceptance_rate=stats.draft_acceptance_rate if stats.num_spec_steps else None,
        mean_acceptance_length=stats.mean_acceptance_length if stats.num_spec_steps else None,
        tokens_per_second=_tokens_per_second(bucket),
        expected_tokens_per_second=_expected(bucket),
        mean_draft_length=_mean_draft_length(bucket),
        tokens_per_round=tokens_per_round(count for g in bucket for count in g.rounds),
    )
