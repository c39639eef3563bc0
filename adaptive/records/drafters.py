"""Sums up what each drafter proposed and what was accepted of it, over the rounds of a log.

In: the log's connection, and an earlier result. Out: ``DrafterFigures``. The sums are kept by blocks of records, so
that after a deletion only the rounds of its blocks are read again.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from dataclasses import dataclass, field

from adaptive.records.stats import Drafted
from adaptive.types import GRAFT

# Consecutive ids of a block. Too high: a deletion has more rounds read again. Too low: more sums are kept and added.
BLOCK = 256

# Number of the block -> drafter -> its figures.
Sums = dict[int, dict[str, Drafted]]


@dataclass(frozen=True)
class DrafterFigures:
    """The figures of each drafter over the records up to id ``last``, by blocks. ``marks`` has for each block with
    records a value that differs if one of them was deleted, or the file replaced."""

    last: int = 0
    marks: dict[int, tuple[int, float]] = field(default_factory=dict)
    sums: Sums = field(default_factory=dict)

    @property
    def drafters(self) -> dict[str, Drafted]:
        """The figures of each drafter over all records, in the order in which they first drafted."""
        return _added(self.sums[number] for number in sorted(self.sums))


def drafter_figures(connection: sqlite3.Connection, known: DrafterFigures) -> DrafterFigures:
    """The figures of each drafter. Of the rounds, which may be millions, only those of records after ``known``, an
    earlier result, are read, and those of its blocks of which a record was deleted. The caller holds a transaction."""
    last = int(connection.execute("SELECT coalesce(max(generation), 0) FROM figures").fetchone()[0])
    marks = _marks(connection, 0, known.last)
    unchanged = {number for number, mark in marks.items() if mark == known.marks.get(number)}
    sums = {number: drafters for number, drafters in known.sums.items() if number in unchanged}
    for number in marks.keys() - unchanged:
        sums |= _sums(connection, number * BLOCK, min((number + 1) * BLOCK, known.last + 1))
    for number, drafters in _sums(connection, known.last + 1, last + 1).items():
        sums[number] = _added((sums.get(number, {}), drafters))
    marks |= _marks(connection, known.last // BLOCK * BLOCK, last)
    return DrafterFigures(last, marks, sums)


def _marks(connection: sqlite3.Connection, first: int, last: int) -> dict[int, tuple[int, float]]:
    """The mark of each block with records, of its records with ids from ``first`` to ``last``."""
    rows = connection.execute(
        """SELECT generation / ?, count(*), total(CAST(created AS INTEGER)) FROM figures
        WHERE generation BETWEEN ? AND ? GROUP BY 1""",
        (BLOCK, first, last),  # whole seconds, whose sum does not depend on their order
    )
    return {number: (count, created) for number, count, created in rows}


def _sums(connection: sqlite3.Connection, first: int, end: int) -> Sums:
    """The figures over the rounds of the records with ids from ``first`` to before ``end``."""
    rows = connection.execute(
        """SELECT block, name, sum(n), sum(d), sum(a) FROM (
            SELECT generation / :block AS block,
                iif(first, substr(drafter, 1, instr(drafter, :graft) - 1), drafter) AS name,
                min(generation) AS since, count(*) AS n, sum(iif(first, first, drafted)) AS d,
                sum(iif(first, min(first, accepted), accepted)) AS a
            FROM rounds WHERE generation >= :first AND generation < :end AND drafted > 0 GROUP BY block, name
            UNION ALL SELECT generation / :block AS block, substr(drafter, instr(drafter, :graft) + 1) AS name,
                min(generation), count(*), sum(drafted - first), sum(max(0, accepted - first))
            FROM rounds WHERE generation >= :first AND generation < :end AND first > 0 GROUP BY block, name
        ) GROUP BY block, name ORDER BY block, min(since)""",
        {"graft": GRAFT, "block": BLOCK, "first": first, "end": end},
    )
    found: Sums = {}
    for number, name, *figures in rows:
        found.setdefault(number, {})[str(name)] = Drafted(*figures)
    return found


def _added(several: Iterable[dict[str, Drafted]]) -> dict[str, Drafted]:
    found: dict[str, Drafted] = {}
    for drafters in several:
        for name, more in drafters.items():
            known = found.get(name, Drafted(0, 0, 0))
            found[name] = Drafted(
                known.rounds + more.rounds, known.drafted + more.drafted, known.accepted + more.accepted
            )
    return found
