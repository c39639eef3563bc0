"""Where a model runs and in which numbers: a device, a dtype, a quantisation, by name or found by trying."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from adaptive.errors import AdaptiveError, first_line
from adaptive.settings import Quantisation

if TYPE_CHECKING:
    import torch


def choose_device(name: str) -> str:
    """``auto`` is the first CUDA device, else MPS, else the CPU. Raises AdaptiveError for one that is not there."""
    import torch

    if name == "auto":
        return "cuda:0" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        torch.empty(1, device=name)
    except (RuntimeError, AssertionError) as error:
        raise AdaptiveError(f"device {name} cannot be used here: {first_line(error)}") from error
    return name


def free_bytes(device: str) -> int:
    """What a program could still have of the machine's memory, and of the GPU's where ``device`` (``choose_device``) is
    one."""
    import psutil
    import torch

    free = int(psutil.virtual_memory().available)
    where = choose_device(device)
    return min(free, int(torch.cuda.mem_get_info(where)[0])) if where.startswith("cuda") else free


def choose_dtype(name: str, device: str, config: Any) -> torch.dtype:
    """The dtype of that name; ``auto`` is bfloat16 (or float16) on a GPU and measured on a CPU."""
    import torch

    if name != "auto":
        dtype: torch.dtype = getattr(torch, name)
        return dtype
    if device.startswith("cuda"):
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    if device == "mps":
        return torch.float16
    from adaptive.engines.cpu.plan import knows
    from adaptive.engines.cpu.weights import packs

    # Where only kernels of our own multiply bfloat16, a model that they do not run would be emulated, and crawl.
    if not packs(torch.bfloat16, torch.device("cpu")) and not knows(getattr(config, "architectures", None)):
        return torch.float32
    return fastest_cpu_dtype(config.get_text_config().hidden_size)


# Bytes of float32 weights that are timed: beyond the caches of most processors, so that what is measured
# is a model's pass over memory and not one matrix's in cache.
DTYPE_TRIAL = 64 << 20
# Seconds after which the trial ends with what it has.
DTYPE_PATIENCE = 0.3


def fastest_cpu_dtype(width: int) -> torch.dtype:
    """float32 or bfloat16, whichever runs layers of this width faster over one and five tokens together.

    Depends on the processor's instructions and memory, so it is measured (some 100 ms), on layers
    prepacked as they will be, the two kinds in turn.
    """
    import time
    from statistics import median

    import torch

    from adaptive.engines.cpu.kernels import multiplies
    from adaptive.engines.cpu.weights import PackedLinear, packs

    def layers(dtype: torch.dtype) -> list[PackedLinear]:
        weight = torch.full((4 * width, width), 0.01, dtype=dtype)
        count = max(1, min(64, DTYPE_TRIAL // (16 * width * width)))
        return [PackedLinear((), lambda: (weight, None)) for _ in range(count)]

    def seconds(stack: list[PackedLinear], dtype: torch.dtype) -> float:
        total = 0.0
        for rows in (1, 5):
            x = torch.ones(rows, width, dtype=torch.float32 if ours else dtype)
            began = time.perf_counter()
            for layer in stack:
                layer(x)
            total += time.perf_counter() - began
        return total

    ours = multiplies(torch.bfloat16, torch.device("cpu"))  # these take float32
    if not ours and not packs(torch.bfloat16, torch.device("cpu")):
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


def quantisation(kind: Quantisation, dtype: torch.dtype) -> Any:
    """The bitsandbytes configuration of transformers for ``kind``, None for none."""
    if kind == "none":
        return None
    try:
        import bitsandbytes  # noqa: F401
    except Exception as error:
        raise AdaptiveError(f"--quantize {kind} needs bitsandbytes, which does not load here: {error}") from error
    from transformers import BitsAndBytesConfig

    if kind == "int8":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)
