"""Our own linear layers and attention equal torch's, with every instruction set of this processor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from adaptive.engines.cpu import kernels
from adaptive.engines.cpu.feed_forward import ClampedGate
from adaptive.engines.cpu.kernels import (
    Attention,
    NativeLinear,
    Prologue,
    built,
    library,
    packed,
    problem,
    runnable,
)
from adaptive.engines.hf.engine import TransformersEngine
from adaptive.engines.load import sampling_kernels
from adaptive.errors import AdaptiveError
from adaptive.pair import load_pair
from adaptive.sampling import transform_logits
from adaptive.settings import load_settings
from adaptive.tokens import on_one_thread
from adaptive.types import SamplingParams


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> object:
    given = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(given)


def clear() -> None:
    """Forget which kernels were found, so that they are looked up again."""
    library.cache_clear()
    problem.cache_clear()


def same(ours: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal to the float64 result but for the rounding of long sums, which is relative to the largest of them."""
    assert ours.dtype == torch.float32
    assert (ours - expected).abs().max() <= 1e-5 * expected.abs().max() + 1e-30


def test_the_best_library_that_was_built_is_used() -> None:
    usable = [name for name in runnable() if built(name)]
    found = library()
    if not usable:
        assert found is None
        return
    assert found is not None
    assert found.name == usable[0]


@pytest.mark.thorough
def test_it_is_said_where_they_were_not_built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    settings = load_settings({"dtype": "float32", "draft_quantize": "none"})
    said = "pip install" in " ".join(load_pair(settings).warnings)
    assert said == bool(runnable() and library() is None)
    monkeypatch.setattr(kernels, "NATIVE", tmp_path)
    clear()
    try:
        pair = load_pair(settings)
        assert ("pip install" in " ".join(pair.warnings)) == bool(runnable())
        # Decoding continues with torch's layers.
        assert isinstance(pair.target, TransformersEngine)
        assert pair.target.cpu_forward is None or not pair.target.cpu_forward.plan.lm_head.native
        assert pair.target.sequence().extend([5, 6, 7], 1).shape == (1, pair.target.vocab_size)
    finally:
        clear()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 1), (7, 5), (64, 32), (100, 33), (129, 1111), (320, 2050)])
def test_linear_layers_equal_torch(shape: tuple[int, int], dtype: torch.dtype, instructions: str, threads: int) -> None:
    torch.manual_seed(0)
    weight, bias = torch.randn(shape).to(dtype), torch.randn(shape[0])
    ours = NativeLinear(weight, bias)
    for rows in (1, 2, 3, 4, 5, 6, 7, 13, 40):
        x, out = torch.randn(rows, shape[1]), torch.randn(rows, shape[0])
        # bfloat16 represents these inputs exactly; another test covers rounding.
        x = x.bfloat16().float()
        expected = x.double() @ weight.double().T + bias
        same(ours(x), expected)
        same(ours(x, out.clone(), add=True), out + expected)
    same(NativeLinear(weight, bias, factor=0.25)(x, out.clone(), add=True), out + 0.25 * expected)


@pytest.mark.parametrize("shape", [(1, 1), (7, 5), (64, 32), (100, 33), (129, 1111), (320, 2050)])
def test_int8_linear_layers(shape: tuple[int, int], instructions: str, threads: int) -> None:
    torch.manual_seed(0)
    weight = torch.randint(-127, 128, shape, dtype=torch.int8)
    scales, bias = torch.rand(shape[0]) + 0.5, torch.randn(shape[0])
    ours = NativeLinear(weight, bias, scales)
    for rows in (1, 2, 3, 4, 5, 6, 7, 13, 40):
        # Inputs are whole multiples of a row's step, so that nothing is rounded.
        steps = torch.randint(-127, 128, (rows, shape[1]))
        steps[:, 0] = 127
        factors = torch.rand(rows, 1, dtype=torch.float64) + 0.01
        expected = (steps * factors) @ (weight.double().T * scales) + bias
        same(ours((steps * factors).float()), expected)
    # Other inputs are rounded to steps of 1/127 of the largest in a row.
    x = torch.randn(5, shape[1])
    exact = x.double() @ (weight.double().T * scales) + bias
    bound = 0.5 * x.abs().amax(1, keepdim=True) / 127 * (weight.double().abs().sum(1) * scales) + 1e-3
    assert ((ours(x) - exact).abs() <= bound).all()
    assert torch.isfinite(ours(torch.zeros(2, shape[1]))).all()


def test_every_top_k_that_is_taken_can_be_sampled_with() -> None:
    with pytest.raises(AdaptiveError, match="top_k is 2147483648"):
        SamplingParams(temperature=0.7, top_k=2**31)
    kernels, logits = sampling_kernels(), torch.randn(1, 50)
    if kernels is None:
        pytest.skip("the kernels are not built, or not for this machine")
    probs = kernels.probabilities(logits, SamplingParams(temperature=1.0, top_k=2**31 - 1), torch.empty(1, 50))
    torch.testing.assert_close(probs, logits.softmax(-1))


@pytest.mark.parametrize("number", [torch.nan, -torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("width", [1, 5, 32, 33, 1111])
def test_int8_layers_of_a_row_that_is_not_numbers_give_none(width: int, number: float, instructions: str) -> None:
    """Else the text would go on from a number that nothing computed."""
    torch.manual_seed(0)
    ours = NativeLinear(torch.randint(-127, 128, (40, width), dtype=torch.int8), None, torch.rand(40) + 0.5)
    x = torch.randn(3, width)
    right = ours(x)
    for place in {0, width // 2, width - 1}:
        broken = x.clone()
        broken[1, place] = number
        found = ours(broken)
        assert found[1].isnan().all()
        assert torch.equal(found[::2], right[::2])


@pytest.mark.parametrize("width", [1, 15, 48, 1025])
def test_prologues(width: int, instructions: str) -> None:
    torch.manual_seed(0)
    weight, norm = torch.randn(30, width), torch.rand(width) + 0.5
    ours = NativeLinear(weight, None)
    for rows in (1, 3, 9):
        x = torch.randn(rows, width)
        normed = x.double() / (x.double().square().sum(-1, keepdim=True) + 0.25).sqrt() * norm
        same(ours(x, prologue=Prologue.RMS_NORM, norm=norm, eps=0.25), normed @ weight.double().T)
        # Large inputs too: beyond 87 the exponential overflows float32.
        for factor in (1, 10, 100):
            x = factor * torch.randn(rows, 2 * width)
            gate, up = x.double().chunk(2, -1)
            expected = (nn.functional.silu(gate) * up) @ weight.double().T
            same(ours(x, prologue=Prologue.SILU_GATE), expected)
            expected = (nn.functional.gelu(gate, approximate="tanh") * up) @ weight.double().T
            same(ours(x, prologue=Prologue.GELU_GATE), expected)
            expected = gate.relu().square() @ weight.double().T
            same(ours(x[:, :width].contiguous(), prologue=Prologue.SQUARED_RELU), expected)


@pytest.mark.parametrize("number", [torch.nan, -torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("width", [1, 15, 48])
def test_prologues_of_numbers_that_are_not_finite_are_torchs(width: int, number: float, instructions: str) -> None:
    """Else a limit would replace what nothing computed, and the text would go on from that."""
    torch.manual_seed(0)
    ours, clamped = NativeLinear(torch.eye(width), None), ClampedGate(1.7, 7.0)
    for place in {0, width // 2, width - 1, width, 2 * width - 1}:
        x = torch.randn(3, 2 * width)
        x[1, place] = number
        half = x[:, place // width * width :][:, :width].contiguous()
        for found, expected in (
            (ours(half, prologue=Prologue.SQUARED_RELU), half.double().relu().square()),
            (ours(x, prologue=Prologue.CLAMPED_GATE, norm=clamped.limits), clamped(x.double())),
        ):
            same(found[::2], expected[::2])
            if expected[1].isfinite().all():
                same(found[1], expected[1])
            else:  # the product spreads it over the whole row
                assert not found[1].isfinite().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_does_not_depend_on_those_beside_it(dtype: torch.dtype, instructions: str, threads: int) -> None:
    torch.manual_seed(0)
    ours = NativeLinear(torch.randn(200, 1500).to(dtype), torch.randn(200))
    norm = torch.rand(1500)
    x = torch.randn(70, 1500)
    together = ours(x, prologue=Prologue.RMS_NORM, norm=norm, eps=1.0)
    for rows in (1, 2, 5, 6, 7, 16, 17, 19, 32, 33, 48, 69):
        assert torch.equal(ours(x[:rows], prologue=Prologue.RMS_NORM, norm=norm, eps=1.0), together[:rows])


def test_the_layout_holds_every_weight_once(instructions: str, threads: int) -> None:
    found = kernels.library()
    assert found is not None
    panel = found.panel
    torch.manual_seed(0)
    for rows, inputs in ((1, 1), (panel, 32), (2 * panel + 3, 70), (panel - 1, 131)):
        for dtype, step in ((torch.float32, 1), (torch.bfloat16, 2), (torch.int8, 4)):
            weight = torch.randint(-99, 100, (rows, inputs)).to(dtype)
            filled = found.module.filled_to(dtype.itemsize)
            groups = packed(weight, found).view(dtype)
            groups = groups.view(-(-rows // panel), -(-inputs // filled) * filled // step, panel, step)
            plain = groups.permute(0, 2, 1, 3).reshape(-(-rows // panel) * panel, -1)
            assert plain[:rows, :inputs].equal(weight)
            assert plain.ne(0).sum() == weight.ne(0).sum()


def write(
    qkv: torch.Tensor, cos_sin: torch.Tensor, weight: torch.Tensor, cache: torch.Tensor, start: int, heads: int
) -> torch.Tensor:
    """Write the tokens' rotated keys and their values into ``cache``; returns the rotated queries (n, heads, size)."""
    _, key_heads, _, size = cache.shape
    parts = qkv.view(len(qkv), -1, size)
    pairs = torch.view_as_complex(parts.view(len(qkv), -1, size // 2, 2))
    by_keys, by_queries = (
        torch.view_as_real(pairs * turn[:, None]).flatten(2) for turn in torch.view_as_complex(cos_sin).unbind(1)
    )
    cache[0, :, start : start + len(qkv)] = by_keys[:, heads : heads + key_heads].transpose(0, 1)
    cache[1, :, start : start + len(qkv)] = parts[:, heads + key_heads :].transpose(0, 1)
    return by_queries * weight


def attended(queries: torch.Tensor, cache: torch.Tensor, start: int, window: int, scale: float) -> torch.Tensor:
    """The attention of rotated queries (n, heads, size)."""
    count, heads, _ = queries.shape
    keys, values = cache.repeat_interleave(heads // cache.shape[1], 1)
    back = start + torch.arange(count)[:, None] - torch.arange(keys.shape[1])  # how far each key is behind its query
    hidden = (back < 0) | (back >= window) if window else back < 0
    scores = (queries.transpose(0, 1) @ keys.transpose(1, 2) * scale).masked_fill(hidden, -torch.inf)
    return (scores.softmax(-1) @ values).transpose(0, 1).flatten(1)


def plain(cache: torch.Tensor) -> torch.Tensor:
    """A cache (2, key heads, capacity, size) whose keys lie in panels, converted to one whose keys lie like the
    values."""
    found = kernels.library()
    assert found is not None
    _, key_heads, capacity, size = cache.shape
    panels = cache[0].view(key_heads, capacity // found.panel, size, found.panel)
    return torch.stack([panels.transpose(2, 3).reshape(key_heads, capacity, size), cache[1]])


@pytest.mark.parametrize("size", [16, 48, 64, 80, 112, 128, 256])
@pytest.mark.parametrize(("heads", "key_heads"), [(4, 4), (4, 2), (3, 1)])
@pytest.mark.parametrize("half", [False, True])
def test_attention_equals_torch(
    size: int, heads: int, key_heads: int, half: bool, instructions: str, threads: int
) -> None:
    if not Attention.supports(size, torch.float32, torch.device("cpu")):
        pytest.fail("this size is to be supported")
    torch.manual_seed(0)
    for start, count, window in (
        (0, 1, 0),
        (0, 5, 0),
        (150, 1, 0),
        (150, 7, 0),
        (150, 7, 20),
        (3, 9, 4),
        (150, 7, 1),
        (3, 9, 2),
        (64, 32, 64),
    ):
        with on_one_thread():
            qkv = torch.randn(count, (heads + 2 * key_heads) * size)
            angles, weight = torch.randn(count, 2, size // 2), torch.rand(size) + 0.5
            cos_sin = torch.stack([angles.cos(), angles.sin()], -1)
            cache = torch.randn(2, key_heads, 224, size, dtype=torch.bfloat16 if half else torch.float32)
            theirs = plain(cache).double()
            queries = write(qkv.double(), cos_sin.double(), weight.double(), theirs, start, heads)
            out = torch.full((count, heads * size), torch.nan)
        layout: dict[str, Any] = {"stride": 2 * size, "query_rope": size, "half": half}
        ours = Attention(heads, key_heads, size, window=window, scale=0.3, query_weight=weight, **layout)
        ours(qkv, cos_sin.data_ptr(), cache.data_ptr(), 224, start, out)
        with on_one_thread():
            written = plain(cache)
            if half:  # numbers that lie between two of bfloat16 go to the nearer one
                assert (written.double() - theirs).abs().le(theirs.abs() * (2**-8 + 1e-6) + 1e-6).all()
            else:
                same(written, theirs)
            same(out, attended(queries[:, :heads], written.double(), start, window, 0.3))


def test_a_cache_of_bfloat16_is_rounded_as_torch_does(instructions: str) -> None:
    ours = Attention(1, 1, 16, stride=16, scale=0.3, half=True)
    size, tokens = 16, 64
    values = torch.randn(tokens, size) * torch.logspace(-30, 30, tokens)[:, None]
    ties = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -(1 + 2**-8), float("inf")])
    values[:4] = ties[:, None]
    values[4] = torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(torch.float32)  # NaN of other bits than usual
    qkv = torch.stack([torch.zeros(tokens, size), values, values], 1).flatten(1)
    cos_sin = torch.tensor([1.0, 0.0]).repeat(tokens, size // 2)  # turns nothing
    cache = torch.zeros(2, 1, tokens, size, dtype=torch.bfloat16)
    out = torch.empty(tokens, size)
    ours(qkv, cos_sin.data_ptr(), cache.data_ptr(), tokens, 0, out)
    keys, rounded = plain(cache)
    assert torch.equal(rounded[0].view(torch.int16)[5:], values.bfloat16().view(torch.int16)[5:])
    assert torch.equal(rounded[0, :4], values[:4].bfloat16())
    assert rounded[0, 4].isnan().all()
    assert torch.equal(keys[0, 5:], rounded[0, 5:])
    assert torch.equal(keys[0, :3], rounded[0, :3])  # infinity times the sine of 0 is NaN


def test_attention_hides_no_broken_number(instructions: str) -> None:
    ours = Attention(2, 2, 16, stride=16, scale=0.3)
    cos_sin, out = torch.ones(2, 8, 2), torch.empty(2, 32)
    for part in (0, 1, 2):  # queries, keys, values
        qkv, cache = torch.randn(2, 3, 2, 16), torch.randn(2, 2, 64, 16)
        qkv[0, part, 1] = torch.nan
        ours(qkv.view(2, 96), cos_sin.data_ptr(), cache.data_ptr(), 64, 20, out)
        assert out[0, 16:].isnan().all()
        assert not out[0, :16].isnan().any()


def test_what_is_not_supported_is_left_to_torch(instructions: str) -> None:
    cpu = torch.device("cpu")
    assert not Attention.supports(20, torch.float32, cpu)
    assert not Attention.supports(64, torch.float64, cpu)
    assert not kernels.multiplies(torch.float16, cpu)
    assert not kernels.multiplies(torch.bfloat16, torch.device("meta"))


@pytest.mark.parametrize("count", [1, 15, 256, 4097, 151936])
def test_softmax_equals_torch(count: int, instructions: str) -> None:
    found = sampling_kernels()
    assert found is not None
    torch.manual_seed(0)
    logits = 5 * torch.randn(3, count)
    logits[1, count // 2 :] += 60
    out = torch.empty_like(logits)
    for factor in (0.3, 1.0, 7.0):
        expected = (logits.double() * factor).softmax(-1)
        assert (found.probabilities(logits, SamplingParams(1 / factor), out) - expected).abs().max() < 1e-6
        assert (out.double().sum(-1) - 1).abs().max() < 1e-5
    logits[2, count // 3 + 1 :] = -torch.inf
    assert found.probabilities(logits, SamplingParams(1.0), out)[2, count // 3 + 1 :].eq(0).all()
    assert (out[2] - logits[2].double().softmax(-1)).abs().max() < 1e-6


@pytest.mark.parametrize("count", [1, 40, 300])
@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_what_is_no_number_stays_none(number: float, count: int, instructions: str) -> None:
    found = sampling_kernels()
    assert found is not None
    for place in {0, count // 2, count - 1}:
        logits = torch.randn(2, count)
        logits[0, place] = number
        out = found.probabilities(logits, SamplingParams(1.0), torch.empty_like(logits))
        assert out[0].isnan().all()
        assert not out[1].isnan().any()
        assert found.draw(out[0].numpy(), 0.5) is None
    nothing = torch.full((1, count), -torch.inf)
    assert found.probabilities(nothing, SamplingParams(1.0), torch.empty(1, count)).isnan().all()


@pytest.mark.parametrize("count", [1, 7, 300, 5000, 151936])
def test_what_is_cut_is_what_transformers_cuts(count: int, instructions: str) -> None:
    found = sampling_kernels()
    assert found is not None
    torch.manual_seed(0)
    for spread in (0.0, 0.3, 3.0, 12.0):
        logits = spread * torch.randn(2, count)
        logits[1, : count // 3] = -torch.inf
        for top_k, top_p, min_p in (
            *((k, 1.0, 0.0) for k in (1, 20, 700, 10**6)),
            *((0, p, 0.0) for p in (1e-6, 0.5, 0.95, 0.9999)),
            *((0, 1.0, m) for m in (0.05, 0.7, 1.0)),
            (40, 0.9, 0.05),
        ):
            params = SamplingParams(temperature=0.7, top_k=top_k, top_p=top_p, min_p=min_p)
            expected = transform_logits(logits.double(), params).softmax(-1)
            out = found.probabilities(logits, params, torch.empty_like(logits))
            assert (out.double().sum(-1) - 1).abs().max() < 1e-5
            for given, ours, theirs in zip(logits, out, expected, strict=True):
                # Any of several tokens tied at the cut may stay, and rounding may keep a few more or fewer: where the
                # last 1e-4 of the mass are cut, 1e-7 of it is up to 1.4e-3 in logits with these random numbers.
                kept, wanted = ours > 1e-30, theirs > 1e-30
                assert (given[kept != wanted] - given[wanted].min()).abs().le(3e-3).all()
                more = abs(int(kept.sum()) - int(wanted.sum()))
                assert more <= 1 + int(wanted.sum()) // 1000
                bound = 1e-6 + (1e-4 + more / int(wanted.sum())) * theirs.max()
                assert (ours - theirs).abs()[kept == wanted].le(bound).all()


@pytest.mark.parametrize("count", [1, 7, 256, 257, 5000])
def test_draws_are_the_inverse_of_the_mass(count: int, instructions: str) -> None:
    found = sampling_kernels()
    assert found is not None
    rng = np.random.default_rng(0)
    for trial in range(60):
        probs = rng.random(count, np.float32) * (rng.random(count) < (1.0 if trial % 2 else 0.05))
        less = rng.random(count - count // 4 * (trial % 3 == 0), np.float32) if trial % 4 else None
        left = probs.astype(np.float64)
        if less is not None:
            left[: len(less)] = np.maximum(left[: len(less)] - less, 0)
        share = float(rng.random()) if trial % 5 else 1 - 2.0**-40
        token = found.draw(probs.astype(np.float32), share, less)
        if not left.sum() > 0:
            assert token is None
            continue
        assert token is not None
        assert left[token] > 0
        mass = np.concatenate([[0], left.cumsum()]) / left.sum()
        assert mass[token] - 1e-5 <= share <= mass[token + 1] + 1e-5
    assert found.draw(np.zeros(count, np.float32), 0.5) is None
    one = np.zeros(count, np.float32)
    one[count // 2] = 1e-20
    assert {found.draw(one, share) for share in (0.0, 0.5, 1 - 2.0**-40)} == {count // 2}
    assert found.draw(one, 0.5, one) is None
