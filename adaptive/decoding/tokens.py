"""Token ids as tensors, by the shortest way.

Between two passes over a model's weights the processor's caches hold little of what comes next, so that the
cost of a small operation is the code it runs through: the two that every round needs take numpy a fraction of
torch's way. Together they were 6% of a token of the bundled target on llama.cpp.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

# What numpy can read.
FLOATS = (torch.float32, torch.float64)


def as_tensor(ids: Sequence[int]) -> torch.Tensor:
    """Token ids as a tensor (n,) int64 on the CPU."""
    return torch.from_numpy(np.array(ids, dtype=np.int64))


def argmax(logits: torch.Tensor) -> torch.Tensor:
    """The likeliest token of every row of logits (n, vocab); (n,) int64 on their device."""
    if logits.device.type == "cpu" and logits.dtype in FLOATS:
        return torch.from_numpy(logits.numpy().argmax(-1))
    return logits.argmax(-1)
