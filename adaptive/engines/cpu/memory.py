"""Memory for packed weights in pages of 2 MB, where the system has such.

A pass reads all weights once. In pages of 4 kB a model of 25 MB is 6,400 of them, of which a processor remembers one to
two thousand: it looks up each anew in every pass, and everything that comes between two passes is looked up anew as
well. Most systems give large pages only to those who ask for them.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import threading

import torch

# Bytes that are asked for at once; a larger weight has its own. Less leaves more of a model outside of large pages,
# which begin at multiples of 2 MB; more stays taken while a little of it is in use.
CHUNK = 1 << 25
# Bytes at whose multiples weights begin: a line of the processor's caches, and what its vectors are read by. And large
# pages, which an older system does not begin memory at by itself.
ALIGNED, LARGE = 64, 1 << 21


class LargePages:
    """Hands out pieces of such memory, one behind the other. A piece is a tensor, which keeps all that was asked for
    with it: what was packed together is given up together."""

    def __init__(self, chunk: int = CHUNK) -> None:
        self._size = chunk
        self._left = torch.empty(0, dtype=torch.uint8)  # of what was asked for last
        self._lock = threading.Lock()

    def words(self, *shape: int) -> torch.Tensor:
        """An int32 tensor of this shape, of any content."""
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
    """Memory of so many bytes, in large pages where there are some."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a system without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _aligned(size: int) -> torch.Tensor:
    """So many bytes, which begin where a large page does."""
    whole = torch.frombuffer(asked_for(size + LARGE), dtype=torch.uint8)
    begin = -whole.data_ptr() % LARGE
    return whole[begin : begin + size]


PAGES = LargePages()
