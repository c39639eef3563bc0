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

from adaptive.engines.head.kinds import HeadModule


def unrolled(
    head: HeadModule, ids: torch.Tensor, features: torch.Tensor, rows: torch.Tensor, steps: int
) -> Iterator[torch.Tensor]:
    """Hidden states (B, R, width), of each of ``steps`` steps, at ``rows`` (B, R) of texts ``ids`` (B, T), which are
    padded on the right.

    ``features`` (B, T, reads): row i has the target's at token i - 1 (zeros for i = 0). Each line of ``rows`` has
    consecutive numbers, which may go beyond T. What stands at step s in the first s places of a line, and beyond a
    text's end, belongs to no draft and means nothing; so does row 0 of a head whose texts begin with a token that has
    no row.
    """
    count = ids.shape[1]
    everything = torch.arange(count, device=ids.device)[None].expand(len(ids), -1)
    cache = DynamicCache()  # without a config: sliding layers would forget, their window is in the mask
    window = getattr(head.config, "sliding_window", None) if _slides(head) else None
    places = [everything]  # of the keys of each step so far
    mask = _mask(everything, places, window, features.dtype, head.begins)
    hidden = head(ids, head.of_target(features), everything, mask, cache)
    made = _at(hidden, rows - 1)
    yield _at(hidden, rows)
    tokens = ids.gather(1, rows.clamp(max=count - 1))
    for _ in range(1, steps):
        places.append(rows)
        hidden = head(tokens, made, rows, _mask(rows, places, window, features.dtype, head.begins), cache)
        yield hidden
        made = torch.cat([hidden[:, :1], hidden[:, :-1]], dim=1)


def _at(hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """The hidden states (B, R, width) at ``rows``; of those that are not there, others."""
    index = rows.clamp(0, hidden.shape[1] - 1)[..., None].expand(-1, -1, hidden.shape[-1])
    return hidden.gather(1, index)


def _slides(head: HeadModule) -> bool:
    kinds = getattr(head.config, "layer_types", None)
    return kinds is None or kinds[0] == "sliding_attention"


def _mask(
    rows: torch.Tensor, places: list[torch.Tensor], window: int | None, dtype: torch.dtype, begins: int
) -> torch.Tensor:
    """(B, 1, R, keys), 0 where a row of the last step sees a key, the keys of all steps behind each other, and the most
    negative number elsewhere. ``places`` (B, R) says in which rows the keys of each step stand. Rows before ``begins``
    are there for nobody but themselves: seeing none would be no number."""
    step = len(places) - 1
    row, first = rows[:, :, None], places[0][:, None]
    sees = [(first <= row - step) & ((first >= begins) | (first == row))]
    sees += [key[:, None] == row - step + back for back, key in enumerate(places[1:], start=1)]
    if window:
        sees = [seen & (key[:, None] > row - window) for seen, key in zip(sees, places, strict=True)]
    seen = torch.cat(sees, dim=2)[:, None]
    mask = torch.zeros(seen.shape, dtype=dtype, device=rows.device)
    return mask.masked_fill_(~seen, torch.finfo(dtype).min)
