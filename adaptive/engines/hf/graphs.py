"""``--cuda-graphs auto``: short passes of a model's own forward, recorded as CUDA graphs and replayed in one launch.

A pass over a few tokens starts a thousand kernels, and Python takes longer to start them than the accelerator to
run them. A recorded pass has its numbers of tokens and keys, and all addresses, for good: tokens and their first
place lie in tensors that are filled before it is replayed, tokens are filled up to one of a few numbers, and keys
beyond the text are masked by the model itself, which knows such caches from transformers' own static one. What chooses
a draft's next token may be recorded with the pass, so that a step of a proposal is one launch.

The addresses are those of one set of buffers an engine (the stage), lent to one cache at a time: a cache's keys are
copied in when an answer begins in it, and out when one begins in another. So every conversation is replayed by the same
recordings. They are made when nobody waits for the next token: ``ready`` is called when a model is loaded and before an
answer's prompt; what has not been recorded by then is eager, whatever comes. Adapters are merged in place, so that
recordings stay valid; where they are hooks, the passes are recorded anew before the next answer.
"""

from __future__ import annotations

import logging
import weakref
from typing import Any, NamedTuple, Protocol

import torch
from transformers import PreTrainedModel

from adaptive.engines.hf.cache import Buffers, Recording, RollbackCache
from adaptive.engines.hf.lora import MergedAdapter
from adaptive.engines.protocol import Chooser
from adaptive.errors import AdaptiveError, first_line

logger = logging.getLogger("adaptive.engines")

# Numbers of tokens that passes are filled up to. More would take seconds more of recording, fewer would compute
# more that nobody wants. Longer passes are a prompt's, in which starting kernels costs little.
SIZES = (1, 2, 3, 5, 9, 17)
# The sizes that are recorded with a choice behind them: a proposal's first step feeds one token, or two behind a round
# that was accepted as a whole, every other step one. More come behind plain rounds, and may be eager.
CHOSEN = SIZES[:2]
# Keys that a recording sees at least, and then by doubling: so attention reads twice what it needs at most. Fewer would
# be recorded anew for longer answers sooner, more are read in vain: of a model of 7B some 1% of what its weights take.
LEAST_KEYS = 2048
# Choosers whose recordings are kept: as many as whoever makes them keeps (``drafting/queued.py``).
CHOOSERS = 4
# Passes before recording: libraries choose their kernels and take their memory in the first ones.
WARM_UP = 2
# How far logits may lie from the eager pass's, as a share of their norm. Two ways of computing in bfloat16 differ
# by a hundredth; a pass that reads another place or another text by about all of it.
NEAR = 0.05
# Tokens of a text on which recordings are proved where the cache holds none; no more than a head reads in a pass.
LEAD = 16


class Which(NamedTuple):
    """What a recording is of: tokens, keys, how often the model's hooks had changed, and what chooses behind it."""

    size: int
    keys: int
    hooks: int
    chooser: Chooser | None


class Recordable(Protocol):
    """What a pass is recorded of: a model on a device, and its eager pass."""

    model: PreTrainedModel
    device: torch.device
    context_length: int

    @property
    def adapter(self) -> MergedAdapter | None:
        """What changes its weights or hooks; None where only weights change, in place."""

    @property
    def vocab_size(self) -> int:
        """Tokens that it knows."""

    def eager(self, tokens: torch.Tensor, rows: int, cache: RollbackCache) -> torch.Tensor:
        """Append tokens (n,) to the cache; logits (rows, vocab) of the last ones."""

    def run(self, tokens: torch.Tensor, places: torch.Tensor, cache: RollbackCache) -> torch.Tensor:
        """The model's own forward of tokens (n,) at ``places`` (n,); logits (n, vocab)."""


class RecordedPasses:
    """The recorded passes of one engine. Eager where recording does not work out, and where nothing was recorded."""

    def __init__(self, engine: Recordable) -> None:
        self.engine = engine
        self.problem: str | None = None  # why passes stay eager
        self.recordings: dict[Which, RecordedPass] = {}
        self.replayed = 0  # passes that were not eager
        self._stage: Buffers | None = None  # that they are recorded over
        self._owner: weakref.ref[RollbackCache] | None = None  # whose keys lie there
        on_cuda = engine.device.type == "cuda"
        self._pool = torch.cuda.graph_pool_handle() if on_cuda else None
        self._stream = torch.cuda.Stream(engine.device) if on_cuda else None
        self._choosers: list[Chooser] = []  # that passes are recorded with, the one used last at the end
        self._newest: RecordedPass | None = None  # which keeps the pool, whatever recordings go
        self._hooks = 0  # times that other operations than before became those of a pass, as by an adapter's hooks
        if engine.adapter is not None and getattr(engine.model, "quantization_method", None):
            engine.adapter.listeners.append(self._count)

    def _count(self, modules: frozenset[str]) -> None:
        self.changed()

    def changed(self) -> None:
        """Passes are other operations from now on, or over other memory: replay nothing that was recorded before."""
        self._hooks += 1

    def __call__(
        self, tokens: torch.Tensor, rows: int, cache: RollbackCache, chooser: Chooser | None = None
    ) -> torch.Tensor | None:
        """Append tokens (n,) to the cache; logits (rows, vocab) of the last ones, after which ``chooser`` has chosen.
        None where the eager pass is to be taken. They are overwritten by this engine's next pass."""
        given, start = len(tokens), cache.length
        if self.problem is not None or not start or not self._lent_to(cache):
            return None
        size = next((size for size in SIZES if size >= given), None)
        if size is None or start + size > self.engine.context_length:
            return None
        fits = (w for w in self.recordings if w.size == size and w.keys >= start + size and w.chooser is chooser)
        which = min((w for w in fits if w.hooks == self._hooks), key=lambda w: w.keys, default=None)
        if which is None:
            return None
        logits = self.recordings[which](tokens, cache)
        cache.advance(given)
        self.replayed += 1
        return logits[given - rows : given]

    def _lent_to(self, cache: RollbackCache) -> bool:
        """Whether the cache's keys lie where the passes were recorded: not where it has grown since."""
        return self._stage is not None and cache.lies_in(self._stage)

    @torch.inference_mode()
    def ready(self, cache: RollbackCache, length: int, chooser: Chooser | None = None) -> None:
        """Have passes over this cache's text of up to ``length`` tokens recorded, with that ``chooser`` behind them
        where there is one. Before anybody waits for the text's next token: this takes a second where passes of this
        kind were never recorded, and else as long as copying the text's keys."""
        if self.problem is not None:
            return
        keys = LEAST_KEYS
        while keys < length:
            keys *= 2
        try:
            self._lend(cache, min(keys, max(SIZES[-1] + LEAD, self.engine.context_length)))
        except (AdaptiveError, RuntimeError) as error:  # no memory: eager passes take none beside the text's own
            logger.warning("--cuda-graphs: %s stays eager in this answer: %s", self._name, first_line(error))
            return
        assert self._stage is not None
        if chooser is not None:
            self._choosers = [*(one for one in self._choosers if one is not chooser), chooser][-CHOOSERS:]
        self.recordings = {which: one for which, one in self.recordings.items() if self._keeps(which)}
        for size in SIZES if chooser is None else CHOSEN:
            which = Which(size, min(keys, self._stage.capacity), self._hooks, chooser)
            if which not in self.recordings and self.problem is None:
                self._record(which, cache)

    def _keeps(self, which: Which) -> bool:
        """Whether a recording may be of use again."""
        known = which.chooser is None or any(which.chooser is one for one in self._choosers)
        return known and which.hooks == self._hooks

    @property
    def _name(self) -> str:
        return type(self.engine.model).__name__

    def _lend(self, cache: RollbackCache, capacity: int) -> None:
        """Have the cache's keys lie in the stage, which holds so many tokens at least."""
        if self._lent_to(cache) and cache.capacity >= capacity:
            return
        if self._stage is None or self._stage.capacity < capacity or not self._stage.suits(cache):
            self.recordings, self._stage = {}, None  # whoever has the old stage keeps it as its own
            cache.reserve(capacity)
            if not cache.length:
                try:
                    self._lead(cache)
                finally:
                    cache.rollback(0)
            self._stage = cache.buffers()
        else:
            owner = None if self._owner is None else self._owner()
            if owner is not None and self._lent_to(owner):
                owner.lie_in(owner.buffers().copied(min(owner.length + SIZES[-1], owner.capacity)))
            cache.lie_in(self._stage)
        self._owner = weakref.ref(cache)

    def _tokens(self, count: int, first: int = 0) -> torch.Tensor:
        """Some tokens (count,), no two of them the same side by side."""
        return (torch.arange(first, first + count, device=self.engine.device) * 7919 + 1) % self.engine.vocab_size

    def _lead(self, cache: RollbackCache) -> None:
        """Begin a text."""
        self.engine.eager(self._tokens(LEAD), 1, cache)

    def _record(self, which: Which, cache: RollbackCache) -> None:
        """Keep a pass that gives the eager one's logits behind what the cache holds, or have ``problem`` set."""
        held = cache.length
        if held + which.size > min(which.keys, self.engine.context_length):
            return
        if not held:
            self._lead(cache)
        start, tokens = cache.length, self._tokens(which.size, 3)
        try:
            expected = self.engine.eager(tokens, which.size, cache).float().clone()
            cache.rollback(start)
            self._prove(which, cache, tokens, expected)
        finally:
            cache.rollback(held)

    def _prove(self, which: Which, cache: RollbackCache, tokens: torch.Tensor, expected: torch.Tensor) -> None:
        chooser = which.chooser
        try:
            recorded = RecordedPass(self.engine, cache, which, self._pool, self._stream)
            if chooser is not None:
                chooser.reset()
            found = recorded(tokens, cache).float()
            never = expected == -torch.inf  # outside of a head's draft vocabulary
            apart = (found - expected).masked_fill(never & (found == -torch.inf), 0.0)
            gap = float(apart.norm() / expected.masked_fill(never, 0.0).norm())
            same = chooser is None or _chooses_alike(chooser, found[-1:])
        except (RuntimeError, NotImplementedError) as error:
            self.problem = first_line(error)
        else:
            if gap < NEAR and same:
                self.recordings[which] = self._newest = recorded
                return
            says = f"differs from the eager one by {gap:.0%}" if same else "is followed by another choice"
            self.problem = f"a recorded pass over {which.size} tokens {says}"
        logger.warning("--cuda-graphs: passes of %s stay eager: %s", self._name, self.problem)


def _chooses_alike(chooser: Chooser, logits: torch.Tensor) -> bool:
    """Whether what it has just chosen is what it chooses from these logits (1, vocab)."""
    recorded = chooser.outcome()
    chooser.reset()
    chooser(logits)
    return all(torch.allclose(a, b, rtol=1e-3, atol=1e-5) for a, b in zip(recorded, chooser.outcome(), strict=True))


class RecordedPass:
    """A pass over some tokens that sees the first keys of a cache. Where the device is not CUDA the same operations are
    run each time instead of replayed."""

    def __init__(
        self, engine: Recordable, cache: RollbackCache, which: Which, pool: Any, stream: torch.cuda.Stream | None
    ) -> None:
        """Raises RuntimeError where the model's forward cannot be recorded. ``stream`` is what it is recorded on."""
        size, device = which.size, engine.device
        self.engine, self.chooser = engine, which.chooser
        self.tokens = torch.zeros(size, dtype=torch.long, device=device)
        self.recording = Recording(torch.zeros((), dtype=torch.long, device=device), size, which.keys)
        self._last = torch.zeros(1, dtype=torch.long, device=device)  # the row that is chosen by
        self._graph: torch.cuda.CUDAGraph | None = None
        if stream is not None:
            self.recording.start.fill_(cache.length)
            with torch.cuda.device(device):
                self._capture(cache, pool, stream)

    def _capture(self, cache: RollbackCache, pool: Any, stream: torch.cuda.Stream) -> None:
        here = torch.cuda.current_stream()
        stream.wait_stream(here)
        try:
            with torch.cuda.stream(stream):
                for _ in range(WARM_UP):
                    self._run(cache)
            here.wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            # cuBLAS keeps a workspace for a stream. Taken inside of a recording it is that one's, and gone with it:
            # every recording takes its own, as torch's own compiler does it.
            torch._C._cuda_clearCublasWorkspaces()
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                self._logits = self._run(cache)
        finally:
            torch._C._cuda_clearCublasWorkspaces()
            torch.cuda.set_stream(here)  # a recording that failed leaves its own in use
        self._graph = graph

    def __call__(self, tokens: torch.Tensor, cache: RollbackCache) -> torch.Tensor:
        """Logits (size, vocab), of which the first n rows are those of tokens (n,) after what the cache holds, which
        does not count them yet; the choice behind the last of them is made."""
        self.tokens[: len(tokens)].copy_(tokens, non_blocking=True)
        self.recording.start.fill_(cache.length)
        self._last.fill_(len(tokens) - 1)
        if self._graph is None:
            return self._run(cache)
        self._graph.replay()
        return self._logits

    def _run(self, cache: RollbackCache) -> torch.Tensor:
        with cache.written_as(self.recording):
            logits = self.engine.run(self.tokens, self.recording.places(), cache)
        if self.chooser is not None:
            self.chooser(logits.index_select(0, self._last))
        return logits
