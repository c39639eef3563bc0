"""Checks measured seconds of passes against each other and limits them to consistent values.

In: the seconds of passes by their number of tokens. Out: the passes that the others contradict, and the limited
seconds. Other work of the machine only makes passes slower, so of two that disagree the lower one is nearer to the
truth.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping

# Ratio to the limit set by the other passes, and to the line between its neighbours, from which on a pass is in doubt.
# Too low: noise is measured again. A step between two kernels is up to 1.2 times the line.
AMISS, ABOVE_LINE = 1.1, 1.3


def bounded(seconds: Mapping[int, float]) -> dict[int, float]:
    """The limited seconds of each pass, by numbers of tokens from 1: at most those of a pass over more tokens, and at
    most those of the next shorter pass plus one pass over a single token for each further token."""
    counts = sorted(seconds)
    found, least = {}, float("inf")
    for count in reversed(counts):
        least = min(least, seconds[count])
        found[count] = least
    for shorter, count in itertools.pairwise(counts):
        found[count] = min(found[count], found[shorter] + (count - shorter) * found[counts[0]])
    return found


def doubtful(seconds: Mapping[int, float]) -> set[int]:
    """The numbers of tokens whose passes the others contradict."""
    counts, most = sorted(seconds), bounded(seconds)
    found = {count for count in counts if seconds[count] > AMISS * most[count]}
    for before, count, after in zip(counts, counts[1:], counts[2:], strict=False):
        part = (count - before) / (after - before)
        between = seconds[before] + part * (seconds[after] - seconds[before])
        if seconds[count] > ABOVE_LINE * between:
            found.add(count)
    return found


def with_neighbours(found: set[int], counts: list[int]) -> set[int]:
    """``found``, and the neighbours of its elements in the sorted ``counts``."""
    near = {counts[max(0, i - 1)] for i, count in enumerate(counts) if count in found}
    return found | near | {counts[min(len(counts) - 1, i + 1)] for i, count in enumerate(counts) if count in found}
