"""The interface of a drafter, which proposes the next tokens.

A drafter gets the committed text and returns a ``Proposal``. It keeps its own state and catches up with the text by
itself, so a round without it (draft length 0) costs it nothing until the next proposal.

A draft may end early by the drafter's own confidence. The output stays exact under two conditions: whether a token is
proposed is decided before it is drawn, and a drawn token is always proposed, with the q it was drawn from. Then every
position that has a token holds a sample of that q, however it was decided that there is one. At the first position
without a token, verification draws from the target's own p. Dropping a token because an unlikely one was drawn would
violate this: the proposed tokens would no longer be distributed as q.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import NamedTuple, Protocol, TypeAlias, TypeGuard, runtime_checkable

from adaptive.control.policy import Adviser
from adaptive.drafting.proposal import Proposal
from adaptive.engines.protocol import FusedCalls, ProposalCall, Proposed, ProposesTogether, Sequence


class Drafter(Protocol):
    """Proposes tokens that follow the committed text."""

    name: str

    def limit(self, committed: int) -> int:
        """The most tokens that can be proposed after ``committed`` tokens."""

    def catch_up(self, committed: int) -> int:
        """The number of ``committed`` tokens that the drafter has not seen, without the last one."""

    def feed(self, committed: list[int], most: int) -> None:
        """Read at most ``most`` of the unseen tokens, without a proposal."""

    def propose(self, committed: list[int], length: int, advise: Adviser | None = None) -> Proposal | None:
        """At most ``length`` (at least 1) tokens after ``committed``; ``advise`` may end them early. None for none."""

    def reserve(self, length: int) -> None:
        """Reserve room for ``length`` committed and drafted tokens in all, as in ``Sequence.reserve``."""

    def rollback(self, length: int) -> None:
        """Forget the tokens after the first ``length`` ones, which were rejected."""


class Wanted(NamedTuple):
    """A proposal for a text that a model is to make, alone (``fused``) or together with others (``engine``)."""

    engine: ProposesTogether
    sequence: Sequence
    fused: FusedCalls
    call: ProposalCall


# A proposal in the making: a generator that yields the calls it needs, is sent their results, and returns the proposal.
Making: TypeAlias = Generator[Wanted, Proposed, Proposal | None]


class MadeTogether(Drafter, Protocol):
    """A drafter whose proposals can be made in one call with those of others."""

    def making(self, committed: list[int], length: int, advise: Adviser | None = None) -> Making:
        """As ``propose``."""


def made_together(drafter: Drafter | None) -> TypeGuard[MadeTogether]:
    """Whether the drafter is of that kind. It is called in every round, and ``isinstance`` of a protocol is slow."""
    return hasattr(drafter, "making")


@runtime_checkable
class GoesOn(Drafter, Protocol):
    """A drafter that can continue behind tokens proposed by another drafter."""

    def go_on(
        self, committed: list[int], proposed: list[int], length: int, advise: Adviser | None = None
    ) -> Proposal | None:
        """As ``propose``, behind ``committed`` followed by ``proposed``."""


class WithoutForward:
    """The methods that a drafter without forwards has no use for: it has no cache and nothing to catch up with."""

    def catch_up(self, committed: int) -> int:
        """0: nothing is fed."""
        return 0

    def feed(self, committed: list[int], most: int) -> None:
        """Does nothing."""

    def reserve(self, length: int) -> None:
        """Does nothing."""

    def rollback(self, length: int) -> None:
        """Does nothing: rejected tokens were never taken in."""
