"""``--cuda-graphs auto``: short passes, recorded as CUDA graphs and replayed in one launch (``recorded_pass.py``).

A pass over a few tokens launches a thousand kernels, and Python takes longer to launch them than the accelerator to run
them. A recorded pass has fixed numbers of tokens. Before a replay, the tokens and the place of the first are written
into tensors, and the tokens are padded to one of a few sizes. The choice of a draft's next token may be recorded with
the pass, so that a step of a proposal is one launch.

Passes of our own forward find the keys of a text wherever they lie, of one text or of several. Passes of a model's own
forward also have fixed addresses: those of one set of buffers per engine (the stage), which one cache at a time uses.
A cache's keys are copied to the stage when an answer begins in it, and copied away when one begins in another cache.
The model masks the keys beyond the text, as it does with transformers' static cache. In both cases the same recordings
serve every conversation. Nothing is recorded within an answer: ``ready`` is called when a model is loaded and before an
answer's prompt (while others may be decoded), ``ready_together`` when a server starts. Passes without a recording are
eager. Adapters that are merged in place keep the recordings valid. If adapters are hooks, the passes are recorded again
before the next answer.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence

import torch

from adaptive.engines.cuda.texts import Texts
from adaptive.engines.hf.cache import Buffers, RollbackCache
from adaptive.engines.hf.recorded_pass import OwnPass, Recordable, RecordedPass, ShortPass, Which
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
# The most texts of a recorded pass, and the sizes, in tokens of each text, of passes over several. More: seconds more
# of recording. Fewer: more of these passes are eager, which takes some ten times as long (a 7B model on an H200).
MOST_TEXTS, SHARED = 8, SIZES[:5]
# The fewest keys that a recording of a model's own forward reads; longer texts double the number, so attention reads at
# most twice what it needs. Too low: longer answers need new recordings sooner. Too high: unneeded keys are read; at
# this value they take some 1% of the time for reading a 7B model's weights.
LEAST_KEYS = 2048
# Choosers whose recordings are kept; the same number as ``KINDS`` in ``drafting/queued.py``, which makes the choosers.
CHOOSERS = 6
# The largest distance of a recorded pass's logits from the eager pass's, as a share of their norm. Two ways of
# computing in bfloat16 differ by about 0.01; a pass that reads the wrong place or text differs by about 1.
NEAR = 0.05
# What errors say if the device has no memory left and they are not torch's own.
NO_MEMORY = ("out of memory", "ALLOC_FAILED")
# Tokens of the text on which recordings are tested if the cache is empty. At most ``SIZES[-1]``, for which a head has
# room for features (``HeadPasses``).
LEAD = 16


class RecordedPasses:
    """The recorded passes of one engine. Passes are eager if recording fails, or if none of that kind is recorded."""

    def __init__(self, engine: Recordable) -> None:
        self.engine = engine
        self.problem: str | None = None  # why passes stay eager
        self.recordings: dict[Which, RecordedPass] = {}
        self.replayed = 0  # number of passes that were not eager
        self._texts: dict[tuple[int, bool], Texts] = {}  # of our forward, by their number and whether features are kept
        self._apart = False  # whether passes over several texts cannot be recorded
        self._stage: Buffers | None = None  # the buffers that recordings of the model's own forward use
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
        which = self._recorded([len(tokens)], [cache], chooser)
        if which is None:
            return None
        return self._replay(which, [tokens], [cache])[0][len(tokens) - rows :]

    @property
    def shares(self) -> bool:
        """Whether any passes over several texts are recorded."""
        return any(which.texts > 1 for which in self.recordings)

    def together(self, tokens: Sequence[torch.Tensor], caches: Sequence[RollbackCache]) -> list[torch.Tensor] | None:
        """Append tokens (n,) to each of several caches by one recorded pass. Returns logits (n, vocab) of each, or None
        if there is no such recording, as ``__call__`` does."""
        which = self._recorded(list(map(len, tokens)), caches, None)
        return None if which is None else self._replay(which, tokens, caches)

    def _recorded(
        self, counts: Sequence[int], caches: Sequence[RollbackCache], chooser: Chooser | None
    ) -> Which | None:
        """The recording for ``counts`` tokens of the texts in these caches, which then have room; None if there is
        none."""
        size = next((size for size in SIZES if size >= max(counts)), None)
        ends = [cache.length + (size or 0) for cache in caches]
        empty = any(not cache.length for cache in caches)
        if self.problem is not None or size is None or empty or max(ends) > self.engine.context_length:
            return None
        if self.engine.short is None:
            return self._on_stage(size, caches, chooser)
        which = Which(size, 0, self._hooks, chooser, len(caches), caches[0].keeps)
        if which not in self.recordings or any(cache.keeps != which.keeps for cache in caches):
            return None
        if chooser is not None and chooser is not self._choosers[-1]:
            self._use(chooser)
        try:
            for cache, end in zip(caches, ends, strict=True):
                if cache.capacity < end:  # by as little as possible: mostly it is the padding that has no room
                    cache.reserve(end)
        except RuntimeError:  # no memory for what a pass is padded with
            return None
        return which

    def _on_stage(self, size: int, caches: Sequence[RollbackCache], chooser: Chooser | None) -> Which | None:
        if len(caches) > 1 or not self._lent_to(caches[0]):
            return None
        end = caches[0].length + size
        fits = (w for w in self.recordings if w.size == size and w.keys >= end and w.chooser is chooser)
        return min((w for w in fits if w.hooks == self._hooks), key=lambda w: w.keys, default=None)

    def _replay(
        self, which: Which, tokens: Sequence[torch.Tensor], caches: Sequence[RollbackCache]
    ) -> list[torch.Tensor]:
        """The logits (n, vocab) of each text's tokens (n,), which are appended."""
        logits = self.recordings[which](tokens, caches)
        for some, cache in zip(tokens, caches, strict=True):
            cache.advance(len(some))
        self.replayed += 1
        return [logits[which.size * i : which.size * i + len(some)] for i, some in enumerate(tokens)]

    @torch.inference_mode()
    def ready(self, cache: RollbackCache, length: int, chooser: Chooser | None = None) -> None:
        """Record the missing passes for a text of up to ``length`` tokens in this cache, with ``chooser`` after them if
        there is one; passes of the model's own forward move the cache to the stage. Call it before an answer: it takes
        a second if passes of this kind were never recorded."""
        if chooser is not None:
            self._use(chooser)
        self.recordings = {which: one for which, one in self.recordings.items() if self._keeps(which)}
        while self.problem is None:
            short = self.engine.short
            try:
                keys = 0 if short is not None else self._staged(cache, length)
                self._record_missing(keys, cache, chooser)
            except (AdaptiveError, torch.OutOfMemoryError) as error:  # eager passes need only the memory of the text
                logger.warning("--cuda-graphs: %s stays eager in this answer: %s", self._name, first_line(error))
                return
            if short is self.engine.short:  # else it cannot be used, and what it had recorded is dropped
                return

    def _use(self, chooser: Chooser) -> None:
        """Note that this chooser is used, so that its recordings are the last to be dropped."""
        self._choosers = [*(one for one in self._choosers if one is not chooser), chooser][-CHOOSERS:]

    @torch.inference_mode()
    def ready_together(self, texts: int, keeps: bool) -> None:
        """Record the passes over 2 to ``texts`` texts, whose caches keep hidden states if ``keeps``. Only our forward
        makes them. Takes some tenths of a second for each; call it when the model has been loaded."""
        if self.engine.short is None or self.problem is not None:
            return
        texts = min(texts, MOST_TEXTS)
        logger.info("passes of %s over up to %d texts are prepared", self._name, texts)
        try:
            two = self._two(keeps)
            for size in SHARED:
                tokens = [self._tokens(size, 3 + cache.length) for cache in two]
                right = [self._eager(some, cache) for some, cache in zip(tokens, two, strict=True)]
                for count in range(2, texts + 1):
                    which, order = Which(size, 0, self._hooks, None, count, keeps), [i % 2 for i in range(count)]
                    if which not in self.recordings and not self._apart:
                        expected = torch.cat([right[i] for i in order])
                        self._prove(which, [two[i] for i in order], [tokens[i] for i in order], expected)
        except (AdaptiveError, RuntimeError) as error:
            logger.warning("--cuda-graphs: %s over several texts stays eager: %s", self._name, first_line(error))

    def _two(self, keeps: bool) -> list[RollbackCache]:
        """Two caches with room for a pass, which hold different numbers of test tokens."""
        two = [RollbackCache(self.engine.model.config.get_text_config(), keeps) for _ in range(2)]
        for number, cache in enumerate(two):
            cache.reserve(LEAD + SIZES[-1])
            self.engine.eager(self._tokens(LEAD - 3 * number), 1, cache)
        return two

    def _record_missing(self, keys: int, cache: RollbackCache, chooser: Chooser | None) -> None:
        """Record the passes that are missing, until one shows that our forward cannot be used."""
        short = self.engine.short
        for size in SIZES:
            chosen = chooser if size in CHOSEN else None
            which = Which(size, keys, self._hooks, chosen, keeps=cache.keeps)
            if which not in self.recordings and self.problem is None and short is self.engine.short:
                self._record(which, cache)

    def _keeps(self, which: Which) -> bool:
        """Whether a recording may be used again."""
        known = which.chooser is None or any(which.chooser is one for one in self._choosers)
        return known and which.hooks == self._hooks

    @property
    def _name(self) -> str:
        return type(self.engine.model).__name__

    def _lent_to(self, cache: RollbackCache) -> bool:
        """Whether the cache uses the stage. It does not if it has grown since."""
        return self._stage is not None and cache.lies_in(self._stage)

    def _staged(self, cache: RollbackCache, length: int) -> int:
        """Move the cache to the stage, with room for ``length`` tokens. Returns the keys that passes are to read."""
        keys = LEAST_KEYS
        while keys < length:
            keys *= 2
        try:
            self._lend(cache, min(keys, max(SIZES[-1] + LEAD, self.engine.context_length)))
        except RuntimeError as error:
            raise AdaptiveError(first_line(error)) from error
        assert self._stage is not None
        return min(keys, self._stage.capacity)

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
        """Record a pass over one text, and keep it if its logits after the held tokens are those of the eager pass.
        Otherwise drop what was to be recorded. The cache's length stays."""
        held = cache.length
        most = min(which.keys or self.engine.context_length, self.engine.context_length)
        if held + which.size > most:
            return
        try:
            if not held:
                self._lead(cache)
            cache.reserve(cache.length + which.size)
            tokens = self._tokens(which.size, 3)
            self._prove(which, [cache], [tokens], self._eager(tokens, cache))
        finally:
            cache.rollback(held)

    def _eager(self, tokens: torch.Tensor, cache: RollbackCache) -> torch.Tensor:
        """The eager pass's logits, float32, of tokens that are not kept."""
        start = cache.length
        logits = self.engine.eager(tokens, len(tokens), cache).float().clone()
        cache.rollback(start)
        return logits

    def _new(self, which: Which, caches: Sequence[RollbackCache]) -> RecordedPass:
        """A new recording, which is captured if the device is CUDA."""
        short, made = self.engine.short, (which.texts, which.keeps)
        if short is None:
            recorded: RecordedPass = OwnPass(self.engine, which)
        else:
            if made not in self._texts:
                self._texts[made] = Texts(caches[0], which.texts, self.engine.device)
            recorded = ShortPass(self.engine, which, short, self._texts[made])
        if self._stream is not None:
            recorded.capture(caches, self._pool, self._stream)
        return recorded

    def _prove(
        self,
        which: Which,
        caches: Sequence[RollbackCache],
        tokens: Sequence[torch.Tensor],
        expected: torch.Tensor,
    ) -> None:
        chooser, same = which.chooser, True
        try:
            recorded = self._new(which, caches)
            if chooser is not None:
                chooser.reset()
            found = recorded(tokens, caches).float()
            never = expected == -torch.inf  # outside a head's draft vocabulary
            apart = (found - expected).masked_fill(never & (found == -torch.inf), 0.0)
            gap = float(apart.norm() / expected.masked_fill(never, 0.0).norm())
            same = chooser is None or _chooses_alike(chooser, found[-1:])
        except Exception as error:  # Triton's compilers raise many kinds
            if _lacks_memory(error):
                raise torch.OutOfMemoryError(first_line(error)) from error
            problem = f"{type(error).__name__}: {first_line(error)}"
        else:
            if gap < NEAR and same:
                self.recordings[which] = self._newest = recorded
                return
            says = f"differs from the eager one by {gap:.0%}" if same else "is followed by another choice"
            problem = f"a recorded pass over {which.size} tokens {says}"
        self._give_up(which, same, problem)

    def _give_up(self, which: Which, same: bool, problem: str) -> None:
        """After a ``problem`` with a recording, drop passes over several texts, our forward, or all recordings. With
        ``same`` the choice after the pass was right."""
        if which.texts > 1:
            logger.warning("--cuda-graphs: passes of %s over several texts stay eager: %s", self._name, problem)
            self._apart = True
            self.recordings = {which: one for which, one in self.recordings.items() if which.texts == 1}
        elif self.engine.short is None or not same:
            logger.warning("--cuda-graphs: passes of %s stay eager: %s", self._name, problem)
            self.problem = problem
        else:
            logger.warning("--cuda-graphs: %s is recorded by its own forward: %s", self._name, problem)
            self.engine.short = None
            self.recordings.clear()


def _lacks_memory(error: Exception) -> bool:
    """Whether an error says that the device has no memory left: torch's own, a library's or a compiler's."""
    return isinstance(error, torch.OutOfMemoryError) or any(words in str(error) for words in NO_MEMORY)


def _chooses_alike(chooser: Chooser, logits: torch.Tensor) -> bool:
    """Whether the chooser's recorded outcome is the same as its eager outcome for these logits (1, vocab)."""
    recorded = chooser.outcome()
    chooser.reset()
    chooser(logits)
    return all(torch.allclose(a, b, rtol=1e-3, atol=1e-5) for a, b in zip(recorded, chooser.outcome(), strict=True))
