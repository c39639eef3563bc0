"""A grown head on our forward: what it packs, and what it shares with its target.

In: a head's module and the target's engine. Out: the plan of the head's layer, and the forward that runs it.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable

import torch
from torch import nn

from adaptive.engines.cpu.families import read_plan
from adaptive.engines.cpu.forward import CpuForward
from adaptive.engines.cpu.fused import fits
from adaptive.engines.cpu.layers import Embedding, RmsNorm
from adaptive.engines.cpu.packing import Packed
from adaptive.engines.cpu.plan import Fuse, Plan
from adaptive.engines.cpu.weights import PackedLinear, of_module
from adaptive.engines.head.module import Head
from adaptive.engines.hf.engine import TransformersEngine


def packed_of(head: Head, target: TransformersEngine) -> tuple[Packed, ...]:
    """The target's packed linear layers, among them its projection to all tokens. The modules of a target whose layers
    are on disk have no weights by which its projection could be told, unless it is the embedding: it is given that of
    the head."""
    if target.cpu_forward is None:
        return ()
    plan, weight = target.cpu_forward.plan, target.model.get_output_embeddings().weight
    if not weight.is_meta:
        return plan.linears
    whole = nn.Linear(head.width, head.vocab_size, bias=False, device="meta")
    whole.weight = head.whole
    projection = copy.copy(plan.lm_head)
    projection.modules = (whole,)
    return (projection,)


def forward_of(head: Head, int8: bool, packed: Iterable[Packed], shared: Iterable[Packed] = ()) -> CpuForward | None:
    """Our forward of a head if a pass is one native call, else None; see ``plan_of``."""
    plan = plan_of(head, int8, packed, shared)
    # A layer with a recurrent state is left to transformers' forward.
    return None if plan is None or plan.delta is not None or not fits(plan) else CpuForward(plan)


@torch.inference_mode()
def plan_of(
    head: Head, int8: bool, packed: Iterable[Packed], shared: Iterable[Packed] = (), again: bool = False
) -> Plan | None:
    """The plan of a head's layer and the modules before it; None if the layer is not supported. Weights that are in
    ``packed`` or ``shared`` already are not packed again. These and ``again`` as in ``read_plan``."""
    packed = tuple(packed)
    body = read_plan(head.body, int8, packed, again, shared)
    if body is None:
        return None
    # A decoder that scales its embeddings (Granite) scales the output of ``fuse`` by the same factor.
    factor, embed = body.embed.multiplier, Embedding(head.body.get_input_embeddings(), body.dtype)
    found = (one for one in packed if isinstance(one, PackedLinear) and one.modules == (head.fuse,))
    linear = next(found, None) or of_module(head.fuse, int8, factor)
    norms = [RmsNorm(norm, body.dtype, body.weight_dtype) for norm in (head.token_norm, head.feature_norm)]
    return dataclasses.replace(
        body, embed=embed, fuse=Fuse(linear, *norms), linears=(*body.linears, linear), ids=head.ids
    )
