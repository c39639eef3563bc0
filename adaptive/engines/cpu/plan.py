"""What our forward has to compute, read from a transformers model.

In: a loaded model. Out: a ``Plan`` of packed linear layers, norms, rotary embeddings and windows, or None
for anything that is not known to be computed right: another architecture, quantised or offloaded
weights, a rotary embedding whose frequencies change with the length of the text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import psutil
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from adaptive.engines.cpu.delta import DeltaNet, DeltaSizes
from adaptive.engines.cpu.kernels import Attention, Prologue, multiplies
from adaptive.engines.cpu.layers import Gate, QkNorm, RmsNorm, TensorFunction, native_gate
from adaptive.engines.cpu.weights import PackedLinear, of_module, packs, packs_int8, stacked

# Of the memory that is free once the model is loaded, the share that a second, packed copy of its weights
# may take. Higher leaves too little for caches and the trainer, lower gives up speed that there is room for.
PACKED_SHARE = 0.7

# Frequencies of these are fixed at load; those of others ("dynamic", "longrope") depend on the text.
FIXED_ROPES = {"default", "linear", "llama3", "yarn"}


@dataclass(frozen=True)
class Layer:
    """One decoder layer.

    ``qkv`` gives queries, keys and values in a row, each head's numbers in the pairs that the rotary embedding turns;
    ``rope`` says which of the model's rotary embeddings, ``window`` how many tokens a query sees (0: all). Norms
    ``after_`` a part are Gemma's, of what the part adds to the residual stream; ``softcap`` bounds attention scores.
    With a ``delta`` net the layer does not attend: ``qkv`` is the net's projection (``native/delta.h``).
    """

    attention_norm: RmsNorm
    qkv: PackedLinear
    qk_norm: QkNorm | None
    attention_output: PackedLinear
    after_attention_norm: RmsNorm | None
    mlp_norm: RmsNorm
    mlp: Mlp
    after_mlp_norm: RmsNorm | None
    scale: float
    rope: int
    window: int
    softcap: float | None
    delta: DeltaNet | None = None


@dataclass(frozen=True)
class Fuse:
    """How a head reads a token and the feature of the one before it: linear([token_norm(embedding),
    feature_norm(feature)])."""

    linear: PackedLinear
    token_norm: RmsNorm
    feature_norm: RmsNorm


@dataclass(frozen=True)
class Plan:
    """A whole model. ``dtype`` is that of activations and cache, ``weight_dtype`` that of the linear layers' inputs;
    ``ropes`` map positions (1, n) to cos and sin as complex numbers (n, head size / 2); ``softcap`` bounds the logits;
    ``names`` gives a module's name in the model, for following adapters; ``fuse`` is how a head reads, None for a model
    that embeds its tokens. ``gated``: ``qkv`` gives a gate for each query behind the values, of what it sees.
    ``delta``: of the layers that do not attend, if there are any."""

    layers: tuple[Layer, ...]
    linears: tuple[PackedLinear, ...]
    embed: Embedding
    final_norm: RmsNorm
    lm_head: PackedLinear
    softcap: float | None
    ropes: tuple[TensorFunction, ...]
    heads: int
    key_heads: int
    head_size: int
    context_length: int
    dtype: torch.dtype
    weight_dtype: torch.dtype
    device: torch.device
    names: dict[nn.Module, str]
    fuse: Fuse | None = None
    gated: bool = False
    delta: DeltaSizes | None = None

    @property
    def width(self) -> int:
        """Numbers of a hidden state."""
        return self.lm_head.inputs


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
    if size % 2 or getattr(config, "use_bidirectional_attention", False) or not _fixed_ropes(config):
        return None
    if not multiplies(torch.int8 if int8 else dtype, device):
        return "torch"
    activations = torch.promote_types(dtype, torch.float32)
    capped = _attention_softcap(config) or getattr(config, "final_logit_softcapping", None)
    name = getattr(config, "hidden_activation", None) or config.hidden_act
    fused = not capped and Attention.supports(size, activations, device) and native_gate(ACT2FN[name]) is not None
    return "fused" if fused else "native"


def read_plan(model: PreTrainedModel, int8: bool = False, packed: Iterable[PackedLinear] = ()) -> Plan | None:
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
    return silu and Attention.supports(_head_size(config), dtype, device) and _delta_sizes(config).computed


def _delta_sizes(config: Any) -> DeltaSizes:
    return DeltaSizes(
        config.linear_num_key_heads,
        config.linear_num_value_heads,
        config.linear_key_head_dim,
        config.linear_value_head_dim,
        config.linear_conv_kernel_dim,
    )


def _head_size(config: Any) -> int:
    size: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return size


def _attention_softcap(config: Any) -> float | None:
    """Gemma 3 has the setting too, and its attention does not use it."""
    return config.attn_logit_softcapping if config.model_type == "gemma2" else None


def _rope_kinds(config: Any) -> list[str | None]:
    """By layer, the name of its rotary embedding where the model has several (Gemma 3)."""
    return list(config.layer_types) if config.model_type == "gemma3_text" else [None] * config.num_hidden_layers


def _fixed_ropes(config: Any) -> bool:
    ropes = config.rope_parameters
    return all((ropes[kind] if kind else ropes)["rope_type"] in FIXED_ROPES for kind in _rope_kinds(config))


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


@dataclass(frozen=True)
class Mlp:
    """The gated feed-forward part, down(gate(gate_up(x))): the gate's and the up projection are one linear layer."""

    gate_up: PackedLinear
    gate: Gate
    down: PackedLinear


class Packing:
    """Packs linear layers, or finds those that are packed already."""

    def __init__(self, int8: bool, packed: Iterable[PackedLinear]) -> None:
        self.int8 = int8
        self._packed = {_memory(linear.modules): linear for linear in packed if linear.int8 == int8}

    def __call__(self, *modules: nn.Linear, order: torch.Tensor | None = None) -> PackedLinear:
        """Modules on the same input as one linear layer; see ``stacked``."""
        found = self._packed.get(_memory(modules))
        if found is not None:
            return found
        return of_module(modules[0], self.int8) if len(modules) == 1 else stacked(modules, order, self.int8)


def _memory(modules: Iterable[nn.Module]) -> tuple[int, ...]:
    return tuple(module.get_parameter("weight").data_ptr() for module in modules)


def _mlp(module: Any, pack: Packing) -> Mlp:
    return Mlp(pack(module.gate_proj, module.up_proj), Gate(module.act_fn), pack(module.down_proj))


def pair_order(heads: int, size: int, rotated: int | None = None) -> torch.Tensor:
    """Where each output of ``heads`` projected heads comes from, (heads * size,) int64.

    Checkpoints rotate number i of a head together with number i + rotated / 2, of the first ``rotated`` (or all); here
    the two stand side by side, so that a rotation is one complex multiplication. Scores do not change: queries and keys
    move alike.
    """
    turned = size if rotated is None else rotated
    inside = torch.cat([torch.arange(turned).view(2, turned // 2).T.reshape(-1), torch.arange(turned, size)])
    return (torch.arange(heads)[:, None] * size + inside).reshape(-1)


def _rope(module: nn.Module, dtype: torch.dtype, size: int, kind: str | None = None) -> TensorFunction:
    """The model's own rotary embedding of heads of this size: cos + i sin of every angle, 1 for what is not rotated."""

    def cos_sin(positions: torch.Tensor) -> torch.Tensor:
        like = torch.empty(1, dtype=dtype, device=positions.device)
        cos, sin = module(like, positions) if kind is None else module(like, positions, kind)
        half = cos.shape[-1] // 2
        turned = torch.complex(cos[0, :, :half], sin[0, :, :half])
        return torch.cat([turned, turned.new_ones(len(turned), size // 2 - half)], dim=1)

    return cos_sin


class Embedding:
    """Tokens (n,) to (n, width) in the activations' dtype; Gemma's times a factor, rounded as transformers does."""

    def __init__(self, module: nn.Embedding, dtype: torch.dtype) -> None:
        self.weight, self.dtype = module.weight, dtype
        scale = getattr(module, "embed_scale", None)
        self.factor: torch.Tensor | None = None if scale is None else scale.to(self.weight.dtype)

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        x = nn.functional.embedding(tokens, self.weight)
        if self.factor is not None:
            x = x * self.factor
        return x if x.dtype == self.dtype else x.to(self.dtype)


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
    if kinds is None:  # Mistral: one window for every layer
        return [window] * config.num_hidden_layers
    return [window if kind == "sliding_attention" else 0 for kind in kinds]


def _llama_like(model: PreTrainedModel, pack: Packing) -> Plan:
    """Llama, Qwen 2 and 3, Mistral, Gemma 2 and 3: gated feed-forward, RMS norms, full rotary."""
    config = model.config
    base: Any = model.model
    gemma = config.model_type.startswith("gemma")
    kinds = _rope_kinds(config)
    dtype, kind = _dtypes(model, pack.int8)
    first = base.layers[0].self_attn
    size = first.head_dim
    heads, key_heads = first.q_proj.out_features // size, first.k_proj.out_features // size
    rotated = pair_order(heads + key_heads, size)
    order = torch.cat([rotated, torch.arange(rotated.numel(), rotated.numel() + key_heads * size)])
    rope_kinds = list(dict.fromkeys(kinds))

    def norm(module: nn.Module, out: torch.dtype = kind) -> RmsNorm:
        return RmsNorm(module, dtype, out, plus_one=gemma)

    layers, linears = [], []
    for index, (block, window) in enumerate(zip(base.layers, _windows(model), strict=True)):
        attention, mlp = block.self_attn, _mlp(block.mlp, pack)
        qkv = pack(attention.q_proj, attention.k_proj, attention.v_proj, order=order)
        attention_output = pack(attention.o_proj)
        linears += [qkv, attention_output, mlp.gate_up, mlp.down]
        layers.append(
            Layer(
                attention_norm=norm(block.input_layernorm),
                qkv=qkv,
                qk_norm=_qk_norm(attention, norm, pair_order(1, size), heads, key_heads),
                attention_output=attention_output,
                after_attention_norm=norm(block.post_attention_layernorm, dtype) if gemma else None,
                mlp_norm=norm(block.pre_feedforward_layernorm if gemma else block.post_attention_layernorm),
                mlp=mlp,
                after_mlp_norm=norm(block.post_feedforward_layernorm, dtype) if gemma else None,
                scale=attention.scaling,
                rope=rope_kinds.index(kinds[index]),
                window=window,
                softcap=_attention_softcap(config),
            )
        )
    lm_head = pack(model.lm_head)
    return Plan(
        layers=tuple(layers),
        linears=(*linears, lm_head),
        embed=Embedding(base.embed_tokens, dtype),
        final_norm=norm(base.norm),
        lm_head=lm_head,
        softcap=getattr(config, "final_logit_softcapping", None),
        ropes=tuple(_rope(base.rotary_emb, dtype, size, kind) for kind in rope_kinds),
        heads=heads,
        key_heads=key_heads,
        head_size=size,
        context_length=config.max_position_embeddings,
        dtype=dtype,
        weight_dtype=kind,
        device=model.device,
        names=_names(model),
    )


def _qk_norm(
    attention: Any, norm: Callable[[nn.Module], RmsNorm], inside: torch.Tensor, heads: int, key_heads: int
) -> QkNorm | None:
    """That of an attention's heads, whose numbers are ordered as ``inside``; None where it has none."""
    if not hasattr(attention, "q_norm"):
        return None
    q, k = norm(attention.q_norm), norm(attention.k_norm)
    return QkNorm(q, torch.stack([q.weight[inside]] * heads + [k.weight[inside]] * key_heads))


def _qwen3_5(model: PreTrainedModel, pack: Packing) -> Plan:
    """Gated delta nets, and between them attention whose queries have a gate, rotated in a part of each head."""
    config = model.config
    base: Any = model.model
    dtype, kind = _dtypes(model, pack.int8)
    sizes, size, heads, key_heads = (
        _delta_sizes(config),
        _head_size(config),
        config.num_attention_heads,
        config.num_key_value_heads,
    )
    rotated = 2 * base.rotary_emb.inv_freq.numel()
    inside = pair_order(1, size, rotated)
    # The projection of queries gives each head's query, and then its gate.
    queries = torch.arange(heads)[:, None] * 2 * size
    keys = 2 * heads * size + pair_order(key_heads, size, rotated)
    values = 2 * heads * size + key_heads * size + torch.arange(key_heads * size)
    gates = queries + size + torch.arange(size)
    order = torch.cat([(queries + inside).reshape(-1), keys, values, gates.reshape(-1)])

    def norm(module: nn.Module) -> RmsNorm:
        return RmsNorm(module, dtype, kind, plus_one=True)

    layers, linears = [], []
    for block in base.layers:
        mlp = _mlp(block.mlp, pack)
        if block.block_type == "linear_attention":
            net = block.linear_attn
            mixed = pack(net.in_proj_qkv, net.in_proj_z, net.in_proj_b, net.in_proj_a)
            output, delta, heads_norm = pack(net.out_proj), DeltaNet(net, sizes), None
        else:
            attention = block.self_attn
            mixed = pack(attention.q_proj, attention.k_proj, attention.v_proj, order=order)
            output, delta = pack(attention.o_proj), None
            heads_norm = _qk_norm(attention, norm, inside, heads, key_heads)
        linears += [mixed, output, mlp.gate_up, mlp.down]
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
                rope=0,
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
        ropes=(_rope(base.rotary_emb, dtype, size),),
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


RECURRENT = {"Qwen3_5ForCausalLM"}
FAMILIES: dict[str, Callable[[PreTrainedModel, Packing], Plan]] = {
    "LlamaForCausalLM": _llama_like,
    "Qwen2ForCausalLM": _llama_like,
    "Qwen3ForCausalLM": _llama_like,
    "MistralForCausalLM": _llama_like,
    "Gemma2ForCausalLM": _llama_like,
    "Gemma3ForCausalLM": _llama_like,
    "Qwen3_5ForCausalLM": _qwen3_5,
}
