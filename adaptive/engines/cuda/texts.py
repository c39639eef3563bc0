"""The keys and values that a pass of our forward writes and reads: those of one text or of several.

A pass over T texts has the same number of tokens of each. On CUDA the kernels read from a table where each text's keys
and values lie. So a recorded pass (``hf/graphs.py``) serves every cache, wherever it lies and however it has grown.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from adaptive.tokens import uploaded


class Cache(Protocol):
    """The cache of a text, as ``hf/cache.py`` has it. Each layer has keys and values (1, key heads, capacity, size)."""

    layers: list[Any]
    keeps: bool

    @property
    def length(self) -> int:
        """Tokens held."""

    def addresses(self) -> tuple[int, ...]:
        """For each layer the addresses of its keys and of its values, and its capacity; the same object until one of
        them changes."""


class Held:
    """Keys and values of one layer. ``start`` (T,) int64: tokens that each text holds before the pass. ``table`` (3, T)
    int64: addresses of keys and of values, and capacities. Without a table, if the device is not CUDA, ``layers`` are
    read."""

    def __init__(self, layer: Any, start: torch.Tensor, table: torch.Tensor | None) -> None:
        self.key_heads, self.size = int(layer.keys.shape[1]), int(layer.keys.shape[3])
        self.start, self.table = start, table
        self.layers: list[Any] = []


class Texts:
    """The texts of a pass: each layer's ``Held``, and with ``keeps`` the hidden states of the pass's tokens."""

    def __init__(self, first: Cache, count: int, device: torch.device) -> None:
        """``count`` texts, whose caches are like ``first``, which holds tokens."""
        self.count, self.keeps = count, first.keeps
        self.hidden: torch.Tensor | None = None  # (tokens, width) after a pass, with ``keeps``
        self.start = torch.zeros(count, dtype=torch.long, device=device)
        self._table: torch.Tensor | None = None
        if device.type == "cuda":
            self._table = torch.zeros(len(first.layers), 3, count, dtype=torch.long, device=device)
        tables = [None] * len(first.layers) if self._table is None else list(self._table)
        self.layers = [Held(layer, self.start, table) for layer, table in zip(first.layers, tables, strict=True)]
        self._known: list[tuple[int, ...]] = []  # what the table holds

    def aim(self, caches: Sequence[Cache]) -> None:
        """Let the next pass write and read these caches, ``count`` of them."""
        if self.count == 1:
            self.start.fill_(caches[0].length)
        else:
            self.start.copy_(uploaded([cache.length for cache in caches], torch.long, self.start.device))
        if self._table is None:
            for number, held in enumerate(self.layers):
                held.layers = [cache.layers[number] for cache in caches]
            return
        wanted = [cache.addresses() for cache in caches]
        if wanted != self._known:
            numbers = uploaded(wanted, torch.long, self.start.device).view(self.count, -1, 3)
            self._table.copy_(numbers.permute(1, 2, 0))
            self._known = wanted

    def keep(self, hidden: torch.Tensor) -> None:
        """Store the hidden states (tokens, width) of the pass."""
        self.hidden = hidden
