"""What the forward does between its linear layers, in the activations' dtype: RMS norms and gated activations."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import nn

from adaptive.engines.cpu.kernels import Prologue

TensorFunction = Callable[[torch.Tensor], torch.Tensor]
# Activations of a gate that the native linear layers compute, by the names of their classes.
GATES = {
    "SiLUActivation": Prologue.SILU_GATE,
    "SiLU": Prologue.SILU_GATE,
    "GELUTanh": Prologue.GELU_GATE,
    "PytorchGELUTanh": Prologue.GELU_GATE,
}


class RmsNorm:
    """x / sqrt(mean(x ** 2) + eps) * weight over rows of d numbers, in four operations: the divisor is
    hypot(|x|, sqrt(eps * d)) / sqrt(d), and sqrt(d) is in ``weight``. ``eps_sum`` is eps * d, ``eps_root`` its root."""

    def __init__(self, module: nn.Module, dtype: torch.dtype, out: torch.dtype, plus_one: bool = False) -> None:
        eps = module.variance_epsilon if hasattr(module, "variance_epsilon") else module.eps
        weight: torch.Tensor = module.weight  # type: ignore[assignment]
        size = weight.shape[-1]
        self.weight = (weight.to(dtype) + 1.0 if plus_one else weight.to(dtype)) * math.sqrt(size)
        self.eps_root = torch.tensor(math.sqrt(float(eps) * size), dtype=dtype)  # type: ignore[arg-type]
        self.eps_sum = float(eps) * size  # type: ignore[arg-type]
        self.out = out

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype != self.weight.dtype:  # the result of a bfloat16 linear layer
            x = x.to(self.weight.dtype)
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        y = torch.div(x, torch.hypot(length, self.eps_root)).mul_(self.weight)
        return y if self.out == y.dtype else y.to(self.out)


class QkNorm:
    """RMS norm of each head's queries and keys (n, heads, size), in place. ``weight`` (heads, size)."""

    def __init__(self, norm: RmsNorm, weight: torch.Tensor) -> None:
        self.eps_root, self.eps_sum = norm.eps_root, norm.eps_sum
        self.weight = weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return x.div_(torch.hypot(length, self.eps_root)).mul_(self.weight)


class Gate:
    """act(gate) * up of (n, 2 * size): gate and up in a row."""

    def __init__(self, act: nn.Module) -> None:
        self.prologue = native_gate(act)
        self.act = _without_module(act)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, -1)
        return self.act(gate).mul_(up)


def native_gate(activation: nn.Module) -> Prologue | None:
    """What the native linear layers call this activation of a gate, None for one that they do not compute."""
    return GATES.get(type(activation).__name__)


def _without_module(activation: nn.Module) -> TensorFunction:
    """The activation without its module's wrapper, where it is a single operation. Never returns its input."""
    if native_gate(activation) is Prologue.SILU_GATE:
        return torch.ops.aten.silu.default  # type: ignore[no-any-return]
    return activation


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
