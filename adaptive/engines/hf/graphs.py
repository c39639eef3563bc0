"""``--cuda-graphs auto``: short passes of a model's own forward, recorded as CUDA graphs and replayed in one launch.

A pass over a few tokens launches a thousand kernels, and Python takes longer to launch them than the accelerator to run
them. A recorded pass has fixed numbers of tokens and keys, and fixed addresses. Before a replay, the tokens and the
place of the first are written into tensors, and the tokens are padded to one of a few sizes. The model masks the keys
beyond the text, as it does with transformers' static cache. The choice of a draft's next token may be recorded with the
pass, so that a step of a proposal is one launch.

The addresses are those of one set of buffers per engine (the stage), which one cache at a time uses. A cache's keys are
copied to the stage when an answer begins in it, and copied away when one begins in another cache. So the same
recordings serve every conversation. Recording happens only while no answer is generated: ``ready`` is called when a
model is loaded and before an answer's prompt. Passes without a recording are eager. Adapters that are merged in place
keep the recordings valid. If adapters are hooks, the passes are recorded again before the next answer.
"""

from __future__ import annotations

import logging
import weakref
from typing import Any, NamedTuple, Protocol

import torch
from transformers import PreTrainedModel

from adaptive.engines.cuda.capture import captured
from adaptive.engines.cuda.forward import ShortForward
from adaptive.engines.hf.cache import Buffers, Recording, RollbackCache
from adaptive.engines.hf.lora import MergedAdapter
from adaptive.engines.protocol import Chooser
from adaptive.errors import AdaptiveError, first_line

logger = logging.getLogger("adaptive.engines")

# The sizes, in tokens, to which passes are padded. More sizes: seconds more of recording. Fewer: more padding is
# computed. Longer passes are a prompt's, in which launching kernels takes a small share of the time.
SIZES = (1, 2, 3, 5, 9, 17)
# The sizes that are recorded with a choice after them. A proposal's first step feeds one token, or two after a round
# whose proposal was accepted completely; every other step feeds one. After plain rounds and rounds of history, more are
# fed: these sizes are recorded without the choice.
CHOSEN = SIZES[:2]
# The fewest keys that a recording reads; longer texts double the number, so attention reads at most twice what it
# needs. Too low: longer answers need new recordings sooner. Too high: unneeded keys are read; at this value they take
# some 1% of the time for reading a 7B model's weights.
LEAST_KEYS = 2048
# Choosers whose recordings are kept; the same number as ``KINDS`` in ``drafting/queued.py``, which makes the choosers.
CHOOSERS = 4
# Passes before a recording. In the first passes, libraries select their kernels and allocate their memory.
WARM_UP = 2
# The largest distance of a recorded pass's logits from the eager pass's, as a share of their norm. Two ways of
# computing in bfloat16 differ by about 0.01; a pass that reads the wrong place or text differs by about 1.
NEAR = 0.05
# Tokens of the text on which recordings are tested if the cache is empty. At most ``SIZES[-1]``, for which a head has
# room for features (``HeadPasses``).
LEAD = 16


class Which(NamedTuple):
    """The key of a recording: tokens, keys, how often the model's hooks had changed, and the chooser after the pass."""

    size: int
    keys: int
    hooks: int
    chooser: Chooser | None


class Recordable(Protocol):
    """An engine whose passes can be recorded: a model on a device, and its eager pass."""

    model: PreTrainedModel
    device: torch.device
    context_length: int
    short: ShortForward | None  # what is recorded instead of the model's own forward

    @property
    def adapter(self) -> MergedAdapter | None:
        """The adapter that changes weights or hooks; None if only weights change, in place."""

    @property
    def vocab_size(self) -> int:
        """The number of tokens in the vocabulary."""

    def eager(self, tokens: torch.Tensor, rows: int, cache: RollbackCache) -> torch.Tensor:
        """Append tokens (n,) to the cache. Returns logits (rows, vocab) of the last ones."""

    def run(self, tokens: torch.Tensor, places: torch.Tensor, cache: RollbackCache) -> torch.Tensor:
        """The model's own forward of tokens (n,) at ``places`` (n,). Returns logits (n, vocab)."""


class RecordedPasses:
    """The recorded passes of one engine. Passes are eager if recording fails, or if none of that kind is recorded."""

    def __init__(self, engine: Recordable) -> None:
        self.engine = engine
        self.problem: str | None = None  # why passes stay eager
        self.recordings: dict[Which, RecordedPass] = {}
        self.replayed = 0  # number of passes that were not eager
        self._stage: Buffers | None = None  # the buffers that recordings use
        self._owner: weakref.ref[RollbackCache] | None = None  # the cache that uses the stage
        on_cuda = engine.device.type == "cuda"
        self._pool = torch.cuda.graph_pool_handle() if on_cuda else None
        self._stream = torch.cuda.Stream(engine.device) if on_cuda else None
        self._choosers: list[Chooser] = []  # choosers with recordings, the last used at the end
        self._newest: RecordedPass | None = None  # a reference that keeps the pool when all recordings are dropped
        self._hooks = 0  # how often ``changed`` was called
        if engine.adapter is not None and getattr(engine.model, "quantization_method", None):
            engine.adapter.listeners.append(self._count)

    def _count(self, modules: frozenset[str]) -> None:
        self.changed()

    def changed(self) -> None:
        """Invalidate all recordings, because the operations of a pass have changed, or the memory that they use."""
        self._hooks += 1

    def __call__(
        self, tokens: torch.Tensor, rows: int, cache: RollbackCache, chooser: Chooser | None = None
    ) -> torch.Tensor | None:
        """Append tokens (n,) to the cache by a recorded pass, followed by ``chooser``. Returns logits (rows, vocab) of
        the last ones, which this engine's next pass overwrites; None if there is no such recording, and the caller must
        run the eager pass."""
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
        """Whether the cache uses the stage. It does not if it has grown since."""
        return self._stage is not None and cache.lies_in(self._stage)

    @torch.inference_mode()
    def ready(self, cache: RollbackCache, length: int, chooser: Chooser | None = None) -> None:
        """Move the cache to the stage, and record the missing passes for a text of up to ``length`` tokens, with
        ``chooser`` after them if there is one. Call it before an answer: it takes a second if passes of this kind were
        never recorded, otherwise the time for copying the text's keys."""
        if self.problem is not None:
            return
        keys = LEAST_KEYS
        while keys < length:
            keys *= 2
        try:
            self._lend(cache, min(keys, max(SIZES[-1] + LEAD, self.engine.context_length)))
        except (AdaptiveError, RuntimeError) as error:  # no memory: eager passes need only that of the text
            self._eager_now(error)
            return
        assert self._stage is not None
        if chooser is not None:
            self._choosers = [*(one for one in self._choosers if one is not chooser), chooser][-CHOOSERS:]
        self.recordings = {which: one for which, one in self.recordings.items() if self._keeps(which)}
        short = self.engine.short
        try:
            self._record_missing(keys, cache, chooser)
            if short is not self.engine.short:  # it cannot be used, and what it had recorded is dropped
                self._record_missing(keys, cache, chooser)
        except torch.OutOfMemoryError as error:  # what is recorded stays
            self._eager_now(error)

    def _record_missing(self, keys: int, cache: RollbackCache, chooser: Chooser | None) -> None:
        """Record the passes that are missing, until one shows that our forward cannot be used."""
        assert self._stage is not None
        short = self.engine.short
        # Our forward reads only the keys that are there, however many a recording may read.
        most = min(keys, self._stage.capacity) if short is None else self._stage.capacity
        for size in SIZES:
            which = Which(size, most, self._hooks, chooser if size in CHOSEN else None)
            if which not in self.recordings and self.problem is None and short is self.engine.short:
                self._record(which, cache)

    def _eager_now(self, error: Exception) -> None:
        logger.warning("--cuda-graphs: %s stays eager in this answer: %s", self._name, first_line(error))

    def _keeps(self, which: Which) -> bool:
        """Whether a recording may be used again."""
        known = which.chooser is None or any(which.chooser is one for one in self._choosers)
        return known and which.hooks == self._hooks

    @property
    def _name(self) -> str:
        return type(self.engine.model).__name__

    def _lend(self, cache: RollbackCache, capacity: int) -> None:
        """Make the cache use the stage, with room for at least ``capacity`` tokens."""
        if self._lent_to(cache) and cache.capacity >= capacity:
            return
        if self._stage is None or self._stage.capacity < capacity or not self._stage.suits(cache):
            self.recordings, self._stage = {}, None  # the cache in the old stage keeps those buffers
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
        """Test tokens (count,), each different from the one before."""
        return (torch.arange(first, first + count, device=self.engine.device) * 7919 + 1) % self.engine.vocab_size

    def _lead(self, cache: RollbackCache) -> None:
        """Fill an empty cache with test tokens."""
        self.engine.eager(self._tokens(LEAD), 1, cache)

    def _record(self, which: Which, cache: RollbackCache) -> None:
        """Record a pass, and keep it if its logits after the held tokens are those of the eager pass. Otherwise drop
        our forward, or set ``problem`` if it was the model's own. The cache's length stays."""
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
        chooser, same = which.chooser, True
        try:
            recorded = RecordedPass(self.engine, cache, which, self._pool, self._stream)
            if chooser is not None:
                chooser.reset()
            found = recorded(tokens, cache).float()
            never = expected == -torch.inf  # outside a head's draft vocabulary
            apart = (found - expected).masked_fill(never & (found == -torch.inf), 0.0)
            gap = float(apart.norm() / expected.masked_fill(never, 0.0).norm())
            same = chooser is None or _chooses_alike(chooser, found[-1:])
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # Triton's compilers raise many kinds
            self.problem = f"{type(error).__name__}: {first_line(error)}"
        else:
            if gap < NEAR and same:
                self.recordings[which] = self._newest = recorded
                return
            says = f"differs from the eager one by {gap:.0%}" if same else "is followed by another choice"
            self.problem = f"a recorded pass over {which.size} tokens {says}"
        if self.engine.short is None or not same:
            logger.warning("--cuda-graphs: passes of %s stay eager: %s", self._name, self.problem)
            return
        logger.warning("--cuda-graphs: %s is recorded by its own forward: %s", self._name, self.problem)
        self.engine.short = self.problem = None
        self.recordings.clear()


def _chooses_alike(chooser: Chooser, logits: torch.Tensor) -> bool:
    """Whether the chooser's recorded outcome is the same as its eager outcome for these logits (1, vocab)."""
    recorded = chooser.outcome()
    chooser.reset()
    chooser(logits)
    return all(torch.allclose(a, b, rtol=1e-3, atol=1e-5) for a, b in zip(recorded, chooser.outcome(), strict=True))


class RecordedPass:
    """A pass over a fixed number of tokens that reads a fixed number of a cache's first keys. If the device is not
    CUDA, the operations are run each time instead of replayed."""

    def __init__(
        self, engine: Recordable, cache: RollbackCache, which: Which, pool: Any, stream: torch.cuda.Stream | None
    ) -> None:
        """Record on ``stream``, or nothing for None. Raises RuntimeError if the model's forward cannot be recorded."""
        size, device = which.size, engine.device
        self.engine, self.chooser = engine, which.chooser
        self.tokens = torch.zeros(size, dtype=torch.long, device=device)
        self.recording = Recording(torch.zeros((), dtype=torch.long, device=device), size, which.keys)
        self._last = torch.zeros(1, dtype=torch.long, device=device)  # the row of logits that the chooser reads
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
            # cuBLAS keeps a workspace per stream. One that is allocated during a recording belongs to that recording
            # and is freed with it. So every recording allocates its own, as in torch's compiler.
            torch._C._cuda_clearCublasWorkspaces()
            with captured(graph, stream, pool):
                self._logits = self._run(cache)
        finally:
            torch._C._cuda_clearCublasWorkspaces()
        self._graph = graph

    def __call__(self, tokens: torch.Tensor, cache: RollbackCache) -> torch.Tensor:
        """Append tokens (n,) to the cache, without counting them in its length, and run the chooser on the last.
        Returns logits (size, vocab), whose first n rows are those of the tokens."""
        self.tokens[: len(tokens)].copy_(tokens, non_blocking=True)
        self.recording.start.fill_(cache.length)
        self._last.fill_(len(tokens) - 1)
        if self._graph is None:
            return self._run(cache)
        self._graph.replay()
        return self._logits

    def _run(self, cache: RollbackCache) -> torch.Tensor:
        short, places = self.engine.short, self.recording.places()
        with cache.written_as(self.recording):
            if short is None:
                logits = self.engine.run(self.tokens, places, cache)
            else:
                logits = short(self.tokens, places, self.recording.start, cache)
        if self.chooser is not None:
            self.chooser(logits.index_select(0, self._last))
        return logits
