"""Linear layers whose weights are packed for the processor once, instead of at every call.

On a CPU, torch's own ``linear`` passes oneDNN a plain weight, which oneDNN reorders in every call. The copy made here
already has the order of the GEMM that reads it: the native one (``kernels.py``) where it was built, else oneDNN's. The
module's own weight stays as it is; adapters merge into it, and ``refresh`` updates the copy.

The copy may also be int8, for a draft: it has half the bytes of bfloat16 and multiplies integers. Its rounding can cost
an accepted token, but nothing else.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from adaptive.engines.cpu.kernels import NativeLinear, Prologue, multiplies
from adaptive.engines.cpu.layers import Gate, RmsNorm, TensorFunction

# Rows (tokens) for which oneDNN chooses the packed order: a verification of a few drafted tokens. One row and a long
# prompt run at full speed in this order; the order for one row is half as fast at five.
PACKED_ROWS = 4

# Rows of a weight that are rounded at once. Too high: a vocabulary projection takes up to four times its memory for a
# moment. Below this value nothing more is gained.
ROUNDED_ROWS = 4096

Weights = tuple[torch.Tensor, torch.Tensor | None]


def packs(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether oneDNN can prepack weights of this dtype on this device."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if not hasattr(torch.ops.mkldnn, "_reorder_linear_weight") or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    if dtype == torch.bfloat16:
        supported: bool = torch.ops.mkldnn._is_mkldnn_bf16_supported()
        return supported
    return dtype == torch.float32


def packs_int8(device: torch.device) -> bool:
    """Whether linear layers of int8 weights, their inputs quantised on the fly, run on this device."""
    return multiplies(torch.int8, device) or (
        device.type == "cpu"
        and torch.backends.quantized.engine in ("x86", "fbgemm")
        and hasattr(torch.ops.quantized, "linear_dynamic")
    )


def fast_int8() -> bool:
    """Whether int8 is faster for a draft on this processor: with the native kernels, or with torch's if the processor
    multiplies int8 vectors in one instruction."""
    return multiplies(torch.int8, torch.device("cpu")) or has_vnni()


def has_vnni() -> bool:
    """Whether this processor multiplies int8 vectors in one instruction."""
    supported: bool = torch.cpu._is_vnni_supported() if hasattr(torch.cpu, "_is_vnni_supported") else False
    return supported


class PackedLinear:
    """One or several linear modules as a single linear layer, prepacked where the machine supports it.

    ``assemble`` returns the weight (out, in) and bias (out,) or None from the modules' current weights; ``modules`` are
    the modules that it reads, for following their changes. ``int8`` keeps the weight as int8, with a scale for each
    output. ``factor`` multiplies the results. Results are float32 with ``int8`` or if ``native``, else in the weight's
    dtype, to which inputs are then rounded.
    """

    def __init__(
        self,
        modules: tuple[nn.Module, ...],
        assemble: Callable[[], Weights],
        int8: bool = False,
        factor: float = 1.0,
    ) -> None:
        self.modules = modules
        self.int8 = int8
        self.factor = factor
        self._assemble = assemble
        self.refresh()

    @torch.inference_mode()
    def refresh(self) -> None:
        """Read the modules' weights again."""
        weight, self.bias = self._assemble()
        self.nbytes, (self.outputs, self.inputs), self.dtype = weight.nbytes, weight.shape, weight.dtype
        self._reordered: torch.Tensor | None = None
        self.kernel: NativeLinear | None = None
        if self.int8 and multiplies(torch.int8, weight.device):
            self.kernel = NativeLinear(*_rounded(weight, self.bias), self.factor)
        elif self.int8:
            self._weight = _int8(weight, self.bias)
            self._narrow = not has_vnni()  # without VNNI sums of pairs could overflow, so inputs use seven bits
        elif multiplies(weight.dtype, weight.device):
            self.kernel = NativeLinear(weight, self.bias, factor=self.factor)
        elif packs(weight.dtype, weight.device):
            self._reordered = _reordered(weight)
        else:
            self._weight = weight

    @property
    def native(self) -> bool:
        """Whether the native kernels compute the layer."""
        return self.kernel is not None

    def __call__(
        self,
        x: torch.Tensor,
        prologue: TensorFunction | None = None,
        out: torch.Tensor | None = None,
        add: bool = False,
    ) -> torch.Tensor:
        """Map ``prologue(x)`` (rows, in) to (rows, out): a new tensor, or written into ``out``, or added to it."""
        if self.kernel is not None:
            if isinstance(prologue, RmsNorm):
                return self.kernel(x, out, add, Prologue.RMS_NORM, prologue.weight, prologue.eps_sum)
            if isinstance(prologue, Gate) and prologue.prologue is not None:
                return self.kernel(x, out, add, prologue.prologue, prologue.limits)
            return self.kernel(x if prologue is None else prologue(x), out, add)
        if prologue is not None:
            x = prologue(x)
        if self.int8:
            y = torch.ops.quantized.linear_dynamic(x, self._weight, self._narrow)
        elif self._reordered is not None:
            x = x.to(self._reordered.dtype)
            y = torch.ops.mkldnn._linear_pointwise(x, self._reordered, self.bias, "none", [], "")
        else:
            y = nn.functional.linear(x.to(self._weight.dtype), self._weight, self.bias)
        if self.factor != 1:
            y *= self.factor
        if out is None:
            result: torch.Tensor = y
            return result
        return out.add_(y) if add else out.copy_(y)


def native_linear(linear: PackedLinear) -> Any:
    """The kernels' object of a native linear layer as it is now."""
    assert linear.kernel is not None
    return linear.kernel.native


@torch.inference_mode()
def _reordered(weight: torch.Tensor) -> torch.Tensor:
    reordered: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), PACKED_ROWS)
    return reordered


def _rounded(weight: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Weight (out, in) as int8, its bias, and the scales (out,) of its outputs."""
    whole, scales = torch.empty_like(weight, dtype=torch.int8), weight.new_empty(len(weight), dtype=torch.float32)
    for begin in range(0, len(weight), ROUNDED_ROWS):
        some = slice(begin, begin + ROUNDED_ROWS)
        rows = weight[some].float()
        # For a row of zeros any positive scale will do.
        scales[some] = (rows.abs().amax(1) / 127).clamp_(min=1e-12)
        whole[some] = (rows / scales[some, None]).round_()
    return whole, bias, scales


def _int8(weight: torch.Tensor, bias: torch.Tensor | None) -> Any:
    """A weight and bias in the order of torch's int8 linear layer."""
    whole, _, scales = _rounded(weight, bias)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the warning that this function will move to another package
        given = torch._make_per_channel_quantized_tensor(whole, scales, torch.zeros(len(whole), dtype=torch.long), 0)
    return torch.ops.quantized.linear_prepack(given, None if bias is None else bias.float())


def of_module(module: nn.Linear, int8: bool = False, factor: float = 1.0) -> PackedLinear:
    """One linear module, times a factor."""
    return PackedLinear((module,), lambda: (module.weight, module.bias), int8, factor)


def stacked(modules: tuple[nn.Linear, ...], order: torch.Tensor | None = None, int8: bool = False) -> PackedLinear:
    """Several modules on the same input as one linear layer, their outputs in a row.

    ``order`` (out,) int64 permutes the outputs: output i is output ``order[i]`` of the modules.
    """

    def assemble() -> Weights:
        weight = torch.cat([module.weight for module in modules])
        bias = None
        if any(module.bias is not None for module in modules):
            bias = torch.cat([m.weight.new_zeros(m.out_features) if m.bias is None else m.bias for m in modules])
        if order is not None:
            weight, bias = weight[order], None if bias is None else bias[order]
        return weight, bias

    return PackedLinear(modules, assemble, int8)
