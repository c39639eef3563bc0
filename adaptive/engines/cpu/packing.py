"""Packs a model's modules as linear layers, several together or the experts within one parameter.

In: transformers' modules. Out: ``PackedLinear`` and ``PackedExperts``. Layers that were already packed from the same
memory in the same way are reused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from adaptive.engines.cpu.weights import PackedLinear, Weights, of_module, stacked


class PackedExperts:
    """The experts that one transformers ``module`` holds in a few parameters: for each expert ``up`` (gate and up
    projection in a row) and ``down``. Packing one at a time needs the memory of one expert beside the result."""

    def __init__(self, module: nn.Module, int8: bool) -> None:
        self.modules, self.int8 = (module,), int8
        read = _transposed if hasattr(module, "gate_up_proj_bias") else _as_it_is
        count = len(module.get_parameter("down_proj"))
        self.up, self.down = (
            [PackedLinear(self.modules, read(module, name, number), int8) for number in range(count)]
            for name in ("gate_up_proj", "down_proj")
        )

    def refresh(self) -> None:
        """Read the module's weights again."""
        for linear in (*self.up, *self.down):
            linear.refresh()

    @property
    def native(self) -> bool:
        """Whether the native kernels compute the experts."""
        return self.down[0].native


Packed = PackedLinear | PackedExperts


def _as_it_is(module: nn.Module, name: str, number: int) -> Callable[[], Weights]:
    return lambda: (module.get_parameter(name)[number], None)


def _transposed(module: nn.Module, name: str, number: int) -> Callable[[], Weights]:
    """For gpt-oss: weights are (in, out), with biases; outputs of gate and up projection alternate."""

    def assemble() -> Weights:
        weight, bias = module.get_parameter(name)[number].T, module.get_parameter(f"{name}_bias")[number]
        if name == "down_proj":
            return weight.contiguous(), bias
        order = torch.arange(len(weight)).view(-1, 2).T.reshape(-1)
        return weight[order], bias[order]

    return assemble


class Packing:
    """Packs linear layers, or returns those that are already in ``packed``, or in ``shared``, whose layers are used
    with the weights that they have, int8 or not."""

    def __init__(self, int8: bool, packed: Iterable[Packed] = (), shared: Iterable[Packed] = ()) -> None:
        self.int8 = int8
        self._packed = {(kind, _memory(linear.modules)): linear for linear in shared for kind in (False, True)}
        self._packed |= {(linear.int8, _memory(linear.modules)): linear for linear in packed}

    def __call__(self, *modules: nn.Linear, order: torch.Tensor | None = None, factor: float = 1.0) -> PackedLinear:
        """Several modules on the same input as one linear layer, see ``stacked``, or one module times a ``factor``."""
        found = self._packed.get((self.int8, _memory(modules)))
        if isinstance(found, PackedLinear):
            return found
        if len(modules) == 1 and order is None:
            return of_module(modules[0], self.int8, factor)
        assert factor == 1
        return stacked(modules, order, self.int8)

    def exact(self, *modules: nn.Module) -> PackedLinear:
        """A mixture's router, see ``exact_router``."""
        found = self._packed.get((False, _memory(modules)))
        return found if isinstance(found, PackedLinear) else exact_router(modules)

    def experts(self, module: nn.Module) -> PackedExperts:
        """A mixture's experts."""
        found = self._packed.get((self.int8, _memory((module,))))
        return found if isinstance(found, PackedExperts) else PackedExperts(module, self.int8)


def _memory(modules: Iterable[nn.Module]) -> tuple[int, ...]:
    """The address of each module's first parameter, in a linear layer its weight."""
    return tuple(next(module.parameters(recurse=False)).data_ptr() for module in modules)


def exact_router(modules: tuple[Any, ...]) -> PackedLinear:
    """Modules on the same input as one linear layer in float32 (float64 for a float64 model), never int8."""

    def assemble() -> Weights:
        weight = torch.cat([module.weight for module in modules])
        biases = [getattr(module, "bias", None) for module in modules]
        bias = None
        if any(one is not None for one in biases):
            parts = zip(modules, biases, strict=True)
            bias = torch.cat([m.weight.new_zeros(len(m.weight)) if one is None else one for m, one in parts])
        dtype = torch.promote_types(weight.dtype, torch.float32)
        return weight.to(dtype), None if bias is None else bias.to(dtype)

    return PackedLinear(modules, assemble)
