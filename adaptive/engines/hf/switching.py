"""Sequences for a model whose rotary embedding changes all of its frequencies at a border of the length (longrope).

For a text with more tokens than the border, the model must compute all tokens with the second set of frequencies; keys
of the first set are of no use then. So a text has two caches. The first serves texts up to the border, the second
longer texts, from their first token on. A cache is fed the tokens that it lacks when its logits or features are needed.
A proposal may cross the border.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from adaptive.engines.protocol import Chooser, Memory, Sequence, no_trees
from adaptive.engines.tree import NO_TREE
from adaptive.tokens import Ids, as_tensor

# Tokens beyond the border at which the first cache is freed. Too low: a regenerated answer near the border computes the
# first cache again. Too high: memory.
BEYOND = 1024


def rope_border(config: Any) -> int | None:
    """The longest text, in tokens, for which the rotary embedding of a text config uses its first frequencies; None if
    they never change."""
    ropes = getattr(config, "rope_parameters", None) or {}
    for rope in (ropes, *(one for one in ropes.values() if isinstance(one, dict))):
        border = rope.get("original_max_position_embeddings")
        if rope.get("rope_type") == "longrope" and border and border < config.max_position_embeddings:
            return int(border)
    return None


class OneCache(Sequence, Protocol):
    """A sequence with one cache."""

    def extend_at_once(self, tokens: Ids, rows: int) -> torch.Tensor:
        """``extend`` in one pass, for any number of tokens."""

    def prepare(self, length: int, chooser: Chooser | None = None) -> None:
        """See ``Prepares``."""


class SwitchingSequence:
    """A sequence with two caches, for texts up to the border and beyond it."""

    fused = None

    def __init__(self, border: int, empty: Callable[[], OneCache]) -> None:
        """``empty`` makes a new sequence with one cache."""
        self.border = border
        self._empty = empty
        self._text: list[int] = []
        self._short, self._long = empty(), empty()

    @property
    def length(self) -> int:
        """Tokens of the text. A cache may hold fewer; it is then fed the rest when needed."""
        return len(self._text)

    @property
    def memory(self) -> Memory:
        """The memory of both caches."""
        return self._short.memory + self._long.memory

    def reserve(self, length: int) -> None:
        """Reserve capacity for ``length`` tokens in all, in the second cache only if it is in use; see the protocol."""
        self._short.reserve(min(length, self.border))
        if self._long.length:
            self._long.reserve(length)

    def prepare(self, length: int, chooser: Chooser | None = None) -> None:
        """Prepare the passes of the cache for a text of ``length`` tokens; see the protocol."""
        held = self._short if length <= self.border else self._long
        held.prepare(length, chooser)

    def extend(self, tokens: Ids, rows: int, parents: list[int] | None = None) -> torch.Tensor:
        """Append n tokens and return logits (rows, vocab) of the last rows; see the protocol."""
        if parents is not None:
            raise no_trees("a model whose rotary embedding changes with the length")
        new = as_tensor(tokens).tolist()
        text = [*self._text, *new]
        first, border = len(text) - rows, self.border
        found = []
        if len(text) <= border or first < border:
            end = min(len(text), border)
            found.append(self._short.extend(text[self._short.length : end], end - first).clone())
        if len(text) > border:
            found.append(self._after(text, len(text) - max(first, border)))
        if len(text) > border + BEYOND and self._short.length:
            self._short = self._empty()
        self._text = text
        return found[0] if len(found) == 1 else torch.cat(found)

    def _after(self, text: list[int], rows: int) -> torch.Tensor:
        """Feed the second cache. Returns logits of the last rows of a text that is longer than the border."""
        held, behind = self._long.length, self.border + 1
        if held >= behind:
            return self._long.extend(text[held:], rows)
        # The last token of a pass decides its frequencies, so the first pass must end beyond the border.
        rest = min(rows, len(text) - behind)
        logits = self._long.extend_at_once(text[held:behind], rows - rest)
        return torch.cat([logits.clone(), self._long.extend(text[behind:], rest)]) if len(text) > behind else logits

    def features(self, begin: int, end: int) -> torch.Tensor:
        """Hidden states (end - begin, feature_width), float32; see the protocol."""
        held = self._short if len(self._text) <= self.border else self._long
        if end > held.length:
            held.extend(self._text[held.length :], 1)
        return held.features(begin, end)

    def keep(self, path: list[int]) -> None:
        """Accept only the empty path, because there are no trees; see the protocol."""
        NO_TREE.check(path)

    def rollback(self, length: int) -> None:
        """Drop all tokens after the first ``length``."""
        length = min(length, len(self._text))
        self._text = self._text[:length]
        for held in (self._short, self._long):
            held.rollback(min(length, held.length))

    def copy_prefix(self, other: Sequence, length: int) -> None:
        """Replace the contents by the first ``length`` tokens of another sequence; see the protocol."""
        assert isinstance(other, SwitchingSequence)
        self._text = other._text[:length]
        for held, source in ((self._short, other._short), (self._long, other._long)):
            held.copy_prefix(source, min(length, source.length))
