"""The lean forward's plan as one call of our own kernels, for models that are made of the usual parts."""

from __future__ import annotations

import torch

from adaptive.engines.kernels import Attention, Decoder, DecoderLayer, Product
from adaptive.engines.lean_maps import Gate, Map, RmsNorm
from adaptive.engines.lean_plan import Plan
from adaptive.engines.packed import PackedLinear


def fits(plan: Plan) -> bool:
    """Whether a ``Decoder`` computes all that the plan says: Llama, Mistral and Qwen 2 on kernels of our own."""
    return (
        Attention.supports(plan.head_size, plan.dtype, plan.device)
        and all(linear.ours for linear in plan.linears)
        and isinstance(plan.final_norm, RmsNorm)
        and plan.logit_cap is None
        and plan.embed.factor is None
        and plan.embed.weight.dtype in (torch.float32, torch.bfloat16)
        and plan.embed.weight.is_contiguous()
        and all(
            isinstance(layer.attention_norm, RmsNorm)
            and isinstance(layer.mix_norm, RmsNorm)
            and isinstance(layer.mix.act, Gate)
            and layer.mix.act.silu
            and layer.head_norm is None
            and layer.attention_post_norm is None
            and layer.mix_post_norm is None
            and layer.score_cap is None
            and not layer.parallel
            for layer in plan.layers
        )
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
            scale=layer.scale,
            rope=layer.rope,
            window=layer.window,
        )
        for layer in plan.layers
    ]
    return Decoder(layers, attention, _product(plan.head), _norm(plan.final_norm), plan.embed.weight)


def _product(linear: PackedLinear) -> Product:
    assert linear.product is not None
    return linear.product


def _norm(norm: Map) -> tuple[torch.Tensor, float]:
    assert isinstance(norm, RmsNorm)
    return norm.weight, norm.square
