"""Our own forward pass over a transformers model's weights.

For one or a few tokens, transformers' modules spend more time in Python and in small operations than in arithmetic.
This forward computes the same function with weights packed once, buffers and views made once for each number of tokens,
and no wrapper in the loop. It equals the model's own forward up to rounding (``tests/test_cpu_forward.py`` checks that
for every architecture that ``families.py`` recognises). Other models keep their own forward.

Activations between matrix products are float32 (float64 for a float64 model) even with bfloat16 weights. The keys and
values of such a model are bfloat16 too where attention is native, so that long texts take half the memory and less
time. With torch's attention they are float32, which is several times faster there.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel

from adaptive.engines.cpu.by_layers import LayerPasses
from adaptive.engines.cpu.cache import CpuCache
from adaptive.engines.cpu.delta import States
from adaptive.engines.cpu.families import Kind, read_plan
from adaptive.engines.cpu.fused import attentions, decoder, fits
from adaptive.engines.cpu.kernels import between_passes, library, native_tree
from adaptive.engines.cpu.masks import FEW
from adaptive.engines.cpu.plan import Plan
from adaptive.engines.cpu.rotary import Rotations
from adaptive.engines.cpu.sampling import CpuSampling
from adaptive.engines.protocol import Judgement, ProposalCall, Proposed, Thresholds, VerificationCall
from adaptive.engines.threads import FEW as TIMED
from adaptive.engines.threads import ThreadChoice
from adaptive.engines.tree import TokenTree
from adaptive.machine import LoadMeter
from adaptive.tokens import Rows, address, width

# Tokens in one native call. Too high: activations need more memory, and ctrl-C takes effect later. Too low: the weights
# are read more often, which costs time below some twenty tokens, where arithmetic takes less time than reading.
MANY = 128
# The same where layers are read from disk, which takes as long as the arithmetic of some hundred tokens. Too high:
# activations need more memory; at this value they take 100 MB in a model of 14B parameters.
MANY_STREAMED = 512


class Given(NamedTuple):
    """Features that a head reads: the address of the first ``known`` tokens' features (known, width), float32."""

    address: int = 0
    known: int = 0


NOTHING = Given()


class CpuForward:
    """The forward pass of one model. Not thread-safe: all passes share its buffers."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._rotations = Rotations(plan.ropes, plan.context_length, plan.device)
        self._layer_passes = LayerPasses(plan, self._rotations)
        self._attentions = attentions(plan)
        # Whether a pass is one native call, for any number of tokens.
        self.fused = fits(plan)
        if self.fused:
            found = library()
            assert found is not None
            self.sampling = CpuSampling(found)
        # The hidden states before these layers are kept; empty: those behind the last layer.
        self._taps: tuple[int, ...] = ()
        self._thresholds: WeakKeyDictionary[Thresholds, Any] = WeakKeyDictionary()
        self._decoder: Any = None  # made again after linear layers change
        # For passes over a few tokens. A prompt is mostly arithmetic, which gains from all of torch's threads.
        self.threads = ThreadChoice(torch.get_num_threads(), LoadMeter())

    @property
    def kind(self) -> Kind:
        """How passes run."""
        return "fused" if self.fused else "native" if self.plan.lm_head.native else "torch"

    @property
    def most(self) -> int:
        """Tokens in one native call."""
        return MANY if self.plan.stream is None else MANY_STREAMED

    @property
    def cache_dtype(self) -> torch.dtype:
        """The dtype of keys and values."""
        return self.plan.dtype if self._attentions is None else self.plan.cache_dtype

    def cache(self, features: bool = False) -> CpuCache:
        """An empty cache for one text. With ``features`` it keeps the hidden states of its tokens."""
        p = self.plan
        found = library() if self._attentions is not None else None
        panel, width = 1 if found is None else found.panel, p.width if features else 0
        nets = [layer.delta for layer in p.layers if layer.delta is not None]
        states = None if p.delta is None else States(p.delta, nets)
        taps = self._taps or (len(p.layers),)
        return CpuCache(p.cache_shapes, self.cache_dtype, p.device, width, panel, states, taps)

    def give_features_before(self, layers: tuple[int, ...]) -> None:
        """Make caches keep the residual stream before these layers, side by side; for caches made from now on."""
        self._taps, self._decoder = layers, None

    def use(self, plan: Plan) -> None:
        """Take over changed weights: ``plan`` is of the same model, read again."""
        self.plan, self._decoder, self._attentions = plan, None, attentions(plan)
        self._layer_passes.plan = plan

    def refresh(self, modules: frozenset[str]) -> None:
        """Take over changed weights of these modules (their names in the model)."""
        self.forget_pass()
        for linear in self.plan.linears:
            if any(self.plan.names.get(module) in modules for module in linear.modules):
                linear.refresh()

    def forget_pass(self) -> None:
        """Make the next pass read anew where the weights are, since they are about to change. Whatever interrupts the
        change, no pass reads memory that it has freed."""
        self._decoder = None

    @torch.inference_mode()
    def __call__(self, tokens: torch.Tensor, rows: int, cache: CpuCache) -> torch.Tensor:
        """Append tokens (n,) to the cache; returns the logits (rows, vocab) of the last ``rows`` of them."""
        if self.fused:
            return self.one_call(tokens.tolist(), torch.empty(rows, self.plan.lm_head.outputs), cache)
        return self.by_layers(tokens, rows, cache)

    @torch.inference_mode()
    def by_layers(
        self, tokens: torch.Tensor, rows: int, cache: CpuCache, tree: TokenTree | None = None
    ) -> torch.Tensor:
        """Append tokens as ``__call__`` does, but never in one native call. With a ``tree`` the tokens are its last n
        nodes, which lie behind the held tokens and are not counted in the cache's length."""
        given, threads = torch.get_num_threads(), self.threads_for(len(tokens))
        if threads != given:
            torch.set_num_threads(threads)  # a fraction of a microsecond
        began = time.perf_counter()
        try:
            logits = self._layer_passes(tokens, rows, cache, tree, self._attentions)
        except BaseException:
            cache.undo(whole=False)
            raise
        finally:
            if threads != given:
                torch.set_num_threads(given)
            if len(tokens) > FEW:  # keep only buffers for few tokens
                self._layer_passes.keep_few()
        self.took(len(tokens), time.perf_counter() - began)
        return logits

    def one_call(
        self,
        tokens: list[int],
        logits: torch.Tensor,
        cache: CpuCache,
        given: Given = NOTHING,
        tree: TokenTree | None = None,
    ) -> torch.Tensor:
        """Append tokens where passes are ``fused``, and write into ``logits`` (rows, vocab), float32; makes no tensor
        where all fit into one call. A head reads the ``given`` features. Only its first token may need a feature behind
        these, which is then in ``cache``. With a ``tree`` as in ``by_layers``; in a head none of its last n nodes
        follows another of them."""
        self.check(tokens)
        count, rows, start = len(tokens), len(logits), cache.length
        rope, decoder = self.prepare(start + (count if tree is None else len(tree)), cache), self.native_pass()
        parts, nodes = (-(-count // self.most), None) if tree is None else (1, native_tree(tree))
        size = -(-count // parts) if parts else 1
        for begin in range(0, count, size):
            end = min(begin + size, count)
            # The rows of logits that belong to this part's tokens.
            wanted = logits[max(0, begin - count + rows) : max(0, end - count + rows)] if parts > 1 else logits
            rope_at, threads = rope + begin * self._rotations.nbytes, self.threads_for(end - begin)
            recall, began = cache.begin(end - begin), time.perf_counter()
            some, place = tokens[begin:end], address(wanted)
            try:
                decoder(
                    some,
                    len(wanted),
                    rope_at,
                    cache.table,
                    cache.capacity,
                    start + begin,
                    cache.hidden_address,
                    given.address,
                    given.known,
                    place,
                    recall,
                    threads,
                    nodes,
                )
            except BaseException as error:
                cache.undo(whole=between_passes(error))
                raise
            self.took(end - begin, time.perf_counter() - began)
            if tree is None:
                cache.end(end - begin)
        return logits

    def propose(self, call: ProposalCall, probs: Rows, cache: CpuCache, given: Given = NOTHING) -> Proposed:
        """See ``FusedCalls``; passes must be ``fused``. Writes the distributions that tokens are drawn from into
        ``probs``. ``given`` as in ``one_call``."""
        tokens = self.few(call, cache, given)
        threads, decoder, wanted = (
            self.threads_for(1),
            self.native_pass(),
            self.wanted(call, tokens, probs, cache, given),
        )
        began = time.perf_counter()
        try:
            drafted, passed = decoder.propose(*wanted, threads)
        except BaseException as error:
            cache.undo(whole=between_passes(error))
            raise
        self.took(1, (time.perf_counter() - began) / (passed - len(tokens) + 1))
        cache.end(passed)
        return Proposed(drafted, probs(0, len(drafted)) if call.uniform else None)

    def few(self, call: ProposalCall, cache: CpuCache, given: Given = NOTHING) -> list[int]:
        """The tokens that a proposal feeds first, at most ``FEW``: of more, all but the last are fed here. Reserves
        room for the whole proposal."""
        tokens = call.tokens
        if len(tokens) > FEW:
            self.one_call(tokens[:-1], torch.empty(0, self.plan.lm_head.outputs), cache, given)
            tokens = tokens[-1:]
        self.check(tokens)
        self.prepare(cache.length + len(tokens) + call.length - 1, cache)
        return tokens

    def wanted(
        self, call: ProposalCall, tokens: list[int], probs: Rows, cache: CpuCache, given: Given = NOTHING
    ) -> tuple[Any, ...]:
        """The kernels' arguments for a proposal that feeds ``tokens`` first. Begins a pass of the cache."""
        thresholds, adviser = None, call.advise
        if isinstance(adviser, Thresholds):
            thresholds, adviser = self._native_thresholds(adviser), None
        return (
            self.sampling.native(call.sampling),
            tokens,
            call.length,
            call.vocab,
            call.uniform,
            address(probs(0, call.length)) if call.uniform else 0,
            thresholds,
            adviser,
            call.mask,
            self.rope_at(cache.length),
            cache.table,
            cache.capacity,
            cache.length,
            cache.hidden_address,
            given.address,
            given.known,
            cache.begin(len(tokens), call.length - 1),
        )

    def _native_thresholds(self, given: Thresholds) -> Any:
        native = self._thresholds.get(given)
        if native is None:
            native = self._thresholds[given] = self.sampling.thresholds(given)
        return native

    def verify(self, call: VerificationCall, logits: torch.Tensor, cache: CpuCache) -> Judgement:
        """See ``FusedCalls``; passes must be ``fused``. Writes the logits of the pass into ``logits``."""
        tokens, q = [*call.fed, *call.drafted], call.q
        self.check(tokens)
        start, size = cache.length, len(tokens)
        rope, decoder = self.prepare(start + size, cache), self.native_pass()
        place, fewer = (0, 0) if q is None else (address(q), width(q))
        sampling, out, threads = self.sampling.native(call.sampling), address(logits), self.threads_for(size)
        recall, began = cache.begin(size), time.perf_counter()  # last: an error from here on undoes a pass
        try:
            found = decoder.verify(
                sampling,
                tokens,
                len(call.drafted),
                place,
                fewer,
                call.uniform,
                call.allowed,
                rope,
                cache.table,
                cache.capacity,
                start,
                cache.hidden_address,
                out,
                recall,
                threads,
            )
        except BaseException as error:
            cache.undo(whole=between_passes(error))
            raise
        self.took(size, time.perf_counter() - began)
        cache.end(size)
        return Judgement(*found)

    def check(self, tokens: list[int]) -> None:
        """Raises IndexError for a token beyond the vocabulary, before a pass begins to change recurrent states. Without
        recurrent states the pass itself checks."""
        if self.plan.delta is not None and tokens and not 0 <= min(tokens) <= max(tokens) < len(self.plan.embed.weight):
            raise IndexError("a token is not of the model's vocabulary")

    def prepare(self, end: int, cache: CpuCache) -> int:
        """Reserve capacity for ``end`` tokens in all; returns the address of the next token's cos and sin."""
        self._rotations.reach(end)
        cache.ensure_capacity(end)
        return self.rope_at(cache.length)

    def rope_at(self, position: int) -> int:
        """The address of a position's cos and sin, valid until the next ``prepare``."""
        return self._rotations.at(position)

    def threads_for(self, count: int) -> int:
        """The number of threads for the next pass, which is over ``count`` tokens."""
        given = torch.get_num_threads()
        chosen = min(given, self.threads.choose(count))
        free = count > TIMED and self.threads.held is None and not self.threads.crowded
        return given if free else chosen

    def took(self, count: int, seconds: float) -> None:
        """Record the time of a pass over ``count`` tokens on the threads that ``threads_for`` returned last."""
        if count <= TIMED:
            self.threads.observe(count, seconds)

    def native_pass(self) -> Any:
        """The native ``Decoder`` of the plan as it is now; passes must be ``fused``."""
        if self._decoder is None:
            assert self._attentions is not None
            self._decoder = decoder(self.plan, self._attentions, self._taps)
        return self._decoder


def cpu_forward(model: PreTrainedModel, int8: bool = False) -> CpuForward | None:
    """Our forward of a model, if asked with ``int8`` weights; None if the model has to use its own."""
    with torch.inference_mode():
        plan = read_plan(model, int8)
        return None if plan is None else CpuForward(plan)
