"""Per-layer inputs: numbers of a token that a layer reads beside the residual stream (Gemma 4 E2B and E4B).

In: transformers' modules. Out: the computation of all layers' inputs, and that of a layer's addition from its input.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from adaptive.engines.cpu.feed_forward import add
from adaptive.engines.cpu.layers import Embedding, Gate, RmsNorm
from adaptive.engines.cpu.packing import Packed, Packing
from adaptive.engines.cpu.weights import PackedLinear


@dataclass(frozen=True)
class PerLayerInputs:
    """Computes the inputs of a model's layers, (layers, size) numbers for a token: (norm(projection(its embedding)) +
    its row of another embedding, ``embed``) * ``factor``."""

    projection: PackedLinear
    norm: RmsNorm
    embed: Embedding
    factor: float

    def __call__(self, tokens: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """The inputs (n, layers, size) of tokens (n,) with embeddings x (n, width)."""
        size = len(self.norm.weight)
        inputs: torch.Tensor = self.norm(self.projection(x).unflatten(1, (-1, size)))
        inputs += self.embed(tokens).unflatten(1, (-1, size))
        return inputs.mul_(self.factor)


@dataclass(frozen=True)
class LayerInput:
    """A layer's addition from its input: norm(projection(act(gate(x)) * input))."""

    gate: PackedLinear
    act: Gate
    projection: PackedLinear
    norm: RmsNorm

    @property
    def linears(self) -> list[Packed]:
        """All packed linear layers."""
        return [self.gate, self.projection]

    def add_to(self, x: torch.Tensor, given: torch.Tensor) -> None:
        """Add to x (n, width) the result for the inputs ``given`` (n, size)."""
        add(x, self.projection, torch.cat([self.gate(x).to(given.dtype), given], dim=1), self.act, self.norm)


def known_inputs(config: Any) -> bool:
    """Whether every token of the vocabulary has a row in the embedding of the layers' inputs, if there is one."""
    if not getattr(config, "hidden_size_per_layer_input", None):
        return True
    return bool(config.vocab_size_per_layer_input >= config.vocab_size)


def per_layer_inputs(
    base: Any, pack: Packing, norm: Callable[..., RmsNorm], dtype: torch.dtype
) -> PerLayerInputs | None:
    """The per-layer inputs of a transformers model, or None if it has none."""
    if not getattr(base, "hidden_size_per_layer_input", None):
        return None
    return PerLayerInputs(
        projection=pack(base.per_layer_model_projection, factor=base.per_layer_model_projection_scale),
        norm=norm(base.per_layer_projection_norm, dtype),
        embed=Embedding(base.embed_tokens_per_layer, dtype),
        factor=base.per_layer_input_scale,
    )


def layer_input(block: Any, pack: Packing, norm: Callable[..., RmsNorm], dtype: torch.dtype) -> LayerInput | None:
    """The use of its input in a transformers layer, or None if it has none."""
    if not getattr(block, "hidden_size_per_layer_input", None):
        return None
    gate, projection = pack(block.per_layer_input_gate), pack(block.per_layer_projection)
    return LayerInput(gate, Gate(block.act_fn), projection, norm(block.post_per_layer_input_norm, dtype))
