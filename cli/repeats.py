"""Measuring a pair several times over, until it is known how much the machine itself leaves open.

In: a pair. Out: independent measurements, and what else used the machine meanwhile. Beside other programs that do not
end soon nothing is measured, unless asked for.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from adaptive.control.costs import CostTable
    from adaptive.machine import Load
    from adaptive.pair import Pair
    from adaptive.types import SamplingParams

# Seconds over which the machine is watched before a measurement, and for how long a load may last until it is given up.
WATCHED_S, PATIENCE_S = 1.0, 15.0
# Measurements at least and at most; one begins so many seconds after the one before it at the earliest: two that follow
# each other at once see the same moment of the machine.
FEWEST, MOST, APART_S = 3, 6, 2.5
# Measurements that may be lost to a load which came meanwhile.
LOST = 3
# Relative standard error of a round's cost, in plain steps, below which no further measurement is made.
CERTAIN = 0.02
# Draft lengths by which that is judged.
JUDGED = (1, 2, 4, 8)


@dataclass(frozen=True)
class Repeats:
    """Measurements of one pair, each by itself; ``load`` is the heaviest that was seen during them."""

    costs: tuple[CostTable, ...]
    load: Load | None

    @property
    def busy(self) -> bool:
        """Whether other programs were in the way."""
        return self.load is not None and self.load.busy


def measure_repeatedly(pair: Pair, sampling: SamplingParams, console: Console, busy: bool) -> Repeats:
    """Until the repeats say enough about the machine. Ends the command with status 1 where other programs are in the
    way, unless ``busy`` lets it go on."""
    from adaptive.measure import measure

    found: list[CostTable] = []
    loads: list[Load] = []
    lost = 0
    while len(found) < FEWEST or (not busy and len(found) < MOST and uncertainty(found) > CERTAIN):
        began = time.monotonic()
        if not busy:
            wait_until_quiet(console)
        with console.status(f"measuring rounds, {len(found) + 1} of at least {FEWEST}"):
            measured = measure(pair, sampling, thorough=not found)  # what context costs is seen once
        if measured.load is not None and measured.load.busy and not busy:
            lost += 1
            if lost > LOST:
                refuse(console, measured.load)
            continue
        found.append(measured.costs)
        loads += [measured.load] if measured.load is not None else []
        time.sleep(max(0.0, APART_S - (time.monotonic() - began)))
    return Repeats(tuple(found), max(loads, key=lambda load: load.others, default=None))


def wait_until_quiet(console: Console) -> None:
    """Let a short load end. Ends the command with status 1 where it does not."""
    from adaptive.machine import LoadMeter

    meter, until = LoadMeter(), time.monotonic() + PATIENCE_S
    with console.status("watching what else this machine does") as status:
        while True:
            time.sleep(WATCHED_S)
            load = meter.read()
            if load is None or not load.busy:
                return
            left = until - time.monotonic()
            if left <= 0:
                refuse(console, load)
            status.update(f"waiting for other programs to end ({load}), {left:.0f} s more")


def refuse(console: Console, load: Load) -> None:
    """Say that nothing can be promised now, and end the command."""
    console.print(
        f"[yellow]this machine is busy ({load}); figures may be off; again when it is quiet, or with --busy[/]",
        soft_wrap=True,
    )
    raise typer.Exit(1)


def uncertainty(costs: Sequence[CostTable]) -> float:
    """The standard error of what a round costs against a plain step, as a share; of several lengths the largest."""
    found: list[float] = []
    for length in JUDGED:
        ratios = [
            (one.start_s + length * one.draft_s + one.verify_s[length] + one.overhead_s) / one.plain_step_s
            for one in costs
        ]
        found.append(statistics.stdev(ratios) / statistics.mean(ratios) / float(len(ratios)) ** 0.5)
    return max(found)


def typical(costs: Sequence[CostTable]) -> CostTable:
    """Of every cost the median of the measurements."""
    from adaptive.control.costs import CostTable

    return CostTable(
        start_s=statistics.median(one.start_s for one in costs),
        draft_s=statistics.median(one.draft_s for one in costs),
        catch_up_s=statistics.median(one.catch_up_s for one in costs),
        verify_s=tuple(
            statistics.median(of_length) for of_length in zip(*(one.verify_s for one in costs), strict=True)
        ),
        overhead_s=statistics.median(one.overhead_s for one in costs),
        token_s=statistics.median(one.token_s for one in costs),
        context_s=costs[0].context_s,
        context=costs[0].context,
        plain_s=statistics.median(one.plain_step_s for one in costs),
    )
