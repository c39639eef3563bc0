"""A grammar as a drafter: where only one text can come next, its tokens are proposed without a forward.

Other tokens may spell the same text, so the target still chooses: the proposal is verified as point masses, and the
answer is the same as with masked decoding alone.
"""

from __future__ import annotations

from adaptive.control.policy import Adviser
from adaptive.drafting.proposal import Proposal
from adaptive.drafting.protocol import WithoutForward
from adaptive.grammar import Constraint
from adaptive.types import GRAMMAR


class GrammarDrafter(WithoutForward):
    """Proposes the tokens that the ``constraint`` of an answer forces."""

    name = GRAMMAR

    def __init__(self, constraint: Constraint) -> None:
        self._constraint = constraint
        self._tokens: list[int] = []

    def look(self, most: int) -> int:
        """The number of tokens, at most ``most``, that are forced next."""
        self._tokens = self._constraint.forced(most)
        return len(self._tokens)

    def propose(self, committed: list[int], length: int, advise: Adviser | None = None) -> Proposal | None:
        """The tokens that ``look`` has found."""
        return Proposal(self.name, self._tokens[:length], None) if self._tokens else None
