"""The kernels of short passes compute what ``operations.py`` does, and products with bitsandbytes' weights.

TRITON_INTERPRET=1 pytest tests/gpu/test_cuda_kernels.py     # without a GPU, where Triton is installed
"""

from __future__ import annotations

import copy
import importlib.util
import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from adaptive.engines.cuda import operations
from adaptive.engines.cuda.linear import product
from adaptive.engines.cuda.texts import Held, Texts

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None
pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available() and not INTERPRETED, reason="needs a CUDA device, or Triton"),
    pytest.mark.xdist_group("gpu"),
]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Triton interprets no products in bfloat16.
SIXTEEN = torch.bfloat16 if DEVICE == "cuda" else torch.float16
TOLERANCE = {torch.float32: 2e-5, torch.float16: 1e-2, torch.bfloat16: 1e-2}
COUNTS = (1, 2, 5, 17) if DEVICE == "cuda" else (1, 5)
KINDS = [torch.float32, SIXTEEN]
# Heads, key heads, head size, window.
ATTENTION = [(4, 2, 16, 0), (4, 4, 64, 0), (8, 1, 32, 7), (16, 2, 64, 40), (32, 8, 128, 0)]


def near(found: torch.Tensor, right: torch.Tensor) -> None:
    assert found.shape == right.shape
    assert found.dtype == right.dtype
    assert not found.isnan().any()
    gap = (found.double() - right.double()).norm() / right.double().norm()
    assert float(gap) < TOLERANCE[right.dtype]


def random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=dtype)


@pytest.mark.parametrize("dtype", KINDS, ids=str)
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("width", [96, 1000, 4864])
def test_products_norms_and_gates(width: int, count: int, dtype: torch.dtype) -> None:
    from adaptive.engines.cuda import kernels

    torch.manual_seed(width + count)
    x, added = random(count, width, dtype=dtype), random(count, width, dtype=dtype)
    weight, bias = random(13, width, dtype=dtype), random(13, dtype=dtype)
    for given in (bias, None):
        near(kernels.linear(x, weight, given), operations.linear(x, weight, given))
    both = torch.cat([x, added], 1)
    near(kernels.gate(both), operations.gate(both))
    norm, ours, theirs = random(width, dtype=dtype), x.clone(), x.clone()
    near(kernels.add_norm(ours, added, norm, 1e-5), operations.add_norm(theirs, added, norm, 1e-5))
    near(ours, theirs)
    near(kernels.add_norm(ours, None, norm, 1e-5), operations.add_norm(theirs, None, norm, 1e-5))


class Text:
    """A cache of one layer with random keys and values, of which the first ``length`` tokens are held."""

    keeps = False

    def __init__(self, length: int, key_heads: int, size: int, dtype: torch.dtype, capacity: int = 128) -> None:
        keys, values = (random(1, key_heads, capacity, size, dtype=dtype) for _ in range(2))
        self.layers, self.length = [SimpleNamespace(keys=keys, values=values)], length

    def addresses(self) -> tuple[int, ...]:
        keys, values = self.layers[0].keys, self.layers[0].values
        return keys.data_ptr(), values.data_ptr(), keys.shape[2]


def held_of(caches: list[Text], on_device: bool) -> Held:
    """The only layer of these caches, for the kernels or for the operations."""
    held = Texts(caches[0], len(caches), torch.device(DEVICE)).layers[0]
    held.start.copy_(torch.tensor([cache.length for cache in caches]))
    held.layers = [cache.layers[0] for cache in caches]
    held.table = (
        torch.tensor([cache.addresses() for cache in caches], device=DEVICE).T.contiguous() if on_device else None
    )
    return held


@pytest.mark.parametrize("dtype", KINDS, ids=str)
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize(("heads", "key_heads", "size", "window"), ATTENTION)
def test_attention(heads: int, key_heads: int, size: int, window: int, count: int, dtype: torch.dtype) -> None:
    torch.manual_seed(heads + count)
    for lengths in ((1,), (60,), (100,), (100, 1), (7, 60, 33)):
        attention_is_right(lengths, heads, key_heads, size, window, count, dtype)


def attention_is_right(
    lengths: tuple[int, ...], heads: int, key_heads: int, size: int, window: int, count: int, dtype: torch.dtype
) -> None:
    """Compare the kernels with the operations on one text or several, which hold these numbers of tokens."""
    from adaptive.engines.cuda import kernels

    caches = [Text(length, key_heads, size, dtype, 128 + 64 * (i % 2)) for i, length in enumerate(lengths)]
    others = copy.deepcopy(caches)
    mine, theirs = held_of(caches, True), held_of(others, False)
    total = count * len(lengths)
    projected = random(total, (heads + 2 * key_heads) * size, dtype=dtype)
    angle = random(total, size // 2, dtype=dtype)
    cos, sin = (torch.cat([part, part], 1) for part in (angle.cos(), angle.sin()))
    for norms in (None, (random(size, dtype=dtype), random(size, dtype=dtype))):
        ours = kernels.rotate_and_store(projected, cos, sin, norms, 1e-6, mine)
        near(ours, operations.rotate_and_store(projected, cos, sin, norms, 1e-6, theirs))
        for one, other in zip(caches, others, strict=True):
            near(one.layers[0].keys, other.layers[0].keys)
            near(one.layers[0].values, other.layers[0].values)
    scale, same = size**-0.5, held_of(caches, False)
    near(kernels.attend(ours, mine, scale, window), operations.attend(ours, same, scale, window))


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize(("inputs", "outputs"), [(128, 40), (704, 96), (512, 41), (1024, 40)])
def test_quantised_products(inputs: int, outputs: int, count: int) -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes.functional")
    from adaptive.engines.cuda import kernels

    torch.manual_seed(inputs + count)
    x, matrix = random(count, inputs, dtype=SIXTEEN), 0.05 * random(outputs, inputs, dtype=SIXTEEN)
    packed, state = bitsandbytes.quantize_4bit(matrix, blocksize=64, quant_type="nf4", compress_statistics=False)
    meant = bitsandbytes.dequantize_4bit(packed, state)
    scales = matrix.float().abs().amax(1)
    rounded = (matrix.float() / scales[:, None] * 127).round().to(torch.int8)
    for bias in (None, random(outputs, dtype=SIXTEEN)):
        given = packed.view(-1, inputs // 2), state.absmax.view(-1, inputs // 64), state.code
        for way in kernels.WAYS:
            near(kernels.nf4(x, *given, bias, way), operations.linear(x, meant, bias))
        right = operations.linear(x, (rounded.float() * scales[:, None] / 127).to(SIXTEEN), bias)
        near(kernels.int8(x, rounded, scales, bias), right)


def layer(kind: str, inputs: int, outputs: int) -> nn.Module:
    """A linear layer with a bias, its weights as bitsandbytes holds them for nf4 and int8."""
    bitsandbytes: Any = pytest.importorskip("bitsandbytes").nn
    weight, bias = 0.05 * random(outputs, inputs, dtype=SIXTEEN), random(outputs, dtype=SIXTEEN)
    made: Any
    if kind == "nf4":
        made = bitsandbytes.Linear4bit(
            inputs, outputs, compute_dtype=SIXTEEN, compress_statistics=False, quant_type="nf4"
        )
        made.weight = bitsandbytes.Params4bit(
            weight, requires_grad=False, compress_statistics=False, quant_type="nf4", module=made
        )
    elif kind == "int8":
        made = bitsandbytes.Linear8bitLt(inputs, outputs, has_fp16_weights=False)
        made.weight = bitsandbytes.Int8Params(weight, requires_grad=False)._quantize(weight.device)
    else:
        made = nn.Linear(inputs, outputs, dtype=SIXTEEN)
        made.weight.data = weight
    made.bias.data = bias
    return made.to(DEVICE).eval().requires_grad_(False)


@torch.inference_mode()
@pytest.mark.parametrize("kind", ["16 bits", "nf4", "int8"])
def test_layers_that_read_the_same_input_are_one_product(kind: str) -> None:
    """The layers still compute what they did, and joining them once more changes nothing."""
    from adaptive.engines.cuda import kernels

    torch.manual_seed(1)
    layers, x = [layer(kind, 128, outputs) for outputs in (32, 16, 16)], random(3, 128, dtype=SIXTEEN)
    before = torch.cat([one(x.clone()) for one in layers], 1) if DEVICE == "cuda" or kind == "16 bits" else None
    first, second = product(layers, kernels), product(layers, kernels)
    found = first(x)
    assert torch.equal(second(x), found)
    if before is not None:
        gap = (found.float() - before.float()).norm() / before.float().norm()
        assert float(gap) < (0.03 if kind == "int8" else 0.01)  # bitsandbytes rounds the input of int8 layers as well
        assert torch.equal(torch.cat([one(x.clone()) for one in layers], 1), before)
    places = {one.weight.untyped_storage().data_ptr() for one in layers}
    assert len(places) == 1
    assert product([layers[0]], kernels)(x).shape == (3, 32)
    if kind != "16 bits":  # as an adapter beside a quantised layer
        handle = layers[1].register_forward_hook(lambda module, given, output: output + given[0][:, :16])
        expected = found.clone()
        expected[:, 32:48] += x[:, :16]
        assert torch.equal(first(x), expected)
        handle.remove()
        assert torch.equal(first(x), found)
