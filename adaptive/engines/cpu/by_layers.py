"""A pass of our forward layer by layer: over native linear layers, or torch's packed for oneDNN, with native attention
or torch's. It runs what cannot be one native call, and is what that is compared with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from adaptive.engines.cpu.cache import CpuCache
from adaptive.engines.cpu.kernels import Attention, native_tree
from adaptive.engines.cpu.layers import capped_attention, sunk_attention
from adaptive.engines.cpu.masks import FEW, MaskTable
from adaptive.engines.cpu.plan import Heads, Layer, Plan
from adaptive.engines.cpu.rotary import Rotations
from adaptive.engines.cpu.workspace import Workspace, make_workspace
from adaptive.engines.tree import TokenTree

# Where oneDNN computes the linear layers, a prompt is padded to a multiple of this number of tokens: oneDNN makes and
# keeps a kernel for every number of rows, with the bundled target 1.6 MB each and 250 MB after 160 prompts. Too high:
# more rows are computed for nothing.
STEP = 16


class LayerPasses:
    """Passes over one model, layer by layer. Not thread-safe: all share buffers."""

    def __init__(self, plan: Plan, rotations: Rotations) -> None:
        self.plan, self._rotations = plan, rotations
        self._spaces: dict[tuple[Heads, int], Workspace] = {}
        self._masks = MaskTable(plan.dtype, plan.device)

    def keep_few(self) -> None:
        """Drop the buffers for many tokens."""
        self._spaces = {kind: space for kind, space in self._spaces.items() if kind[1] <= FEW}

    def __call__(
        self,
        tokens: torch.Tensor,
        rows: int,
        cache: CpuCache,
        tree: TokenTree | None,
        attentions: Sequence[Attention | None] | None,
    ) -> torch.Tensor:
        """Append tokens as ``CpuForward.by_layers`` does. ``attentions``: the native attention of every layer; None for
        torch's."""
        plan, given, start = self.plan, len(tokens), cache.length
        place = start if tree is None else start + len(tree) - given
        # No token before the padding sees it, and the next pass overwrites it.
        if given > FEW and not plan.lm_head.native:
            tokens = nn.functional.pad(tokens, (0, -given % STEP))
            tree = None if tree is None else tree.grown([-1] * (-given % STEP))
        count = len(tokens)
        self._rotations.reach(place + count)
        x = plan.embed(tokens)
        inputs = None if plan.inputs is None else plan.inputs(tokens, x)
        if attentions is not None:
            self._native_layers(x, inputs, given, cache, place, tree, attentions)
        else:
            self._torch_layers(x, inputs, given, cache, place, tree)
        if tree is None:
            cache.end(given)
        cache.hold(len(plan.layers), place, x[:given])
        if not rows:
            return x.new_empty(0, plan.lm_head.outputs)
        # In the activations' dtype: argmax over bfloat16 is several times slower on a CPU.
        logits = plan.lm_head(x[given - rows : given], plan.final_norm).to(plan.dtype)
        if plan.softcap is not None:
            logits = torch.tanh(logits / plan.softcap) * plan.softcap
        return logits

    def _native_layers(
        self,
        x: torch.Tensor,
        inputs: torch.Tensor | None,
        given: int,
        cache: CpuCache,
        begin: int,
        tree: TokenTree | None,
        attentions: Sequence[Attention | None],
    ) -> None:
        """Run all layers on native attention, adding to the residual stream x (n, width) of the tokens from ``begin``
        on. The first ``given`` tokens are the text's, the others padding. ``inputs`` (n, layers, size) are the
        per-layer inputs."""
        start = cache.length
        cache.ensure_capacity(begin + len(x))
        shape = None if tree is None else native_tree(tree)
        rope = self._rotations.at(start)
        recall, nets = cache.begin(given), 0
        for number, (layer, attention) in enumerate(zip(self.plan.layers, attentions, strict=True)):
            cache.hold(number, begin, x[:given])
            if layer.delta is not None:
                attended = x.new_zeros(len(x), layer.attention_output.inputs)
                layer.delta(layer.qkv(x, layer.attention_norm), attended, nets, given, recall)
                nets += 1
            else:
                assert attention is not None
                space = self._projected(x, layer)
                attended, place = space.attended_rows, cache.addresses[layer.cache]
                attention(space.qkv, rope, place, cache.capacity, start, attended, shape)
            layer.add_to(x, attended, None if inputs is None else inputs[:, number])

    def _torch_layers(
        self,
        x: torch.Tensor,
        inputs: torch.Tensor | None,
        given: int,
        cache: CpuCache,
        begin: int,
        tree: TokenTree | None,
    ) -> None:
        """Run all layers on torch's attention, for any dtype; parameters as in ``_native_layers``."""
        count, start = len(x), cache.length
        keys, values, places = cache.views(begin, begin + count)
        kinds = {(layer.window, self._space(layer.heads, count).repeats) for layer in self.plan.layers}
        masks: Mapping[tuple[int, int], torch.Tensor | None]
        if tree is None:
            ropes = [(q.narrow(0, start, count), kv.narrow(2, start, count)) for q, kv in self._rotations.tables]
            masks = self._masks.of(start, count, kinds)
        else:
            at = torch.tensor(tree.depths[-count:], device=x.device) + start
            ropes = [(q.index_select(0, at), kv.index_select(2, at)) for q, kv in self._rotations.tables]
            masks = self._masks.of_tree(start, count, tree, kinds)
        for number, layer in enumerate(self.plan.layers):
            cache.hold(number, begin, x[:given])
            space = self._projected(x, layer)
            k, v, mask = keys[layer.cache], values[layer.cache], masks[layer.window, space.repeats]
            torch.mul(space.queries, ropes[layer.rope.queries][0], out=space.rotated)
            if space.keys_values is not None:
                torch.mul(space.keys_values, ropes[layer.rope.keys][1], out=places[layer.cache])
            if layer.query_weight is not None:
                space.query_rows.mul_(layer.query_weight)
            if layer.sinks is not None:
                attended = sunk_attention(space.query_rows, k, v, mask, layer.scale, layer.sinks)
            elif layer.softcap is None:
                attended = nn.functional.scaled_dot_product_attention(
                    space.query_rows, k, v, attn_mask=mask, scale=layer.scale, enable_gqa=not space.grouped
                )
            else:
                attended = capped_attention(space.query_rows, k, v, mask, layer.scale, layer.softcap)
            space.attended.copy_(attended.view(space.attended.shape))
            layer.add_to(x, space.attended_rows, None if inputs is None else inputs[:, number])

    def _projected(self, x: torch.Tensor, layer: Layer) -> Workspace:
        """The buffers of a layer's heads, filled with its queries, keys and values."""
        space = self._space(layer.heads, len(x))
        layer.qkv(x, layer.attention_norm, space.qkv)
        if layer.head_norms is not None:
            layer.head_norms(space.by_head)
        return space

    def _space(self, heads: Heads, count: int) -> Workspace:
        """The buffers for ``count`` tokens, which layers with the same heads share."""
        if (heads, count) not in self._spaces:
            self._spaces[heads, count] = make_workspace(self.plan, heads, count)
        return self._spaces[heads, count]
