"""Timing on a device: until a call returns, until the device has finished it, and how long the device was busy."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from gpu_parts.work import Bench, Budget


@dataclass(frozen=True)
class Taken:
    """Medians of ``times`` calls in seconds: until the call ``returned``, and until the device was ``done`` with it."""

    returned: float
    done: float
    times: int


def take(bench: Bench, calls: dict[str, Callable[[], object]], budget: Budget) -> dict[str, Taken]:
    """Time calls in turn, so that a slow moment affects all of them, as often as the budget allows. The first turn is
    not counted: it records passes and chooses kernels."""
    for call in calls.values():
        call()
        bench.synchronise()
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    for turn in range(bench.scale.repeats):
        if turn and budget.over:
            break
        for name, call in calls.items():
            bench.synchronise()
            began = time.perf_counter()
            call()
            returned = time.perf_counter() - began
            bench.synchronise()
            found[name].append((returned, time.perf_counter() - began))
    middle = statistics.median
    return {
        name: Taken(middle(one for one, _ in times), middle(one for _, one in times), len(times))
        for name, times in found.items()
    }


class Marks:
    """Points in the work of a device, timed by the device's clock and by the program's."""

    def __init__(self, bench: Bench) -> None:
        self._on_cuda = bench.device.type == "cuda"
        self._host: list[float] = []
        self._events: list[torch.cuda.Event] = []

    def mark(self) -> None:
        """Set a mark after all work that was given to the device so far."""
        if self._on_cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._events.append(event)
        self._host.append(time.perf_counter())

    def host(self) -> list[float]:
        """Seconds between consecutive marks by the program's clock."""
        return [after - before for before, after in zip(self._host, self._host[1:], strict=False)]

    def device(self) -> list[float] | None:
        """Seconds between consecutive marks by the device's clock, after synchronising; None if it has no clock."""
        if not self._on_cuda:
            return None
        pairs = zip(self._events, self._events[1:], strict=False)
        return [before.elapsed_time(after) / 1e3 for before, after in pairs]


def at_work(bench: Bench, call: Callable[[], object]) -> float | None:
    """Total seconds of a call's kernels and copies on the device; None if the device has no clock."""
    if bench.device.type != "cuda":
        return None
    from torch.profiler import ProfilerActivity, profile

    bench.synchronise()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        call()
        bench.synchronise()
    return float(sum(row.self_device_time_total for row in seen.key_averages()) / 1e6)
