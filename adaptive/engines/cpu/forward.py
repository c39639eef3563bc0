"""A forward pass of our own over a transformers model's weights.

transformers' modules spend more time in Python and in small operations than in arithmetic when one
or a few tokens pass through. Here the same function is computed with weights packed once, buffers
and views made once per number of tokens, and no wrapper in the loop. It equals the model's own
forward to rounding (``tests/test_lean.py`` holds it to that for every architecture that
``lean_plan`` recognises); models that it does not recognise keep their own forward.

Activations between matrix products are float32 (float64 for a float64 model) also where the weights
are bfloat16: attention over a float32 cache is several times faster on a CPU, and closer to the truth.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from adaptive.engines.cpu.cache import LeanCache
from adaptive.engines.cpu.compiled import CompiledPass, constants
from adaptive.engines.cpu.decoder import Choice, Decoder
from adaptive.engines.cpu.fused import decoder, fits
from adaptive.engines.cpu.kernels import Attention, Rule
from adaptive.engines.cpu.layers import Map
from adaptive.engines.cpu.plan import Layer, Plan, read_plan
from adaptive.engines.cpu.weights import PackedLinear
from adaptive.engines.threads import FEW as TIMED
from adaptive.engines.threads import ThreadChoice

# Tokens in one pass up to which buffers are kept and queries of one key head are stacked as rows of one
# product (which needs a mask of tokens times queries a head). Beyond, a pass is a prompt's: its buffers
# are made anew and forgotten.
FEW = 32
# Tokens in one call of ours. More reads the weights less often, which arithmetic hides from some twenty on; fewer needs
# less room for what lies between two layers, and looks for ctrl-C more often.
MANY = 128
# Where products are oneDNN's, a prompt is filled up to a multiple of so many tokens: it makes a kernel for every number
# of rows and keeps it, on the bundled target 1.6 MB a number and 250 MB after 160 prompts. Higher computes more rows
# for nothing.
STEP = 16


@dataclass
class Workspace:
    """Buffers for a pass over n tokens, and the views of them that every layer uses.

    ``mixed`` (n, qkv) takes the product of the fused projection; ``queries``, ``both`` are complex views
    of its query part (n, key heads, group, size / 2) and of keys and values (2, key heads, n, size / 2).
    ``rotated`` and ``rows`` are two views of the rotated queries, the second as attention wants them.
    ``heads`` and ``flat`` are two views of attention's result, the second as the next product wants it.
    """

    mixed: torch.Tensor
    normed: torch.Tensor
    queries: torch.Tensor
    both: torch.Tensor
    rotated: torch.Tensor
    rows: torch.Tensor
    heads: torch.Tensor
    flat: torch.Tensor
    grouped: bool


class LeanForward:
    """The forward pass of one model. Not for several threads at once: its buffers are shared."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._spaces: dict[int, Workspace] = {}
        self._table_length = 0
        self._masks = MaskTable(plan)
        # Passes that are compiled, by (tokens, rows of logits). They come from another thread.
        self._compiled: dict[tuple[int, int], CompiledPass] = {}
        self._weights_are_read = threading.Lock()
        self._attention: Attention | None = None
        bent = any(layer.score_cap is not None for layer in plan.layers)
        if Attention.supports(plan.head_size, plan.dtype, plan.device) and not bent:
            self._attention = Attention(plan.heads, plan.key_heads, plan.head_size, len(plan.ropes))
        # Whether a pass is one call of ours, for any number of tokens but where many are torch's.
        self.whole = self._attention is not None and fits(plan)
        self._decoder: Decoder | None = None  # made anew when a product is
        # Of a pass over a few tokens. A prompt is arithmetic, which all that torch was given share well.
        self.threads = ThreadChoice(torch.get_num_threads())

    def cache(self) -> LeanCache:
        """An empty cache for one text."""
        p = self.plan
        return LeanCache(len(p.layers), p.key_heads, p.head_size, p.dtype, p.device)

    def refresh(self, modules: frozenset[str]) -> None:
        """Follow a change of the weights of these modules (their names in the model)."""
        with self._weights_are_read:
            changed = [
                linear
                for linear in self.plan.linears
                if any(self.plan.names.get(module) in modules for module in linear.modules)
            ]
            for linear in changed:
                linear.refresh()
            self._decoder = None
            for which, compiled in self._compiled.items():
                compiled.update(constants(self.plan, *which, only=frozenset(changed)))

    def leave_attention_to_torch(self) -> None:
        """Before any text: have keys lie in caches as values do, not in our panels: compiled passes expect that."""
        self._attention, self.whole = None, False

    def install(self, which: tuple[int, int], package: Path) -> None:
        """Use a compiled pass, for (tokens, rows of logits), from the next call on. From any thread. Raises
        RuntimeError where it cannot be loaded."""
        with self._weights_are_read, torch.inference_mode():
            compiled = CompiledPass(package, constants(self.plan, *which))
            self._compiled = {**self._compiled, which: compiled}

    @torch.inference_mode()
    def __call__(self, tokens: torch.Tensor, rows: int, cache: LeanCache) -> torch.Tensor:
        """Append tokens (n,) to the cache; logits (rows, vocab) of the last ``rows`` of them."""
        if self.is_one_call(len(tokens), rows):
            return self.at_once(tokens.tolist(), torch.empty(rows, self.plan.head.outputs), cache)
        given, threads = torch.get_num_threads(), self._threads_for(len(tokens))
        if threads != given:
            torch.set_num_threads(threads)  # a fraction of a microsecond
        began = time.perf_counter()
        try:
            logits = self._quickest_pass(tokens, rows, cache)
        finally:
            if threads != given:
                torch.set_num_threads(given)
        self._took(len(tokens), time.perf_counter() - began)
        return logits

    def _quickest_pass(self, tokens: torch.Tensor, rows: int, cache: LeanCache) -> torch.Tensor:
        compiled = self._compiled.get((len(tokens), rows))
        start, end = cache.length, cache.length + len(tokens)
        if compiled is None or not start:  # the first tokens of a text are a prompt's
            return self._pass(tokens, rows, cache)
        if end > self._table_length:
            self._extend_tables(end)
        cache.make_room(end)
        logits = compiled(tokens, self._places[:end], self._turns[start:end], cache)
        cache.length = end
        return logits

    def is_one_call(self, count: int, rows: int) -> bool:
        """Whether a pass over so many tokens, to so many rows of logits, is one call of ours."""
        return self.whole and (count <= FEW or not self.plan.head.tiled) and (count, rows) not in self._compiled

    def at_once(self, tokens: list[int], logits: torch.Tensor, cache: LeanCache) -> torch.Tensor:
        """The same into ``logits`` (rows, vocab), float32, where passes are ``whole``; no tensor is made."""
        count, rows, start = len(tokens), len(logits), cache.length
        turns, decoder = self._prepare(start + count, cache), self._whole_pass()
        parts = -(-count // MANY)
        size = -(-count // parts) if parts else 1
        for begin in range(0, count, size):
            end = min(begin + size, count)
            # The rows of logits that are of this part's tokens.
            wanted = logits[max(0, begin - count + rows) : max(0, end - count + rows)] if parts > 1 else logits
            place, threads = turns + begin * self._turn_bytes, self._threads_for(end - begin)
            began = time.perf_counter()
            decoder(tokens[begin:end], place, cache.addresses, cache.capacity, start + begin, wanted, threads)
            self._took(end - begin, time.perf_counter() - began)
        cache.length = start + count
        return logits

    def draft(self, tokens: list[int], choice: Choice, cache: LeanCache) -> list[int]:
        """Where passes are ``whole``, a proposal after tokens, which are appended to the cache, as are those of the
        proposal but the last."""
        if len(tokens) > FEW:
            self(torch.tensor(tokens[:-1]), 0, cache)
            tokens = tokens[-1:]
        start = cache.length
        turns = self._prepare(start + len(tokens) + choice.length - 1, cache)
        threads, decoder = self._threads_for(1), self._whole_pass()
        began = time.perf_counter()
        drafted, passed = decoder.draft(tokens, choice, turns, cache.addresses, cache.capacity, start, threads)
        self._took(1, (time.perf_counter() - began) / (passed - len(tokens) + 1))
        cache.length = start + passed
        return drafted

    def verify(self, tokens: list[int], rule: Rule, logits: torch.Tensor, cache: LeanCache) -> int:
        """Where passes are ``whole``, one over a few tokens into ``logits``, and how many of them stand; see
        ``AtOnce``."""
        start, size = cache.length, len(tokens)
        turns, decoder = self._prepare(start + size, cache), self._whole_pass()
        threads, began = self._threads_for(size), time.perf_counter()
        accepted = decoder.verify(tokens, rule, turns, cache.addresses, cache.capacity, start, logits, threads)
        self._took(size, time.perf_counter() - began)
        cache.length = start + size
        return accepted

    def _prepare(self, end: int, cache: LeanCache) -> int:
        """Room for so many tokens in all; where the rotations of the next one are."""
        if end > self._table_length:
            self._extend_tables(end)
        cache.make_room(end)
        return self._turns_at + cache.length * self._turn_bytes

    def _threads_for(self, count: int) -> int:
        """Threads of the next pass, over so many tokens."""
        given = torch.get_num_threads()
        return given if count > TIMED else min(given, self.threads.choose(count))

    def _took(self, count: int, seconds: float) -> None:
        if count <= TIMED:
            self.threads.observe(count, seconds)

    def _whole_pass(self) -> Decoder:
        if self._decoder is None:
            assert self._attention is not None
            self._decoder = decoder(self.plan, self._attention)
        return self._decoder

    def _pass(self, tokens: torch.Tensor, rows: int, cache: LeanCache) -> torch.Tensor:
        plan, given, start = self.plan, len(tokens), cache.length
        # What is filled up is seen by nothing before it, and the next pass writes over it.
        if given > FEW and (plan.head.tiled or not plan.head.ours):
            tokens = nn.functional.pad(tokens, (0, -given % STEP))
        count = len(tokens)
        if start + count > self._table_length:
            self._extend_tables(start + count)
        space = self._spaces.get(count) or self._make_space(count)
        x = plan.embed(tokens)
        if self._attention is not None:
            self._attended_by_us(x, space, cache, self._attention)
        else:
            self._attended_by_torch(x, space, cache)
        cache.length = start + given
        if not rows:
            return x.new_empty(0)
        # In the activations' dtype: argmax over bfloat16 is several times slower on a CPU.
        logits = plan.head(x[given - rows : given], plan.final_norm).to(plan.dtype)
        if plan.logit_cap is not None:
            logits = torch.tanh(logits / plan.logit_cap) * plan.logit_cap
        return logits

    def _attended_by_us(self, x: torch.Tensor, space: Workspace, cache: LeanCache, attention: Attention) -> None:
        """All layers, added into the residual stream x (n, width) in place."""
        start = cache.length
        cache.make_room(start + len(x))
        # A token's rotations, one after the other.
        turns, step = self._turns_at + start * self._turn_bytes, self._turn_bytes // len(self.plan.ropes)
        for layer, place in zip(self.plan.layers, cache.addresses, strict=True):
            layer.project(x, layer.attention_norm, space.mixed)
            if layer.head_norm is not None:
                layer.head_norm(space.normed)
            attention(
                space.mixed,
                turns + layer.rope * step,
                place,
                cache.capacity,
                start,
                layer.window,
                layer.scale,
                space.flat,
            )
            _mix(x, layer, space.flat)

    def _attended_by_torch(self, x: torch.Tensor, space: Workspace, cache: LeanCache) -> None:
        """The same for any dtype, and for scores that are bent."""
        count, start = len(x), cache.length
        keys, values, places = cache.views(start + count)
        turns = [(q.narrow(0, start, count), kv.narrow(2, start, count)) for q, kv in self._tables]
        masks = self._masks.of(start, count, space.grouped)
        for layer, k, v, place in zip(self.plan.layers, keys, values, places, strict=True):
            layer.project(x, layer.attention_norm, space.mixed)
            if layer.head_norm is not None:
                layer.head_norm(space.normed)
            turn, mask = turns[layer.rope], masks[layer.window]
            torch.mul(space.queries, turn[0], out=space.rotated)
            torch.mul(space.both, turn[1], out=place)
            if layer.score_cap is None:
                seen = nn.functional.scaled_dot_product_attention(
                    space.rows, k, v, attn_mask=mask, scale=layer.scale, enable_gqa=not space.grouped
                )
            else:
                seen = _capped_attention(space.rows, k, v, mask, layer.scale, layer.score_cap)
            space.heads.copy_(seen.view(space.heads.shape))
            _mix(x, layer, space.flat)

    def _make_space(self, count: int) -> Workspace:
        p = self.plan
        size, group, key_heads = p.head_size, p.heads // p.key_heads, p.key_heads
        # A key head's queries are the rows of one product; for many tokens the mask would be too large.
        grouped = count <= FEW or group == 1 or any(layer.score_cap is not None for layer in p.layers)
        mixed = torch.empty(count, (p.heads + 2 * key_heads) * size, dtype=p.dtype, device=p.device)
        pairs = torch.view_as_complex(mixed.view(count, p.heads + 2 * key_heads, size // 2, 2))
        flat = torch.empty(count, p.heads * size, dtype=p.weight_dtype, device=p.device)
        heads = flat.view(count, key_heads, group, size)
        if grouped:
            buffer = torch.empty(key_heads, count, group, size, dtype=p.dtype, device=p.device)
            rotated, rows = buffer.permute(1, 0, 2, 3), buffer.view(1, key_heads, count * group, size)
            heads = heads.permute(1, 0, 2, 3)
        else:
            buffer = torch.empty(key_heads, group, count, size, dtype=p.dtype, device=p.device)
            rotated, rows = buffer.permute(2, 0, 1, 3), buffer.view(1, p.heads, count, size)
            heads = heads.permute(1, 2, 0, 3)
        space = Workspace(
            mixed=mixed,
            normed=mixed.view(count, p.heads + 2 * key_heads, size)[:, : p.heads + key_heads],
            queries=pairs[:, : p.heads].view(count, key_heads, group, size // 2),
            both=pairs[:, p.heads :].view(count, 2, key_heads, size // 2).permute(1, 2, 0, 3),
            rotated=torch.view_as_complex(rotated.unflatten(-1, (size // 2, 2))),
            rows=rows,
            heads=heads,
            flat=flat,
            grouped=grouped,
        )
        if count <= FEW:
            self._spaces[count] = space
        return space

    @torch.inference_mode()
    def _extend_tables(self, length: int) -> None:
        """Rotations for positions up to at least ``length``, each kind as (q (n, 1, 1, size / 2), kv (2, 1, n,
        size / 2)); values are turned by one, which leaves them alone."""
        self._table_length = min(max(2 * length, 2048), max(self.plan.context_length, length))
        positions = torch.arange(self._table_length, device=self.plan.device)[None]
        self._tables, turns = [], []
        for rope in self.plan.ropes:
            turn = rope(positions)
            half = self.plan.head_size // 2
            # Partial rotary: the rest of every head is turned by one.
            turn = torch.cat([turn, turn.new_ones(len(turn), half - turn.shape[1])], 1)
            self._tables.append((turn[:, None, None], torch.stack([turn, torch.ones_like(turn)])[:, None]))
            turns.append(torch.view_as_real(turn))
        # The same as compiled passes want it: real numbers (n, ropes, size / 2, 2).
        self._places, self._turns = positions[0], torch.stack(turns, 1)
        # And as our own kernels do: where they lie, and the bytes of a token's.
        self._turns_at, self._turn_bytes = self._turns.data_ptr(), self._turns[0].nbytes


class MaskTable:
    """Which keys a query may see, as slices of one table.

    Row i of a table is the i-th new token; column ``reach`` + j the key j places after the first new
    one. The mask of any pass over at most ``FEW`` tokens is then a rectangle of it.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.windows = sorted({layer.window for layer in plan.layers})
        self._group = plan.heads // plan.key_heads
        self._reach = -1
        self._tables: dict[int, torch.Tensor] = {}

    def of(self, start: int, count: int, grouped: bool) -> dict[int, torch.Tensor | None]:
        """By window (0 for none): the additive mask of a pass, or None where every key is seen."""
        masks: dict[int, torch.Tensor | None] = {}
        for window in self.windows:
            if count == 1 and (not window or start < window):
                masks[window] = None
            elif count <= FEW:
                if start > self._reach:
                    self._extend(start)
                table = self._tables[window]
                masks[window] = table[: count * self._group, self._reach - start : self._reach + count]
            else:
                masks[window] = self._rows(window, start, count, self._group if grouped else 1)
        return masks

    def _extend(self, start: int) -> None:
        self._reach = max(2 * start, 2048)
        self._tables = {window: self._rows(window, self._reach, FEW, self._group) for window in self.windows}

    def _rows(self, window: int, start: int, count: int, repeats: int) -> torch.Tensor:
        """(count * repeats, start + count): 0 where seen, -inf where not; every token's row ``repeats`` times."""
        query = torch.arange(start, start + count, device=self.plan.device)[:, None]
        key = torch.arange(start + count, device=self.plan.device)[None]
        hidden = (key > query) | (key <= query - window) if window else key > query
        mask = torch.zeros(hidden.shape, dtype=self.plan.dtype, device=self.plan.device)
        return mask.masked_fill_(hidden, -torch.inf).repeat_interleave(repeats, 0)


def _mix(x: torch.Tensor, layer: Layer, seen: torch.Tensor) -> None:
    """Add to x (n, width) a layer's output projection of ``seen`` (n, heads * size), and its feed-forward part."""
    if layer.parallel:
        inner = layer.mix.up(x, layer.mix_norm)
        layer.output(seen, out=x, add=True)
    else:
        _add(x, layer.output, seen, None, layer.attention_post_norm)
        inner = layer.mix.up(x, layer.mix_norm)
    _add(x, layer.mix.down, inner, layer.mix.act, layer.mix_post_norm)


def _add(x: torch.Tensor, product: PackedLinear, y: torch.Tensor, first: Map | None, norm: Map | None) -> None:
    """Add ``norm(product(first(y)))`` to x."""
    if norm is None:
        product(y, first, out=x, add=True)
    else:
        x += norm(product(y, first))


def _capped_attention(
    rows: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    cap: float,
) -> torch.Tensor:
    """Attention with scores bent into (-cap, cap) (Gemma 2); shapes as in torch's own."""
    scores = torch.tanh(rows @ keys.transpose(-1, -2) * (scale / cap)) * cap
    if mask is not None:
        scores += mask
    return scores.softmax(-1) @ values


def lean_forward(model: PreTrainedModel, int8: bool = False) -> LeanForward | None:
    """The lean forward of a model, with ``int8`` weights, or None where its own is to be used."""
    with torch.inference_mode():
        plan = read_plan(model, int8)
        return None if plan is None else LeanForward(plan)
