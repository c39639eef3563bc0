"""Medians of what calls take, for the benchmarks beside this file."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

REPEATS = 15

# What is timed by: wall clock, or the process's own time where other programs use the machine.
clock: Callable[[], float] = time.perf_counter


def seconds(call: Callable[[], object], repeats: int = REPEATS) -> float:
    """The median of several calls."""
    call()
    times = []
    for _ in range(repeats):
        began = clock()
        call()
        times.append(clock() - began)
    return statistics.median(times)


def count_processor_time() -> None:
    """From now on count this process's own time."""
    global clock
    clock = time.process_time
