"""Memory for packed weights in pages of 2 MB, where the system supports them.

A pass reads all weights once. A model of 25 MB has 6,400 pages of 4 kB, but a processor caches only one to two thousand
page translations: it looks up every page again in every pass, and also those of the code and data between two passes.
Most systems give large pages only on request.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import threading

import torch

# Bytes of one allocation; a larger weight has its own. Too low: more of a model lies outside large pages, which begin
# at multiples of 2 MB. Too high: more memory stays allocated while only a little of it is in use.
CHUNK = 1 << 25
# Bytes. Weights begin at multiples of ALIGNED: a line of the processor's caches, and a vector. Allocations begin at
# multiples of LARGE, the size of a large page; an older system does not align them by itself.
ALIGNED, LARGE = 64, 1 << 21


class LargePages:
    """Hands out pieces of memory in large pages, one behind the other. A piece is a tensor that keeps its whole
    allocation alive: weights that were packed together are freed together."""

    def __init__(self, chunk: int = CHUNK) -> None:
        self._size = chunk
        self._left = torch.empty(0, dtype=torch.uint8)  # the rest of the last allocation
        self._lock = threading.Lock()

    def words(self, *shape: int) -> torch.Tensor:
        """An uninitialised int32 tensor of this shape."""
        size = 4 * math.prod(shape)
        if not size or not hasattr(mmap, "MADV_HUGEPAGE"):
            return torch.empty(shape, dtype=torch.int32)
        if size > self._size:
            piece = _aligned(size)
        else:
            with self._lock:
                if size > len(self._left):
                    self._left = _aligned(self._size)
                piece, self._left = self._left[:size], self._left[-(-size // ALIGNED) * ALIGNED :]
        return piece.view(torch.int32).view(shape)


def asked_for(size: int) -> mmap.mmap:
    """Memory of ``size`` bytes, in large pages where the system has them. Raises MemoryError."""
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"{size} bytes could not be allocated") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a system without large pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _aligned(size: int) -> torch.Tensor:
    """A tensor of ``size`` bytes that begins at a multiple of a large page."""
    whole = torch.frombuffer(asked_for(size + LARGE), dtype=torch.uint8)
    begin = -whole.data_ptr() % LARGE
    return whole[begin : begin + size]


PAGES = LargePages()
