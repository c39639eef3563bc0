"""Keeps the target's distribution of every output position, from the logits that verification computes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from adaptive.engines.load import sampling_kernels
from adaptive.engines.protocol import SamplingKernels
from adaptive.tokens import floats, on_one_thread
from adaptive.types import Supervision

# Entries of the distribution kept per position. Too low: the tail that sampling at temperature 1 draws from is lost.
# Too high: disk (6 bytes each) for probability mass that is rarely above one percent.
TOP_K = 32
# Rows of logits that wait to be reduced together where torch reduces them. A round has few rows, and small operations
# cost by their number. Too high: more memory (600 kB per row at 150,000 tokens).
BATCH = 24
# Positions for which memory is allocated at once where the kernels reduce.
ROOM = 128


class Kept:
    """Reduced supervision of ``count`` positions: ``ids`` and ``logprobs`` (at least count, k), ``rest`` (at least
    count,)."""

    def __init__(self, ids: Any, logprobs: Any, rest: Any, count: int) -> None:
        self.ids, self.logprobs, self.rest, self.count = ids, logprobs, rest, count


class Written(Kept):
    """Memory that the kernels fill row by row."""

    def __init__(self, kept: int, room: int) -> None:
        super().__init__(
            np.empty((room, kept), np.int32), np.empty((room, kept), np.float32), np.empty(room, np.float32), 0
        )
        self._width, self.left = 4 * kept, room  # bytes per row, rows
        self._begin: tuple[int, ...] = tuple(part.ctypes.data for part in (self.ids, self.logprobs, self.rest))

    def append(self, kernels: SamplingKernels, logits: torch.Tensor, count: int) -> None:
        """Reduce the first ``count`` rows of ``logits``; there must be room for them."""
        ids, logprobs, rest = self._begin
        behind = self.count * self._width
        into = ids + behind, logprobs + behind, rest + 4 * self.count
        kernels.likeliest_of(logits, count, self._width // 4, into)
        self.count, self.left = self.count + count, self.left - count


class SupervisionBuffer:
    """Collects the supervision of each position and returns it at the end of a generation. Kernels reduce logits that
    are on the CPU at once; other logits are copied on their device and reduced in batches."""

    def __init__(self) -> None:
        self._kernels = sampling_kernels()
        self._rows: torch.Tensor | None = None  # (BATCH, vocab) in the logits' dtype; the first ``_waiting`` are used
        self._waiting = 0
        self._chosen: list[torch.Tensor | list[float]] = []
        self._kept: list[Kept] = []
        self._open: Written | None = None  # the last of them, if it has room

    def append(self, logits: torch.Tensor, chosen: torch.Tensor | list[float] | None, count: int | None = None) -> None:
        """Add the first ``count`` rows (all by default) of raw target logits (n, vocab), which may change afterwards,
        and their tokens' log-probabilities ``chosen`` (count,); None throughout a greedy answer."""
        if chosen is not None:
            self._chosen.append(chosen)
        array = None if self._kernels is None else floats(logits)
        given, vocab = (logits if array is None else array).shape
        count = given if count is None else count
        if self._kernels is not None and array is not None:
            if self._waiting:
                self._digest()
            if self._open is None or self._open.left < count:
                self._open = Written(min(TOP_K, vocab), max(ROOM, count))
                self._kept.append(self._open)
            self._open.append(self._kernels, logits, count)
            return
        self._open = None
        if self._waiting + count > BATCH:
            self._digest()
        if count > BATCH:
            self._reduce(logits[:count])
            return
        if self._rows is None:
            self._rows = logits.new_empty(BATCH, vocab)
        self._rows[self._waiting : self._waiting + count] = logits[:count]
        self._waiting += count

    def _digest(self) -> None:
        """Reduce the waiting rows."""
        if self._waiting:
            assert self._rows is not None
            self._reduce(self._rows[: self._waiting])
            self._waiting = 0

    def _reduce(self, logits: torch.Tensor) -> None:
        with on_one_thread():
            # One softmax: logsumexp takes several times as long on a CPU.
            top = logits.float().log_softmax(-1).topk(min(TOP_K, logits.shape[-1]), dim=-1)
            logprobs = top.values
            rest = (1 - logprobs.exp().sum(-1)).clamp_(min=0).log()
        self._kept.append(Kept(top.indices, logprobs, rest, len(logprobs)))

    def take(self, count: int, first: int = 0) -> Supervision:
        """The supervision of positions ``first`` up to ``count`` (a stop may cut the last round)."""
        self._digest()
        ids, logprobs, rest = (
            _rows([getattr(part, name)[: part.count] for part in self._kept], first, count)
            for name in ("ids", "logprobs", "rest")
        )
        return Supervision(
            ids=ids.numpy().astype(np.int32),
            logprobs=logprobs.numpy().astype(np.float16),
            rest=rest.numpy().astype(np.float16),
            chosen=self._chosen_of(first, count),
        )

    def _chosen_of(self, first: int, count: int) -> npt.NDArray[np.float16]:
        if not self._chosen:
            return np.zeros(count - first, dtype=np.float16)
        return _rows(self._chosen, first, count).float().numpy().astype(np.float16)


def _rows(parts: Sequence[Any], first: int, count: int) -> torch.Tensor:
    """Rows ``first`` up to ``count`` of the concatenated parts (tensors, arrays or lists), on the CPU. Other rows are
    not copied. All tensors are on one device, from which they are copied together."""
    device = next((part.device for part in parts if isinstance(part, torch.Tensor)), None)
    wanted, begins = [], 0
    for part in parts:
        if begins < count and begins + len(part) > first:
            wanted.append(torch.as_tensor(part[max(0, first - begins) : count - begins], device=device))
        begins += len(part)
    return torch.cat(wanted).cpu()
