"""The buffers of a pass that runs layer by layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from adaptive.engines.cpu.masks import FEW
from adaptive.engines.cpu.plan import Heads, Plan


@dataclass
class Workspace:
    """Buffers for a pass over n tokens, and their views, for all layers with the same heads.

    ``qkv`` (n, outputs of the projection) takes the projection's result; ``by_head`` (n, -1, size) is a view by head.
    ``queries`` (n, key heads, group, size / 2) and ``keys_values`` (2, key heads, n, size / 2) are complex views of
    ``qkv``, the second None if the layers reuse keys and values. ``rotated`` and ``query_rows`` are two views of the
    rotated queries, the second for attention. ``attended`` and ``attended_rows`` are two views of attention's result,
    the second for the next linear layer. ``grouped``: the queries of one key head are rows of one matrix, so a mask has
    ``repeats`` rows for each token.
    """

    qkv: torch.Tensor
    by_head: torch.Tensor
    queries: torch.Tensor
    keys_values: torch.Tensor | None
    rotated: torch.Tensor
    query_rows: torch.Tensor
    attended: torch.Tensor
    attended_rows: torch.Tensor
    grouped: bool
    repeats: int


def make_workspace(p: Plan, heads: Heads, count: int) -> Workspace:
    """The buffers for a pass of the model over ``count`` tokens, for layers with these ``heads``."""
    size, group, key_heads = heads.size, heads.group, heads.keys
    # Grouped, a key head's queries are the rows of one product; for many tokens the mask would be too large.
    grouped = count <= FEW or group == 1 or any(layer.odd for layer in p.layers)
    several = heads.queries * (2 if heads.gated else 1) + (0 if heads.reused else 2 * key_heads)
    qkv = torch.empty(count, several * size, dtype=p.dtype, device=p.device)
    pairs = torch.view_as_complex(qkv.view(count, several, size // 2, 2))
    attended_rows = torch.empty(count, heads.queries * size, dtype=p.weight_dtype, device=p.device)
    attended = attended_rows.view(count, key_heads, group, size)
    if grouped:
        buffer = torch.empty(key_heads, count, group, size, dtype=p.dtype, device=p.device)
        rotated, query_rows = buffer.permute(1, 0, 2, 3), buffer.view(1, key_heads, count * group, size)
        attended = attended.permute(1, 0, 2, 3)
    else:
        buffer = torch.empty(key_heads, group, count, size, dtype=p.dtype, device=p.device)
        rotated, query_rows = buffer.permute(2, 0, 1, 3), buffer.view(1, heads.queries, count, size)
        attended = attended.permute(1, 2, 0, 3)
    keys_values = None
    if not heads.reused:
        both = pairs[:, heads.queries : heads.queries + 2 * key_heads]
        keys_values = both.unflatten(1, (2, key_heads)).permute(1, 2, 0, 3)
    return Workspace(
        qkv=qkv,
        by_head=qkv.view(count, several, size),
        queries=pairs[:, : heads.queries].view(count, key_heads, group, size // 2),
        keys_values=keys_values,
        rotated=torch.view_as_complex(rotated.unflatten(-1, (size // 2, 2))),
        query_rows=query_rows,
        attended=attended,
        attended_rows=attended_rows,
        grouped=grouped,
        repeats=group if grouped else 1,
    )
