"""Isotonic regression: the nearest non-decreasing sequence (pool adjacent violators)."""

from __future__ import annotations

from collections.abc import Iterable


def rising(values: Iterable[float], weights: Iterable[float]) -> list[float]:
    """The non-decreasing sequence of least weighted squared distance from ``values``: decreasing neighbours get
    their mean. Weights must be above 0."""
    blocks: list[tuple[float, float, int]] = []  # mean, weight, values in it
    for value, by in zip(values, weights, strict=True):
        mean, weight, count = value, by, 1
        while blocks and blocks[-1][0] > mean:
            other, other_weight, other_count = blocks.pop()
            mean = (mean * weight + other * other_weight) / (weight + other_weight)
            weight, count = weight + other_weight, count + other_count
        blocks.append((mean, weight, count))
    return [mean for mean, _, count in blocks for _ in range(count)]
