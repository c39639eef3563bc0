"""The lean forward's plan as one call of our own kernels, for models that are made of the usual parts."""

from __future__ import annotations

import torch

from adaptive.engines.cpu.decoder import Decoder, DecoderLayer, Norm
from adaptive.engines.cpu.kernels import Attention, First, Product
from adaptive.engines.cpu.layers import Gate, HeadNorm, Map, RmsNorm
from adaptive.engines.cpu.plan import Layer, Plan
from adaptive.engines.cpu.weights import PackedLinear


def fits(plan: Plan) -> bool:
    """Whether a ``Decoder`` computes all that the plan says: Llama, Mistral, Qwen and Gemma 3 on kernels of our own."""
    return (
        Attention.supports(plan.head_size, plan.dtype, plan.device)
        and all(linear.ours for linear in plan.linears)
        and isinstance(plan.final_norm, RmsNorm)
        and plan.logit_cap is None
        and plan.embed.weight.dtype in (torch.float32, torch.bfloat16)
        and plan.embed.weight.is_contiguous()
        and len({_gate(layer) for layer in plan.layers}) == 1
        and all(_gate(layer) is not None and _is_usual(layer) for layer in plan.layers)
    )


def _gate(layer: Layer) -> First | None:
    return layer.mix.act.first if isinstance(layer.mix.act, Gate) else None


def _is_usual(layer: Layer) -> bool:
    return (
        isinstance(layer.attention_norm, RmsNorm)
        and isinstance(layer.mix_norm, RmsNorm)
        and isinstance(layer.head_norm, HeadNorm | None)
        and isinstance(layer.attention_post_norm, RmsNorm | None)
        and isinstance(layer.mix_post_norm, RmsNorm | None)
        and layer.score_cap is None
        and not layer.parallel
    )


def decoder(plan: Plan, attention: Attention) -> Decoder:
    """The plan with its products as they are now; it ``fits``."""
    layers = [
        DecoderLayer(
            project=_product(layer.project),
            output=_product(layer.output),
            up=_product(layer.mix.up),
            down=_product(layer.mix.down),
            attention_norm=_norm(layer.attention_norm),
            mix_norm=_norm(layer.mix_norm),
            head_norm=None if layer.head_norm is None else _norm(layer.head_norm),
            after_attention=None if layer.attention_post_norm is None else _norm(layer.attention_post_norm),
            after_mix=None if layer.mix_post_norm is None else _norm(layer.mix_post_norm),
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
    return Decoder(layers, attention, gate, _norm(plan.final_norm), _product(plan.head), embed.weight, factor)


def _product(linear: PackedLinear) -> Product:
    assert linear.product is not None
    return linear.product


def _norm(norm: Map) -> Norm:
    assert isinstance(norm, RmsNorm | HeadNorm)
    return Norm(norm.weight, norm.square)
