"""Linear layers that read the same input, as one product.

The joined matrix takes the place of the layers' own, which keep views of it. So memory holds it once, the model's own
forward still works, and an adapter that is merged into a layer changes both.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import nn

logger = logging.getLogger("adaptive.engines")

Product = Callable[[torch.Tensor], torch.Tensor]
# Dtypes in which the kernels multiply quantised weights, and the numbers that share a scale in nf4.
SIXTEEN_BITS = {torch.bfloat16, torch.float16}
NF4_BLOCK = 64


def product(layers: Sequence[Any], use: ModuleType) -> Product:
    """The product of an input (n, inputs) with the weights of ``layers``, one after the other: (n, all outputs).
    ``use`` has the operations. Layers in formats that it does not multiply are called."""
    if all(type(layer) is nn.Linear for layer in layers):
        return _plain(layers, use)
    quantised = _int8(layers, use) or _nf4(layers, use)
    if quantised is None:
        return lambda x: _called(layers, x)
    multiply = quantised
    # An adapter beside a quantised layer is a hook of the layer.
    return lambda x: _called(layers, x) if any(layer._forward_hooks for layer in layers) else multiply(x)


def _called(layers: Sequence[Any], x: torch.Tensor) -> torch.Tensor:
    parts = [layer(x) for layer in layers]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def _plain(layers: Sequence[Any], use: ModuleType) -> Product:
    weight, bias = _joined([layer.weight for layer in layers]), _biases(layers)
    return lambda x: use.linear(x, weight, bias)  # type: ignore[no-any-return]


def _nf4(layers: Sequence[Any], use: ModuleType) -> Product | None:
    """The product with bitsandbytes' nf4 layers; None for other layers."""
    states: list[Any] = [getattr(getattr(layer, "weight", None), "quant_state", None) for layer in layers]
    if not hasattr(use, "nf4") or not all(map(_reads, layers, states)):
        return None
    packed, bias = _joined([layer.weight for layer in layers]), _biases(layers)
    scales = _joined([state.absmax for state in states])
    for state, part in zip(states, scales.split([len(state.absmax) for state in states]), strict=True):
        state.absmax = part
    code, inputs = states[0].code, layers[0].in_features
    packed, scales = packed.view(-1, inputs // 2), scales.view(-1, inputs // NF4_BLOCK)

    def multiply(x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = use.nf4(x, packed, scales, code, bias)
        return y

    shape = inputs, len(packed), packed.device
    if shape not in _PAYS:
        x = torch.ones(TRIED, inputs, dtype=layers[0].compute_dtype, device=packed.device)
        ours, theirs = _seconds(lambda: multiply(x)), _seconds(lambda: _called(layers, x))
        _PAYS[shape] = ours < theirs
        logger.debug("nf4 %d x %d: %.0f us, bitsandbytes %.0f us", inputs, len(packed), ours * 1e6, theirs * 1e6)
    return multiply if _PAYS[shape] else None


# Whether our kernel for nf4 is the faster one, by inputs, outputs and device; tried with TRIED tokens.
_PAYS: dict[tuple[int, int, torch.device], bool] = {}
TRIED, TIMES = 5, 5


@torch.inference_mode()
def _seconds(call: Callable[[], object]) -> float:
    """The least seconds of a call by the device's clock, replayed as a graph; infinite if it cannot be captured."""
    call()
    torch.cuda.synchronize()
    graph, found = torch.cuda.CUDAGraph(), list[float]()
    try:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for _ in range(TIMES):
                call()
    except RuntimeError:
        return math.inf
    for _ in range(TIMES):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) / 1e3 / TIMES)
    return min(found)


def _reads(layer: Any, state: Any) -> bool:
    """Whether the kernel reads this layer, of this 4-bit state."""
    if state is None:
        return False
    plain = state.quant_type == "nf4" and state.blocksize == NF4_BLOCK and not state.nested
    whole = layer.in_features % NF4_BLOCK == 0 and layer.weight.dtype == torch.uint8
    return bool(plain and whole and layer.compute_dtype in SIXTEEN_BITS and state.dtype == layer.compute_dtype)


def _int8(layers: Sequence[Any], use: ModuleType) -> Product | None:
    """The product with bitsandbytes' 8-bit layers, whose inputs are not rounded here; None for other layers."""
    if not hasattr(use, "int8") or any(not hasattr(layer, "state") for layer in layers):
        return None
    if any(layer.weight.dtype != torch.int8 for layer in layers):
        return None
    # bitsandbytes keeps matrix and scales beside the weight until a layer's first pass, and then in its ``state``.
    places = [layer.weight if getattr(layer.weight, "SCB", None) is not None else layer.state for layer in layers]
    if any(place.CB is None or place.SCB is None for place in places):
        return None
    weight, bias = _joined([layer.weight for layer in layers]), _biases(layers)
    scales = _joined([place.SCB for place in places])
    rows = [layer.out_features for layer in layers]
    for place, part, some in zip(places, weight.split(rows), scales.split(rows), strict=True):
        place.CB, place.SCB = part, some
    return lambda x: use.int8(x, weight, scales, bias)  # type: ignore[no-any-return]


def _biases(layers: Sequence[Any]) -> torch.Tensor | None:
    """The biases of layers that either all have one or all have none."""
    biases = [layer.bias for layer in layers if layer.bias is not None]
    return _joined(biases) if biases else None


@torch.no_grad()
def _joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """These tensors in a row, as one of which they are views from now on."""
    first, rows = tensors[0].data, [len(one) for one in tensors]
    ends = [one.data_ptr() + one.nbytes for one in tensors]
    stored = {one.untyped_storage().data_ptr() for one in tensors}
    if len(stored) == 1 and all(a == b.data_ptr() for a, b in zip(ends, tensors[1:], strict=False)):
        return first.as_strided((sum(rows), *first.shape[1:]), first.stride())  # joined before, or only one
    whole = torch.cat([one.data for one in tensors])
    for one, part in zip(tensors, whole.split(rows), strict=True):
        one.data = part
    return whole
