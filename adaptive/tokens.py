"""Token ids and the likeliest of them, by the shortest way.

Between two passes over a model's weights the processor's caches hold little of what comes next, so that the
cost of a small operation is the code it runs through. There a call into torch takes 60 to 140 us that takes 4
when it is repeated, one into numpy 30, and a list of the program's own next to nothing. So ids are lists wherever
they are known without waiting for a device, and an argmax on the processor is numpy's.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

# Token ids: a list where the program knows them, a tensor (n,) int64 where a device is still to compute them.
Ids: TypeAlias = list[int] | torch.Tensor
# Distributions (n, vocab): an array, or a list of its rows, where the program has them, a tensor on a device.
Distributions: TypeAlias = npt.NDArray[np.float32] | list[npt.NDArray[np.float32]] | torch.Tensor
# What numpy can read.
FLOATS = (torch.float32, torch.float64)


def as_tensor(ids: Ids) -> torch.Tensor:
    """Token ids as a tensor (n,) int64, on the CPU where they are a list."""
    return torch.from_numpy(np.array(ids, dtype=np.int64)) if isinstance(ids, list) else ids


def as_list(ids: Ids) -> list[int]:
    """Token ids as a list; waits for a device that is still to compute them."""
    listed: list[int] = ids if isinstance(ids, list) else ids.tolist()
    return listed


def moved(ids: torch.Tensor, device: torch.device) -> torch.Tensor:
    """On ``device``, without waiting for it where that is safe: to CUDA through memory that the system cannot move,
    which torch keeps until it has been read. Another device may read the program's memory later, when it is something
    else's, and a copy to the processor may be read before it has come."""
    if device.type == "cuda" and ids.device.type == "cpu" and ids.numel():
        return ids.pin_memory().to(device, non_blocking=True)
    return ids.to(device)


def uploaded(numbers: Sequence[Any], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Numbers of the program's as a tensor on ``device``. ``torch.tensor(numbers, device=device)`` waits for all that
    the device has been given to do."""
    return moved(torch.tensor(numbers, dtype=dtype), device)


def join(parts: Sequence[Ids]) -> Ids:
    """Ids end to end: a list if all of them are, else a tensor on the last one's device."""
    if all(isinstance(part, list) for part in parts):
        return list(itertools.chain.from_iterable(parts))
    tensors = [as_tensor(part) for part in parts]
    device = tensors[-1].device
    if any(tensor.device != device for tensor in tensors):
        tensors = [moved(tensor, device) for tensor in tensors]
    return torch.cat(tensors)


def of_array(array: npt.NDArray[np.float32]) -> torch.Tensor:
    """An array as a tensor over the same memory, which ``as_array`` gives back, and ``address`` finds, without asking
    torch for it: after a pass over a model's weights that takes as long as adding up its numbers."""
    tensor = torch.from_numpy(array)
    tensor.array, tensor.address = array, array.ctypes.data  # type: ignore[attr-defined]
    return tensor


def address(tensor: torch.Tensor) -> int:
    """Where a tensor's numbers begin in memory."""
    known: int | None = getattr(tensor, "address", None)
    return tensor.data_ptr() if known is None else known


def width(tensor: torch.Tensor) -> int:
    """How many numbers a row has."""
    array: npt.NDArray[np.float32] | None = getattr(tensor, "array", None)
    return int((tensor if array is None else array).shape[-1])


class Rows:
    """Room for rows of ``width`` numbers, float32, that are written again and again."""

    def __init__(self, width: int) -> None:
        self.width = width
        self._buffer = np.empty((0, width), np.float32)
        self._views: dict[tuple[int, int], torch.Tensor] = {}

    def __call__(self, first: int, count: int) -> torch.Tensor:
        """Rows ``first`` to ``first + count``; they last until these are asked for again."""
        view = self._views.get((first, count))
        if view is None:
            if first + count > len(self._buffer):
                self._buffer = np.empty((max(first + count, 2 * len(self._buffer)), self._buffer.shape[1]), np.float32)
                self._views.clear()
            view = self._views[first, count] = of_array(self._buffer[first : first + count])
        return view


def as_array(logits: torch.Tensor) -> npt.NDArray[Any] | None:
    """The same numbers for numpy, over the same memory; None where it cannot read them."""
    array: npt.NDArray[Any] | None = getattr(logits, "array", None)
    if array is None and logits.device.type == "cpu" and logits.dtype in FLOATS:
        array = logits.numpy()
    return array


def floats(logits: torch.Tensor) -> npt.NDArray[np.float32] | None:
    """Rows of float32, one behind the other in the program's memory; None where they are otherwise."""
    array = as_array(logits)
    if array is None or hasattr(logits, "address"):  # an array's own, whose kind need not be asked for
        return array
    return array if array.dtype == np.float32 and array.flags.c_contiguous else None


def argmax(logits: torch.Tensor) -> Ids:
    """The likeliest token of every row of logits (n, vocab); a tensor where they are on a device."""
    array = as_array(logits)
    if array is not None:
        found: list[int] = array.argmax(-1).tolist()
        return found
    return known(logits.argmax(-1))


def likeliest(logits: torch.Tensor) -> tuple[float, Ids]:
    """The probability and the id of the likeliest token of logits (1, vocab)."""
    array = as_array(logits)
    if array is None:
        sure, best = logits.float().softmax(-1).max(-1)
        return float(sure), known(best)
    row = array[0]
    token = int(row.argmax())
    return 1 / float(np.exp(row - row[token]).sum()), [token]


def known(ids: Ids) -> Ids:
    """A list where that waits for nobody."""
    if isinstance(ids, list) or ids.device.type != "cpu":
        return ids
    found: list[int] = ids.tolist()
    return found


@contextlib.contextmanager
def on_one_thread() -> Iterator[None]:
    """Have torch's operations of this thread run on it alone. Where another program has a core, those that are shared
    wait for its turn to end, for a hundred times what the work takes."""
    threads = torch.get_num_threads()
    if threads == 1:
        yield
        return
    torch.set_num_threads(1)  # a fraction of a microsecond
    try:
        yield
    finally:
        torch.set_num_threads(threads)
