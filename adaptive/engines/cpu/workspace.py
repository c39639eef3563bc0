"""The buffers of a pass that goes layer by layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from adaptive.engines.cpu.masks import FEW
from adaptive.engines.cpu.plan import Plan


@dataclass
class Workspace:
    """Buffers for a pass over n tokens, and the views of them that every layer uses.

    ``qkv`` (n, (heads + 2 * key heads) * size) takes the result of the fused projection, gates of the queries behind it
    where there are any; ``qk`` is its queries and keys by head. ``queries`` (n, key heads, group, size / 2) and
    ``keys_values`` (2, key heads, n, size / 2) are complex views of it. ``rotated`` and ``query_rows`` are two views of
    the rotated queries, the second as attention wants them. ``attended`` and ``attended_rows`` are two views of
    attention's result, the second as the next linear layer wants it. ``grouped``: the queries of one key head are rows
    of one matrix.
    """

    qkv: torch.Tensor
    qk: torch.Tensor
    queries: torch.Tensor
    keys_values: torch.Tensor
    rotated: torch.Tensor
    query_rows: torch.Tensor
    attended: torch.Tensor
    attended_rows: torch.Tensor
    grouped: bool


def make_workspace(p: Plan, count: int) -> Workspace:
    """For a pass of the model over so many tokens."""
    size, group, key_heads = p.head_size, p.heads // p.key_heads, p.key_heads
    # A key head's queries are the rows of one product; for many tokens the mask would be too large.
    grouped = count <= FEW or group == 1 or any(layer.odd for layer in p.layers)
    several = p.heads * (2 if p.gated else 1) + 2 * key_heads
    qkv = torch.empty(count, several * size, dtype=p.dtype, device=p.device)
    pairs = torch.view_as_complex(qkv.view(count, several, size // 2, 2))
    attended_rows = torch.empty(count, p.heads * size, dtype=p.weight_dtype, device=p.device)
    attended = attended_rows.view(count, key_heads, group, size)
    if grouped:
        buffer = torch.empty(key_heads, count, group, size, dtype=p.dtype, device=p.device)
        rotated, query_rows = buffer.permute(1, 0, 2, 3), buffer.view(1, key_heads, count * group, size)
        attended = attended.permute(1, 0, 2, 3)
    else:
        buffer = torch.empty(key_heads, group, count, size, dtype=p.dtype, device=p.device)
        rotated, query_rows = buffer.permute(2, 0, 1, 3), buffer.view(1, p.heads, count, size)
        attended = attended.permute(1, 2, 0, 3)
    return Workspace(
        qkv=qkv,
        qk=qkv.view(count, several, size)[:, : p.heads + key_heads],
        queries=pairs[:, : p.heads].view(count, key_heads, group, size // 2),
        keys_values=pairs[:, p.heads : p.heads + 2 * key_heads].unflatten(1, (2, key_heads)).permute(1, 2, 0, 3),
        rotated=torch.view_as_complex(rotated.unflatten(-1, (size // 2, 2))),
        query_rows=query_rows,
        attended=attended,
        attended_rows=attended_rows,
        grouped=grouped,
    )
