"""What the lean forward does between its products, in the activations' dtype: norms and activations."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import nn

from adaptive.engines.cpu.kernels import First

Map = Callable[[torch.Tensor], torch.Tensor]
# Gates that our own products compute, by the names of their activations' classes.
GATES = {
    "SiLUActivation": First.SILU_GATE,
    "SiLU": First.SILU_GATE,
    "GELUTanh": First.GELU_GATE,
    "PytorchGELUTanh": First.GELU_GATE,
}


class RmsNorm:
    """x / sqrt(mean(x ** 2) + eps) * weight, in four operations: |x| and sqrt(eps * d) are the sides of a right
    triangle whose hypotenuse, over sqrt(d), is the divisor. ``square`` is the second side's."""

    def __init__(self, module: nn.Module, dtype: torch.dtype, out: torch.dtype, plus_one: bool = False) -> None:
        eps = module.eps if plus_one else module.variance_epsilon
        weight: torch.Tensor = module.weight  # type: ignore[assignment]
        size = weight.shape[-1]
        self.weight = (weight.to(dtype) + 1.0 if plus_one else weight.to(dtype)) * math.sqrt(size)
        self.side = torch.tensor(math.sqrt(float(eps) * size), dtype=dtype)  # type: ignore[arg-type]
        self.square = float(eps) * size  # type: ignore[arg-type]
        self.out = out

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype != self.weight.dtype:  # what a bfloat16 product gave
            x = x.to(self.weight.dtype)
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        y = torch.div(x, torch.hypot(length, self.side)).mul_(self.weight)
        return y if self.out == y.dtype else y.to(self.out)


class HeadNorm:
    """RMS norm of each head's queries and keys (n, heads, size), in place. ``weight`` (heads, size)."""

    def __init__(self, norm: RmsNorm, weight: torch.Tensor) -> None:
        self.side, self.square = norm.side, norm.square
        self.weight = weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return x.div_(torch.hypot(length, self.side)).mul_(self.weight)


class LayerNorm:
    """A layer norm, in float32 wherever the weights are."""

    def __init__(self, module: nn.LayerNorm, dtype: torch.dtype, out: torch.dtype) -> None:
        self.shape, self.eps, self.out = module.normalized_shape, module.eps, out
        self.weight = None if module.weight is None else module.weight.to(dtype)
        self.bias = None if module.bias is None else module.bias.to(dtype)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.layer_norm(x, self.shape, self.weight, self.bias, self.eps)
        return y if self.out == y.dtype else y.to(self.out)


class Gate:
    """act(gate) * up of (n, 2 * size): gate and up in a row."""

    def __init__(self, act: nn.Module) -> None:
        self.first = GATES.get(type(act).__name__)
        self.act = activation(act)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, -1)
        return self.act(gate).mul_(up)


def activation(module: nn.Module) -> Map:
    """The activation without its module's wrapper, where it is a single operation. Never returns its input."""
    if GATES.get(type(module).__name__) is First.SILU_GATE:
        return torch.ops.aten.silu.default  # type: ignore[no-any-return]
    return module
