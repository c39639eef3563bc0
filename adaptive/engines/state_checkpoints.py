"""Recurrent states of a text that are kept for a rollback beyond its last passes: a few, far apart."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

# Checkpoints per text. Too low: more of the text is computed again where a conversation branches. Too high: memory;
# each one holds the recurrent states of all layers.
CHECKPOINTS = 4
# Tokens before a prompt's end at which recurrent states are kept, for another answer to the prompt, or to one with a
# different end (templates end a prompt with a few tokens of their own). These last tokens take a pass of their own.
REMEMBER_BEFORE = 16

Stored = TypeVar("Stored")


class Checkpoints(Generic[Stored]):
    """The states of one text after some of its lengths (tokens), in order. At most CHECKPOINTS are kept."""

    def __init__(self) -> None:
        self._held: dict[int, Stored] = {}

    def __contains__(self, length: int) -> bool:
        return length in self._held

    def __iter__(self) -> Iterator[Stored]:
        return iter(self._held.values())

    def add(self, length: int, states: Stored) -> None:
        """Keep the states after ``length`` tokens, which no checkpoint reaches yet. If there are too many then, drop
        the one whose neighbours are nearest to each other, but not this one."""
        self._held[length] = states
        lengths = [0, *self._held]
        if len(self._held) > CHECKPOINTS:
            gaps = [after - before for before, after in zip(lengths, lengths[2:], strict=False)]
            del self._held[lengths[1 + gaps.index(min(gaps))]]

    def last(self, most: int) -> tuple[int, Stored] | None:
        """The length and states of the last checkpoint of at most ``most`` tokens."""
        return next((one for one in reversed(self._held.items()) if one[0] <= most), None)

    def cut(self, length: int) -> None:
        """Drop the checkpoints of more than ``length`` tokens."""
        self._held = {at: states for at, states in self._held.items() if at <= length}

    def copy(self, other: Checkpoints[Stored], length: int) -> None:
        """Hold those of ``other`` of at most ``length`` tokens, with the same states."""
        self._held = {at: states for at, states in other._held.items() if at <= length}
