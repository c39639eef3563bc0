"""The interfaces of what proposes the next tokens: a ``Proposer``, and a ``Drafter``, which has a cache.

A proposer gets the committed text and returns a ``Proposal``. It keeps its own state and catches up with the text by
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


class Proposer(Protocol):
    """Proposes tokens that follow the committed text."""

    name: str

    def propose(self, committed: list[int], length: int, advise: Adviser | None = None) -> Proposal | None:
        """At most ``length`` (at least 1) tokens after ``committed``; ``advise`` may end them early. None for none."""

    def rollback(self, length: int) -> None:
        """Forget the tokens after the first ``length`` ones, which were rejected."""


class Drafter(Proposer, Protocol):
    """Proposes by forward passes of a draft, or of a head, which has a cache."""

    def limit(self, committed: int) -> int:
        """The most tokens that can be proposed after ``committed`` tokens."""

    def unseen(self, committed: int) -> int:
        """The number of ``committed`` tokens that the drafter has not seen, without the last one."""

    def feed(self, committed: list[int], most: int) -> None:
        """Read at most ``most`` of the unseen tokens, without a proposal."""

    def reserve(self, length: int) -> None:
        """Reserve room for ``length`` committed and drafted tokens in all, as in ``Sequence.reserve``."""


class Wanted(NamedTuple):
    """A proposal for a text that a model is to make, alone (``fused``) or together with others (``engine``)."""

    engine: ProposesTogether
    sequence: Sequence
    fused: FusedCalls
    call: ProposalCall


# A proposal in progress: a generator that yields the calls it needs, is sent their results, and returns the proposal.
Proposing: TypeAlias = Generator[Wanted, Proposed, Proposal | None]


class ProposesWithOthers(Proposer, Protocol):
    """A proposer whose proposals can be made in one call with those of others."""

    def proposing(self, committed: list[int], length: int, advise: Adviser | None = None) -> Proposing:
        """As ``propose``."""


def proposes_with_others(drafter: Proposer | None) -> TypeGuard[ProposesWithOthers]:
    """Whether the proposer is of that kind. It is called in every round, and ``isinstance`` of a protocol is slow."""
    return hasattr(drafter, "proposing")


@runtime_checkable
class GoesOn(Drafter, Protocol):
    """A drafter that can continue behind tokens proposed by another drafter."""

    def go_on(
        self, committed: list[int], proposed: list[int], length: int, advise: Adviser | None = None
    ) -> Proposal | None:
        """As ``propose``, behind ``committed`` followed by ``proposed``."""


class WithoutForward:
    """A proposer without forwards, which has no cache."""

    def rollback(self, length: int) -> None:
        """Does nothing: rejected tokens were never taken in."""
