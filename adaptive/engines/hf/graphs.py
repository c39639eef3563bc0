"""``--cuda-graphs auto``: short passes of a model's own forward, recorded as CUDA graphs and replayed in one launch.

A pass over a few tokens starts a thousand kernels, and Python takes longer to start them than the accelerator to
run them. A recorded pass has its numbers of tokens and keys, and all addresses, for good: tokens and their first
place lie in tensors that are filled before it is replayed, tokens are filled up to one of a few numbers, and keys
beyond the text are masked by the model itself, which knows such caches from transformers' own static one.
Adapters are merged in place, so that recordings stay valid; where they are hooks, the passes are recorded anew.
"""

from __future__ import annotations

import logging
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel

from adaptive.engines.hf.cache import Recording, RollbackCache
from adaptive.engines.hf.lora import MergedAdapter
from adaptive.errors import first_line

logger = logging.getLogger("adaptive.engines")

# Numbers of tokens that passes are filled up to. More would take seconds more of recording, fewer would compute
# more that nobody wants. Longer passes are a prompt's, in which starting kernels costs little.
SIZES = (1, 2, 3, 5, 9, 17)
# Keys that a recording sees at least, and then by doubling: so attention reads twice what it needs at most.
LEAST_KEYS = 512
# Passes before recording: libraries choose their kernels and take their memory in the first ones.
WARM_UP = 2
# How far logits may lie from the eager pass's, as a share of their norm. Two ways of computing in bfloat16 differ
# by a hundredth; a pass that reads another place or another text by about all of it.
NEAR = 0.05

# Tokens, keys, total capacity of the cache, and how many times the model's hooks have changed.
Which = tuple[int, int, int, int]


class Recordable(Protocol):
    """What a pass is recorded of: a model on a device, and its eager pass."""

    model: PreTrainedModel
    device: torch.device
    context_length: int

    @property
    def adapter(self) -> MergedAdapter | None:
        """What changes its weights or hooks; None where only weights change, in place."""

    def eager(self, tokens: torch.Tensor, rows: int, cache: RollbackCache) -> torch.Tensor:
        """Append tokens (n,) to the cache; logits (rows, vocab) of the last ones."""

    def run(self, tokens: torch.Tensor, places: torch.Tensor, cache: RollbackCache) -> torch.Tensor:
        """The model's own forward of tokens (n,) at ``places`` (n,); logits (n, vocab)."""


class RecordedPasses:
    """The recorded passes of one engine, over all of its caches. Eager where recording does not work out."""

    def __init__(self, engine: Recordable) -> None:
        self.engine = engine
        self.problem: str | None = None  # why passes stay eager
        on_cuda = engine.device.type == "cuda"
        self._pool = torch.cuda.graph_pool_handle() if on_cuda else None
        self._stream = torch.cuda.Stream(engine.device) if on_cuda else None
        self._newest: RecordedPass | None = None  # which keeps the pool, whatever caches go
        self._hooks = 0  # times that an adapter came or went as hooks
        if engine.adapter is not None and getattr(engine.model, "quantization_method", None):
            engine.adapter.listeners.append(self._count)

    def _count(self, modules: frozenset[str]) -> None:
        self._hooks += 1

    def __call__(self, tokens: torch.Tensor, rows: int, cache: RollbackCache) -> torch.Tensor | None:
        """Append tokens (n,) to the cache; logits (rows, vocab) of the last ones, None where the eager pass is to be
        taken. They are overwritten by the next pass of this size."""
        given, start = len(tokens), cache.length
        size = next((size for size in SIZES if size >= given), None)
        if size is None or not start or self.problem is not None:
            return None
        keys = LEAST_KEYS
        while keys < start + size:
            keys *= 2
        keys = min(keys, cache.capacity)
        if start + size > min(keys, self.engine.context_length):
            return None
        which = size, keys, cache.total_capacity, self._hooks  # a buffer that grew is another one
        recorded = cache.recordings.get(which) or self._record(tokens, which, cache)
        if recorded is None:
            return None
        logits = recorded(tokens, cache)
        cache.advance(given)
        return logits[given - rows : given]

    def _record(self, tokens: torch.Tensor, which: Which, cache: RollbackCache) -> RecordedPass | None:
        """A pass that gives the eager one's logits for these tokens, or None with ``problem`` set."""
        size, keys = which[:2]
        start = cache.length
        expected = self.engine.eager(tokens, len(tokens), cache).float()  # what fails here is not the recording's
        cache.rollback(start)
        try:
            recorded = RecordedPass(self.engine, cache, size, keys, self._pool, self._stream)
            found = recorded(tokens, cache)[: len(tokens)].float()
            gap = float((found - expected).norm() / expected.norm())
        except (RuntimeError, NotImplementedError) as error:
            self.problem = first_line(error)
        else:
            if gap < NEAR:
                cache.recordings = {old: one for old, one in cache.recordings.items() if old[2:] == which[2:]}
                cache.recordings[which] = self._newest = recorded
                return recorded
            self.problem = f"a recorded pass over {size} tokens differs from the eager one by {gap:.0%}"
        logger.warning("--cuda-graphs: passes of %s stay eager: %s", type(self.engine.model).__name__, self.problem)
        return None


class RecordedPass:
    """A pass over ``size`` tokens that sees the first ``keys`` places of a cache. Where the device is not CUDA the same
    operations are run each time instead of replayed."""

    def __init__(
        self,
        engine: Recordable,
        cache: RollbackCache,
        size: int,
        keys: int,
        pool: Any,
        stream: torch.cuda.Stream | None,
    ) -> None:
        """Raises RuntimeError where the model's forward cannot be recorded. ``stream`` is what it is recorded on."""
        self.engine = engine
        self.tokens = torch.zeros(size, dtype=torch.long, device=engine.device)
        self.recording = Recording(torch.zeros((), dtype=torch.long, device=engine.device), size, keys)
        self._graph: torch.cuda.CUDAGraph | None = None
        if stream is not None:
            self.recording.start.fill_(cache.length)
            with torch.cuda.device(engine.device):
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
        """Logits (size, vocab), of which the first n rows are those of tokens (n,) after what the cache holds: the one
        that the pass was made for, which does not count them yet."""
        self.tokens[: len(tokens)].copy_(tokens, non_blocking=True)
        self.recording.start.fill_(cache.length)
        if self._graph is None:
            return self._run(cache)
        self._graph.replay()
        return self._logits

    def _run(self, cache: RollbackCache) -> torch.Tensor:
        with cache.written_as(self.recording):
            return self.engine.run(self.tokens, self.recording.places(), cache)
