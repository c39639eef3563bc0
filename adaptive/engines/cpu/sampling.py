"""Chooses tokens with the compiled kernels, from logits in the CPU's memory; any engine may have computed them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from adaptive.engines.cpu.kernels import Library
from adaptive.engines.protocol import Floats, Judgement, Thresholds
from adaptive.tokens import address, width
from adaptive.types import SamplingParams


class CpuSampling:
    """``SamplingKernels`` on one library."""

    def __init__(self, library: Library) -> None:
        self._module = library.module
        self._known: tuple[SamplingParams | None, Any] = None, None  # one tuple, so that threads see both or neither

    def native(self, params: SamplingParams) -> Any:
        """The parameters for the kernels. They are kept for the next call, which mostly has the same ones."""
        known, native = self._known
        if known is not params:
            factor = 0.0 if params.greedy else 1 / params.temperature
            seed = None if params.seed is None else params.seed % 2**64
            native = self._module.Sampling(factor, params.top_p, params.min_p, params.top_k, params.greedy, seed)
            self._known = params, native
        return native

    def thresholds(self, given: Thresholds) -> Any:
        """Thresholds for the kernels, which read and write the same arrays."""
        return self._module.Thresholds(
            given.edges,
            given.accepted,
            given.follow,
            given.drop_below,
            given.last_below,
            given.reach,
            given.bins,
            given.asked,
            given.drafts,
        )

    def probabilities(self, logits: torch.Tensor, params: SamplingParams, out: torch.Tensor) -> torch.Tensor:
        """See ``SamplingKernels``."""
        logits = _plain(logits)
        self._module.probabilities(self.native(params), address(logits), address(out), *logits.shape)
        return out

    def draw(self, probs: Floats, uniform: float, less: Floats | None = None) -> int | None:
        """See ``SamplingKernels``."""
        probs = np.ascontiguousarray(probs, np.float32)
        place, count = 0, 0
        if less is not None:
            less = np.ascontiguousarray(less, np.float32)
            place, count = less.ctypes.data, len(less)
        token: int = self._module.draw(probs.ctypes.data, place, len(probs), count, uniform)
        return None if token < 0 else token

    def race(self, probs: Floats, seed: int, position: int) -> int | None:
        """See ``SamplingKernels``."""
        probs = np.ascontiguousarray(probs, np.float32)
        token: int = self._module.race(probs.ctypes.data, len(probs), seed % 2**64, position)
        return None if token < 0 else token

    def judge(
        self,
        logits: torch.Tensor,
        drafted: list[int],
        position: int,
        params: SamplingParams,
        q: torch.Tensor | None,
        uniform: Sequence[float],
        allowed: Sequence[int] = (),
    ) -> Judgement:
        """See ``SamplingKernels``."""
        logits = _plain(logits)
        place, fewer = (0, 0) if q is None else (address(q), width(q))
        vocab = width(logits)
        sampling = self.native(params)
        found = self._module.judge(sampling, address(logits), vocab, drafted, position, place, fewer, uniform, allowed)
        return Judgement(*found)

    def likeliest_of(self, logits: torch.Tensor, count: int, kept: int, into: tuple[int, int, int]) -> None:
        """See ``SamplingKernels``."""
        self._module.likeliest_of(address(logits), count, width(logits), kept, *into)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as contiguous float32. One with an ``address`` (see ``of_array``) is that already."""
    return tensor if hasattr(tensor, "address") else tensor.float().contiguous()
