"""Several processes that train as one, under ``torchrun`` or ``accelerate launch``; a no-op in a single process.

Every process reads the same log and iterates over the same batches. Of each batch it takes every n-th
example; the gradients are summed over all processes before the update, so that every process makes the
update that a single process would have made, up to rounding. Only the first process writes adapters, checkpoints and
messages. On several machines, all must have the state folder (or each a copy of it).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import torch

Item = TypeVar("Item")


def join(device: str) -> str:
    """Join the other processes that a launcher started, if any, and return the device of this one.

    ``device`` is the requested one; ``auto`` and ``cuda`` become this process's own GPU. Call this once, before
    anything else here.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return device
    from accelerate import PartialState

    on_cpu = device == "cpu" or not torch.cuda.is_available()
    state = PartialState(cpu=on_cpu)
    return "cpu" if on_cpu else f"cuda:{state.local_process_index}"


def leave() -> None:
    """Leave the process group, so that no process waits for one that has ended."""
    if count() > 1:
        torch.distributed.destroy_process_group()


def count() -> int:
    """The number of processes that train together."""
    return torch.distributed.get_world_size() if _together() else 1


def first() -> bool:
    """Whether this process is the one that writes files and prints messages."""
    return not _together() or torch.distributed.get_rank() == 0


def share(items: Sequence[Item]) -> list[Item]:
    """This process's part of ``items``."""
    return list(items[torch.distributed.get_rank() :: count()] if _together() else items)


def total(values: Sequence[float]) -> list[float]:
    """Each value summed over all processes."""
    if not _together():
        return list(values)
    from accelerate.utils import reduce

    summed: torch.Tensor = reduce(torch.tensor(values, dtype=torch.float64, device=_device()), "sum")
    return summed.tolist()


def everywhere(holds: bool) -> bool:
    """Whether ``holds`` is True in all processes."""
    return total([holds])[0] == count()


def in_all(call: Callable[[], Item], ended: type[Exception]) -> Item:
    """The result of ``call``. If it raises ``ended`` in one process, all raise it, so that none waits for another."""
    found: list[Item] = []
    with contextlib.suppress(ended):
        found.append(call())
    if not everywhere(bool(found)):
        raise ended
    return found[0]


def sum_gradients(weights: Iterable[torch.nn.Parameter]) -> None:
    """Replace every gradient by its sum over all processes; a process whose part was empty adds nothing."""
    if not _together():
        return
    from accelerate.utils import reduce

    trained = list(weights)
    flat = torch.cat([(torch.zeros_like(w) if w.grad is None else w.grad).reshape(-1) for w in trained])
    for weight, gradient in zip(trained, reduce(flat, "sum").split([w.numel() for w in trained]), strict=True):
        weight.grad = gradient.view_as(weight)


def _together() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _device() -> torch.device:
    from accelerate import PartialState

    device: torch.device = PartialState().device
    return device
