"""Medians of what calls and passes take, for the benchmarks beside this file."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from adaptive.engines.protocol import Engine, Sequence

REPEATS = 15
# Seconds of passes after which the number of threads has been tried.
SETTLED = 0.3

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


def filled(engine: Engine, context: int) -> Sequence:
    """A sequence that holds so many tokens."""
    sequence = engine.sequence()
    sequence.reserve(context + 16)
    sequence.extend([token % (engine.vocab_size - 1) for token in range(context)], 1)
    return sequence


def settle(sequence: Sequence, count: int) -> None:
    """Passes until it is known how many threads they should use."""
    held, until = sequence.length, time.perf_counter() + SETTLED
    while time.perf_counter() < until:
        sequence.extend(list(range(count)), count)
        sequence.rollback(held)


def bare(sequence: Sequence, count: int, repeats: int = REPEATS) -> float:
    """Seconds of a pass over ``count`` tokens, with logits of all; undone each time."""
    held, tokens = sequence.length, list(range(count))

    def call() -> None:
        sequence.extend(tokens, count)
        sequence.rollback(held)

    return seconds(call, repeats)
