"""Devices: chooses the one that a model runs on, its free memory, and quantisation on it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from adaptive.errors import AdaptiveError, first_line
from adaptive.installation import install_command, requirement
from adaptive.machine import memory
from adaptive.settings import Quantisation

if TYPE_CHECKING:
    import torch


def choose_device(name: str) -> str:
    """The device to use. ``auto``: the first CUDA device, else the CPU. Apple's graphics (``mps``) must be named,
    because nothing has been run on them. Raises AdaptiveError if the named device cannot be used."""
    import torch

    if name == "auto":
        return "cuda:0" if torch.cuda.is_available() else "cpu"
    try:
        torch.device(name)
    except RuntimeError as error:
        raise AdaptiveError(f"there is no device {name}; give auto, cpu, cuda, cuda:1 or mps") from error
    try:
        torch.empty(1, device=name)
    except (RuntimeError, AssertionError) as error:
        raise AdaptiveError(f"device {name} cannot be used here: {first_line(error)}") from error
    return name


def free_bytes(device: str) -> int:
    """Bytes that another program could still allocate of the memory that this one may use (``machine.memory``), or of
    the GPU's if ``device`` (``choose_device``) is a GPU and has less."""
    import torch

    free = memory().available
    where = choose_device(device)
    return min(free, int(torch.cuda.mem_get_info(where)[0])) if where.startswith("cuda") else free


def device_bytes(device: str) -> int:
    """Bytes that this program can still allocate on ``device`` (``choose_device``), including GPU memory that torch
    holds unused."""
    import torch

    where = choose_device(device)
    if where.startswith("cuda"):
        held = torch.cuda.memory_reserved(where) - torch.cuda.memory_allocated(where)
        return int(torch.cuda.mem_get_info(where)[0]) + held
    return memory().available


def quantisation(kind: Quantisation, dtype: torch.dtype, skip: Sequence[str] | None = None) -> Any:
    """The bitsandbytes configuration of transformers for ``kind``, None for ``none``. ``skip``: modules that stay
    unquantised, None for transformers' default. Raises AdaptiveError if bitsandbytes does not load."""
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
    """What to do if bitsandbytes does not load: install it if it is missing, else ``otherwise``."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        found = version("bitsandbytes")
    except PackageNotFoundError:
        return f"install it: {install_command(requirement('bitsandbytes'))}"
    return f"version {found} is installed and does not work on this machine: {otherwise}"
