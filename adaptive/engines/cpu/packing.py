"""Which modules of a model are packed as one linear layer.

In: transformers' modules. Out: ``PackedLinear``, made once: those that are packed already, of the same memory and in
the same way, are found again.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from adaptive.engines.cpu.weights import PackedLinear, of_module, stacked


class Packing:
    """Packs linear layers, or finds those that are packed already."""

    def __init__(self, int8: bool, packed: Iterable[PackedLinear]) -> None:
        self.int8 = int8
        self._packed = {_memory(linear.modules): linear for linear in packed if linear.int8 == int8}

    def __call__(self, *modules: nn.Linear, order: torch.Tensor | None = None, factor: float = 1.0) -> PackedLinear:
        """Modules on the same input as one linear layer, see ``stacked``; or one, times a ``factor``."""
        found = self._packed.get(_memory(modules))
        if found is not None:
            return found
        if len(modules) == 1 and order is None:
            return of_module(modules[0], self.int8, factor)
        return stacked(modules, order, self.int8)


def _memory(modules: Iterable[nn.Module]) -> tuple[int, ...]:
    return tuple(module.get_parameter("weight").data_ptr() for module in modules)
