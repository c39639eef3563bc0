"""What our forward computes: a model as packed linear layers, norms, rotations and windows.

``families.py`` reads it from a transformers model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from adaptive.engines.cpu.delta import DeltaNet, DeltaSizes
from adaptive.engines.cpu.feed_forward import Mixture, Mlp
from adaptive.engines.cpu.layers import Embedding, QkNorm, RmsNorm, TensorFunction
from adaptive.engines.cpu.packing import Packed
from adaptive.engines.cpu.rotary import Rotation
from adaptive.engines.cpu.weights import PackedLinear


@dataclass(frozen=True)
class Layer:
    """One decoder layer.

    ``qkv`` gives queries, keys and values in a row, each head's numbers in the pairs that the rotary embedding turns;
    ``rope`` says which of the model's rotary embeddings, ``window`` how many tokens a query sees (0: all). A part reads
    through its norm, if there is one; that ``after_`` it is of what it adds to the residual stream. ``query_weight``
    (size,) multiplies rotated queries; ``softcap`` bounds attention scores; ``sinks`` (heads,) are scores that take
    their share and have no value. With a ``delta`` net the layer does not attend: ``qkv`` is the net's projection
    (``native/delta.h``).
    """

    attention_norm: RmsNorm | None
    qkv: PackedLinear
    qk_norm: QkNorm | None
    attention_output: PackedLinear
    after_attention_norm: RmsNorm | None
    mlp_norm: RmsNorm | None
    mlp: Mlp | Mixture
    after_mlp_norm: RmsNorm | None
    scale: float
    rope: Rotation
    window: int
    softcap: float | None
    query_weight: torch.Tensor | None = None
    delta: DeltaNet | None = None
    sinks: torch.Tensor | None = None

    @property
    def odd(self) -> bool:
        """Whether torch has no operation for its attention."""
        return self.softcap is not None or self.sinks is not None


@dataclass(frozen=True)
class Fuse:
    """How a head reads a token and the feature of the one before it: linear([token_norm(embedding),
    feature_norm(feature)])."""

    linear: PackedLinear
    token_norm: RmsNorm
    feature_norm: RmsNorm


@dataclass(frozen=True)
class Plan:
    """A whole model. ``dtype`` is that of activations and cache, ``weight_dtype`` that of the linear layers' inputs;
    ``ropes`` map positions (1, n) to cos and sin as complex numbers (n, head size / 2); ``softcap`` bounds the logits;
    ``names`` gives a module's name in the model, for following adapters; ``fuse`` is how a head reads, None for a model
    that embeds its tokens. ``gated``: ``qkv`` gives a gate for each query behind the values, of what it sees.
    ``delta``: of the layers that do not attend. ``stream`` (``native/stream.h``) reads weights that do not stay."""

    layers: tuple[Layer, ...]
    linears: tuple[Packed, ...]
    embed: Embedding
    final_norm: RmsNorm
    lm_head: PackedLinear
    softcap: float | None
    ropes: tuple[TensorFunction, ...]
    heads: int
    key_heads: int
    head_size: int
    context_length: int
    dtype: torch.dtype
    weight_dtype: torch.dtype
    device: torch.device
    names: dict[nn.Module, str]
    fuse: Fuse | None = None
    gated: bool = False
    delta: DeltaSizes | None = None
    stream: Any = None

    @property
    def width(self) -> int:
        """Numbers of a hidden state."""
        return self.lm_head.inputs
