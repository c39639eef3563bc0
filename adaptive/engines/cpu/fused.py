"""Our forward's plan as one native call, for models that are made of the usual parts."""

from __future__ import annotations

from typing import Any

import torch

from adaptive.engines.cpu.feed_forward import Mixture
from adaptive.engines.cpu.kernels import Attention, Prologue, library
from adaptive.engines.cpu.layers import RmsNorm
from adaptive.engines.cpu.plan import Layer, Plan
from adaptive.engines.cpu.weights import native_linear


def fits(plan: Plan) -> bool:
    """Whether a ``Decoder`` computes all that the plan says: on native kernels, and without softcaps."""
    return (
        Attention.supports(plan.head_size, plan.dtype, plan.device)
        and all(linear.native for linear in plan.linears)
        and plan.softcap is None
        and plan.embed.weight.dtype in (torch.float32, torch.bfloat16)
        and plan.embed.weight.is_contiguous()
        and len({_gate(layer) for layer in plan.layers}) == 1
        and all(_gate(layer) is not None and layer.softcap is None for layer in plan.layers)
    )


def _gate(layer: Layer) -> Prologue | None:
    return layer.mlp.gate.prologue


def decoder(plan: Plan, attention: Attention) -> Any:
    """The plan with its linear layers as they are now, for the kernels; it ``fits``, and outlives this."""
    found = library()
    assert found is not None
    native = found.module

    def norm(of: RmsNorm | None) -> Any:
        return native.Norm() if of is None else native.Norm(of.weight.data_ptr(), of.eps_sum, len(of.weight))

    layers = [
        native.Layer(
            qkv=native_linear(layer.qkv),
            output=native_linear(layer.attention_output),
            up=None if isinstance(layer.mlp, Mixture) else native_linear(layer.mlp.gate_up),
            down=None if isinstance(layer.mlp, Mixture) else native_linear(layer.mlp.down),
            mixture=layer.mlp.native if isinstance(layer.mlp, Mixture) else None,
            attention_norm=norm(layer.attention_norm),
            mlp_norm=norm(layer.mlp_norm),
            query_norm=norm(None if layer.qk_norm is None else layer.qk_norm.query),
            key_norm=norm(None if layer.qk_norm is None else layer.qk_norm.key),
            after_attention=norm(layer.after_attention_norm),
            after_mlp=norm(layer.after_mlp_norm),
            scale=layer.scale,
            key_rope=layer.rope.keys,
            query_rope=layer.rope.queries,
            query_weight=0 if layer.query_weight is None else layer.query_weight.data_ptr(),
            window=layer.window,
            delta=None if layer.delta is None else layer.delta.native,
            sinks=0 if layer.sinks is None else layer.sinks.data_ptr(),
        )
        for layer in plan.layers
    ]
    embedding, fuse = plan.embed.weight, plan.fuse
    return native.Decoder(
        layers=layers,
        attention=attention.native,
        head=native_linear(plan.lm_head),
        embedding=embedding.data_ptr(),
        final_norm=norm(plan.final_norm),
        factor=plan.embed.factor,
        gate=int(_gate(plan.layers[0]) or 0),
        half=embedding.dtype == torch.bfloat16,
        vocab=len(embedding),
        fuse=None if fuse is None else native_linear(fuse.linear),
        token_norm=norm(None if fuse is None else fuse.token_norm),
        feature_norm=norm(None if fuse is None else fuse.feature_norm),
        stream=plan.stream,
    )
