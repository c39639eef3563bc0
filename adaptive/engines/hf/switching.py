"""Texts of a model whose rotary embedding changes all of its frequencies where the text passes a border (longrope).

What such a model says of a text with more tokens than the border is what it says when all of it is computed with the
other frequencies; its keys of before are of no use then. So a text has two caches, each fed with what it lacks when it
is asked for something: the first one up to the border, the second one, from the beginning, behind it. A proposal may
cross it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from adaptive.engines.protocol import Chooser, Memory, Sequence, no_trees
from adaptive.engines.tree import NO_TREE
from adaptive.tokens import Ids, as_tensor

# Tokens behind the border at which the cache of before it is given back. Sooner, and an answer that is made anew there
# computes it again; later only takes memory.
BEYOND = 1024


def rope_border(config: Any) -> int | None:
    """Tokens up to which a text config's rotary embedding has its first frequencies; None where it never changes."""
    ropes = getattr(config, "rope_parameters", None) or {}
    for rope in (ropes, *(one for one in ropes.values() if isinstance(one, dict))):
        border = rope.get("original_max_position_embeddings")
        if rope.get("rope_type") == "longrope" and border and border < config.max_position_embeddings:
            return int(border)
    return None


class OneCache(Sequence, Protocol):
    """A sequence of one cache."""

    def extend_at_once(self, tokens: Ids, rows: int) -> torch.Tensor:
        """``extend`` in one pass, however many tokens they are."""

    def prepare(self, length: int, chooser: Chooser | None = None) -> None:
        """Of ``Prepares``."""


class SwitchingSequence:
    """See above."""

    fused = None

    def __init__(self, border: int, empty: Callable[[], OneCache]) -> None:
        """``empty`` makes a new sequence of one cache."""
        self.border = border
        self._empty = empty
        self._text: list[int] = []
        self._short, self._long = empty(), empty()

    @property
    def length(self) -> int:
        """Tokens of the text, all of which one cache or the other holds, or can be fed."""
        return len(self._text)

    @property
    def memory(self) -> Memory:
        """What both caches take."""
        return self._short.memory + self._long.memory

    def reserve(self, length: int) -> None:
        """Reserve for ``length`` tokens in all; the second cache only once it is in use. See the protocol."""
        self._short.reserve(min(length, self.border))
        if self._long.length:
            self._long.reserve(length)

    def prepare(self, length: int, chooser: Chooser | None = None) -> None:
        """Of the cache that most of the text will be in; see the protocol."""
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
        """Logits of the last rows of a text that is longer than the border."""
        held, behind = self._long.length, self.border + 1
        if held >= behind:
            return self._long.extend(text[held:], rows)
        # What frequencies a pass takes is decided by its last token: the first one must end behind the border.
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
        """There is no tree; see the protocol."""
        NO_TREE.check(path)

    def rollback(self, length: int) -> None:
        """Forget everything after the first ``length`` tokens."""
        length = min(length, len(self._text))
        self._text = self._text[:length]
        for held in (self._short, self._long):
            held.rollback(min(length, held.length))

    def copy_prefix(self, other: Sequence, length: int) -> None:
        """Hold the first ``length`` tokens of another sequence; see the protocol."""
        assert isinstance(other, SwitchingSequence)
        self._text = other._text[:length]
        for held, source in ((self._short, other._short), (self._long, other._long)):
            held.copy_prefix(source, min(length, source.length))
