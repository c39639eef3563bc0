"""The dtype in which a CPU decodes fastest, found by trying."""

from __future__ import annotations

import time
from statistics import median

import torch

from adaptive.engines.cpu.kernels import multiplies
from adaptive.engines.cpu.weights import PackedLinear, packs

# Bytes of float32 weights that are timed: beyond the caches of most processors, so that what is measured
# is a model's pass over memory and not one matrix's in cache.
DTYPE_TRIAL = 64 << 20
# Seconds after which the trial ends with what it has.
DTYPE_PATIENCE = 0.3


def fastest_dtype(width: int) -> torch.dtype:
    """float32 or bfloat16, whichever runs layers of this width faster over one and five tokens together.

    Depends on the processor's instructions and memory, so it is measured (some 100 ms), on layers
    prepacked as they will be, the two kinds in turn.
    """

    def layers(dtype: torch.dtype) -> list[PackedLinear]:
        weight = torch.full((4 * width, width), 0.01, dtype=dtype)
        count = max(1, min(64, DTYPE_TRIAL // (16 * width * width)))
        return [PackedLinear((), lambda: (weight, None)) for _ in range(count)]

    def seconds(stack: list[PackedLinear], dtype: torch.dtype) -> float:
        total = 0.0
        for rows in (1, 5):
            x = torch.ones(rows, width, dtype=torch.float32 if native else dtype)
            began = time.perf_counter()
            for layer in stack:
                layer(x)
            total += time.perf_counter() - began
        return total

    native = multiplies(torch.bfloat16, torch.device("cpu"))  # these take float32
    if not native and not packs(torch.bfloat16, torch.device("cpu")):
        return torch.float32
    given = torch.get_num_threads()
    # One thread: beside another busy program, threads wait for each other and drown what is measured.
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
