"""The dtype in which a CPU decodes fastest, measured once and kept in a file.

Another dtype rounds differently: if each run measured again, a busy moment could change greedy text from run to run.
"""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from statistics import median

import torch

from adaptive.engines.cpu import kernels
from adaptive.engines.cpu.kernels import multiplies
from adaptive.engines.cpu.weights import PackedLinear, packs
from adaptive.machine import processor_name
from checkpoints.files import replace_text

# Bytes of float32 weights that are timed: more than the caches of most processors hold, so that the trial measures
# reading from memory, as a model's pass does, and not one matrix in a cache.
DTYPE_TRIAL = 64 << 20
# Seconds after which the trial ends with the measurements so far.
DTYPE_PATIENCE = 0.3


# The file in the state folder: names of dtypes by machine, software and width.
FILE = "dtypes.json"


def kept_dtype(width: int, folder: Path) -> torch.dtype:
    """The result of the first ``fastest_dtype`` for this width on this machine and software. It is kept in ``folder``
    if that exists and can be written."""
    compiled = kernels.library()
    name = "no kernels" if compiled is None else compiled.name
    here = f"{processor_name()}; torch {torch.__version__}; {name}; width {width}"
    known = _read(folder / FILE)
    for dtype in (torch.float32, torch.bfloat16):
        if known.get(here) == str(dtype):
            return dtype
    found = fastest_dtype(width)
    if folder.is_dir():
        with contextlib.suppress(OSError):
            replace_text(folder, folder / FILE, json.dumps({**known, here: str(found)}, indent=1))
    return found


def _read(file: Path) -> dict[str, str]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def fastest_dtype(width: int) -> torch.dtype:
    """float32 or bfloat16, whichever takes less time for layers of this width over one plus over five tokens.

    That depends on the processor's instructions and memory, so it is measured (some 100 ms), on layers packed as in a
    model, the two dtypes alternating.
    """

    rows = max(1, min(4 * width, DTYPE_TRIAL // (4 * width)))  # of a layer, which has at most DTYPE_TRIAL bytes

    def layers(dtype: torch.dtype) -> list[PackedLinear]:
        weight = torch.full((rows, width), 0.01, dtype=dtype)
        count = max(1, min(64, DTYPE_TRIAL // (4 * rows * width)))
        return [PackedLinear((), lambda: (weight, None)) for _ in range(count)]

    def seconds(stack: list[PackedLinear], dtype: torch.dtype) -> float:
        total = 0.0
        for tokens in (1, 5):
            x = torch.ones(tokens, width, dtype=torch.float32 if native else dtype)
            began = time.perf_counter()
            for layer in stack:
                layer(x)
            total += time.perf_counter() - began
        return total

    native = multiplies(torch.bfloat16, torch.device("cpu"))  # native kernels take float32 inputs
    if not native and not packs(torch.bfloat16, torch.device("cpu")):
        return torch.float32
    given = torch.get_num_threads()
    # One thread: beside another busy program, threads wait for each other, and the waits hide the difference.
    torch.set_num_threads(1)
    try:
        with torch.inference_mode():
            stacks = {dtype: layers(dtype) for dtype in (torch.float32, torch.bfloat16)}
            times: dict[torch.dtype, list[float]] = {dtype: [] for dtype in stacks}
            began = time.perf_counter()
            while len(times[torch.float32]) < 7 and time.perf_counter() - began < DTYPE_PATIENCE:
                for dtype, stack in stacks.items():
                    times[dtype].append(seconds(stack, dtype))
    finally:
        torch.set_num_threads(given)
    return min(times, key=lambda dtype: median(times[dtype]))
