"""What our forward has to compute, read from a transformers model.

In: a loaded model. Out: a ``Plan`` of packed linear layers, norms, rotary embeddings and windows, or None
for anything that is not known to be computed right: another architecture, quantised or offloaded
weights, a rotary embedding whose frequencies change with the length of the text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Literal, NamedTuple

import psutil
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from adaptive.engines.cpu.delta import DeltaNet, DeltaSizes
from adaptive.engines.cpu.feed_forward import feed_forward, known_router
from adaptive.engines.cpu.kernels import Attention, Prologue, multiplies
from adaptive.engines.cpu.layers import Embedding, QkNorm, RmsNorm, native_gate
from adaptive.engines.cpu.packing import Packed, Packing
from adaptive.engines.cpu.plan import Layer, Plan
from adaptive.engines.cpu.rotary import Rotation, known_ropes, pair_order, read_ropes
from adaptive.engines.cpu.weights import packs, packs_int8

# Of the memory that is free once the model is loaded, the share that a second, packed copy of its weights
# may take. Higher leaves too little for caches and the trainer, lower gives up speed that there is room for.
PACKED_SHARE = 0.7


# Which of our forwards runs: a pass in one native call, layer by layer on native linear layers, or torch's operations.
Kind = Literal["fused", "native", "torch"]


def forward_kind(
    architecture: str, config: Any, dtype: torch.dtype, device: torch.device, int8: bool = False
) -> Kind | None:
    """Which of our forwards computes a checkpoint of this class with weights of this dtype (or ``int8``) on this
    device; None for none of them. No weights are needed to tell."""
    if architecture not in FAMILIES or device.type != "cpu" or (int8 and not packs_int8(device)):
        return None
    if dtype != torch.float64 and not packs(dtype, device) and not multiplies(dtype, device):
        return None
    size = _head_size(config)
    if architecture in RECURRENT and not _recurs(config, torch.promote_types(dtype, torch.float32), device):
        return None
    if size % 2 or getattr(config, "use_bidirectional_attention", False) or not known_ropes(config):
        return None
    if not known_router(config) or getattr(config, "clip_qkv", None) is not None:
        return None
    if not multiplies(torch.int8 if int8 else dtype, device):
        return "torch"
    activations = torch.promote_types(dtype, torch.float32)
    capped = _attention_softcap(config) or getattr(config, "final_logit_softcapping", None)
    name = getattr(config, "hidden_activation", None) or config.hidden_act
    gate = native_gate(ACT2FN[name], architecture not in UNGATED)
    fused = not capped and Attention.supports(size, activations, device) and gate is not None
    return "fused" if fused else "native"


def read_plan(model: PreTrainedModel, int8: bool = False, packed: Iterable[Packed] = ()) -> Plan | None:
    """The plan of ``model``, or None where it is to be run by its own forward; ``int8`` as in ``PackedLinear``. Weights
    that are ``packed`` already, in the same way and from the same memory, are not packed again."""
    name = type(model).__name__
    if not type(model).__module__.startswith("transformers.models.") or not _plain(model):
        return None
    if forward_kind(name, model.config, model.dtype, model.device, int8) is None:
        return None
    return FAMILIES[name](model, Packing(int8, packed))


def _recurs(config: Any, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether gated delta nets of this config and the attention between them are computed: natively, or not at all."""
    if set(config.layer_types) - {"linear_attention", "full_attention"}:
        return False
    silu = native_gate(ACT2FN[config.hidden_act]) is Prologue.SILU_GATE
    return silu and Attention.supports(_head_size(config), dtype, device) and DeltaSizes.of(config).computed


def _head_size(config: Any) -> int:
    size: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return size


def _attention_softcap(config: Any) -> float | None:
    """Gemma 3 has the setting too, and its attention does not use it."""
    return config.attn_logit_softcapping if config.model_type == "gemma2" else None


def _plain(model: PreTrainedModel) -> bool:
    """Whether the model's weights are what they seem: one dtype, in memory, nothing hooked or replaced."""
    weights = list(model.parameters())
    kinds = {(weight.dtype, weight.device) for weight in weights}
    if len(kinds) != 1 or getattr(model, "peft_config", None):
        return False
    if sum(weight.nbytes for weight in weights) > PACKED_SHARE * psutil.virtual_memory().available:
        return False
    if getattr(model, "quantization_method", None) or getattr(model, "_tp_size", None):
        return False
    for module in model.modules():
        if module._forward_hooks or module._forward_pre_hooks or hasattr(module, "_hf_hook"):
            return False
        if isinstance(module, nn.Linear) and type(module) is not nn.Linear:
            return False
    return True


def _dtypes(model: PreTrainedModel, int8: bool) -> tuple[torch.dtype, torch.dtype]:
    """Of activations, and of the linear layers' inputs."""
    kind = next(model.parameters()).dtype
    exact = int8 or multiplies(kind, model.device)  # these take float32
    return torch.promote_types(kind, torch.float32), torch.float32 if exact else kind


def _names(model: PreTrainedModel) -> dict[nn.Module, str]:
    return {module: name for name, module in model.named_modules()}


def _windows(model: PreTrainedModel) -> list[int]:
    """Tokens that a query of each layer sees, 0 for all."""
    config = model.config
    window = getattr(config, "sliding_window", None) or 0
    kinds = getattr(config, "layer_types", None)
    if kinds is None or config.model_type in ONE_WINDOW:
        return [window] * config.num_hidden_layers
    return [window if kind == "sliding_attention" else 0 for kind in kinds]


# Types whose window is that of every layer.
ONE_WINDOW = {"mistral", "ministral3", "phi3"}


class Norms(NamedTuple):
    """The names of a layer's norms: of what its attention reads and of what that adds, of what its feed-forward part
    reads and adds. Empty where there is none."""

    attention: str = "input_layernorm"
    after_attention: str = ""
    mlp: str = "post_attention_layernorm"
    after_mlp: str = ""


BEFORE = Norms()
AFTER = Norms("", "post_attention_layernorm", "", "post_feedforward_layernorm")
GEMMA = Norms("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
GLM4 = Norms("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")


def _llama_like(
    model: PreTrainedModel,
    pack: Packing,
    norms: Norms = BEFORE,
    plus_one: bool = False,
    side_by_side: bool = False,
) -> Plan:
    """Llama and what is made of the same parts: RMS norms, whose weights may be stored less one; attention whose rotary
    embedding may turn numbers that lie ``side_by_side``; a feed-forward part."""
    config = model.config
    base: Any = model.model
    dtype, kind = _dtypes(model, pack.int8)
    size = _head_size(config)
    heads, key_heads = config.num_attention_heads, config.num_key_value_heads
    ropes = read_ropes(model, size, dtype)
    rotated = pair_order(heads + key_heads, size, ropes.rotated, side_by_side)
    order = torch.cat([rotated, torch.arange(rotated.numel(), rotated.numel() + key_heads * size)])
    residual = getattr(config, "residual_multiplier", 1.0)

    def norm(module: nn.Module, out: torch.dtype = kind) -> RmsNorm:
        return RmsNorm(module, dtype, out, plus_one)

    def named(block: Any, name: str, out: torch.dtype = kind) -> RmsNorm | None:
        return norm(getattr(block, name), out) if name else None

    layers: list[Layer] = []
    linears: list[Packed] = []
    for block, rope, window in zip(base.layers, ropes.layers, _windows(model), strict=True):
        attention, mlp = block.self_attn, feed_forward(block, pack, residual)
        qkv = pack(*_projections(attention), order=order)
        qk_norm, query_weight = _qk_norm(attention, norm, rotated, heads, key_heads)
        attention_output = pack(attention.o_proj, factor=residual)
        linears += [qkv, attention_output, *mlp.linears]
        layers.append(
            Layer(
                attention_norm=named(block, norms.attention),
                qkv=qkv,
                qk_norm=qk_norm,
                attention_output=attention_output,
                after_attention_norm=named(block, norms.after_attention, dtype),
                mlp_norm=named(block, norms.mlp),
                mlp=mlp,
                after_mlp_norm=named(block, norms.after_mlp, dtype),
                scale=attention.scaling,
                rope=rope,
                window=window,
                softcap=_attention_softcap(config),
                query_weight=query_weight,
                sinks=attention.sinks.to(dtype) if hasattr(attention, "sinks") else None,
            )
        )
    lm_head = pack(model.lm_head, factor=1 / getattr(config, "logits_scaling", 1.0))
    return Plan(
        layers=tuple(layers),
        linears=(*linears, lm_head),
        embed=Embedding(base.embed_tokens, dtype, getattr(config, "embedding_multiplier", 1.0)),
        final_norm=norm(base.norm),
        lm_head=lm_head,
        softcap=getattr(config, "final_logit_softcapping", None),
        ropes=ropes.tables,
        heads=heads,
        key_heads=key_heads,
        head_size=size,
        context_length=config.max_position_embeddings,
        dtype=dtype,
        weight_dtype=kind,
        device=model.device,
        names=_names(model),
    )


def _projections(attention: Any) -> tuple[nn.Linear, ...]:
    """Those of queries, keys and values."""
    if hasattr(attention, "qkv_proj"):
        return (attention.qkv_proj,)
    return attention.q_proj, attention.k_proj, attention.v_proj


def _qk_norm(
    attention: Any, norm: Callable[[nn.Module], RmsNorm], order: torch.Tensor, heads: int, key_heads: int
) -> tuple[QkNorm | None, torch.Tensor | None]:
    """That of an attention whose queries, and behind them keys, are ordered as ``order``, None where it has none; and a
    layer's ``query_weight``."""
    size, weight = len(order) // (heads + key_heads), None
    if hasattr(attention, "q_norm"):
        query, key = norm(attention.q_norm), norm(attention.k_norm)
        # Heads are ordered alike, so that the first of them say the order of a head or of all.
        for one in (query, key):
            one.weight = one.weight[order[: len(one.weight)]]
    elif hasattr(attention, "query_layernorm"):
        # Hunyuan's stand behind the rotation. That leaves lengths alone, so that what they divide by is the same before
        # it; of their weights a score has the product.
        query, key = norm(attention.query_layernorm), norm(attention.key_layernorm)
        weight = (query.weight * key.weight / size)[order[:size]].contiguous()
        for one in (query, key):
            one.weight = torch.full_like(one.weight, math.sqrt(size))
    else:
        return None, None
    return QkNorm(query, key, heads, key_heads, size), weight


def _qwen3_5(model: PreTrainedModel, pack: Packing) -> Plan:
    """Gated delta nets, and between them attention whose queries have a gate, rotated in a part of each head: Qwen 3.5
    and Qwen 3-Next, dense or mixtures."""
    config = model.config
    base: Any = model.model
    dtype, kind = _dtypes(model, pack.int8)
    sizes, size, heads, key_heads = (
        DeltaSizes.of(config),
        _head_size(config),
        config.num_attention_heads,
        config.num_key_value_heads,
    )
    ropes = read_ropes(model, size, dtype)
    turned = pair_order(heads + key_heads, size, ropes.rotated)
    # The projection of queries gives each head's query, and then its gate.
    queries = torch.arange(heads)[:, None] * 2 * size
    keys = 2 * heads * size + turned[: key_heads * size]
    values = 2 * heads * size + key_heads * size + torch.arange(key_heads * size)
    gates = queries + size + torch.arange(size)
    order = torch.cat([(queries + turned[:size]).reshape(-1), keys, values, gates.reshape(-1)])

    def norm(module: nn.Module) -> RmsNorm:
        return RmsNorm(module, dtype, kind, plus_one=True)

    layers: list[Layer] = []
    linears: list[Packed] = []
    for block in base.layers:
        mlp = feed_forward(block, pack)
        if block.block_type == "linear_attention":
            net = block.linear_attn
            if hasattr(net, "in_proj_qkvz"):
                mixed = pack(net.in_proj_qkvz, net.in_proj_ba, order=sizes.by_key_head())
            else:
                mixed = pack(net.in_proj_qkv, net.in_proj_z, net.in_proj_b, net.in_proj_a)
            output, delta, heads_norm = pack(net.out_proj), DeltaNet(net, sizes), None
        else:
            attention = block.self_attn
            mixed = pack(attention.q_proj, attention.k_proj, attention.v_proj, order=order)
            output, delta = pack(attention.o_proj), None
            heads_norm, _ = _qk_norm(attention, norm, turned, heads, key_heads)
        linears += [mixed, output, *mlp.linears]
        layers.append(
            Layer(
                attention_norm=norm(block.input_layernorm),
                qkv=mixed,
                qk_norm=heads_norm,
                attention_output=output,
                after_attention_norm=None,
                mlp_norm=norm(block.post_attention_layernorm),
                mlp=mlp,
                after_mlp_norm=None,
                scale=size**-0.5,
                rope=Rotation(),
                window=0,
                softcap=None,
                delta=delta,
            )
        )
    lm_head = pack(model.lm_head)
    return Plan(
        layers=tuple(layers),
        linears=(*linears, lm_head),
        embed=Embedding(base.embed_tokens, dtype),
        final_norm=norm(base.norm),
        lm_head=lm_head,
        softcap=None,
        ropes=ropes.tables,
        heads=heads,
        key_heads=key_heads,
        head_size=size,
        context_length=config.max_position_embeddings,
        dtype=dtype,
        weight_dtype=kind,
        device=model.device,
        names=_names(model),
        gated=True,
        delta=sizes if any(layer.delta is not None for layer in layers) else None,
    )


RECURRENT = {"Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM", "Qwen3NextForCausalLM"}
# Those whose feed-forward part has no gate.
UNGATED = {"ArceeForCausalLM"}
FAMILIES: dict[str, Callable[[PreTrainedModel, Packing], Plan]] = {
    "ArceeForCausalLM": _llama_like,
    "CwmForCausalLM": _llama_like,
    "Dots1ForCausalLM": _llama_like,
    "Ernie4_5ForCausalLM": partial(_llama_like, side_by_side=True),
    "Exaone4ForCausalLM": partial(_llama_like, norms=AFTER),
    "GemmaForCausalLM": partial(_llama_like, plus_one=True),
    "Gemma2ForCausalLM": partial(_llama_like, norms=GEMMA, plus_one=True),
    "Gemma3ForCausalLM": partial(_llama_like, norms=GEMMA, plus_one=True),
    "GlmForCausalLM": partial(_llama_like, side_by_side=True),
    "Glm4ForCausalLM": partial(_llama_like, norms=GLM4, side_by_side=True),
    "Glm4MoeForCausalLM": _llama_like,
    "GptOssForCausalLM": _llama_like,
    "GraniteForCausalLM": _llama_like,
    "GraniteMoeForCausalLM": _llama_like,
    "HeliumForCausalLM": partial(_llama_like, side_by_side=True),
    "HunYuanDenseV1ForCausalLM": _llama_like,
    "LlamaForCausalLM": _llama_like,
    "MinistralForCausalLM": _llama_like,
    "Ministral3ForCausalLM": _llama_like,
    "MiniMaxM2ForCausalLM": _llama_like,
    "MistralForCausalLM": _llama_like,
    "MixtralForCausalLM": _llama_like,
    "OlmoeForCausalLM": _llama_like,
    "Olmo2ForCausalLM": partial(_llama_like, norms=AFTER),
    "Olmo3ForCausalLM": partial(_llama_like, norms=AFTER),
    "Phi3ForCausalLM": _llama_like,
    "Qwen2ForCausalLM": _llama_like,
    "Qwen2MoeForCausalLM": _llama_like,
    "Qwen3ForCausalLM": _llama_like,
    "Qwen3MoeForCausalLM": _llama_like,
    "Qwen3_5ForCausalLM": _qwen3_5,
    "Qwen3_5MoeForCausalLM": _qwen3_5,
    "Qwen3NextForCausalLM": _qwen3_5,
    "SeedOssForCausalLM": _llama_like,
    "SmolLM3ForCausalLM": _llama_like,
}
