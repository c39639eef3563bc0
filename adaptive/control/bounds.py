"""What a profile of costs can be, whatever the clock said.

In: seconds of passes by how many tokens they are over. Out: those that the others contradict, and what is left of
them. Whatever else a machine does only makes passes slower, so the lower of two that disagree is nearer to the truth.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping

# A pass that takes so many times what it can take at most by the others is in doubt, and so is one that sticks out by
# so much above the line between its neighbours. Nearer to 1, and noise is measured again; a step between two kernels
# is up to 1.2 times the line.
AMISS, ABOVE_LINE = 1.1, 1.3


def bounded(seconds: Mapping[int, float]) -> dict[int, float]:
    """The most that passes can take, by numbers of tokens from 1: no more than a pass over more tokens, and no more
    than a shorter pass and one over a single token for each of the others."""
    counts = sorted(seconds)
    found, least = {}, float("inf")
    for count in reversed(counts):
        least = min(least, seconds[count])
        found[count] = least
    for shorter, count in itertools.pairwise(counts):
        found[count] = min(found[count], found[shorter] + (count - shorter) * found[counts[0]])
    return found


def doubtful(seconds: Mapping[int, float]) -> set[int]:
    """Numbers of tokens whose passes the others contradict."""
    counts, most = sorted(seconds), bounded(seconds)
    found = {count for count in counts if seconds[count] > AMISS * most[count]}
    for before, count, after in zip(counts, counts[1:], counts[2:], strict=False):
        part = (count - before) / (after - before)
        between = seconds[before] + part * (seconds[after] - seconds[before])
        if seconds[count] > ABOVE_LINE * between:
            found.add(count)
    return found


def with_neighbours(found: set[int], counts: list[int]) -> set[int]:
    """``found``, and what stands next to it in the sorted ``counts``."""
    near = {counts[max(0, i - 1)] for i, count in enumerate(counts) if count in found}
    return found | near | {counts[min(len(counts) - 1, i + 1)] for i, count in enumerate(counts) if count in found}
