"""Linear layers that read the same input, as one product.

The joined matrix takes the place of the layers' own, which keep views of it. So memory holds it once, the model's own
forward still works, and an adapter that is merged into a layer changes both.
"""

from __future__ import annotations

import bisect
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import nn

from adaptive.engines.cuda.capture import captured
from adaptive.errors import first_line

logger = logging.getLogger("adaptive.engines")

Product = Callable[[torch.Tensor], torch.Tensor]
# Dtypes in which the kernels multiply quantised weights, and the numbers that share a scale in nf4.
SIXTEEN_BITS = {torch.bfloat16, torch.float16}
NF4_BLOCK = 64


def product(layers: Sequence[Any], use: ModuleType) -> Product:
    """The product of an input (n, inputs) with the weights of ``layers``, one after the other: (n, all outputs).
    ``use`` has the operations. Layers in formats that it does not multiply are called, and those of which some only
    have a bias."""
    if len({getattr(layer, "bias", None) is None for layer in layers}) > 1:
        return lambda x: _called(layers, x)
    if all(map(_is_plain, layers)):
        return _plain(layers, use)
    multiply = _int8(layers, use) or _nf4(layers, use)
    if multiply is None:
        return lambda x: _called(layers, x)
    return lambda x: _hooked(layers, x, multiply(x))


def _is_plain(layer: Any) -> bool:
    """Whether a layer's output is x @ weight.T + bias, with a weight of numbers."""
    linear = type(layer) is nn.Linear and "forward" not in vars(layer)
    return linear and type(layer.weight) is nn.Parameter and not layer._forward_hooks


def _hooked(layers: Sequence[Any], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """``y`` with what the layers' hooks make of it: an adapter beside a quantised layer is a hook."""
    if not any(layer._forward_hooks for layer in layers):
        return y
    parts = list(y.split([layer.out_features for layer in layers], dim=-1))
    for number, layer in enumerate(layers):
        for hook in layer._forward_hooks.values():
            found = hook(layer, (x,), parts[number])
            parts[number] = parts[number] if found is None else found
    return torch.cat(parts, dim=-1)


def _called(layers: Sequence[Product], x: torch.Tensor) -> torch.Tensor:
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

    def ours(way: int, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = use.nf4(x, packed, scales, code, bias, way)
        return y

    def theirs(x: torch.Tensor) -> torch.Tensor:
        return _called([layer.forward for layer in layers], x)  # without hooks

    if not packed.is_cuda:
        return partial(ours, 1)  # interpreted: nothing to time
    shape = inputs, len(packed), packed.device
    if shape not in _FASTEST:
        ways = {way: partial(ours, way) for way in use.WAYS}
        tried = [torch.ones(count, inputs, dtype=layers[0].compute_dtype, device=packed.device) for count in TRIED]
        _FASTEST[shape] = tuple(_fastest(ways, theirs, x) for x in tried)
        logger.debug("nf4, %d x %d: warps of the fastest kernel of ours: %s", inputs, len(packed), _FASTEST[shape])
    calls = [theirs if way is None else partial(ours, way) for way in _FASTEST[shape]]
    return lambda x: calls[bisect.bisect_left(UP_TO, len(x))](x)


# Which way of our kernel for nf4 is the fastest for each of ``TRIED`` numbers of tokens, by inputs, outputs and device;
# None if it is bitsandbytes' own. Each is tried TIMES times; ours must take less than MARGIN of the time. What is found
# for a number is used for up to UP_TO tokens, for the last for all others.
_FASTEST: dict[tuple[int, int, torch.device], tuple[int | None, ...]] = {}
TRIED, UP_TO, TIMES, MARGIN = (1, 5, 17), (1, 9), 5, 0.95


def _fastest(ours: Mapping[int, Product], theirs: Product, x: torch.Tensor) -> int | None:
    taken = {way: _seconds(call, x) for way, call in ours.items()}
    best = min(taken, key=taken.__getitem__)
    return best if taken[best] < MARGIN * _seconds(theirs, x) else None


@torch.inference_mode()
def _seconds(call: Product, x: torch.Tensor) -> float:
    """The least seconds of ``call(x)`` by the device's clock, replayed as a graph; infinite if it cannot be."""
    found = list[float]()
    with torch.cuda.device(x.device):
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        try:
            call(x)  # compiles kernels, and allocates
            torch.cuda.synchronize()
            with captured(graph, stream):
                for _ in range(TIMES):
                    call(x)
            for _ in range(TIMES):
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                graph.replay()
                end.record()
                end.synchronize()
                found.append(begin.elapsed_time(end) / 1e3 / TIMES)
        except Exception as error:  # Triton's compilers raise many kinds
            logger.debug("a product in nf4 cannot be captured: %s", first_line(error))
            return math.inf
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
