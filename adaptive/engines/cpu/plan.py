"""What the lean forward has to compute, read from a transformers model.

In: a loaded model. Out: a ``Plan`` of packed products, norms, rotations and windows, or None for
anything that is not known to be computed right: another architecture, quantised or offloaded
weights, a rotation whose frequencies change with the length of the text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from torch import nn
from transformers import PreTrainedModel

from adaptive.engines.cpu.kernels import multiplies
from adaptive.engines.cpu.layers import Gate, HeadNorm, LayerNorm, Map, RmsNorm, activation
from adaptive.engines.cpu.weights import PackedLinear, of_module, packs, packs_int8, stacked

# Of the memory that is free once the model is loaded, the share that a second, packed copy of its weights
# may take. Higher leaves too little for caches and the trainer, lower gives up speed that there is room for.
PACKED_SHARE = 0.7

# Frequencies of these are fixed at load; those of others ("dynamic", "longrope") depend on the text.
FIXED_ROPES = {"default", "linear", "llama3", "yarn"}


@dataclass(frozen=True)
class Layer:
    """One decoder layer. ``project`` gives queries, keys and values in a row, each head's numbers in
    pairs to rotate; ``mix`` is the feed-forward part; ``rope`` says which rotation, ``window`` how many
    tokens a query sees (0: all). ``parallel``: both parts read the same residual (GPT-NeoX)."""

    attention_norm: Map
    project: PackedLinear
    head_norm: Map | None
    output: PackedLinear
    attention_post_norm: Map | None
    mix_norm: Map
    mix: Mix
    mix_post_norm: Map | None
    scale: float
    rope: int
    window: int
    score_cap: float | None
    parallel: bool


@dataclass(frozen=True)
class Plan:
    """A whole model. ``dtype`` is that of activations and cache, ``weight_dtype`` that of the products'
    inputs; ``ropes`` map positions (1, n) to complex turns (n, rotary size / 2); ``names`` gives a module's
    name in the model, for following adapters."""

    layers: tuple[Layer, ...]
    linears: tuple[PackedLinear, ...]
    embed: Embedding
    final_norm: Map
    head: PackedLinear
    logit_cap: float | None
    ropes: tuple[Map, ...]
    heads: int
    key_heads: int
    head_size: int
    context_length: int
    dtype: torch.dtype
    weight_dtype: torch.dtype
    device: torch.device
    names: dict[nn.Module, str]


def knows(architectures: list[str] | None) -> bool:
    """Whether a checkpoint of this class, as its config names it, may have a plan."""
    return any(name in FAMILIES for name in architectures or ())


def read_plan(model: PreTrainedModel, int8: bool = False) -> Plan | None:
    """The plan of ``model``, or None where it is to be run by its own forward; ``int8`` as in ``PackedLinear``."""
    family = FAMILIES.get(type(model).__name__)
    if family is None or not type(model).__module__.startswith("transformers.models.") or not _plain(model):
        return None
    if int8 and not packs_int8(model.device):
        return None
    return family(model, int8)


def _plain(model: PreTrainedModel) -> bool:
    """Whether the model's weights are what they seem: one dtype, in memory, nothing hooked or replaced."""
    weights = list(model.parameters())
    kinds = {(weight.dtype, weight.device) for weight in weights}
    if len(kinds) != 1 or getattr(model, "peft_config", None):
        return False
    dtype, device = weights[0].dtype, weights[0].device
    if sum(weight.nbytes for weight in weights) > PACKED_SHARE * psutil.virtual_memory().available:
        return False
    if dtype != torch.float64 and not packs(dtype, device) and not multiplies(dtype, device):
        return False
    if device.type != "cpu" or getattr(model, "quantization_method", None) or getattr(model, "_tp_size", None):
        return False
    for module in model.modules():
        if module._forward_hooks or module._forward_pre_hooks or hasattr(module, "_hf_hook"):
            return False
        if isinstance(module, nn.Linear) and type(module) is not nn.Linear:
            return False
    return True


@dataclass(frozen=True)
class Mix:
    """The feed-forward part: down(act(up(x))), or if ``gated``, gate and up as one product and ``act`` a ``Gate``.
    ``activation`` is the name of its class."""

    up: PackedLinear
    act: Map
    down: PackedLinear
    gated: bool
    activation: str


def _gated(mlp: Any, int8: bool) -> Mix:
    up = stacked((mlp.gate_proj, mlp.up_proj), int8=int8)
    return Mix(up, Gate(mlp.act_fn), of_module(mlp.down_proj, int8), True, type(mlp.act_fn).__name__)


def pair_order(heads: int, size: int, rotary: int) -> torch.Tensor:
    """Where each output of ``heads`` projected heads comes from, (heads * size,) int64.

    Checkpoints rotate number i of a head together with number i + rotary / 2; here the two stand side by
    side, so that a rotation is one complex product. Scores do not change: queries and keys move alike.
    """
    half = rotary // 2
    inside = torch.cat([torch.arange(rotary).view(2, half).T.reshape(-1), torch.arange(rotary, size)])
    return (torch.arange(heads)[:, None] * size + inside).reshape(-1)


def _rope(module: nn.Module, dtype: torch.dtype, kind: str | None = None) -> Map:
    """The model's own rotation as complex turns."""

    def turns(positions: torch.Tensor) -> torch.Tensor:
        like = torch.empty(1, dtype=dtype, device=positions.device)
        cos, sin = module(like, positions) if kind is None else module(like, positions, kind)
        half = cos.shape[-1] // 2
        return torch.complex(cos[0, :, :half], sin[0, :, :half])

    return turns


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
    """Of activations, and of the products' inputs."""
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


def _llama_like(model: PreTrainedModel, int8: bool) -> Plan | None:
    """Llama, Qwen 2 and 3, Mistral, Gemma 2 and 3: gated feed-forward, RMS norms, full rotary."""
    config = model.config
    base: Any = model.model
    gemma = config.model_type.startswith("gemma")
    dual = config.model_type == "gemma3_text"
    kinds = list(config.layer_types) if dual else [None]
    ropes = config.rope_parameters
    if any((ropes[kind] if kind else ropes)["rope_type"] not in FIXED_ROPES for kind in kinds):
        return None
    if getattr(config, "use_bidirectional_attention", False):
        return None
    dtype, kind = _dtypes(model, int8)
    first = base.layers[0].self_attn
    size = first.head_dim
    heads, key_heads = first.q_proj.out_features // size, first.k_proj.out_features // size
    if size % 2 or any(layer.self_attn.head_dim != size for layer in base.layers):
        return None
    turned = pair_order(heads + key_heads, size, size)
    order = torch.cat([turned, torch.arange(turned.numel(), turned.numel() + key_heads * size)])
    rope_kinds = list(dict.fromkeys(kinds))

    def norm(module: nn.Module, out: torch.dtype = kind) -> RmsNorm:
        return RmsNorm(module, dtype, out, plus_one=gemma)

    def head_norm(attention: nn.Module) -> HeadNorm | None:
        if not hasattr(attention, "q_norm"):
            return None
        inside = pair_order(1, size, size)
        q, k = norm(attention.q_norm), norm(attention.k_norm)  # type: ignore[arg-type]
        weights = [q.weight[inside]] * heads + [k.weight[inside]] * key_heads
        return HeadNorm(q, torch.stack(weights))

    layers, linears = [], []
    for index, (block, window) in enumerate(zip(base.layers, _windows(model), strict=True)):
        attention, mlp = block.self_attn, _gated(block.mlp, int8)
        project = stacked((attention.q_proj, attention.k_proj, attention.v_proj), order, int8)
        output = of_module(attention.o_proj, int8)
        linears += [project, output, mlp.up, mlp.down]
        layers.append(
            Layer(
                attention_norm=norm(block.input_layernorm),
                project=project,
                head_norm=head_norm(attention),
                output=output,
                attention_post_norm=norm(block.post_attention_layernorm, dtype) if gemma else None,
                mix_norm=norm(block.pre_feedforward_layernorm if gemma else block.post_attention_layernorm),
                mix=mlp,
                mix_post_norm=norm(block.post_feedforward_layernorm, dtype) if gemma else None,
                scale=attention.scaling,
                rope=rope_kinds.index(kinds[index]) if dual else 0,
                window=window,
                # Gemma 3 has the setting too, and its attention does not use it.
                score_cap=config.attn_logit_softcapping if config.model_type == "gemma2" else None,
                parallel=False,
            )
        )
    head = of_module(model.lm_head, int8)
    return Plan(
        layers=tuple(layers),
        linears=(*linears, head),
        embed=Embedding(base.embed_tokens, dtype),
        final_norm=norm(base.norm),
        head=head,
        logit_cap=getattr(config, "final_logit_softcapping", None),
        ropes=tuple(_rope(base.rotary_emb, dtype, kind) for kind in rope_kinds),
        heads=heads,
        key_heads=key_heads,
        head_size=size,
        context_length=config.max_position_embeddings,
        dtype=dtype,
        weight_dtype=kind,
        device=model.device,
        names=_names(model),
    )


def _neox(model: PreTrainedModel, int8: bool) -> Plan | None:
    """GPT-NeoX: layer norms, fused projection by head, partial rotary, both parts in parallel."""
    config = model.config
    base: Any = model.gpt_neox
    if config.rope_parameters["rope_type"] not in FIXED_ROPES:
        return None
    dtype, kind = _dtypes(model, int8)
    heads, size = config.num_attention_heads, base.layers[0].attention.head_size
    rotary = base.layers[0].attention.rotary_ndims
    if size % 2 or rotary % 2:
        return None
    # The checkpoint has query, key and value of one head, then the next head.
    by_part = torch.arange(3 * heads * size).view(heads, 3, size).transpose(0, 1).reshape(-1)
    pairs = pair_order(2 * heads, size, rotary)
    order = by_part[torch.cat([pairs, torch.arange(pairs.numel(), 3 * heads * size)])]
    layers, linears = [], []
    for block in base.layers:
        project, output = (
            stacked((block.attention.query_key_value,), order, int8),
            of_module(block.attention.dense, int8),
        )
        mlp = Mix(
            of_module(block.mlp.dense_h_to_4h, int8),
            activation(block.mlp.act),
            of_module(block.mlp.dense_4h_to_h, int8),
            False,
            type(block.mlp.act).__name__,
        )
        linears += [project, output, mlp.up, mlp.down]
        layers.append(
            Layer(
                attention_norm=LayerNorm(block.input_layernorm, dtype, kind),
                project=project,
                head_norm=None,
                output=output,
                attention_post_norm=None,
                mix_norm=LayerNorm(block.post_attention_layernorm, dtype, kind),
                mix=mlp,
                mix_post_norm=None,
                scale=block.attention.scaling,
                rope=0,
                window=0,
                score_cap=None,
                parallel=config.use_parallel_residual,
            )
        )
    head = of_module(model.lm_head, int8)
    return Plan(
        layers=tuple(layers),
        linears=(*linears, head),
        embed=Embedding(base.embed_in, dtype),
        final_norm=LayerNorm(base.final_layer_norm, dtype, kind),
        head=head,
        logit_cap=None,
        ropes=(_rope(base.rotary_emb, dtype),),
        heads=heads,
        key_heads=heads,
        head_size=size,
        context_length=config.max_position_embeddings,
        dtype=dtype,
        weight_dtype=kind,
        device=model.device,
        names=_names(model),
    )


FAMILIES: dict[str, Callable[[PreTrainedModel, bool], Plan | None]] = {
    "LlamaForCausalLM": _llama_like,
    "Qwen2ForCausalLM": _llama_like,
    "Qwen3ForCausalLM": _llama_like,
    "MistralForCausalLM": _llama_like,
    "Gemma2ForCausalLM": _llama_like,
    "Gemma3ForCausalLM": _llama_like,
    "GPTNeoXForCausalLM": _neox,
}
