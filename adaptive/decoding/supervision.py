"""Keeps the target's distribution of every output position, from the logits that verification computes."""

from __future__ import annotations

import numpy as np
import torch

from adaptive.records.types import Supervision

# Entries of the distribution kept a position. Fewer lose the tail that sampling at temperature 1
# visits; more cost disk (6 bytes each) for mass that is rarely over a percent.
TOP_K = 32


class SupervisionTape:
    """Collects rows on the device and hands them over once, at the end of a generation."""

    def __init__(self) -> None:
        self.ids: list[torch.Tensor] = []
        self.logprobs: list[torch.Tensor] = []
        self.rest: list[torch.Tensor] = []
        self.chosen: list[torch.Tensor] = []

    def append(self, logits: torch.Tensor, chosen: torch.Tensor) -> None:
        """Raw target logits (n, vocab) of n committed positions; chosen (n,) log-probabilities."""
        top = logits.topk(min(TOP_K, logits.shape[-1]), dim=-1)
        logprobs = top.values.float() - logits.float().logsumexp(-1, keepdim=True)
        left = (1 - logprobs.exp().sum(-1)).clamp_(min=0)
        self.ids.append(top.indices)
        self.logprobs.append(logprobs)
        self.rest.append(left.log())
        self.chosen.append(chosen)

    def take(self, count: int) -> Supervision:
        """The first ``count`` positions (a stop string may cut the last round)."""

        def joined(rows: list[torch.Tensor]) -> torch.Tensor:
            return torch.cat(rows)[:count].cpu()

        return Supervision(
            ids=joined(self.ids).numpy().astype(np.int32),
            logprobs=joined(self.logprobs).numpy().astype(np.float16),
            rest=joined(self.rest).numpy().astype(np.float16),
            chosen=joined(self.chosen).float().numpy().astype(np.float16),
        )
