"""The operations of a short pass, on torch. They define what ``kernels.py`` computes on CUDA, and run elsewhere.

A pass has n tokens in all, the same number of each of its texts. All results are in the dtype of the inputs.
"""

from __future__ import annotations

import torch
from torch import nn

from adaptive.engines.cuda.texts import Held


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x (n, inputs) @ weight (outputs, inputs).T + bias."""
    return nn.functional.linear(x, weight, bias)


def add_norm(x: torch.Tensor, added: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Add ``added`` (n, width) to x (n, width) in place, if there is one. Returns the RMS norm of x with this weight,
    which, as in transformers, is computed in float32 and rounded before the product with the weight."""
    if added is not None:
        x += added
    y = x.float()
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    return weight * y.to(x.dtype)


def rotate_and_store(
    projected: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    eps: float,
    held: Held,
) -> torch.Tensor:
    """Split ``projected`` (n, (heads + 2 * key heads) * size) into queries, keys and values, apply the RMS ``norms``
    (each (size,)) of queries and keys, if there are any, and the rotary embedding ``cos``, ``sin`` (n, size), and write
    keys and values after those of their texts. Returns the queries (n, heads, size)."""
    key_heads, half = held.key_heads, held.size // 2
    each = projected.view(len(projected), -1, held.size)
    parts = list(each.split([each.shape[1] - 2 * key_heads, key_heads, key_heads], dim=1))
    for number in range(2):
        one = parts[number]
        if norms is not None:
            one = add_norm(one.contiguous(), None, norms[number], eps)
        turned = torch.cat([-one[..., half:], one[..., :half]], -1)
        parts[number] = one * cos[:, None] + turned * sin[:, None]
    count = len(projected) // len(held.layers)
    texts = zip(held.layers, held.start, parts[1].split(count), parts[2].split(count), strict=True)
    for layer, start, keys, values in texts:
        places = start + torch.arange(count, device=start.device)
        layer.keys.index_copy_(2, places, keys.transpose(0, 1)[None])
        layer.values.index_copy_(2, places, values.transpose(0, 1)[None])
    queries: torch.Tensor = parts[0]
    return queries


def attend(queries: torch.Tensor, held: Held, scale: float, window: int) -> torch.Tensor:
    """Causal attention of queries (n, heads, size), each over its text, the tokens of the pass included. A query sees
    the last ``window`` tokens (0: all). Returns (n, heads * size)."""
    count, heads = len(queries) // len(held.layers), queries.shape[1]
    found = []
    for layer, start, own in zip(held.layers, held.start, queries.split(count), strict=True):
        places = start + torch.arange(count, device=start.device)
        behind = places[:, None] - torch.arange(layer.keys.shape[2], device=start.device)
        seen = (behind >= 0) & (behind < window) if window else behind >= 0
        attended = nn.functional.scaled_dot_product_attention(
            own.transpose(0, 1)[None],
            layer.keys,
            layer.values,
            attn_mask=seen,
            scale=scale,
            enable_gqa=heads != held.key_heads,
        )
        found.append(attended[0].transpose(0, 1).reshape(count, -1))
    return torch.cat(found)


def gate(x: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of x (n, 2 * width), the gates first."""
    first, up = x.chunk(2, -1)
    gated: torch.Tensor = nn.functional.silu(first) * up
    return gated
