"""The interface of a draft-length policy, and the simplest one."""

from __future__ import annotations

from typing import Protocol

from adaptive.records.types import Round


class LengthPolicy(Protocol):
    """Chooses how many tokens the next round drafts. One policy serves a pair, over all sessions."""

    name: str

    def next_length(self, limit: int) -> int:
        """Draft length of the next round, 0 to ``limit`` (what is left of context and answer). 0 is plain decoding."""

    def observe(self, outcome: Round) -> None:
        """Learn from a finished round."""


class FixedLength:
    """The same draft length every round."""

    def __init__(self, length: int) -> None:
        self.name = f"fixed:{length}"
        self.length = length

    def next_length(self, limit: int) -> int:
        """The fixed length, or less where less is left."""
        return min(self.length, limit)

    def observe(self, outcome: Round) -> None:
        """Nothing to learn."""
