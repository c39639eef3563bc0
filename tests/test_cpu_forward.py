"""Our own forward on a CPU computes what transformers computes, for every supported architecture."""

from __future__ import annotations

import copy
import functools
import re
from typing import Any

import pytest
import torch
from transformers import (
    ArceeConfig,
    AutoModelForCausalLM,
    CwmConfig,
    Ernie4_5Config,
    Exaone4Config,
    Gemma2Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    Gemma4UnifiedTextConfig,
    GemmaConfig,
    Glm4Config,
    GlmConfig,
    GPTNeoXConfig,
    GraniteConfig,
    HeliumConfig,
    HunYuanDenseV1Config,
    LlamaConfig,
    Ministral3Config,
    MinistralConfig,
    MistralConfig,
    Olmo2Config,
    Olmo3Config,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    SeedOssConfig,
    SmolLM3Config,
)

from adaptive.engines.cpu.families import forward_kind
from adaptive.engines.cpu.forward import FEW, CpuForward, cpu_forward
from adaptive.engines.cpu.fused import fits
from adaptive.engines.cpu.rotary import Rotations, Table

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
GROUPED: dict[str, Any] = {**SIZES, "num_key_value_heads": 2, "head_dim": 16}
DEFAULT = {"rope_type": "default", "rope_theta": 1e4}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
CONFIGS = {
    "llama": LlamaConfig(**GROUPED),
    "llama, as many key heads, biases": LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "llama, one key head, llama3 rotation, tied": LlamaConfig(
        **{**GROUPED, "num_key_value_heads": 1}, rope_parameters=LLAMA3, tie_word_embeddings=True
    ),
    "llama, yarn rotation": LlamaConfig(**GROUPED, rope_parameters=YARN),
    "qwen2": Qwen2Config(**{k: v for k, v in GROUPED.items() if k != "head_dim"}),
    "qwen2, window in some layers": Qwen2Config(
        **{k: v for k, v in GROUPED.items() if k != "head_dim"},
        use_sliding_window=True,
        sliding_window=7,
        max_window_layers=1,
    ),
    "qwen3": Qwen3Config(**GROUPED),
    "mistral": MistralConfig(**GROUPED, sliding_window=None),
    "mistral, window": MistralConfig(**GROUPED, sliding_window=7),
    "gemma2": Gemma2Config(**GROUPED, sliding_window=7, query_pre_attn_scalar=24),
    "gemma2, no softcap": Gemma2Config(**GROUPED, attn_logit_softcapping=None, final_logit_softcapping=None),
    "gemma3": Gemma3TextConfig(**GROUPED, sliding_window=7, query_pre_attn_scalar=24, sliding_window_pattern=2),
    "llama, a window that it does not read": LlamaConfig(**GROUPED, sliding_window=7),
    "llama, another activation": LlamaConfig(**GROUPED, hidden_act="gelu"),
}
# Configurations that differ from those above by a norm, a factor, the rotation or the layout of weights.
MORE = {
    "arcee": ArceeConfig(**GROUPED, mlp_bias=True),
    "cwm": CwmConfig(**GROUPED, sliding_window=7, rope_parameters=LLAMA3),
    "ernie4_5": Ernie4_5Config(**GROUPED, use_bias=True),
    "exaone4": Exaone4Config(**GROUPED, sliding_window=7, sliding_window_pattern=2),
    "exaone4, all layers full": Exaone4Config(**GROUPED, sliding_window=None, layer_types=["full_attention"] * 3),
    "gemma": GemmaConfig(**GROUPED),
    "glm": GlmConfig(**GROUPED, pad_token_id=3),
    "glm4": Glm4Config(**GROUPED, pad_token_id=3),
    "granite": GraniteConfig(
        **GROUPED, embedding_multiplier=12.0, residual_multiplier=0.3, attention_multiplier=0.1, logits_scaling=6.0
    ),
    "granite, logits as they are": GraniteConfig(**GROUPED, embedding_multiplier=12.0),
    "helium": HeliumConfig(**{**GROUPED, "hidden_size": 64}, attention_bias=True),
    "hunyuan_v1_dense": HunYuanDenseV1Config(**GROUPED),
    "hunyuan_v1_dense, stretched": HunYuanDenseV1Config(
        **GROUPED, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 1000.0, "factor": 1.0}
    ),
    "ministral": MinistralConfig(
        **GROUPED, sliding_window=7, layer_types=["full_attention"] + ["sliding_attention"] * 2
    ),
    "ministral3": Ministral3Config(
        **GROUPED, rope_parameters={**YARN, "original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.1}
    ),
    "olmo2": Olmo2Config(**GROUPED),
    "olmo3": Olmo3Config(**GROUPED, sliding_window=7, layer_types=["sliding_attention"] * 2 + ["full_attention"]),
    "phi3": Phi3Config(**GROUPED, pad_token_id=3),
    "phi3, partly rotated, window": Phi3Config(
        **GROUPED, pad_token_id=3, sliding_window=7, rope_parameters={**DEFAULT, "partial_rotary_factor": 0.75}
    ),
    "seed_oss": SeedOssConfig(**GROUPED),
    "smollm3": SmolLM3Config(**GROUPED, pad_token_id=3, no_rope_layers=[1, 0, 1]),
}
# Heads of two sizes, values that equal the keys, layers that share keys and values or have per-layer inputs.
SLIDING, FULL = "sliding_attention", "full_attention"
TWO_SIZES: dict[str, Any] = {
    **GROUPED,
    "sliding_window": 7,
    "num_hidden_layers": 3,
    "layer_types": [SLIDING, SLIDING, FULL],
    "global_head_dim": 32,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 3.0,
}
GEMMA4 = {
    "gemma4, values are keys": Gemma4TextConfig(**TWO_SIZES, attention_k_eq_v=True, num_global_key_value_heads=1),
    "gemma4, keys of another layer": Gemma4TextConfig(
        **{
            **TWO_SIZES,
            "num_hidden_layers": 6,
            "layer_types": [SLIDING, FULL, SLIDING, SLIDING, SLIDING, FULL],
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 101,
        },
        num_kv_shared_layers=3,
        use_double_wide_mlp=True,
    ),
    "gemma4_unified": Gemma4UnifiedTextConfig(
        **{key: value for key, value in TWO_SIZES.items() if key != "hidden_size_per_layer_input"},
        attention_k_eq_v=True,
    ),
}
ALL: dict[str, PreTrainedConfig] = {**CONFIGS, **MORE, **GEMMA4}
# A configuration for each kind of part that ``CONFIGS`` lacks: queries rotated differently from keys, layers without
# rotation, projections in one matrix with partly rotated heads, factors, norms after the parts and over all heads, a
# norm after the rotation, no gate.
VARIED = ["ministral3", "smollm3", "phi3, partly rotated, window", "granite", "olmo3", "hunyuan_v1_dense", "arcee"]
VARIED += [name for name in GEMMA4 if name != "gemma4_unified"]
# Models for which transformers rounds to float32 whatever the dtype: Gemma 2's eager softmax, Ernie's rotation.
# Hunyuan's norm follows a rotation by float32 angles, whose rounding changes vector lengths.
ROUNDED = ("gemma2", "ernie4_5", "hunyuan")


def made(name: str, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    """A model of random weights, none at a value that would hide a mistake (norms of one, biases of zero)."""
    torch.manual_seed(5)
    config = copy.deepcopy(ALL[name])  # saving a model writes its dtype into the config
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.uniform_(0.5, 1.5)
    return model.to(dtype)


def own(model: PreTrainedModel) -> CpuForward:
    """Our forward of the model, which must be supported."""
    forward = cpu_forward(model)
    assert forward is not None
    return forward


def truth(model: PreTrainedModel, tokens: torch.Tensor) -> torch.Tensor:
    """The logits (n, vocab) of a whole text (n,), by transformers."""
    if model.dtype == torch.float64:
        model = copy.deepcopy(model)
        for module in model.modules():
            if type(module).__name__.endswith("RMSNorm"):
                module.forward = functools.partial(exact_norm, module)
    with torch.inference_mode():
        return model(input_ids=tokens[None]).logits[0]


def exact_norm(module: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """An RMS norm without transformers' internal rounding to float32."""
    eps = getattr(module, "variance_epsilon", None) or module.eps
    weight = getattr(module, "weight", 1.0)
    if re.match("Gemma[23]?RMS", type(module).__name__):
        weight = weight + 1
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def text(length: int) -> torch.Tensor:
    """Random tokens."""
    return torch.randint(0, SIZES["vocab_size"], (length,), generator=torch.Generator().manual_seed(length))


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 2e-5)], ids=["float64", "float32"]
)
def test_logits_equal_those_of_transformers(
    name: str, dtype: torch.dtype, tolerance: float, linear_layers: str
) -> None:
    model = made(name, dtype)
    forward, tokens = own(model), text(FEW + 30)
    assert forward.plan.lm_head.native == (linear_layers == "ours" and dtype == torch.float32)
    right = truth(model, tokens)
    scale = right.abs().max()
    tolerance = max(tolerance, 1e-6) if name.startswith(ROUNDED) else tolerance
    cache = forward.cache()
    # Passes of several tokens, one token, and a large piece.
    done = 0
    for count in (9, 1, 5, 1, FEW + 4, 1):
        got = forward(tokens[done : done + count], count, cache)
        done += count
        torch.testing.assert_close(got / scale, right[done - count : done] / scale, rtol=0, atol=tolerance)


@pytest.mark.parametrize("name", [*CONFIGS, *VARIED])
def test_a_rolled_back_text_leaves_no_trace(name: str) -> None:
    model = made(name)
    forward, tokens = own(model), text(30)
    cache = forward.cache()
    forward(tokens[:12], 1, cache)
    forward(text(6), 6, cache)
    cache.rollback(10)
    got = forward(tokens[10:], 20, cache)
    torch.testing.assert_close(got, truth(model, tokens)[10:], rtol=0, atol=1e-4 if name.startswith(ROUNDED) else 1e-8)


def test_only_the_rows_asked_for_are_returned() -> None:
    model = made("llama")
    forward = own(model)
    assert forward(text(9), 2, forward.cache()).shape == (2, 97)
    assert forward(text(9), 0, forward.cache()).numel() == 0


@pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="this processor has no bfloat16 linear layers"
)
@pytest.mark.parametrize("name", ["llama", "granite", "olmo2", "gemma4, keys of another layer"])
def test_bfloat16_is_as_close_to_the_truth_as_transformers(name: str, linear_layers: str) -> None:
    exact = made(name, torch.bfloat16).to(torch.float64)
    rounded = made(name, torch.bfloat16)
    forward = own(rounded)
    tokens = text(20)
    right = truth(exact, tokens)
    ours = (forward(tokens, 20, forward.cache()).double() - right).abs().mean()
    theirs = (truth(rounded, tokens).double() - right).abs().mean()
    assert ours <= 1.5 * theirs


LLAMA_PARTS = ["model.layers.1.self_attn.k_proj", "model.layers.2.mlp.up_proj", "lm_head"]
FUSED_PARTS = ["model.layers.1.self_attn.qkv_proj", "model.layers.2.mlp.gate_up_proj", "lm_head"]


# Cases: one call, layer by layer, factors on refreshed weights, several projections in one matrix.
@pytest.mark.parametrize("name", ["llama", "llama, as many key heads, biases", "granite", "phi3"])
def test_a_change_of_weights_is_followed_where_it_is_told(name: str, linear_layers: str) -> None:
    model = made(name, torch.float32)
    forward, tokens = own(model), text(9)
    forward(tokens, 9, forward.cache())
    parts = FUSED_PARTS if name == "phi3" else LLAMA_PARTS
    with torch.no_grad():
        for module in parts:
            weight = model.get_submodule(module).weight
            weight.add_(0.1 * torch.randn(weight.shape))
    forward.refresh(frozenset(parts))
    torch.testing.assert_close(forward(tokens, 9, forward.cache()), truth(model, tokens), rtol=0, atol=1e-4)


def test_a_token_beyond_the_vocabulary_is_an_error(linear_layers: str) -> None:
    forward = own(made("llama", torch.float32))
    cache = forward.cache()
    forward(text(5), 1, cache)
    for token in (-1, 97, 2**40):
        with pytest.raises((IndexError, RuntimeError)):
            forward(torch.tensor([3, token]), 1, cache)
        assert cache.length == 5
    forward(text(3), 1, cache)


def test_a_pass_over_nothing_is_an_error(linear_layers: str) -> None:
    """It would read before its first row."""
    forward = own(made("llama", torch.float32))
    if forward.fused:
        with pytest.raises(ValueError, match="needs a token"):
            forward.native_pass()([], 1, 0, 0, 0, 0, 0, 0, 0, 0, None, 1)


def test_tables_that_cannot_grow_stay_as_they_are() -> None:
    calls: list[int] = []

    def at(positions: torch.Tensor) -> torch.Tensor:
        calls.append(positions.shape[1])
        if len(calls) == 2:
            raise MemoryError
        return torch.polar(torch.ones(positions.shape[1], 4), positions[0, :, None] * torch.ones(4))

    rotations = Rotations((Table(8, at),), 10_000, torch.device("cpu"))
    rotations.reach(100)
    address = rotations.address
    with pytest.raises(MemoryError):
        rotations.reach(5000)
    assert rotations.address == address
    rotations.reach(5000)
    assert len(rotations.tables[0][0]) >= 5000


def test_llama_and_its_like_are_one_call(linear_layers: str) -> None:
    known = {name for name in ALL if fits(own(made(name, torch.float32)).plan)}
    # Heads of twelve numbers, and an activation that the kernels lack.
    odd = {
        "qwen2",
        "qwen2, window in some layers",
        "llama, as many key heads, biases",
        "llama, another activation",
    }
    assert known == (ALL.keys() - odd if linear_layers == "ours" else set())
    assert not fits(own(made("llama")).plan)  # float64


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", [*CONFIGS, *VARIED])
def test_which_forward_it_is_follows_from_the_configuration(name: str, dtype: torch.dtype, linear_layers: str) -> None:
    kind = forward_kind(type(made(name)).__name__, ALL[name], dtype, torch.device("cpu"))
    forward = cpu_forward(made(name, dtype))
    if forward is None:
        assert kind is None
    else:
        assert kind == forward.kind


# Models for which torch computes some norms in a layer-by-layer pass: norms of heads and of the parts' outputs.
NORMED_BY_TORCH = {"qwen3", "gemma2", "gemma3", "olmo3", "hunyuan_v1_dense", *GEMMA4}


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "gemma3", "mistral, window", *VARIED])
# Where torch computes a norm, the last bit may differ. In bfloat16 a product's input may then round to the neighbouring
# number, twice the unit roundoff of 2 ** -8 away, and a logit that depends on that input alone moves by as much.
@pytest.mark.parametrize(("dtype", "rounded"), [(torch.float32, 1e-5), (torch.bfloat16, 2 * 2**-8)])
def test_one_call_is_what_layer_by_layer_is(name: str, dtype: torch.dtype, rounded: float) -> None:
    forward, tokens = own(made(name, dtype)), text(FEW + 20)
    if not forward.fused:
        pytest.skip("there are no kernels for this processor, or none were built")
    one, other = forward.cache(), forward.cache()
    done = 0
    for count in (7, 1, FEW + 8, 3):
        part = tokens[done : done + count]
        done += count
        forward.fused = True
        fused = forward(part, count, one)
        forward.fused = False
        near = rounded * float(fused.abs().max()) if name in NORMED_BY_TORCH else 0
        if name in GEMMA4:  # their factors and soft caps amplify the rounding of each layer
            near *= len(forward.plan.layers)
        torch.testing.assert_close(fused, forward(part, count, other), rtol=0, atol=near)


def test_the_cache_grows_without_forgetting() -> None:
    model = made("llama")
    forward, tokens = own(model), text(100)
    cache = forward.cache()
    forward(tokens[:50], 1, cache)
    held = cache.memory.total
    cache.reserve(5000)
    assert cache.memory.total > held
    torch.testing.assert_close(forward(tokens[50:], 50, cache), truth(model, tokens)[50:], rtol=0, atol=1e-8)


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**GROUPED, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
        GPTNeoXConfig(**SIZES, rotary_pct=0.5),
    ],
)
def test_what_is_not_known_keeps_its_own_forward(config: PreTrainedConfig) -> None:
    assert cpu_forward(AutoModelForCausalLM.from_config(config)) is None


def test_hooked_and_mixed_models_keep_their_own_forward() -> None:
    hooked = made("llama", torch.float32)
    hooked.model.layers[0].register_forward_hook(lambda *args: None)
    assert cpu_forward(hooked) is None
    mixed = made("llama", torch.float32)
    mixed.model.norm.to(torch.float64)
    assert cpu_forward(mixed) is None


@pytest.mark.parametrize("ours", [True, False])
def test_short_passes_try_both_numbers_of_threads_and_compute_the_same(ours: bool) -> None:
    given = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        forward = own(made("llama", torch.float32))
        if not ours:
            forward.fused = False
        cache, tried, expected = forward.cache(), set(), None
        for _ in range(2000):
            tried.add(forward.threads.choose(3))
            logits = forward(text(3), 3, cache).clone()
            cache.rollback(0)
            assert torch.get_num_threads() == 2
            if expected is None:
                expected = logits
            assert torch.equal(logits, expected)
            if tried == {1, 2}:
                break
        assert tried == {1, 2}
    finally:
        torch.set_num_threads(given)
