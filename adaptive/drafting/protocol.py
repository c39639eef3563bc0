"""Who proposes the next tokens.

A drafter sees the committed text and returns a ``Proposal``. It keeps whatever state it needs and
catches up by itself, so that a round without it (draft length 0) costs it nothing until it is asked.

A draft may end early on the drafter's own confidence, and the output stays exact if two things hold:
whether a token is proposed is decided before it is drawn, and a token once drawn is proposed, with
the q it was drawn from. Verification then meets, at every position that has a token, a sample of
that q, whatever decided that there should be one; at the first position that has none, it draws from
the target's own p. Dropping a token for being the unlikely one that was drawn would break this: what
is proposed would no longer be distributed as q.
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
        """The most tokens it can propose after ``committed`` tokens."""

    def catch_up(self, committed: int) -> int:
        """How many of ``committed`` tokens it has not seen, beyond the last one."""

    def feed(self, committed: list[int], most: int) -> None:
        """See at most so many of the tokens that it has not seen, and propose nothing."""

    def propose(self, committed: list[int], length: int, advise: Adviser | None = None) -> Proposal | None:
        """At most ``length`` (at least 1) tokens after ``committed``, fewer where ``advise`` says so; None for none."""

    def reserve(self, length: int) -> None:
        """Make room for ``length`` committed and drafted tokens in all; as of a ``Sequence``."""

    def rollback(self, length: int) -> None:
        """Tokens after the first ``length`` committed ones did not stand."""


class Wanted(NamedTuple):
    """A proposal that a model is to make for a text, by itself (``fused``) or with those for others (``engine``)."""

    engine: ProposesTogether
    sequence: Sequence
    fused: FusedCalls
    call: ProposalCall


# A proposal in the making: it says what it wants of models, is sent that, and returns what it has come to.
Making: TypeAlias = Generator[Wanted, Proposed, Proposal | None]


class MadeTogether(Drafter, Protocol):
    """A drafter whose proposals can be made together with those of others."""

    def making(self, committed: list[int], length: int, advise: Adviser | None = None) -> Making:
        """As ``propose``."""


def made_together(drafter: Drafter | None) -> TypeGuard[MadeTogether]:
    """Whether it is such a drafter. Asked in every round of every answer: ``isinstance`` of a protocol is slow."""
    return hasattr(drafter, "making")


@runtime_checkable
class GoesOn(Drafter, Protocol):
    """A drafter that can go on behind tokens that somebody else proposes."""

    def go_on(
        self, committed: list[int], proposed: list[int], length: int, advise: Adviser | None = None
    ) -> Proposal | None:
        """As ``propose``, behind ``committed`` and the ``proposed`` tokens."""


class WithoutForward:
    """What a drafter has no need of that takes no forward: it has no cache, and nothing to catch up with."""

    def catch_up(self, committed: int) -> int:
        """Nothing is fed to anybody."""
        return 0

    def feed(self, committed: list[int], most: int) -> None:
        """As above."""

    def reserve(self, length: int) -> None:
        """Nothing to reserve."""

    def rollback(self, length: int) -> None:
        """What did not stand was never taken in."""
