"""What a drafter hands to verification."""

from __future__ import annotations

from typing import NamedTuple

import torch

from adaptive.tokens import Distributions, Ids, as_tensor


class Proposal(NamedTuple):
    """K drafted tokens, a chain, and the very distributions they were drawn from, over the draft's vocabulary.

    ``probs`` is None where nothing was drawn: the likeliest tokens, or those of a drafter without chance. Where the
    target samples, such a token is verified as drawn from a point mass. ``drafter`` says who drafted.
    """

    drafter: str
    tokens: Ids
    probs: Distributions | None


def point_masses(tokens: Ids, vocab: int) -> torch.Tensor:
    """Distributions (K, vocab) that give each of K ``tokens`` everything. Verified against them, a token x stands with
    probability p(x), else another is drawn from p without x, renormalised."""
    ids = as_tensor(tokens)
    return torch.zeros(len(ids), vocab, device=ids.device).scatter_(1, ids[:, None], 1.0)
