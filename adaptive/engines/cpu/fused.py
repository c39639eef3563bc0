"""Translates a plan of our forward for the kernels, so that a pass is one native call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from adaptive.engines.cpu.feed_forward import Beside, Mixture, Mlp, native_norm
from adaptive.engines.cpu.kernels import Attention, Prologue, library
from adaptive.engines.cpu.layer_inputs import LayerInput, PerLayerInputs
from adaptive.engines.cpu.layers import Embedding
from adaptive.engines.cpu.plan import Layer, Plan
from adaptive.engines.cpu.weights import native_linear


def attentions(plan: Plan) -> list[Attention | None] | None:
    """The native attention of every layer, None for a layer with a delta net; None if any attention is not native."""
    sizes = {layer.heads.size for layer in plan.layers}
    if not all(Attention.supports(size, plan.dtype, plan.device) for size in sizes):
        return None
    places = plan.rope_places
    return [
        None
        if layer.delta is not None
        else Attention(
            *layer.heads,
            stride=places[-1],
            key_rope=places[layer.rope.keys],
            query_rope=places[layer.rope.queries],
            half=plan.cache_dtype == torch.bfloat16,
            window=layer.window,
            scale=layer.scale,
            softcap=layer.softcap or 0.0,
            query_weight=layer.query_weight,
            sinks=layer.sinks,
        )
        for layer in plan.layers
    ]


def fits(plan: Plan) -> bool:
    """Whether a native ``Decoder`` can compute the whole plan."""
    embeds = [plan.embed.weight, *(() if plan.inputs is None else (plan.inputs.embed.weight,))]
    return (
        all(Attention.supports(layer.heads.size, plan.dtype, plan.device) for layer in plan.layers)
        and all(linear.native for linear in plan.linears)
        and all(weight.dtype in (torch.float32, torch.bfloat16) and weight.is_contiguous() for weight in embeds)
        and len(gates := _gates(plan)) == 1
        and None not in gates
    )


def _gates(plan: Plan) -> set[Prologue | None]:
    """The native gates of all layers and of their inputs; None among them for a gate that is not native."""
    inputs = [layer.input.act for layer in plan.layers if layer.input is not None]
    return {gate.prologue for gate in (*(layer.mlp.gate for layer in plan.layers), *inputs)}


def decoder(plan: Plan, attentions: Sequence[Attention | None], taps: Sequence[int] = ()) -> Any:
    """The native ``Decoder`` of a plan that ``fits``, with its current linear layers. The plan must outlive it.
    ``taps``: the layers before which features are kept; none: behind the last."""
    found = library()
    assert found is not None
    native, fuse = found.module, plan.fuse
    layers = [_layer(native, *both) for both in zip(plan.layers, attentions, strict=True)]
    return native.Decoder(
        layers=layers,
        stride=plan.rope_places[-1],
        head=native_linear(plan.lm_head),
        embedding=_embedding(native, plan.embed),
        final_norm=native_norm(plan.final_norm),
        gate=int(plan.layers[0].mlp.gate.prologue or 0),
        vocab=len(plan.embed.weight),
        softcap=plan.softcap or 0.0,
        inputs=None if plan.inputs is None else _inputs(native, plan.inputs),
        fuse=None if fuse is None else native_linear(fuse.linear),
        token_norm=native_norm(None if fuse is None else fuse.token_norm),
        feature_norm=native_norm(None if fuse is None else fuse.feature_norm),
        stream=plan.stream,
        ids=0 if plan.ids is None else plan.ids.data_ptr(),
        taps=list(taps),
    )


def _layer(native: Any, layer: Layer, attention: Attention | None) -> Any:
    norms, mlp = layer.head_norms, layer.mlp
    dense = mlp.dense if isinstance(mlp, Beside) else mlp if isinstance(mlp, Mlp) else None
    mixture = mlp.mixture if isinstance(mlp, Beside) else mlp if isinstance(mlp, Mixture) else None
    return native.Layer(
        qkv=native_linear(layer.qkv),
        output=native_linear(layer.attention_output),
        up=None if dense is None else native_linear(dense.gate_up),
        down=None if dense is None else native_linear(dense.down),
        mixture=None if mixture is None else mixture.native,
        attention=None if attention is None else attention.native,
        delta=None if layer.delta is None else layer.delta.native,
        cache=layer.cache,
        attention_norm=native_norm(layer.attention_norm),
        mlp_norm=native_norm(layer.mlp_norm),
        query_norm=native_norm(None if norms is None else norms.query),
        key_norm=native_norm(None if norms is None else norms.key),
        value_norm=native_norm(None if norms is None else norms.value),
        after_attention=native_norm(layer.after_attention_norm),
        after_mlp=native_norm(layer.after_mlp_norm),
        beside=mlp.native if isinstance(mlp, Beside) else native.Beside(),
        input=_input(native, layer.input),
        factor=layer.factor,
    )


def _embedding(native: Any, embed: Embedding) -> Any:
    weight = embed.weight
    return native.Embedding(weight.data_ptr(), weight.shape[1], weight.dtype == torch.bfloat16, embed.factor)


def _inputs(native: Any, inputs: PerLayerInputs) -> Any:
    embedding = _embedding(native, inputs.embed)
    return native.PerLayerInputs(native_linear(inputs.projection), native_norm(inputs.norm), embedding, inputs.factor)


def _input(native: Any, given: LayerInput | None) -> Any:
    if given is None:
        return native.LayerInput()
    return native.LayerInput(native_linear(given.gate), native_linear(given.projection), native_norm(given.norm))
