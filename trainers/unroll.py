"""Runs a head over several texts at once, unrolled over its own features: the drafts from every starting row.

In: token ids and the target's features. Out: hidden states by (step in the draft, row).

Row j at step 0 reads the target's feature of token j - 1: a draft starts there. Row j at step s reads the feature that
row j - 1 computed at step s - 1: it is the s-th further token of a draft that started at row j - s. Given the text,
this equals the computation of drafting, since a drafted token matters only if the tokens before it equal the text. So
a row attends to the keys of its draft: step 0's up to the row where the draft started, then one key of each later
step. (EAGLE-3, Li et al. 2025, "training-time test".)
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from transformers import DynamicCache

from adaptive.engines.head.kinds import HeadModule


def unrolled(
    head: HeadModule, ids: torch.Tensor, features: torch.Tensor, rows: torch.Tensor, steps: int
) -> Iterator[torch.Tensor]:
    """Hidden states (B, R, width) of each of ``steps`` steps, at ``rows`` (B, R) of texts ``ids`` (B, T), which are
    padded on the right.

    ``features`` (B, T, reads): row i has the target's feature of token i - 1 (zeros for i = 0). Each line of ``rows``
    has consecutive numbers, which may exceed T. At step s, the first s places of a line and those beyond a text's end
    belong to no draft and are meaningless. So is row 0 if the first token of a text has no row (``head.begins`` is 1).
    """
    count = ids.shape[1]
    everything = torch.arange(count, device=ids.device)[None].expand(len(ids), -1)
    cache = DynamicCache()  # without a config: sliding layers would drop keys; the mask applies their window
    window = getattr(head.config, "sliding_window", None) if _slides(head) else None
    places = [everything]  # the rows of each step's keys so far
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
    """The hidden states (B, R, width) at ``rows``; for rows out of range, the nearest row's."""
    index = rows.clamp(0, hidden.shape[1] - 1)[..., None].expand(-1, -1, hidden.shape[-1])
    return hidden.gather(1, index)


def _slides(head: HeadModule) -> bool:
    kinds = getattr(head.config, "layer_types", None)
    return kinds is None or kinds[0] == "sliding_attention"


def _mask(
    rows: torch.Tensor, places: list[torch.Tensor], window: int | None, dtype: torch.dtype, begins: int
) -> torch.Tensor:
    """The attention mask (B, 1, R, keys): 0 where a row of the last step sees a key, else the most negative number. The
    keys of all steps are concatenated; ``places`` (B, R) holds the rows of each step's keys. Rows before ``begins`` are
    seen only by themselves, since a row that sees no key would become NaN."""
    step = len(places) - 1
    row, first = rows[:, :, None], places[0][:, None]
    sees = [(first <= row - step) & ((first >= begins) | (first == row))]
    sees += [key[:, None] == row - step + back for back, key in enumerate(places[1:], start=1)]
    if window:
        sees = [seen & (key[:, None] > row - window) for seen, key in zip(sees, places, strict=True)]
    seen = torch.cat(sees, dim=2)[:, None]
    mask = torch.zeros(seen.shape, dtype=dtype, device=rows.device)
    return mask.masked_fill_(~seen, torch.finfo(dtype).min)
