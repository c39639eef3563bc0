"""Our own forward of mixtures of experts computes what transformers computes, and reads only the chosen experts."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from test_cpu_forward import FEW, GROUPED, SIZES, TWO_SIZES, own, text, truth
from test_head_engine import bound, module_logits
from test_head_module import randomised
from test_hybrid_forward import HYBRID
from test_joint import check as check_joint
from tiny_models import GREEDY, Greedy, alone, noisy, prompt_of, tiny_model
from transformers import (
    AutoModelForCausalLM,
    Dots1Config,
    Gemma4TextConfig,
    Glm4MoeConfig,
    GptOssConfig,
    GraniteMoeConfig,
    MiniMaxM2Config,
    MixtralConfig,
    OlmoeConfig,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from adaptive.engines.cpu import kernels
from adaptive.engines.cpu.families import forward_kind
from adaptive.engines.cpu.feed_forward import Mixture
from adaptive.engines.cpu.forward import cpu_forward
from adaptive.engines.cpu.packing import exact_router
from adaptive.engines.head.engine import HeadEngine
from adaptive.engines.head.module import Head
from adaptive.engines.hf.engine import TransformersEngine
from adaptive.engines.protocol import ProposalCall

EXPERTS: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 36}
SHARED: dict[str, Any] = {**EXPERTS, "shared_expert_intermediate_size": 44}
SIGMOID: dict[str, Any] = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 36,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.7,
}
NO_HEAD = {name: value for name, value in GROUPED.items() if name != "head_dim"}
ATTENDING = {
    "qwen3_moe": Qwen3MoeConfig(**GROUPED, **EXPERTS, norm_topk_prob=True),
    "qwen3_moe, shares not normalised, a dense layer": Qwen3MoeConfig(
        **GROUPED, **EXPERTS, norm_topk_prob=False, mlp_only_layers=[1]
    ),
    "qwen2_moe": Qwen2MoeConfig(
        **{**NO_HEAD, "hidden_size": 64}, **SHARED, use_sliding_window=True, sliding_window=7, max_window_layers=3
    ),
    "mixtral": MixtralConfig(**GROUPED, num_local_experts=4, num_experts_per_tok=2, sliding_window=7),
    "gpt_oss": GptOssConfig(
        **{**GROUPED, "num_hidden_layers": 4},
        num_local_experts=5,
        num_experts_per_tok=2,
        sliding_window=7,
        swiglu_limit=0.6,
    ),
    "olmoe": OlmoeConfig(**{**NO_HEAD, "hidden_size": 64}, num_experts=8, num_experts_per_tok=3),
    "glm4_moe": Glm4MoeConfig(**GROUPED, **SIGMOID, use_qk_norm=True, attention_bias=True),
    "minimax_m2": MiniMaxM2Config(
        **GROUPED,
        num_local_experts=8,
        num_experts_per_tok=3,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    ),
    "granitemoe": GraniteMoeConfig(
        **{**NO_HEAD, "hidden_size": 64},
        num_local_experts=4,
        num_experts_per_tok=2,
        residual_multiplier=0.3,
        logits_scaling=3.0,
    ),
    "dots1": Dots1Config(**GROUPED, **SIGMOID),
    # Beside a dense part.
    "gemma4": Gemma4TextConfig(
        **TWO_SIZES, enable_moe_block=True, num_experts=5, top_k_experts=2, moe_intermediate_size=32
    ),
}
RECURRING = {
    "qwen3_5_moe": Qwen3_5MoeTextConfig(**HYBRID, **SHARED),
    "qwen3_next": Qwen3NextConfig(**HYBRID, **SHARED, norm_topk_prob=True, mlp_only_layers=[1]),
    "qwen3_next, one value head a key head": Qwen3NextConfig(
        **{**HYBRID, "linear_num_value_heads": 2}, **SHARED, norm_topk_prob=False
    ),
}
CONFIGS: dict[str, Any] = {**ATTENDING, **RECURRING}

compiled = pytest.mark.skipif(kernels.library() is None, reason="the kernels are not built, or not for this processor")


def made(name: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A checkpoint of random weights, none of them at a value that would hide a mistake."""
    torch.manual_seed(5)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(CONFIGS[name]).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.add_(0.2 * torch.randn_like(buffer))
    return model.to(dtype)


def near(got: torch.Tensor, right: torch.Tensor, tolerance: float) -> None:
    scale = right.abs().max()
    torch.testing.assert_close(got / scale, right / scale, rtol=0, atol=tolerance)


PASSES = (9, 1, 5, 1, FEW + 4, 1)


@pytest.mark.parametrize("name", ATTENDING)
@pytest.mark.parametrize(
    # transformers' routers compute their softmax in float32, whatever the model's dtype.
    ("dtype", "tolerance"),
    [(torch.float64, 1e-6), (torch.float32, 2e-5)],
    ids=["float64", "float32"],
)
def test_logits_equal_those_of_transformers(
    name: str, dtype: torch.dtype, tolerance: float, linear_layers: str
) -> None:
    model = made(name, dtype)
    forward, tokens = own(model), text(FEW + 30)
    assert forward.fused == (linear_layers == "ours" and dtype == torch.float32)
    if dtype == torch.float64:
        model.set_experts_implementation("eager")  # the default one has no kernels for it
    right, cache, done = truth(model, tokens), forward.cache(), 0
    for count in PASSES:
        got = forward(tokens[done : done + count], count, cache)
        done += count
        near(got, right[done - count : done], tolerance)


@compiled
@pytest.mark.parametrize("name", RECURRING)
def test_logits_of_hybrids_equal_those_of_transformers(name: str) -> None:
    model = made(name)
    forward, tokens = own(model), text(FEW + 30)
    assert forward.fused
    right, cache, done = truth(model, tokens), forward.cache(), 0
    for count in PASSES:
        got = forward(tokens[done : done + count], count, cache)
        done += count
        near(got, right[done - count : done], 2e-4)


@compiled
@pytest.mark.parametrize("name", CONFIGS)
def test_a_pass_by_layers_says_the_same(name: str) -> None:
    model = made(name)
    forward, tokens = own(model), text(30)
    forward.fused = False
    near(forward(tokens, 30, forward.cache()), truth(model, tokens), 2e-4 if name in RECURRING else 2e-5)


@compiled
@pytest.mark.parametrize("name", ["qwen3_moe", "qwen2_moe", "gpt_oss", "gemma4", "qwen3_5_moe"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_tokens_logits_do_not_depend_on_those_beside_it(name: str, dtype: torch.dtype) -> None:
    engine = TransformersEngine(made(name, dtype))
    assert engine.joint
    check_joint(engine, 0)
    tokens = text(25).tolist()
    one, several = engine.sequence(), engine.sequence()
    for sequence in (one, several):
        sequence.extend(tokens[:9], 1)
    together = several.extend(tokens[9:], 16).clone()
    for number, token in enumerate(tokens[9:]):
        assert torch.equal(one.extend([token], 1)[0], together[number])


@compiled
@pytest.mark.parametrize("int8", [False, True], ids=["bfloat16", "int8"])
def test_rounded_weights_say_nearly_the_same(int8: bool) -> None:
    rounded = made("qwen3_moe", torch.bfloat16)
    forward = cpu_forward(rounded, int8=int8)
    assert forward is not None
    assert forward.fused
    mixture = forward.plan.layers[0].mlp
    assert isinstance(mixture, Mixture)
    assert mixture.experts.int8 == int8
    assert mixture.router.dtype == torch.float32
    tokens = text(30)
    got, right = forward(tokens, 30, forward.cache()), truth(rounded.float(), tokens)
    assert torch.nn.functional.cosine_similarity(got, right, dim=1).mean() > 0.98


@compiled
def test_experts_that_nobody_chose_are_not_read() -> None:
    """Weights of the other experts are NaN here, so that reading one would make the output NaN."""
    model = made("qwen3_moe")
    tokens = text(4)
    right = truth(model, tokens)
    with torch.no_grad():
        # Outputs requested beside logits leave hooks behind.
        scores = copy.deepcopy(model)(tokens[None], output_router_logits=True).router_logits
        for block, of_layer in zip(model.model.layers, scores, strict=True):
            unused = torch.ones(EXPERTS["num_experts"], dtype=torch.bool)
            unused[of_layer.topk(EXPERTS["num_experts_per_tok"]).indices.unique()] = False
            assert unused.any()
            block.mlp.experts.gate_up_proj[unused] = torch.nan
            block.mlp.experts.down_proj[unused] = torch.nan
    forward = own(model)
    near(forward(tokens, 4, forward.cache()), right, 2e-5)


@compiled
@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss", "qwen3_next"])
def test_greedy_output_equals_target_alone(model_type: str) -> None:
    reference = tiny_model(model_type)
    target, draft = TransformersEngine(reference), TransformersEngine(noisy(reference))
    assert target.cpu_forward is not None
    assert target.cpu_forward.fused
    prompt = prompt_of(40)
    expected = alone(reference, prompt, 40)
    for length in (1, 4, 9, None):
        assert Greedy(target, draft, length).say(prompt, 40) == expected
    itself = Greedy(target, target, 4)
    assert itself.say(prompt, 40) == expected
    assert itself.accepted == 1


def test_groups_of_experts_and_clipped_queries_keep_transformers_forward() -> None:
    config = Dots1Config(**GROUPED, n_group=4, topk_group=2)
    assert forward_kind("Dots1ForCausalLM", config, torch.float32, torch.device("cpu")) is None
    config = OlmoeConfig(clip_qkv=8.0)
    assert forward_kind("OlmoeForCausalLM", config, torch.float32, torch.device("cpu")) is None


@compiled
def test_a_proposal_in_one_call_is_what_single_steps_say() -> None:
    engine = TransformersEngine(made("gpt_oss"))
    fed = text(20).tolist()
    drafted = engine.sequence().propose(ProposalCall(fed, 6, SIZES["vocab_size"], GREEDY, [], None)).tokens
    sequence, said = engine.sequence(), list(fed)
    for _ in range(6):
        said.append(int(sequence.extend(said[sequence.length :], 1).argmax()))
    assert drafted == said[20:]


@compiled
def test_a_change_of_weights_is_followed_where_it_is_told() -> None:
    model, tokens = made("qwen2_moe"), text(12)
    forward = own(model)
    before = forward(tokens, 12, forward.cache()).clone()
    names = ["self_attn.q_proj", "mlp.gate", "mlp.experts", "mlp.shared_expert.up_proj", "mlp.shared_expert_gate"]
    changed = [f"model.layers.1.{name}" for name in names]
    with torch.no_grad():
        for name in changed:
            for parameter in model.get_submodule(name).parameters(recurse=False):
                parameter.add_(0.1 * torch.randn(parameter.shape))
    forward.refresh(frozenset(changed))
    got = forward(tokens, 12, forward.cache())
    near(got, truth(model, tokens), 2e-5)
    assert (got - before).abs().max() > 0.01


@compiled
def test_a_head_on_a_mixture_is_our_own_and_follows_its_weights() -> None:
    engine = TransformersEngine(made("qwen3_moe"))
    head = HeadEngine(randomised(Head.from_target(engine.model)), engine)
    assert head.cpu_forward is not None
    held, draft = bound(engine, head)
    tokens = text(30)
    held.extend(tokens.tolist(), 1)
    near(draft.extend(tokens.tolist(), 30), module_logits(head.head, held.features(0, 30), tokens), 1e-4)


def test_a_router_with_a_bias_beside_a_gate_without_one_is_one_layer() -> None:
    torch.manual_seed(0)
    router, gate = torch.nn.Linear(32, 8), torch.nn.Linear(32, 1, bias=False)
    x = torch.randn(3, 32)
    with torch.inference_mode():
        torch.testing.assert_close(exact_router((router, gate))(x), torch.cat([router(x), gate(x)], 1))
