"""Reads from a transformers model what our forward has to compute.

In: a loaded model. Out: a ``Plan`` of packed linear layers, norms, rotary embeddings and windows, or None
for a model that our forward may not compute correctly: another architecture, quantised or offloaded
weights, a rotary embedding whose frequencies change with the length of the text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from adaptive.engines.cpu.delta import DeltaNet, DeltaSizes
from adaptive.engines.cpu.feed_forward import feed_forward, known_router
from adaptive.engines.cpu.kernels import Attention, Prologue, multiplies
from adaptive.engines.cpu.layer_inputs import known_inputs, layer_input, per_layer_inputs
from adaptive.engines.cpu.layers import Embedding, HeadNorms, RmsNorm, native_gate
from adaptive.engines.cpu.packing import Packed, Packing
from adaptive.engines.cpu.plan import Heads, Layer, Plan
from adaptive.engines.cpu.rotary import Rotation, known_ropes, pair_order, read_ropes
from adaptive.engines.cpu.weights import packs, packs_int8
from adaptive.machine import memory

# The share of the memory free after loading the model that a second, packed copy of its weights may take. Too
# high: too little is left for caches and the trainer. Too low: models run slower although there is room for the copy.
PACKED_SHARE = 0.7


# How our forward runs: a pass in one native call, layer by layer on native linear layers, or on torch's operations.
Kind = Literal["fused", "native", "torch"]


def forward_kind(
    architecture: str, config: Any, dtype: torch.dtype, device: torch.device, int8: bool = False
) -> Kind | None:
    """How our forward runs a checkpoint of this class with weights of this dtype (or ``int8``) on this device; None if
    it does not. Needs only the config, no weights."""
    if architecture not in FAMILIES or device.type != "cpu" or (int8 and not packs_int8(device)):
        return None
    if int8 and dtype == torch.float64:
        return None  # the activations have the dtype, and the kernels know none of 64 bits
    if dtype != torch.float64 and not packs(dtype, device) and not multiplies(dtype, device):
        return None
    sizes = {heads.size for heads in _heads(config)}
    if architecture in RECURRENT and not _recurs(config, torch.promote_types(dtype, torch.float32), device):
        return None
    if getattr(config, "use_bidirectional_attention", None) not in CAUSAL or any(size % 2 for size in sizes):
        return None
    if not known_ropes(config) or not known_inputs(config) or not known_router(config):
        return None
    if getattr(config, "clip_qkv", None) is not None:
        return None
    if not multiplies(torch.int8 if int8 else dtype, device):
        return "torch"
    activations = torch.promote_types(dtype, torch.float32)
    name = getattr(config, "hidden_activation", None) or config.hidden_act
    gate = native_gate(ACT2FN[name], architecture not in UNGATED)
    fused = gate is not None and all(Attention.supports(size, activations, device) for size in sizes)
    return "fused" if fused else "native"


def read_plan(
    model: PreTrainedModel,
    int8: bool = False,
    packed: Iterable[Packed] = (),
    again: bool = False,
    shared: Iterable[Packed] = (),
) -> Plan | None:
    """The plan of ``model``, or None if the model has to run its own forward. ``int8`` as in ``PackedLinear``. Weights
    that are already in ``packed``, in the same way and from the same memory, are not packed again, nor those in
    ``shared``, in whichever way. ``again``: the model had a plan before and nearly all of its weights are packed, so
    that the memory left is not asked for."""
    name = type(model).__name__
    if not type(model).__module__.startswith("transformers.models.") or not is_plain(model):
        return None
    if not again and not has_room(copied(model), model.dtype, memory().available):
        return None
    if forward_kind(name, model.config, model.dtype, model.device, int8) is None:
        return None
    return FAMILIES[name](model, Packing(int8, packed, shared))


def _recurs(config: Any, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the native kernels compute this config's gated delta nets and the attention between them. There is no
    other implementation here."""
    if set(config.layer_types) - {"linear_attention", "full_attention"}:
        return False
    silu = native_gate(ACT2FN[config.hidden_act]) is Prologue.SILU_GATE
    return silu and Attention.supports(_heads(config)[0].size, dtype, device) and DeltaSizes.of(config).computed


def _heads(config: Any, gated: bool = False) -> list[Heads]:
    """The heads of each layer. In Gemma 4 some layers have heads of another size, or reuse an earlier layer's keys."""
    each = [config] * config.num_hidden_layers
    if getattr(config, "is_heterogeneous", False):
        each = list(config.per_layer_config)
    sharing = getattr(config, "kv_sharing_modes", [None] * len(each))
    return [
        Heads(
            queries=one.num_attention_heads,
            keys=one.num_key_value_heads,
            size=getattr(one, "head_dim", None) or one.hidden_size // one.num_attention_heads,
            gated=gated,
            reused=mode == "reuse",
        )
        for one, mode in zip(each, sharing, strict=True)
    ]


def _caches(config: Any, heads: list[Heads]) -> list[int]:
    """By layer, the number of the text's cache that it attends over: its own, or with ``reused`` heads that of the last
    layer before it of the same kind that has one."""
    found: list[int] = []
    last: dict[str, int] = {}
    kinds = getattr(config, "layer_types", None) or [""] * len(heads)
    for kind, one in zip(kinds, heads, strict=True):
        if not one.reused:
            last[kind] = sum(not before.reused for before in heads[: len(found)])
        found.append(last[kind])
    return found


def _attention_softcap(config: Any) -> float | None:
    """The cap of attention scores, or None. Gemma 3 has the setting too, but its attention does not use it."""
    return config.attn_logit_softcapping if config.model_type == "gemma2" else None


def is_plain(model: PreTrainedModel) -> bool:
    """Whether the weights are of one dtype, on one device, not adapted, quantised, sharded, hooked or replaced."""
    weights = list(model.parameters())
    kinds = {(weight.dtype, weight.device) for weight in weights}
    if len(kinds) != 1 or getattr(model, "peft_config", None):
        return False
    if getattr(model, "quantization_method", None) or getattr(model, "_tp_size", None):
        return False
    for module in model.modules():
        if module._forward_hooks or module._forward_pre_hooks or hasattr(module, "_hf_hook"):
            return False
        if isinstance(module, nn.Linear) and type(module) is not nn.Linear:
            return False
    return True


def copied(model: nn.Module) -> int:
    """How many of a model's weights its packed copy has, which may be on the meta device."""
    read = (module for module in model.modules() if not isinstance(module, nn.Embedding))  # these are not packed
    return sum(weight.numel() for module in read for weight in module.parameters(recurse=False))


def has_room(numbers: int, dtype: torch.dtype, free: int) -> bool:
    """Whether ``free`` bytes of memory have room for a packed copy of that many weights."""
    return numbers * dtype.itemsize <= PACKED_SHARE * free


def _dtypes(model: PreTrainedModel, int8: bool) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
    """The dtypes of activations, of the linear layers' inputs, and of keys and values in native attention."""
    kind = next(model.parameters()).dtype
    exact = int8 or multiplies(kind, model.device)  # such layers take float32
    activations = torch.promote_types(kind, torch.float32)
    return activations, torch.float32 if exact else kind, kind if kind == torch.bfloat16 else activations


def _names(model: PreTrainedModel) -> dict[nn.Module, str]:
    return {module: name for name, module in model.named_modules()}


def sliding_window(config: Any, layer: int) -> int:
    """How many tokens a query of a layer sees, 0 for all."""
    if config.model_type in NO_WINDOW:
        return 0
    window = getattr(config, "sliding_window", None) or 0
    kinds = getattr(config, "layer_types", None)
    if kinds is None or config.model_type in ONE_WINDOW:
        return window
    return window if kinds[layer] == "sliding_attention" else 0


# Values of ``use_bidirectional_attention`` with which attention over text is causal.
CAUSAL = (None, False, "vision")
# Model types whose attention does not read a window that the config has.
NO_WINDOW = {"llama"}
# Model types in which every layer has the same window.
ONE_WINDOW = {"mistral", "ministral3", "phi3"}


class Norms(NamedTuple):
    """The names of a layer's norms: of the attention's input and output, and of the feed-forward part's input and
    output. Empty for none."""

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
    """The plan of Llama and of models with the same parts: RMS norms, whose weights may be stored minus one
    (``plus_one``); attention, whose rotary embedding may pair adjacent numbers (``side_by_side``); a feed-forward part.
    """
    config = model.config
    base: Any = model.model
    dtype, kind, cache_dtype = _dtypes(model, pack.int8)
    heads = _heads(config)
    ropes = read_ropes(model, [one.size for one in heads], dtype)
    residual = getattr(config, "residual_multiplier", 1.0)
    order_of = cache(partial(_order, side_by_side=side_by_side))  # most layers share one

    def norm(module: nn.Module, out: torch.dtype = kind, size: int = 0) -> RmsNorm:
        return RmsNorm(module, dtype, out, plus_one, size)

    def named(block: Any, name: str, out: torch.dtype = kind) -> RmsNorm | None:
        return norm(getattr(block, name), out) if name else None

    layers: list[Layer] = []
    linears: list[Packed] = []
    for number, (block, own, place) in enumerate(zip(base.layers, heads, _caches(config, heads), strict=True)):
        attention, mlp = block.self_attn, feed_forward(block, pack, norm, dtype, residual)
        order = order_of(own, ropes.rotated[number])
        qkv = pack(*_projections(attention), order=order)
        head_norms, query_weight = _head_norms(attention, norm, order, own)
        attention_output = pack(attention.o_proj, factor=residual)
        given = layer_input(block, pack, norm, dtype)
        linears += [qkv, attention_output, *mlp.linears, *(() if given is None else given.linears)]
        layers.append(
            Layer(
                attention_norm=named(block, norms.attention),
                qkv=qkv,
                heads=own,
                cache=place,
                head_norms=head_norms,
                attention_output=attention_output,
                after_attention_norm=named(block, norms.after_attention, dtype),
                mlp_norm=named(block, norms.mlp),
                mlp=mlp,
                after_mlp_norm=named(block, norms.after_mlp, dtype),
                scale=attention.scaling,
                rope=ropes.layers[number],
                window=sliding_window(config, number),
                softcap=_attention_softcap(config),
                query_weight=query_weight,
                sinks=attention.sinks.to(dtype) if hasattr(attention, "sinks") else None,
                input=given,
                factor=float(block.layer_scalar) if hasattr(block, "layer_scalar") else 1.0,
            )
        )
    inputs = per_layer_inputs(base, pack, norm, dtype)
    lm_head = pack(model.lm_head, factor=1 / getattr(config, "logits_scaling", 1.0))
    return Plan(
        layers=tuple(layers),
        linears=(*linears, *(() if inputs is None else (inputs.projection,)), lm_head),
        embed=Embedding(base.embed_tokens, dtype, getattr(config, "embedding_multiplier", 1.0)),
        final_norm=norm(base.norm),
        lm_head=lm_head,
        softcap=getattr(config, "final_logit_softcapping", None),
        ropes=ropes.tables,
        context_length=config.max_position_embeddings,
        dtype=dtype,
        weight_dtype=kind,
        cache_dtype=cache_dtype,
        device=model.device,
        names=_names(model),
        inputs=inputs,
    )


def _order(heads: Heads, rotated: int, side_by_side: bool) -> torch.Tensor:
    """The order (see ``stacked``) of a projection's queries, keys and values in which our layers take them."""
    values = 0 if heads.reused else heads.keys * heads.size
    turned = pair_order(heads.queries + (0 if heads.reused else heads.keys), heads.size, rotated, side_by_side)
    return torch.cat([turned, torch.arange(turned.numel(), turned.numel() + values)])


def _projections(attention: Any) -> tuple[nn.Linear, ...]:
    """The projections to queries, keys and values. The keys' projection also gives the values if these have none of
    their own (Gemma 4)."""
    if hasattr(attention, "qkv_proj"):
        return (attention.qkv_proj,)
    if not hasattr(attention, "k_proj"):
        return (attention.q_proj,)
    return attention.q_proj, attention.k_proj, attention.v_proj or attention.k_proj


def _head_norms(
    attention: Any, norm: Callable[..., RmsNorm], order: torch.Tensor, heads: Heads
) -> tuple[HeadNorms | None, torch.Tensor | None]:
    """The head norms of an attention, or None, and the layer's ``query_weight``. ``order`` is that of the queries and
    the keys behind them."""
    size, weight, value = heads.size, None, None
    key: RmsNorm | None
    if hasattr(attention, "q_norm"):
        query, key = norm(attention.q_norm), None if heads.reused else norm(attention.k_norm)
        # All heads have the same order, so a prefix of ``order`` is the order of one head, or of all of them.
        for one in (query, key):
            if one is not None:
                one.weight = one.weight[order[: len(one.weight)]]
        if hasattr(attention, "v_norm"):
            value = norm(attention.v_norm, size=size)
    elif hasattr(attention, "query_layernorm"):
        # Hunyuan's norms come after the rotation. A rotation keeps lengths, so the norms can divide before it. Only the
        # product of the two weights matters for a score: it becomes ``query_weight``.
        query, key = norm(attention.query_layernorm), norm(attention.key_layernorm)
        weight = (query.weight * key.weight / size)[order[:size]].contiguous()
        for one in (query, key):
            one.weight = torch.full_like(one.weight, math.sqrt(size))
    else:
        return None, None
    return HeadNorms(query, key, value, heads.queries, heads.keys, size), weight


def _qwen3_5(model: PreTrainedModel, pack: Packing) -> Plan:
    """The plan of Qwen 3.5 and Qwen 3-Next, dense or mixtures: gated delta nets, and between them attention with a gate
    for each query, whose rotary embedding rotates a part of each head."""
    config = model.config
    base: Any = model.model
    dtype, kind, cache_dtype = _dtypes(model, pack.int8)
    sizes, all_heads = DeltaSizes.of(config), _heads(config, gated=True)
    own = all_heads[0]
    heads, key_heads, size = own.queries, own.keys, own.size
    ropes = read_ropes(model, [one.size for one in all_heads], dtype)
    turned = pair_order(heads + key_heads, size, ropes.rotated[0])
    # The projection of queries gives, head after head, the query and then its gate.
    queries = torch.arange(heads)[:, None] * 2 * size
    keys = 2 * heads * size + turned[: key_heads * size]
    values = 2 * heads * size + key_heads * size + torch.arange(key_heads * size)
    gates = queries + size + torch.arange(size)
    order = torch.cat([(queries + turned[:size]).reshape(-1), keys, values, gates.reshape(-1)])

    def norm(module: nn.Module, out: torch.dtype = kind) -> RmsNorm:
        return RmsNorm(module, dtype, out, plus_one=True)

    layers: list[Layer] = []
    linears: list[Packed] = []
    attending = 0
    for block in base.layers:
        mlp = feed_forward(block, pack, norm, dtype)
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
            heads_norm, _ = _head_norms(attention, norm, turned, own)
        linears += [mixed, output, *mlp.linears]
        layers.append(
            Layer(
                attention_norm=norm(block.input_layernorm),
                qkv=mixed,
                heads=own,
                cache=attending,
                head_norms=heads_norm,
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
        attending += delta is None
    lm_head = pack(model.lm_head)
    return Plan(
        layers=tuple(layers),
        linears=(*linears, lm_head),
        embed=Embedding(base.embed_tokens, dtype),
        final_norm=norm(base.norm),
        lm_head=lm_head,
        softcap=None,
        ropes=ropes.tables,
        context_length=config.max_position_embeddings,
        dtype=dtype,
        weight_dtype=kind,
        cache_dtype=cache_dtype,
        device=model.device,
        names=_names(model),
        delta=sizes if any(layer.delta is not None for layer in layers) else None,
    )


RECURRENT = {"Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM", "Qwen3NextForCausalLM"}
# Architectures whose feed-forward part has no gate.
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
    "Gemma4ForCausalLM": partial(_llama_like, norms=GEMMA),
    "Gemma4UnifiedForCausalLM": partial(_llama_like, norms=GEMMA),
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
