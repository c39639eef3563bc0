"""Sums up what each drafter proposed and what was accepted of it, over the rounds of a log.

In: the log's connection, and an earlier result. Out: ``DrafterFigures``.
"""

from __future__ import annotations

import sqlite3
from dataclasses import astuple, dataclass, field

from adaptive.records.stats import Drafted
from adaptive.types import GRAFT


@dataclass(frozen=True)
class DrafterFigures:
    """The figures of each drafter over the records up to id ``last``, in the order in which they first drafted.
    ``mark`` is a value that differs if one of these records was deleted, or the file replaced."""

    drafters: dict[str, Drafted] = field(default_factory=dict)
    last: int = 0
    mark: tuple[int, float] = (0, 0.0)


def drafter_figures(connection: sqlite3.Connection, known: DrafterFigures) -> DrafterFigures:
    """The figures of each drafter. Of the rounds, which may be millions, only those of records after ``known``, an
    earlier result, are read; all of them if a record of ``known`` was deleted. The caller holds a transaction."""
    mark = "SELECT count(*), total(created) FROM figures WHERE generation <= ?"
    if connection.execute(mark, (known.last,)).fetchone() != known.mark:
        known = DrafterFigures()
    last = connection.execute("SELECT coalesce(max(generation), 0) FROM figures").fetchone()[0]
    rows = connection.execute(
        """SELECT name, sum(n), sum(d), sum(a) FROM (
            SELECT iif(first, substr(drafter, 1, instr(drafter, :graft) - 1), drafter) AS name,
                min(generation) AS since, count(*) AS n, sum(iif(first, first, drafted)) AS d,
                sum(iif(first, min(first, accepted), accepted)) AS a
            FROM rounds WHERE generation > :after AND generation <= :last AND drafted > 0 GROUP BY name
            UNION ALL SELECT substr(drafter, instr(drafter, :graft) + 1) AS name, min(generation), count(*),
                sum(drafted - first), sum(max(0, accepted - first))
            FROM rounds WHERE generation > :after AND generation <= :last AND first > 0 GROUP BY name
        ) GROUP BY name ORDER BY min(since)""",
        {"graft": GRAFT, "after": known.last, "last": last},
    ).fetchall()
    now = connection.execute(mark, (last,)).fetchone()
    found = dict(known.drafters)
    for name, *figures in rows:
        before = found.get(str(name), Drafted(0, 0, 0))
        found[str(name)] = Drafted(*(a + b for a, b in zip(astuple(before), figures, strict=True)))
    return DrafterFigures(found, last, now)
