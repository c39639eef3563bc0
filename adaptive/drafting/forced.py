"""A grammar as a drafter: where only one text may come next, its tokens are proposed without a forward.

Another way of cutting the same text into tokens may stand there too, so that the target still has its say: what is
proposed is verified as point masses, and the answer is that of masked decoding alone.
"""

from __future__ import annotations

from adaptive.control.policy import Adviser
from adaptive.drafting.proposal import Proposal
from adaptive.drafting.protocol import WithoutForward
from adaptive.grammar import Constraint
from adaptive.types import GRAMMAR


class ForcedDrafter(WithoutForward):
    """Proposes what the ``constraint`` of an answer leaves no choice about."""

    name = GRAMMAR

    def __init__(self, constraint: Constraint) -> None:
        self._constraint = constraint
        self._tokens: list[int] = []

    def look(self, most: int) -> int:
        """How many tokens, at most so many, can only come next."""
        self._tokens = self._constraint.forced(most)
        return len(self._tokens)

    def propose(self, committed: list[int], length: int, advise: Adviser | None = None) -> Proposal | None:
        """What ``look`` has found."""
        return Proposal(self.name, self._tokens[:length], None) if self._tokens else None

    def limit(self, committed: int) -> int:
        """Any number: there is no cache."""
        return len(self._tokens)
