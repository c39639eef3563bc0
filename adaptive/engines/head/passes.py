"""A head's passes by transformers' forward of its layer, recorded as CUDA graphs on request."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from adaptive.engines.cuda.forward import ShortForward
from adaptive.engines.head.kinds import HeadModule
from adaptive.engines.hf.cache import RollbackCache
from adaptive.engines.hf.graphs import SIZES, RecordedPasses
from adaptive.engines.protocol import Chooser


class HeadPasses:
    """The passes of one ``head`` over any of its caches, which keep features."""

    adapter = None
    short: ShortForward | None = None

    def __init__(self, head: HeadModule, context_length: int) -> None:
        self.head = head
        self.model: PreTrainedModel = head.body
        self.context_length = context_length
        self.vocab_size = head.vocab_size
        self.device = head.device
        self.recorded: RecordedPasses | None = None
        # The features that recorded passes read, at a fixed address; and those that the next pass reads.
        self._place = torch.zeros(SIZES[-1], head.width, dtype=head.dtype, device=head.device)
        self._read = self._place

    def record(self) -> None:
        """From now on, record short passes and replay them (``hf/graphs.py``)."""
        self.recorded = RecordedPasses(self)

    def __call__(self, tokens: torch.Tensor, features: torch.Tensor, rows: int, cache: RollbackCache) -> torch.Tensor:
        """Append tokens (n,) that read ``features`` (n, width). Returns logits (rows, vocab) of the last ones, which
        the next pass may overwrite."""
        logits = self._replayed(tokens, features, rows, cache)
        if logits is not None:
            return logits
        self._read = features
        return self.eager(tokens, rows, cache)

    def choose(self, tokens: torch.Tensor, features: torch.Tensor, cache: RollbackCache, chooser: Chooser) -> bool:
        """Append tokens (n,) and run ``chooser`` on the logits of the last, if that has been recorded. Returns False
        if nothing was done."""
        return self._replayed(tokens, features, 1, cache, chooser) is not None

    def _replayed(
        self,
        tokens: torch.Tensor,
        features: torch.Tensor,
        rows: int,
        cache: RollbackCache,
        chooser: Chooser | None = None,
    ) -> torch.Tensor | None:
        if self.recorded is None or len(tokens) > len(self._place):
            return None
        self._place[: len(tokens)] = features
        self._read = self._place
        return self.recorded(tokens, rows, cache, chooser)

    def ready(self, cache: RollbackCache, length: int, chooser: Chooser | None = None) -> None:
        """Record the missing passes if passes are recorded; see ``RecordedPasses.ready``."""
        if self.recorded is not None:
            self._read = self._place
            self.recorded.ready(cache, length, chooser)

    def eager(self, tokens: torch.Tensor, rows: int, cache: RollbackCache) -> torch.Tensor:
        """Append tokens (n,) to the cache. Returns logits (rows, vocab) of the last ones."""
        start, count = cache.length, len(tokens)
        cache.ensure_capacity(start + count)
        places = torch.arange(start, start + count, device=tokens.device)
        hidden = self._hidden(tokens, places, cache)
        return self.head.logits(hidden[count - rows :])

    def run(self, tokens: torch.Tensor, places: torch.Tensor, cache: RollbackCache) -> torch.Tensor:
        """The forward of tokens (n,) at ``places`` (n,), in a form that can be recorded. Returns logits (n, vocab)."""
        return self.head.logits(self._hidden(tokens, places, cache))

    def _hidden(self, tokens: torch.Tensor, places: torch.Tensor, cache: RollbackCache) -> torch.Tensor:
        """Hidden states (n, width), which are also stored in the cache."""
        read = self._read[None, : len(tokens)]
        positions = places[None] + self.head.begins
        hidden: torch.Tensor = self.head(tokens[None], read, positions, past_key_values=cache)
        cache.keep(hidden)
        return hidden[0]
