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

# Entries of the distribution kept a position. Fewer lose the tail that sampling at temperature 1
# visits; more cost disk (6 bytes each) for mass that is rarely over a percent.
TOP_K = 32
# Rows of logits that wait to be reduced together where torch does it. One round has few rows, and the price of small
# operations is in their number; more rows hold more memory (600 kB each at 150,000 tokens).
BATCH = 24
# Positions that memory is taken for at once where the kernels do it.
ROOM = 128


class Kept:
    """What is kept of ``count`` positions: ``ids`` and ``logprobs`` (at least count, k), ``rest`` (at least count,)."""

    def __init__(self, ids: Any, logprobs: Any, rest: Any, count: int) -> None:
        self.ids, self.logprobs, self.rest, self.count = ids, logprobs, rest, count


class Written(Kept):
    """Room that the kernels fill, row after row."""

    def __init__(self, kept: int, room: int) -> None:
        super().__init__(
            np.empty((room, kept), np.int32), np.empty((room, kept), np.float32), np.empty(room, np.float32), 0
        )
        self._width, self.left = 4 * kept, room  # bytes a row, rows
        self._begin: tuple[int, ...] = tuple(part.ctypes.data for part in (self.ids, self.logprobs, self.rest))

    def append(self, kernels: SamplingKernels, logits: torch.Tensor, count: int) -> None:
        """The first rows of ``logits``, for which there must be room."""
        ids, logprobs, rest = self._begin
        behind = self.count * self._width
        into = ids + behind, logprobs + behind, rest + 4 * self.count
        kernels.likeliest_of(logits, count, self._width // 4, into)
        self.count, self.left = self.count + count, self.left - count


class SupervisionBuffer:
    """Collects what is kept of each position, and hands it over at the end of a generation. Logits on the processor are
    reduced as they come, by the kernels; others are copied where they are, and reduced some together."""

    def __init__(self) -> None:
        self._kernels = sampling_kernels()
        self._rows: torch.Tensor | None = None  # (BATCH, vocab) of the logits' own kind, of which the first are waiting
        self._waiting = 0
        self._chosen: list[torch.Tensor | list[float]] = []
        self._kept: list[Kept] = []
        self._open: Written | None = None  # the last of them, where it has room

    def append(self, logits: torch.Tensor, chosen: torch.Tensor | list[float] | None, count: int | None = None) -> None:
        """The first ``count`` rows (all by default) of raw target logits (n, vocab), which may change afterwards; their
        tokens' log-probabilities ``chosen`` (count,), or None for a whole answer that is greedy."""
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
        """Reduce the waiting rows to what is kept of them."""
        if self._waiting:
            assert self._rows is not None
            self._reduce(self._rows[: self._waiting])
            self._waiting = 0

    def _reduce(self, logits: torch.Tensor) -> None:
        with on_one_thread():
            # One softmax: a logsumexp takes several times as long on a CPU.
            top = logits.float().log_softmax(-1).topk(min(TOP_K, logits.shape[-1]), dim=-1)
            logprobs = top.values
            rest = (1 - logprobs.exp().sum(-1)).clamp_(min=0).log()
        self._kept.append(Kept(top.indices, logprobs, rest, len(logprobs)))

    def take(self, count: int, first: int = 0) -> Supervision:
        """Positions ``first`` up to ``count`` (a stop may cut the last round)."""
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
    """Rows ``first`` up to ``count`` of the parts (tensors, arrays or lists) end to end, on the CPU; the others are not
    copied."""
    wanted, begins = [], 0
    for part in parts:
        if begins < count and begins + len(part) > first:
            wanted.append(torch.as_tensor(part[max(0, first - begins) : count - begins]))
        begins += len(part)
    return torch.cat(wanted).cpu()
