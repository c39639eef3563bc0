"""The plan that our forward computes: a model as packed linear layers, norms, rotations and windows.

``families.py`` reads it from a transformers model.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import nn

from adaptive.engines.cpu.delta import DeltaNet, DeltaSizes
from adaptive.engines.cpu.feed_forward import Beside, Mixture, Mlp, add
from adaptive.engines.cpu.layer_inputs import LayerInput, PerLayerInputs
from adaptive.engines.cpu.layers import Embedding, HeadNorms, RmsNorm
from adaptive.engines.cpu.packing import Packed
from adaptive.engines.cpu.rotary import Rotation, Table
from adaptive.engines.cpu.weights import PackedLinear


class Heads(NamedTuple):
    """How many heads a layer has for its ``queries`` and for its ``keys``, of ``size`` numbers each. ``gated``: behind
    the values the projection gives a gate for each query's result. ``reused``: the projection gives queries only, which
    attend over the keys and values of an earlier layer."""

    queries: int
    keys: int
    size: int
    gated: bool = False
    reused: bool = False

    @property
    def group(self) -> int:
        """Query heads for each key head."""
        return self.queries // self.keys


@dataclass(frozen=True)
class Layer:
    """One decoder layer.

    ``qkv`` gives queries, keys and values in a row, each head's numbers in the pairs that the rotary embedding rotates.
    ``cache`` is the number of the text's cache that the layer attends over, ``rope`` selects among the model's rotary
    embeddings, ``window`` is how many tokens a query sees (0: all). A part's norm applies to its input, its ``after_``
    norm to what it adds to the residual stream, ``head_norms`` to queries, keys and values; each may be None.
    ``query_weight`` (size,) multiplies rotated queries; ``softcap`` bounds attention scores; ``sinks`` (heads,) are
    scores that take a share of the softmax and have no value. With a ``delta`` net the layer does not attend: ``qkv``
    is the net's projection (``native/delta.h``). ``input`` adds the part of the per-layer inputs, if there is one.
    ``factor`` multiplies the residual stream at the end of the layer.
    """

    attention_norm: RmsNorm | None
    qkv: PackedLinear
    heads: Heads
    cache: int
    head_norms: HeadNorms | None
    attention_output: PackedLinear
    after_attention_norm: RmsNorm | None
    mlp_norm: RmsNorm | None
    mlp: Mlp | Mixture | Beside
    after_mlp_norm: RmsNorm | None
    scale: float
    rope: Rotation
    window: int
    softcap: float | None
    query_weight: torch.Tensor | None = None
    delta: DeltaNet | None = None
    sinks: torch.Tensor | None = None
    input: LayerInput | None = None
    factor: float = 1.0

    @property
    def odd(self) -> bool:
        """Whether torch has no operation for its attention."""
        return self.softcap is not None or self.sinks is not None

    def add_to(self, x: torch.Tensor, attended: torch.Tensor, given: torch.Tensor | None) -> None:
        """Add to x (n, width) the output projection of the attention's result ``attended`` (n, heads * size), then the
        feed-forward part, then the part of the layer's input ``given`` (n, size), if it has one."""
        add(x, self.attention_output, attended, None, self.after_attention_norm)
        self.mlp.add_to(x, self.mlp_norm, self.after_mlp_norm)
        if self.input is not None and given is not None:
            self.input.add_to(x, given)
        if self.factor != 1:
            x *= self.factor


@dataclass(frozen=True)
class Fuse:
    """How a head reads a token and the feature of the token before it: linear([token_norm(embedding),
    feature_norm(feature)])."""

    linear: PackedLinear
    token_norm: RmsNorm
    feature_norm: RmsNorm


@dataclass(frozen=True)
class Plan:
    """A whole model. ``dtype`` is that of activations, ``weight_dtype`` that of the linear layers' inputs,
    ``cache_dtype`` that of keys and values where attention is native (elsewhere it is ``dtype``).
    ``ropes`` are the rotary embeddings of the layers; ``softcap`` bounds the logits; ``names`` gives a module's name in
    the model, for following adapters. ``fuse`` is the input of a head, None for a model that embeds its tokens.
    ``delta``: the sizes of the delta nets, if there are any. ``inputs`` computes the per-layer inputs, if there are
    any. ``stream`` (``native/stream.h``) reads weights that do not stay in memory. ``ids`` (outputs of ``lm_head``,),
    int64, increasing, are the tokens of the logits, None if these are of the whole vocabulary."""

    layers: tuple[Layer, ...]
    linears: tuple[Packed, ...]
    embed: Embedding
    final_norm: RmsNorm
    lm_head: PackedLinear
    softcap: float | None
    ropes: tuple[Table, ...]
    context_length: int
    dtype: torch.dtype
    weight_dtype: torch.dtype
    cache_dtype: torch.dtype
    device: torch.device
    names: dict[nn.Module, str]
    fuse: Fuse | None = None
    delta: DeltaSizes | None = None
    inputs: PerLayerInputs | None = None
    stream: Any = None
    ids: torch.Tensor | None = None

    @property
    def width(self) -> int:
        """How many numbers a hidden state has."""
        return self.lm_head.inputs

    @property
    def attending(self) -> list[Layer]:
        """The layers that attend."""
        return [layer for layer in self.layers if layer.delta is None]

    @property
    def rope_places(self) -> list[int]:
        """Where each rotary embedding's numbers begin among those of a token, and last how many numbers a token has."""
        return list(accumulate((table.size for table in self.ropes), initial=0))

    @property
    def cache_shapes(self) -> list[tuple[int, int]]:
        """(key heads, head size) of each of a text's caches."""
        own = {layer.cache: layer.heads for layer in self.attending if not layer.heads.reused}
        return [(own[number].keys, own[number].size) for number in range(len(own))]
