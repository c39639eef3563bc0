"""Runs the parts of ``gpu.py``: each within its seconds and with a result file of its own; a failure stops no other.

In: parts and a folder. Out: a ``Result`` a part. A part with a good result in the folder is not run again.
"""

from __future__ import annotations

import gc
import json
import os
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from adaptive.errors import AdaptiveError, first_line
from gpu_parts.models import Workshop
from gpu_parts.scale import Scale

# Figures of a part by name: numbers, texts, lists and mappings of these.
Figures = dict[str, Any]


class Wrong(Exception):  # noqa: N818 - the finding of a check, not an error of the program
    """Raised if something that must be exact is not; the message describes it."""


class Budget:
    """The seconds that a part may take, counted from now on."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._began = time.perf_counter()

    @property
    def left(self) -> float:
        """Seconds left, at least 0."""
        return max(0.0, self.seconds - (time.perf_counter() - self._began))

    def share(self, share: float) -> Budget:
        """A budget of this share of the seconds left."""
        return Budget(share * self.left)

    @property
    def over(self) -> bool:
        """Whether the seconds are used up."""
        return not self.left


@dataclass
class Bench:
    """The environment of a running part."""

    scale: Scale
    device: torch.device
    workshop: Workshop
    budget: Budget
    folder: Path

    def synchronise(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


@dataclass(frozen=True)
class Part:
    """One part. ``seconds``: its share of the usual 8 minutes, including the time to make its models. ``kinds``: the
    kinds of its models. ``beside``: bytes in addition to their weights, for caches and copies."""

    name: str
    words: str
    seconds: float
    kinds: tuple[str, ...]
    run: Callable[[Bench], Figures]
    beside: Callable[[Scale], int] = lambda scale: 0


@dataclass(frozen=True)
class Result:
    """The result of a part: ``figures``, or a ``problem`` in words. ``left_out``: the part was not started because it
    would not fit. ``peak``: most bytes of the device's memory in use; None if the device has no memory of its own."""

    part: str
    device: str
    scale: str
    seconds: float
    peak: int | None = None
    figures: Figures = field(default_factory=dict)
    problem: str | None = None
    left_out: bool = False


def run(
    parts: Sequence[Part],
    scale: Scale,
    device: torch.device,
    folder: Path,
    factor: float,
    again: bool,
    need: Callable[[Part], int],
) -> Iterator[str]:
    """Run the parts that have no good result in ``folder`` yet, or all of them with ``again``. Each gets ``factor``
    times its seconds; ``need`` returns the bytes of the device's memory that it takes. Yields a line after each."""
    folder.mkdir(parents=True, exist_ok=True)
    workshop = Workshop(scale, device)
    for part in parts:
        file = folder / f"{part.name}.json"
        found = None if again else read(file)
        if found is not None and found.problem is None and (found.scale, found.device) == (scale.name, name_of(device)):
            yield f"{part.name}: there already"
            continue
        needed = need(part)  # takes seconds, which are not the part's
        result = _one(part, Bench(scale, device, workshop, Budget(factor * part.seconds), folder), needed)
        write(file, result)
        yield f"{part.name}: {result.problem or 'done'} ({result.seconds:.1f} s)"
    workshop.clear()


def _one(part: Part, bench: Bench, need: int) -> Result:
    device, began = bench.device, time.perf_counter()
    named: dict[str, Any] = {"part": part.name, "device": name_of(device), "scale": bench.scale.name}
    on_cuda = device.type == "cuda"
    if on_cuda:
        if bench.workshop.kind not in part.kinds:
            bench.workshop.clear()
        free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
        if need > free:
            said = f"takes {need / 1e9:.1f} GB of the device's memory, of which {free / 1e9:.1f} GB are free"
            return Result(**named, seconds=0.0, problem=said, left_out=True)
        torch.cuda.reset_peak_memory_stats(device)
    problem, figures = None, {}
    try:
        figures = part.run(bench)
        bench.synchronise()
    except (Wrong, AdaptiveError) as error:
        problem = str(error)
    except Exception as error:  # the other parts run after any error
        problem = f"{type(error).__name__}: {first_line(error)}"
        (bench.folder / f"{part.name}.log").write_text(traceback.format_exc(), encoding="utf-8")
        bench.workshop.clear()
    gc.collect()
    peak = torch.cuda.max_memory_allocated(device) if on_cuda else None
    return Result(**named, seconds=time.perf_counter() - began, peak=peak, figures=figures, problem=problem)


def name_of(device: torch.device) -> str:
    """The name of a device in results."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


def read(file: Path) -> Result | None:
    """The result in a file; None if there is none or it cannot be read."""
    try:
        return Result(**json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def write(file: Path, result: Result) -> None:
    """Write a result atomically."""
    part = file.with_suffix(".part")
    part.write_text(json.dumps(asdict(result), indent=1), encoding="utf-8")
    os.replace(part, file)
