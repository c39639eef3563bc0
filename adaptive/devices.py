"""Where a model runs: a device by name or found by trying, the memory there, and what quantises on it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from adaptive.errors import AdaptiveError, first_line
from adaptive.installation import install_command, requirement
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
    """What another program could still have of the machine's memory, and of the GPU's where ``device``
    (``choose_device``) is one."""
    import psutil
    import torch

    free = int(psutil.virtual_memory().available)
    where = choose_device(device)
    return min(free, int(torch.cuda.mem_get_info(where)[0])) if where.startswith("cuda") else free


def device_bytes(device: str) -> int:
    """What this program can still have of the memory of ``device`` (``choose_device``), with what torch holds of a
    GPU's and does not use."""
    import psutil
    import torch

    where = choose_device(device)
    if where.startswith("cuda"):
        held = torch.cuda.memory_reserved(where) - torch.cuda.memory_allocated(where)
        return int(torch.cuda.mem_get_info(where)[0]) + held
    return int(psutil.virtual_memory().available)


def quantisation(kind: Quantisation, dtype: torch.dtype, skip: Sequence[str] | None = None) -> Any:
    """The bitsandbytes configuration of transformers for ``kind``, None for none; ``skip`` are the modules that stay as
    they are, None for those that transformers leaves out. Raises AdaptiveError where bitsandbytes does not load."""
    if kind == "none":
        return None
    try:
        import bitsandbytes  # noqa: F401
    except Exception as error:
        raise AdaptiveError(
            f"--quantize {kind} needs bitsandbytes, which does not load here ({first_line(error)}); {cure()}"
        ) from error
    from transformers import BitsAndBytesConfig

    if kind == "int8":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=dtype,
        llm_int8_skip_modules=None if skip is None else list(skip),
    )


def cure(otherwise: str = "leave --quantize out") -> str:
    """What helps where bitsandbytes does not: to install one that is missing; ``otherwise`` where it is there."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        found = version("bitsandbytes")
    except PackageNotFoundError:
        return f"install it: {install_command(requirement('bitsandbytes'))}"
    return f"version {found} is installed and does not work on this machine: {otherwise}"
