"""Keeps the target's distribution of every output position, from the logits that verification computes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from adaptive.tokens import as_array, on_one_thread
from adaptive.types import Supervision

# Entries of the distribution kept a position. Fewer lose the tail that sampling at temperature 1
# visits; more cost disk (6 bytes each) for mass that is rarely over a percent.
TOP_K = 32
# Rows of logits that wait to be digested together. One round has few rows, and the price of small
# operations is in their number; more rows hold more memory (600 kB each at 150,000 tokens).
BATCH = 24


class SupervisionBuffer:
    """Collects rows on the device and hands them over once, at the end of a generation."""

    def __init__(self) -> None:
        self._rows: Any = None  # (BATCH, vocab) of the logits' own kind, of which the first are waiting
        self._waiting = 0
        self._chosen: list[torch.Tensor | list[float]] = []
        self._digested: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

    def append(self, logits: torch.Tensor, chosen: torch.Tensor | list[float] | None, count: int | None = None) -> None:
        """The first ``count`` rows (all by default) of raw target logits (n, vocab), which are copied; their tokens'
        log-probabilities ``chosen`` (count,), or None for a whole answer that is greedy."""
        if chosen is not None:
            self._chosen.append(chosen)
        array = as_array(logits)
        rows: Any = logits if array is None else array
        given, vocab = rows.shape
        count = given if count is None else count
        if self._waiting + count > BATCH:
            self._digest()
        if count > BATCH:
            self._reduce(logits[:count])
            return
        if self._rows is None:
            self._rows = logits.new_empty(BATCH, vocab) if array is None else np.empty((BATCH, vocab), array.dtype)
        self._rows[self._waiting : self._waiting + count] = rows[:count]
        self._waiting += count

    def _digest(self) -> None:
        """Reduce the waiting rows to what is kept of them."""
        if self._waiting:
            self._reduce(torch.as_tensor(self._rows[: self._waiting]))
            self._waiting = 0

    def _reduce(self, logits: torch.Tensor) -> None:
        with on_one_thread():
            # One softmax: a logsumexp takes several times as long on a CPU.
            top = logits.float().log_softmax(-1).topk(min(TOP_K, logits.shape[-1]), dim=-1)
            logprobs = top.values
            rest = (1 - logprobs.exp().sum(-1)).clamp_(min=0).log()
        self._digested.append((top.indices, logprobs, rest))

    def take(self, count: int, first: int = 0) -> Supervision:
        """Positions ``first`` up to ``count`` (a stop may cut the last round)."""
        self._digest()
        ids, logprobs, rest = (_rows(parts, first, count) for parts in zip(*self._digested, strict=True))
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


def _rows(parts: Sequence[torch.Tensor | list[float]], first: int, count: int) -> torch.Tensor:
    """Rows ``first`` up to ``count`` of the parts end to end, on the CPU; the others are not copied."""
    wanted, begins = [], 0
    for part in parts:
        if begins < count and begins + len(part) > first:
            wanted.append(torch.as_tensor(part[max(0, first - begins) : count - begins]))
        begins += len(part)
    return torch.cat(wanted).cpu()
