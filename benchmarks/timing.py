"""Median times of calls and passes, for the other benchmarks in this folder."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from adaptive.engines.protocol import Engine, Sequence

REPEATS = 15
# Seconds of passes after which the engine has chosen its number of threads.
SETTLED = 0.3

# The clock of all timings: wall clock, or the process's own time if other programs use the machine.
clock: Callable[[], float] = time.perf_counter


def seconds(call: Callable[[], object], repeats: int = REPEATS) -> float:
    """Median seconds of several calls, after one that is not timed."""
    call()
    times = []
    for _ in range(repeats):
        began = clock()
        call()
        times.append(clock() - began)
    return statistics.median(times)


def count_processor_time() -> None:
    """Switch the clock to this process's own time."""
    global clock
    clock = time.process_time


def filled(engine: Engine, context: int) -> Sequence:
    """A sequence that holds ``context`` tokens."""
    sequence = engine.sequence()
    sequence.reserve(context + 16)
    sequence.extend([token % (engine.vocab_size - 1) for token in range(context)], 1)
    return sequence


def settle(sequence: Sequence, count: int) -> None:
    """Run passes until the engine has chosen the number of threads for them."""
    held, until = sequence.length, time.perf_counter() + SETTLED
    while time.perf_counter() < until:
        sequence.extend(list(range(count)), count)
        sequence.rollback(held)


def bare(sequence: Sequence, count: int, repeats: int = REPEATS) -> float:
    """Seconds of a pass over ``count`` tokens with logits of all, including its rollback."""
    held, tokens = sequence.length, list(range(count))

    def call() -> None:
        sequence.extend(tokens, count)
        sequence.rollback(held)

    return seconds(call, repeats)
