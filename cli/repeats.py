"""Measures a pair repeatedly, until the machine's own variation is known well enough.

In: a pair. Out: independent measurements, and the load of other programs meanwhile. If other programs keep the machine
busy, nothing is measured unless ``busy`` allows it.
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

# WATCHED_S: seconds over which the load is measured before a measurement. PATIENCE_S: longest wait for a load to end.
WATCHED_S, PATIENCE_S = 1.0, 15.0
# Fewest and most measurements. One begins at least APART_S seconds after the previous one began: measurements in
# immediate succession see the same state of the machine.
FEWEST, MOST, APART_S = 3, 6, 2.5
# Measurements that may be discarded because of a load that came meanwhile.
LOST = 3
# Relative standard error of a round's cost, in plain steps, below which no further measurement is made.
CERTAIN = 0.02
# Draft lengths at which that error is computed.
JUDGED = (1, 2, 4, 8)


@dataclass(frozen=True)
class Repeats:
    """Independent measurements of one pair; ``load`` is the heaviest load during them."""

    costs: tuple[CostTable, ...]
    load: Load | None

    @property
    def busy(self) -> bool:
        """Whether other programs disturbed the measurements."""
        return self.load is not None and self.load.busy


def measure_repeatedly(pair: Pair, sampling: SamplingParams, console: Console, busy: bool) -> Repeats:
    """Measure until the repeats are certain enough. Ends the command with status 1 if other programs keep the machine
    busy, unless ``busy`` is set."""
    from adaptive.measure import measure

    found: list[CostTable] = []
    loads: list[Load] = []
    lost = 0
    while len(found) < FEWEST or (not busy and len(found) < MOST and uncertainty(found) > CERTAIN):
        began = time.monotonic()
        if not busy:
            wait_until_quiet(console)
        with console.status(f"measuring rounds, {len(found) + 1} of at least {FEWEST}"):
            measured = measure(pair, sampling, thorough=not found)  # the cost of context is measured once
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
    """Wait for a short load to end. Ends the command with status 1 if it lasts longer than PATIENCE_S."""
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
    """Print that the machine is too busy to measure, and end the command with status 1."""
    console.print(
        f"[yellow]this machine is busy ({load}); figures may be off; again when it is quiet, or with --busy[/]",
        soft_wrap=True,
    )
    raise typer.Exit(1)


def uncertainty(costs: Sequence[CostTable]) -> float:
    """The relative standard error of a round's cost in plain steps; the largest over the lengths JUDGED."""
    found: list[float] = []
    for length in JUDGED:
        ratios = [
            (one.start_s + length * one.draft_s + one.verify_s[length] + one.overhead_s) / one.plain_step_s
            for one in costs
        ]
        found.append(statistics.stdev(ratios) / statistics.mean(ratios) / float(len(ratios)) ** 0.5)
    return max(found)


def typical(costs: Sequence[CostTable]) -> CostTable:
    """The median of the measurements for every cost."""
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
