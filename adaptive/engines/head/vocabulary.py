"""A head's draft vocabulary: the tokens that it can propose, if they are not all of the target's tokens.

With a large vocabulary, the projection to all tokens takes most of a head's step, and most tokens are never generated.
A head with a draft vocabulary computes logits only for its tokens. Every other token has the draft probability q = 0,
so that only the target can produce it.
"""

from __future__ import annotations

import torch

from adaptive.errors import AdaptiveError


def spread(few: torch.Tensor, ids: torch.Tensor, vocab: int) -> torch.Tensor:
    """Logits (..., vocab) from the logits ``few`` (..., N) of the tokens ``ids`` (N,); -inf for all others."""
    logits = few.new_full((*few.shape[:-1], vocab), -torch.inf)
    return logits.index_copy_(-1, ids, few)


def columns_of(ids: torch.Tensor, vocab: int) -> torch.Tensor:
    """For each of ``vocab`` tokens its place among ``ids`` (N,), N for one that is not there: (vocab,) int64."""
    found = torch.full((vocab,), len(ids), device=ids.device)
    found[ids] = torch.arange(len(ids), device=ids.device)
    return found


def check_ids(ids: torch.Tensor, vocab: int) -> None:
    """Raise AdaptiveError unless ``ids`` are a draft vocabulary of a target with ``vocab`` tokens: (N,) int64, strictly
    increasing, at least one."""
    if ids.ndim != 1 or ids.dtype != torch.long or not len(ids):
        raise AdaptiveError(f"its draft vocabulary is no list of token ids, but {tuple(ids.shape)} of {ids.dtype}")
    if int(ids.min()) < 0 or int(ids.max()) >= vocab:
        raise AdaptiveError(
            f"its draft vocabulary has tokens from {int(ids.min())} to {int(ids.max())}, and the target's are 0 to "
            f"{vocab - 1}"
        )
    if not bool((ids[1:] > ids[:-1]).all()):
        raise AdaptiveError("its draft vocabulary is not in increasing order, or names a token twice")
