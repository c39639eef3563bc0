"""The parts of the forward beside its packed linear layers, in the activations' dtype: RMS norms, gated activations,
embeddings, and attention that torch has no operation for."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import nn

from adaptive.engines.cpu.kernels import Prologue

TensorFunction = Callable[[torch.Tensor], torch.Tensor]
# Activations that the native linear layers compute, by the names of their classes: with a gate, and without.
GATES = {
    "SiLUActivation": Prologue.SILU_GATE,
    "SiLU": Prologue.SILU_GATE,
    "GELUTanh": Prologue.GELU_GATE,
    "PytorchGELUTanh": Prologue.GELU_GATE,
}
ACTIVATIONS = {"ReLUSquaredActivation": Prologue.SQUARED_RELU}


class RmsNorm:
    """x / sqrt(mean(x ** 2) + eps) * weight over rows of d numbers, in four operations: the divisor is
    hypot(|x|, sqrt(eps * d)) / sqrt(d), and ``weight`` includes sqrt(d). ``eps_sum`` is eps * d, ``eps_root`` its root.
    """

    def __init__(
        self, module: nn.Module, dtype: torch.dtype, out: torch.dtype, plus_one: bool = False, size: int = 0
    ) -> None:
        """``size`` is the d of a module without a weight."""
        eps = module.variance_epsilon if hasattr(module, "variance_epsilon") else module.eps
        weight: torch.Tensor = getattr(module, "weight", None)  # type: ignore[assignment]
        weight = torch.ones(size, dtype=dtype) if weight is None else weight.to(dtype)
        size = weight.shape[-1]
        self.weight = (weight + 1.0 if plus_one else weight) * math.sqrt(size)
        self.eps_root = torch.tensor(math.sqrt(float(eps) * size), dtype=dtype)  # type: ignore[arg-type]
        self.eps_sum = float(eps) * size  # type: ignore[arg-type]
        self.out = out

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype != self.weight.dtype:  # the result of a bfloat16 linear layer
            x = x.to(self.weight.dtype)
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        y = torch.div(x, torch.hypot(length, self.eps_root)).mul_(self.weight)
        return y if self.out == y.dtype else y.to(self.out)


class HeadNorms:
    """RMS norms, in place, of tokens' queries, keys and values in a row (n, heads, size). A norm is over each head by
    itself or, if it has that many weights, over all queries or all keys of a token. Weights are in the order of the
    numbers. Keys and values may have no norm."""

    def __init__(
        self, query: RmsNorm, key: RmsNorm | None, value: RmsNorm | None, heads: int, key_heads: int, size: int
    ) -> None:
        self.query, self.key, self.value = query, key, value
        norms = [(query, heads), *((norm, key_heads) for norm in (key, value) if norm is not None)]
        if len(query.weight) == size:
            weight = torch.cat([norm.weight.expand(count, size) for norm, count in norms])
            self._parts = [(slice(0, len(weight)), weight, query.eps_root)]
        else:
            assert key is not None
            self._parts = [
                (slice(0, heads), query.weight[None], query.eps_root),
                (slice(heads, heads + key_heads), key.weight[None], key.eps_root),
            ]

    def __call__(self, x: torch.Tensor) -> None:
        for some, weight, eps_root in self._parts:
            part = x[:, some].view(len(x), *weight.shape)
            length = torch.linalg.vector_norm(part, dim=-1, keepdim=True)
            part.div_(torch.hypot(length, eps_root)).mul_(weight)


class Gate:
    """act(gate) * up of (n, 2 * size), gate and up in a row; if not ``gated``, act(up) of (n, size). ``limits``: its
    further parameters for the kernels."""

    limits: torch.Tensor | None = None

    def __init__(self, act: nn.Module, gated: bool = True) -> None:
        self.prologue = native_gate(act, gated)
        self.gated = gated
        self.act = _without_module(act)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if not self.gated:
            return self.act(x)
        gate, up = x.chunk(2, -1)
        return self.act(gate).mul_(up)


def native_gate(activation: nn.Module, gated: bool = True) -> Prologue | None:
    """The prologue of native linear layers with this activation, of a gate or not ``gated``; None if there is none."""
    return (GATES if gated else ACTIVATIONS).get(type(activation).__name__)


def _without_module(activation: nn.Module) -> TensorFunction:
    """The activation without its module's wrapper, if it is a single operation. Never returns its input."""
    if native_gate(activation) is Prologue.SILU_GATE:
        return torch.ops.aten.silu.default  # type: ignore[no-any-return]
    return activation


class Embedding:
    """Maps tokens (n,) to (n, width) in the activations' dtype, times a ``factor``, rounded as in transformers."""

    def __init__(self, module: nn.Embedding, dtype: torch.dtype, multiplier: float = 1.0) -> None:
        """``multiplier`` is the model's factor. Gemma's module has its own instead, rounded to the weights' dtype."""
        self.weight, self.dtype, self.multiplier = module.weight, dtype, multiplier
        scale = getattr(module, "embed_scale", None)
        self.factor = multiplier if scale is None else float(scale.to(self.weight.dtype))

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        x = nn.functional.embedding(tokens, self.weight)
        if self.factor != 1:
            x = x * self.factor
        return x if x.dtype == self.dtype else x.to(self.dtype)


def capped_attention(
    rows: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    cap: float,
) -> torch.Tensor:
    """Attention with scores softly capped to (-cap, cap) (Gemma 2); shapes as in torch's own."""
    scores = torch.tanh(rows @ keys.transpose(-1, -2) * (scale / cap)) * cap
    if mask is not None:
        scores += mask
    return scores.softmax(-1) @ values


def sunk_attention(
    rows: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    sinks: torch.Tensor,
) -> torch.Tensor:
    """Attention in which a sink takes a share of the softmax (gpt-oss). ``sinks`` (heads,) are the sinks' scores. The
    queries are grouped: ``rows`` (1, key heads, n * group, size)."""
    scores = rows @ keys.transpose(-1, -2) * scale
    if mask is not None:
        scores += mask
    key_heads, count = rows.shape[1:3]
    sunk = sinks.view(1, key_heads, 1, -1).expand(1, key_heads, count * key_heads // len(sinks), -1)
    whole = torch.cat([scores, sunk.reshape(1, key_heads, count, 1)], dim=-1)
    return whole.softmax(-1)[..., :-1] @ values
