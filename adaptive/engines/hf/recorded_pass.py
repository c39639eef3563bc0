"""One recorded pass: captured as a CUDA graph, aimed at the caches it is to extend, and replayed.

``OwnPass`` is the model's own forward. It has fixed addresses, so its one text must lie in the buffers with which it
was captured. ``ShortPass`` is ours (``engines/cuda/``), over one text or several, which lie anywhere.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from transformers import PreTrainedModel

from adaptive.engines.cuda.capture import captured
from adaptive.engines.cuda.forward import ShortForward
from adaptive.engines.cuda.texts import Texts
from adaptive.engines.hf.cache import Recording, RollbackCache
from adaptive.engines.hf.lora import MergedAdapter
from adaptive.engines.protocol import Chooser

# Passes before a recording. In the first passes, libraries select their kernels and allocate their memory.
WARM_UP = 2


class Which(NamedTuple):
    """The key of a recording: tokens of each text; keys that it reads, 0 for all that are there (our forward); how
    often the model's hooks had changed; the chooser after the pass; texts; whether it keeps hidden states."""

    size: int
    keys: int
    hooks: int
    chooser: Chooser | None = None
    texts: int = 1
    keeps: bool = False


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


class RecordedPass(ABC):
    """A pass over a fixed number of tokens of each text, and the chooser on the last token of the first one. If the
    device is not CUDA, the operations are run each time instead of replayed."""

    def __init__(self, engine: Recordable, which: Which) -> None:
        self.engine, self.which = engine, which
        self.tokens = torch.zeros(which.texts * which.size, dtype=torch.long, device=engine.device)
        self._last = torch.zeros(1, dtype=torch.long, device=engine.device)  # the row of logits that the chooser reads
        self._graph: torch.cuda.CUDAGraph | None = None

    def capture(self, caches: Sequence[RollbackCache], pool: Any, stream: torch.cuda.Stream) -> None:
        """Capture the pass, aimed at these caches. Raises RuntimeError if the forward cannot be captured."""
        with torch.cuda.device(self.engine.device):
            self._aim(caches)
            here = torch.cuda.current_stream()
            stream.wait_stream(here)
            try:
                with torch.cuda.stream(stream):
                    for _ in range(WARM_UP):
                        self._run(caches)
                here.wait_stream(stream)
                graph = torch.cuda.CUDAGraph()
                # cuBLAS keeps a workspace per stream. One that is allocated during a recording belongs to that
                # recording and is freed with it. So every recording allocates its own, as in torch's compiler.
                torch._C._cuda_clearCublasWorkspaces()
                with captured(graph, stream, pool):
                    self._logits = self._run(caches)
            finally:
                torch._C._cuda_clearCublasWorkspaces()
        self._graph = graph

    def __call__(self, tokens: Sequence[torch.Tensor], caches: Sequence[RollbackCache]) -> torch.Tensor:
        """Append tokens (n,) to each cache, without counting them in its length. Returns logits (texts * size, vocab),
        of each text's ``size`` rows the first n those of its tokens."""
        size = self.which.size
        for number, some in enumerate(tokens):
            self.tokens[number * size : number * size + len(some)].copy_(some, non_blocking=True)
        if self.which.chooser is not None:
            self._last.fill_(len(tokens[0]) - 1)
        self._aim(caches)
        if self._graph is None:
            return self._run(caches)
        self._graph.replay()
        return self._logits

    def _run(self, caches: Sequence[RollbackCache]) -> torch.Tensor:
        logits = self._forward(caches)
        if self.which.chooser is not None:
            self.which.chooser(logits.index_select(0, self._last))
        return logits

    @abstractmethod
    def _aim(self, caches: Sequence[RollbackCache]) -> None:
        """Write into the tensors that the pass reads where the caches are, and how long."""

    @abstractmethod
    def _forward(self, caches: Sequence[RollbackCache]) -> torch.Tensor:
        """The logits (texts * size, vocab)."""


class OwnPass(RecordedPass):
    """A pass of the model's own forward, over one text in the buffers with which it was captured."""

    def __init__(self, engine: Recordable, which: Which) -> None:
        super().__init__(engine, which)
        start = torch.zeros((), dtype=torch.long, device=engine.device)
        self._recording = Recording(start, which.size, which.keys)

    def _aim(self, caches: Sequence[RollbackCache]) -> None:
        self._recording.start.fill_(caches[0].length)

    def _forward(self, caches: Sequence[RollbackCache]) -> torch.Tensor:
        with caches[0].written_as(self._recording):
            return self.engine.run(self.tokens, self._recording.places(), caches[0])


class ShortPass(RecordedPass):
    """A pass of our forward. ``texts``: what it reads and writes, which passes over as many texts share."""

    def __init__(self, engine: Recordable, which: Which, short: ShortForward, texts: Texts) -> None:
        super().__init__(engine, which)
        self._short, self._texts = short, texts
        self._hidden: torch.Tensor | None = None
        self._steps = torch.arange(which.size, device=engine.device)

    def __call__(self, tokens: Sequence[torch.Tensor], caches: Sequence[RollbackCache]) -> torch.Tensor:
        """As ``RecordedPass``; hidden states are stored as well if they are kept."""
        logits, size = super().__call__(tokens, caches), self.which.size
        if self._hidden is not None:
            for number, (some, cache) in enumerate(zip(tokens, caches, strict=True)):
                cache.hold(cache.length, self._hidden[number * size : number * size + len(some)])
        return logits

    def _aim(self, caches: Sequence[RollbackCache]) -> None:
        self._texts.aim(caches)

    def _forward(self, caches: Sequence[RollbackCache]) -> torch.Tensor:
        logits = self._short(self.tokens, (self._texts.start[:, None] + self._steps).flatten(), self._texts)
        self._hidden = self._texts.hidden
        return logits
