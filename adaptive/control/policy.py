"""The interface of a draft-length policy, and the simplest one.

The loop asks ``next_length`` before every round and reports the round to ``observe``; in between,
the drafter asks ``advise`` at every drafted position if the policy is ``attentive``. Front ends say
``begin`` when an answer starts and ``swapped`` when the draft has become another one.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, TypeAlias

from adaptive.types import Round

# Weight of one round in the running mean of what is accepted of a draft of fixed length.
ACCEPTED_STEP = 0.05


@dataclass(frozen=True)
class Scope:
    """What an answer belongs to, for estimates kept apart: its session and its sampling temperature, and whether it is
    drawn under a seed, where fewer drafted tokens stand (``adaptive/noise.py``)."""

    session: str
    temperature: float
    seeded: bool = False

    @property
    def drafter(self) -> str:
        """Whose acceptance it is, as estimates name it."""
        return "model+seed" if self.seeded else "model"


class Advice(IntEnum):
    """What a drafter does with the position whose distribution it has just computed; the numbers of
    ``engines/cpu/native/draft.h``."""

    DROP = 0  # propose nothing here: the draft ends before this position
    LAST = 1  # propose a token here and end the draft
    MORE = 2  # propose a token here and go on


class Lead(NamedTuple):
    """What a round proposes: ``history`` tokens of a proposal that takes no forward of the draft, and behind them at
    most ``model`` tokens that the draft is asked for. Both 0 is plain decoding."""

    history: int
    model: int


# Asked with a position (from 1) and the largest probability of the distribution there.
Adviser: TypeAlias = Callable[[int, float], Advice]


class Beside:
    """Chooses how many tokens one answer drafts in rounds that it shares with others, whose proposals one pass of the
    target verifies. This one drafts nothing.

    ``expected`` is the tokens per second that this answer gets from such rounds; 0 where that is not forecast.
    """

    expected: float = 0.0
    clock: Callable[[], float] = staticmethod(time.perf_counter)

    @property
    def adviser(self) -> Adviser | None:
        """Whom the drafter asks at every position."""
        return None

    def next_length(self, limit: int, answers: int) -> int:
        """The most tokens that the next round drafts, 0 to ``limit``, where ``answers`` share its pass."""
        return 0

    def worth_looking(self, behind: bool = False) -> bool:
        """As of a ``LengthPolicy``."""
        return True

    def look_took(self, seconds: float, behind: bool = False) -> None:
        """As of a ``LengthPolicy``."""

    def leave_alone(self) -> None:
        """As of a ``LengthPolicy``."""

    def rests(self, drafting: bool) -> int:
        """As of a ``LengthPolicy``."""
        return 0

    def lead(self, reach: Sequence[float], length: int, limit: int, singly: bool = False) -> Lead:
        """As of a ``LengthPolicy``: who proposes in the round whose length was asked for last."""
        return Lead(0, length)

    def adviser_behind(self, tokens: int, sure: float) -> Adviser | None:
        """As of a ``LengthPolicy``."""
        return self.adviser

    def sure_of_draft(self, drafted: int, agreed: Sequence[float]) -> float:
        """As of a ``LengthPolicy``."""
        return 0.0

    def tail_may_pay(self, drafted: int, sure: float) -> bool:
        """As of a ``LengthPolicy``."""
        return False

    def tail(self, drafted: int, sure: float, reach: Sequence[float], limit: int) -> int:
        """As of a ``LengthPolicy``."""
        return 0

    def observe(self, outcome: Round) -> None:
        """Learn from a finished round of the model's, or a plain one. Its seconds are a share of the pass."""

    def passed(self, outcome: Round) -> None:
        """As of a ``LengthPolicy``."""


class LengthPolicy(ABC):
    """Chooses how many tokens the next round drafts. One policy serves a pair, over all sessions.

    ``attentive`` policies are asked at every position, which costs the drafter one probability a
    token; the others never make it compute one. ``expected`` is the tokens per second that the policy
    expects of the round it has just chosen; 0 where it forecasts nothing. The length just chosen holds for
    ``steady`` rounds: in the next ones it need not be asked for, and they may be observed together. ``tree``: what
    is drafted are trees, and their lengths are numbers of nodes. ``clock`` is what the seconds of the rounds that it
    observes are by.
    """

    name: str
    clock: Callable[[], float] = staticmethod(time.perf_counter)
    attentive: bool = False
    expected: float = 0.0
    steady: int = 1
    tree: bool = False

    @abstractmethod
    def next_length(self, limit: int, waiting: int = 0, context: int = 0) -> int:
        """The most tokens the next round drafts, 0 to ``limit`` (what is left of context and answer).

        0 is plain decoding. ``waiting`` counts committed tokens that the drafter has not seen, beyond
        the last one, which it is always fed; ``context`` counts all committed tokens.
        """

    def advise(self, position: int, confidence: float) -> Advice:
        """Whether to propose a token at ``position`` (from 1) and whether to go on after it.

        ``confidence`` is the largest probability of the draft's distribution there. Must not depend
        on the token that will be drawn from that distribution (see ``ModelDrafter.propose``).
        """
        return Advice.MORE

    @property
    def expected_speed_up(self) -> float | None:
        """Expected tokens per second of drafting as it would be done now, over those of plain decoding; None where
        that is not known."""
        return None

    @property
    def present_speed_up(self) -> float | None:
        """The same of rounds as they have lately been, whoever drafted them."""
        return self.expected_speed_up

    @property
    def adviser(self) -> Adviser | None:
        """Whom the drafter asks at every position."""
        return self.advise if self.attentive else None

    @abstractmethod
    def observe(self, outcome: Round) -> None:
        """Learn from a finished round of the model's, or a plain one."""

    def worth_looking(self, behind: bool = False) -> bool:
        """Whether looking for a proposal that takes no forward of the draft is worth its time: before the next round,
        or ``behind`` the draft of this one."""
        return True

    def look_took(self, seconds: float, behind: bool = False) -> None:  # noqa: B027 - most look whatever it takes
        """Such a look, with what was decided by it, took so long."""

    def leave_alone(self) -> None:  # noqa: B027 - as above
        """The next round is the model's or a plain one, for which nothing is looked for; ``lead`` is not asked."""

    def rests(self, drafting: bool) -> int:
        """For how many rounds behind it nothing is to be looked for either; ``drafting``: they are the model's."""
        return 0

    def lead(self, reach: Sequence[float], length: int, limit: int, singly: bool = False) -> Lead:
        """What the next round proposes, at most ``limit`` tokens. ``next_length`` chose ``length`` of the draft's,
        and a proposal was found that takes no forward of it: ``reach`` is of each of its tokens the probability that
        all up to it are accepted. ``singly``: the draft reads each of them in a pass of its own."""
        return Lead(0, length)

    def adviser_behind(self, tokens: int, sure: float) -> Adviser | None:
        """Whom the draft asks that goes on behind so many tokens of another proposal, all of which stand with this
        probability."""
        return self.adviser

    def sure_of_draft(self, drafted: int, agreed: Sequence[float]) -> float:
        """The probability that all ``drafted`` tokens of the draft that was just made are accepted. ``agreed`` is of
        the first ones, which the other proposal has too, how likely such tokens are accepted."""
        return 0.0

    def tail_may_pay(self, drafted: int, sure: float) -> bool:
        """Whether a proposal that takes no forward is worth looking for behind a draft of ``drafted`` tokens, all of
        which are accepted with probability ``sure``."""
        return False

    def tail(self, drafted: int, sure: float, reach: Sequence[float], limit: int) -> int:
        """How many tokens of such a proposal are worth verifying there, at most ``limit``. ``reach`` is of each the
        probability that all up to it are accepted, given that the draft is."""
        return 0

    def passed(self, outcome: Round) -> None:  # noqa: B027 - as above
        """A round has finished that verified such a proposal, or began with one."""

    def among(self, scope: Scope) -> Beside:
        """What chooses for an answer of this scope in the rounds that it shares with others."""
        return Beside()

    def shared(self, rows: int, seconds: float) -> None:  # noqa: B027 - only some know what passes cost
        """A pass over so many tokens of several answers' rounds took so long."""

    def drafted(self, answers: int, length: int, seconds: float) -> None:  # noqa: B027 - as above
        """The model's drafts of so many answers, the longest of ``length`` tokens, took so long in all."""

    def begin(self, scope: Scope) -> None:  # noqa: B027 - most policies keep no estimates apart
        """An answer starts."""

    def swapped(self, expected: Sequence[float] | None = None) -> None:  # noqa: B027 - nothing to forget without memory
        """The draft was replaced (an adapter swap): what was learned about acceptance is in doubt.

        ``expected`` is what replay promises of the new one: acceptance at every position given that all before it
        were accepted; None where nobody knows.
        """


class FixedLength(LengthPolicy):
    """The same draft length every round, of a chain or of a ``tree``."""

    steady = 1000

    def __init__(self, length: int, tree: bool = False) -> None:
        self.name = f"{'tree' if tree else 'fixed'}:{length}"
        self.length, self.tree = length, tree
        self.accepted = 0.0  # tokens of the model's lately, by round

    def next_length(self, limit: int, waiting: int = 0, context: int = 0) -> int:
        """The fixed length, or less where less is left."""
        return min(self.length, limit)

    def observe(self, outcome: Round) -> None:
        """Remember how much of the model's drafts is accepted."""
        if outcome.drafted:
            self.accepted += ACCEPTED_STEP * (outcome.accepted - self.accepted)

    def worth_looking(self, behind: bool = False) -> bool:
        """Before every round that drafts, and never before plain decoding."""
        return self.length > 0 and not behind

    def lead(self, reach: Sequence[float], length: int, limit: int, singly: bool = False) -> Lead:
        """The other proposal where more of it is expected than the model's drafts brought: it costs no more."""
        most = min(self.length, limit, len(reach))
        return Lead(most, 0) if sum(reach[:most]) > self.accepted else Lead(0, length)

    def among(self, scope: Scope) -> Beside:
        """The same length."""
        return FixedBeside(self)


class FixedBeside(Beside):
    """The same draft length, whoever shares the pass."""

    def __init__(self, policy: FixedLength) -> None:
        self._policy = policy

    def next_length(self, limit: int, answers: int) -> int:
        """The fixed length, or less where less is left."""
        return self._policy.next_length(limit)

    def lead(self, reach: Sequence[float], length: int, limit: int, singly: bool = False) -> Lead:
        """As alone."""
        return self._policy.lead(reach, length, limit, singly)

    def observe(self, outcome: Round) -> None:
        """As alone."""
        self._policy.observe(outcome)
