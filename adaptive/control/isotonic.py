"""Isotonic regression: the nearest sequence that never falls (pool adjacent violators)."""

from __future__ import annotations

from collections.abc import Iterable


def rising(values: Iterable[float], weights: Iterable[float]) -> list[float]:
    """The never falling sequence of least weighted squared distance from ``values``: neighbours that fall take their
    mean. Weights are above 0."""
    means: list[float] = []  # of blocks of neighbours
    sums: list[float] = []  # of their weights
    sizes: list[int] = []
    for value, by in zip(values, weights, strict=True):
        mean, weight, size = value, by, 1
        while means and means[-1] > mean:
            other = sums.pop()
            mean = (mean * weight + means.pop() * other) / (weight + other)
            weight += other
            size += sizes.pop()
        means.append(mean)
        sums.append(weight)
        sizes.append(size)
    if len(means) == sum(sizes):
        return means
    return [mean for mean, size in zip(means, sizes, strict=True) for _ in range(size)]
