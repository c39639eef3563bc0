"""The measurement of costs at a pair's first use, with fewer rounds.

It takes two seconds of a processor for each pair that a test opens, which would be half of what the tests take. The
rounds, and what is computed from them, are the real ones.
"""

from __future__ import annotations

from adaptive import measure, timed_rounds

# Sweeps over all lengths, repetitions of doubtful lengths, and short generations: what people's machines are given, and
# what tests are.
WHOLE = measure.SWEEPS, measure.AGAIN, timed_rounds.GENERATIONS
QUICK = 3, 0, 1
# A command that a test starts with this variable at "whole" measures as on people's machines.
MEASURE = "TESTS_MEASURE"


def measure_by(rounds: tuple[int, int, int]) -> None:
    """Measure with that many rounds in this process."""
    measure.SWEEPS, measure.AGAIN, timed_rounds.GENERATIONS = rounds
