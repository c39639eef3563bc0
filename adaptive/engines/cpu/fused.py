"""Our forward's plan as one native call, for models that are made of the usual parts."""

from __future__ import annotations

import torch

from adaptive.engines.cpu.decoder import Decoder, DecoderLayer, Norm
from adaptive.engines.cpu.kernels import Attention, First, Product
from adaptive.engines.cpu.layers import QkNorm, RmsNorm
from adaptive.engines.cpu.plan import Layer, Plan
from adaptive.engines.cpu.weights import PackedLinear


def fits(plan: Plan) -> bool:
    """Whether a ``Decoder`` computes all that the plan says: Llama, Mistral, Qwen and Gemma 3 on native kernels."""
    return (
        Attention.supports(plan.head_size, plan.dtype, plan.device)
        and all(linear.native for linear in plan.linears)
        and plan.softcap is None
        and plan.embed.weight.dtype in (torch.float32, torch.bfloat16)
        and plan.embed.weight.is_contiguous()
        and len({_gate(layer) for layer in plan.layers}) == 1
        and all(_gate(layer) is not None and layer.softcap is None for layer in plan.layers)
    )


def _gate(layer: Layer) -> First | None:
    return layer.mlp.gate.prologue


def decoder(plan: Plan, attention: Attention) -> Decoder:
    """The plan with its linear layers as they are now; it ``fits``."""
    layers = [
        DecoderLayer(
            project=_native(layer.qkv),
            output=_native(layer.attention_output),
            up=_native(layer.mlp.gate_up),
            down=_native(layer.mlp.down),
            attention_norm=_norm(layer.attention_norm),
            mix_norm=_norm(layer.mlp_norm),
            head_norm=None if layer.qk_norm is None else _norm(layer.qk_norm),
            after_attention=None if layer.after_attention_norm is None else _norm(layer.after_attention_norm),
            after_mix=None if layer.after_mlp_norm is None else _norm(layer.after_mlp_norm),
            scale=layer.scale,
            rope=layer.rope,
            window=layer.window,
        )
        for layer in plan.layers
    ]
    gate = _gate(plan.layers[0])
    assert gate is not None
    embed = plan.embed
    factor = 1.0 if embed.factor is None else float(embed.factor)
    return Decoder(layers, attention, gate, _norm(plan.final_norm), _native(plan.lm_head), embed.weight, factor)


def _native(linear: PackedLinear) -> Product:
    assert linear.product is not None
    return linear.product


def _norm(norm: RmsNorm | QkNorm) -> Norm:
    return Norm(norm.weight, norm.eps_sum)
