"""A head over several texts at once, unrolled over its own features: what it computes when it drafts, for every start.

In: token ids and the target's features. Out: hidden states by (step in the draft, row).

Row j at step 0 reads the target's feature of token j - 1: a draft that starts there. Row j at step s reads what row
j - 1 made at step s - 1: the s-th further token of a draft that started at row j - s. Given the text, that is just what
drafting computes, since a token is drafted behind others only where those stand. So its keys are those of its draft:
step 0's up to the row where it started, then one of each later step. (EAGLE-3, Li et al. 2025, "training-time test".)
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from transformers import DynamicCache

from adaptive.engines.head.module import Head


def unrolled(head: Head, ids: torch.Tensor, features: torch.Tensor, steps: int) -> Iterator[torch.Tensor]:
    """Hidden states (B, T, width) of each of ``steps`` steps, of texts ``ids`` (B, T), padded on the right.

    ``features`` (B, T, width): row i has the target's hidden state at token i - 1 (zeros for i = 0). At step s, rows
    before s belong to no draft, and what is in them means nothing.
    """
    count = ids.shape[1]
    positions = torch.arange(count, device=ids.device)[None]
    cache = DynamicCache()  # without a config: sliding layers would forget, their window is in the mask
    window = getattr(head.config, "sliding_window", None) if _slides(head) else None
    made = features
    for step in range(steps):
        mask = _mask(count, step, window, features)
        hidden = head(ids, made, positions, mask, cache)
        yield hidden
        made = torch.cat([torch.zeros_like(hidden[:, :1]), hidden[:, :-1]], dim=1)


def _slides(head: Head) -> bool:
    kinds = getattr(head.config, "layer_types", None)
    return kinds is None or kinds[0] == "sliding_attention"


def _mask(count: int, step: int, window: int | None, like: torch.Tensor) -> torch.Tensor:
    """(1, 1, count, (step + 1) * count), 0 where row j at ``step`` sees a key, the keys of all steps so far behind
    each other, and the most negative number elsewhere."""
    row = torch.arange(count, device=like.device)[:, None]
    key = torch.arange(count, device=like.device)[None]
    sees = [key <= row - step, *(key == row - step + back for back in range(1, step + 1))]
    if window:
        sees = [seen & (key > row - window) for seen in sees]
    if step:  # rows of no draft see themselves, since a softmax over nothing is not a number
        sees[-1] = sees[-1] | ((row < step) & (key == row))
    seen = torch.cat(sees, dim=1)
    nothing = torch.finfo(like.dtype).min
    return torch.zeros(seen.shape, dtype=like.dtype, device=like.device).masked_fill_(~seen, nothing)[None, None]
