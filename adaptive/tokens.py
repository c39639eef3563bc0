"""Token ids and their argmax, with as little overhead as possible.

After a pass over a model's weights, the processor's caches hold little of the program, so a small operation costs as
much as the code it runs through. There a call into torch takes 60 to 140 us instead of 4 when repeated, one into numpy
30, and a Python list almost nothing. So ids are lists if they are known without waiting for a device, and an argmax on
the CPU is numpy's.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

# Token ids: a list if they are known, a tensor (n,) int64 if a device may still have to compute them.
Ids: TypeAlias = list[int] | torch.Tensor
# Distributions (n, vocab): an array or a list of its rows on the CPU, or a tensor.
Distributions: TypeAlias = npt.NDArray[np.float32] | list[npt.NDArray[np.float32]] | torch.Tensor
# Dtypes that numpy has as well.
FLOATS = (torch.float32, torch.float64)


def as_tensor(ids: Ids) -> torch.Tensor:
    """Token ids as a tensor (n,) int64, on the CPU if they were a list."""
    return torch.from_numpy(np.array(ids, dtype=np.int64)) if isinstance(ids, list) else ids


def as_list(ids: Ids) -> list[int]:
    """Token ids as a list; waits for the device if they are not computed yet."""
    listed: list[int] = ids if isinstance(ids, list) else ids.tolist()
    return listed


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """The number of tokens at the beginning that both have."""
    length = min(len(one), len(other))
    if one[:length] == other[:length]:
        return length
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), length)


def moved(ids: torch.Tensor, device: torch.device) -> torch.Tensor:
    """``ids`` on ``device``, copied without waiting where that is safe: only to CUDA, from pinned memory, which torch
    keeps until it has been read. Another device might read the program's memory after it was reused, and a copy to the
    CPU might be read before it has arrived."""
    if device.type == "cuda" and ids.device.type == "cpu" and ids.numel():
        return ids.pin_memory().to(device, non_blocking=True)
    return ids.to(device)


def uploaded(numbers: Sequence[Any], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Python numbers as a tensor on ``device``. ``torch.tensor(numbers, device=device)`` would wait for all work that
    is queued on the device."""
    return moved(torch.tensor(numbers, dtype=dtype), device)


def join(parts: Sequence[Ids]) -> Ids:
    """Concatenated ids: a list if all parts are lists, else a tensor on the last part's device."""
    if all(isinstance(part, list) for part in parts):
        return list(itertools.chain.from_iterable(parts))
    tensors = [as_tensor(part) for part in parts]
    device = tensors[-1].device
    if any(tensor.device != device for tensor in tensors):
        tensors = [moved(tensor, device) for tensor in tensors]
    return torch.cat(tensors)


def of_array(array: npt.NDArray[np.float32]) -> torch.Tensor:
    """An array as a tensor over the same memory. ``as_array`` and ``address`` get the array and its address back
    without calling torch, which after a pass over a model's weights takes as long as summing the numbers."""
    tensor = torch.from_numpy(array)
    tensor.array, tensor.address = array, array.ctypes.data  # type: ignore[attr-defined]
    return tensor


def address(tensor: torch.Tensor) -> int:
    """The address of a tensor's data."""
    known: int | None = getattr(tensor, "address", None)
    return tensor.data_ptr() if known is None else known


def width(tensor: torch.Tensor) -> int:
    """The length of a row."""
    array: npt.NDArray[np.float32] | None = getattr(tensor, "array", None)
    return int((tensor if array is None else array).shape[-1])


class Rows:
    """A reusable buffer for rows of ``width`` float32 numbers."""

    def __init__(self, width: int) -> None:
        self.width = width
        self._buffer = np.empty((0, width), np.float32)
        self._views: dict[tuple[int, int], torch.Tensor] = {}

    def __call__(self, first: int, count: int) -> torch.Tensor:
        """Rows ``first`` to ``first + count``, valid until they are requested again."""
        view = self._views.get((first, count))
        if view is None:
            if first + count > len(self._buffer):
                self._buffer = np.empty((max(first + count, 2 * len(self._buffer)), self._buffer.shape[1]), np.float32)
                self._views.clear()
            view = self._views[first, count] = of_array(self._buffer[first : first + count])
        return view


def as_array(logits: torch.Tensor) -> npt.NDArray[Any] | None:
    """A numpy view of the same memory; None if numpy cannot read it."""
    array: npt.NDArray[Any] | None = getattr(logits, "array", None)
    if array is None and logits.device.type == "cpu" and logits.dtype in FLOATS:
        array = logits.numpy()
    return array


def floats(logits: torch.Tensor) -> npt.NDArray[np.float32] | None:
    """A contiguous float32 view on the CPU; None if the numbers are stored otherwise."""
    array = as_array(logits)
    if array is None or hasattr(logits, "address"):  # made by ``of_array``, so the dtype is known
        return array
    return array if array.dtype == np.float32 and array.flags.c_contiguous else None


def argmax(logits: torch.Tensor) -> Ids:
    """The likeliest token of every row of logits (n, vocab); a tensor if they are on a device."""
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
    """Ids as a list if that does not wait for a device."""
    if isinstance(ids, list) or ids.device.type != "cpu":
        return ids
    found: list[int] = ids.tolist()
    return found


@contextlib.contextmanager
def on_one_thread() -> Iterator[None]:
    """Run torch's operations of this thread on it alone. Beside another program on the same cores, a shared operation
    waits for a thread that is not scheduled, a hundred times as long as the work takes."""
    threads = torch.get_num_threads()
    if threads == 1:
        yield
        return
    torch.set_num_threads(1)  # a fraction of a microsecond
    try:
        yield
    finally:
        torch.set_num_threads(threads)
