"""The interface of a draft-length policy, and the simplest policy.

The decoding loop calls ``next_length`` before a round and reports the round to ``observe``. In between, the drafter
calls the policy's ``adviser``, if it has one, at every drafted position. ``GraftingPolicy`` has the decisions about
proposals of earlier text. Front ends call ``begin`` when an answer starts and ``swapped`` when the draft was replaced.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, TypeAlias

from adaptive.types import Round

# Weight of one round in the running mean of the accepted tokens of a draft of fixed length.
ACCEPTED_STEP = 0.05
# Acceptance of each of its tokens before the first such round. Too low: weak matches of history come before a good
# draft for some rounds. Too high: the draft comes before good matches.
EXPECTED = 0.6


@dataclass(frozen=True)
class Scope:
    """The keys of separate estimates for an answer: its session, its sampling temperature, and whether it is drawn
    under a seed, which accepts fewer drafted tokens (``adaptive/noise.py``)."""

    session: str
    temperature: float
    seeded: bool = False

    @property
    def drafter(self) -> str:
        """The name of the drafter in estimates."""
        return "model+seed" if self.seeded else "model"


class Advice(IntEnum):
    """What a drafter does at the position whose distribution it has just computed. The numbers are those of
    ``engines/cpu/native/draft.h``."""

    DROP = 0  # propose nothing here: the draft ends before this position
    LAST = 1  # propose a token here and end the draft
    MORE = 2  # propose a token here and continue


class Lead(NamedTuple):
    """What a round proposes: ``history`` tokens of a proposal that takes no forward of the draft, followed by at most
    ``model`` tokens drafted by the model. Both 0 is plain decoding."""

    history: int
    model: int


# Called with a position (from 1) and the largest probability of the draft's distribution there. The result must not
# depend on the token that will be drawn from that distribution (see drafting/protocol.py). For a tree: with a node's
# place among the nodes, likeliest first, and the probability that the target's text leads through it.
Adviser: TypeAlias = Callable[[int, float], Advice]


class TreeAdviser:
    """Decides which nodes a drafted tree has; an ``Adviser``.

    The draft's probabilities are raised to the power ``sharpness`` and normalised. The tree ends before the first node
    that the target's text leads through with a probability below ``least``, by its place; none ends it if that is
    empty. The draft computes what follows nodes of one depth in a pass, if the text leads through one of them with a
    probability of at least ``reach``. ``expected`` is the sum of the probabilities of the current tree's nodes, the
    expected number of accepted ones, None if it was not asked about any; ``passes`` are those over its nodes, which
    took ``passes_s`` seconds.
    """

    def __init__(self) -> None:
        self.sharpness = 1.0
        self.least: Sequence[float] = ()
        self.reach = 0.0
        self.expected: float | None = None
        self.passes, self.passes_s = 0, 0.0

    def deeper(self, probability: float) -> bool:
        """Whether a pass over nodes of one depth is worth its time; the target's text leads through one of them with
        this ``probability``."""
        return probability >= self.reach

    def passed(self, seconds: float) -> None:
        """Take in the seconds of such a pass."""
        self.passes, self.passes_s = self.passes + 1, self.passes_s + seconds

    def __call__(self, position: int, confidence: float) -> Advice:
        """See ``Adviser``. Call it for the nodes in order."""
        if position == 1:
            self.expected = 0.0
        if self.least and confidence < self.least[min(position, len(self.least)) - 1]:
            return Advice.DROP
        self.expected = (self.expected or 0.0) + confidence
        return Advice.MORE


class GraftingPolicy:
    """What a policy decides about proposals that take no forward of the draft: those of earlier text, and how they are
    combined with the model's (``drafting/grafting.py``). This base class looks nothing up behind a draft and lets the
    model draft all rounds. ``clock`` gives the seconds that it is told."""

    clock: Callable[[], float] = staticmethod(time.perf_counter)

    @property
    def adviser(self) -> Adviser | None:
        """The function that the drafter calls at every position, which requires one probability per token from it. None
        for none: the drafter then computes no such probability."""
        return None

    def worth_looking(self, behind: bool = False) -> bool:
        """Whether a lookup for a proposal that takes no forward of the draft is worth its time: before the next round,
        or ``behind`` the draft of this round."""
        return True

    def look_took(self, seconds: float, behind: bool = False) -> None:
        """Take in the seconds of such a lookup, including the decision about its result."""

    def look_skipped(self) -> None:
        """Note that a lookup was due behind this round's draft and is not made, because no result could pay behind so
        many tokens."""

    def rests(self, drafting: bool) -> int:
        """The number of rounds after the next one that need no lookup either. ``drafting``: the model drafts them."""
        return 0

    def lead(self, reach: Sequence[float], length: int, limit: int, singly: bool = False, passed: int = 0) -> Lead:
        """What the next round proposes, at most ``limit`` tokens. ``next_length`` chose ``length`` tokens of the model,
        ``passed`` rounds ago, and a proposal that takes no forward was found: ``reach`` is, for each of its tokens, the
        probability that all up to it are accepted. ``singly``: the draft reads each of them in a pass of its own.
        Without this call, the model drafts the round, or it is plain."""
        return Lead(0, length)

    def adviser_behind(self, tokens: int, sure: float) -> Adviser | None:
        """The function that a draft calls at every position if it continues after ``tokens`` tokens of another
        proposal, all of which are accepted with probability ``sure``."""
        return self.adviser

    def sure_of_draft(self, drafted: int, agreed: Sequence[float]) -> float:
        """The probability that all ``drafted`` tokens of the current draft are accepted. ``agreed`` is the acceptance
        of each of the first tokens, which the other proposal has as well."""
        return 0.0

    def tail_may_pay(self, drafted: int, sure: float) -> bool:
        """Whether to look up a proposal that takes no forward after a draft of ``drafted`` tokens, all of which are
        accepted with probability ``sure``."""
        return False

    def tail(self, drafted: int, sure: float, reach: Sequence[float], limit: int) -> int:
        """How many tokens of that proposal are worth verifying after the draft, at most ``limit``. ``reach`` is, for
        each, the probability that all up to it are accepted, given that the draft is."""
        return 0

    def observe_free(self, outcome: Round) -> None:
        """Learn from a finished round whose proposal took no forward of the draft (``FREE`` drafters)."""


class SharedLength(GraftingPolicy):
    """Chooses how many tokens one answer drafts in rounds that it shares with others: one pass of the target verifies
    the proposals of all. This base class drafts nothing.

    ``expected`` is the tokens per second that this answer gets from such rounds; 0 if there is no forecast. The caller
    keeps ``decoded``, the answer's tokens so far, up to date.
    """

    expected: float = 0.0
    decoded: int = 0

    @property
    def steps(self) -> int:
        """Tokens about which ``adviser`` was asked since ``next_length``, dropped ones included."""
        return 0

    def next_length(self, limit: int, answers: int, waiting: int = 0) -> int:
        """The most tokens that the next round drafts, 0 to ``limit``, if ``answers`` answers share its pass.
        ``waiting`` is the number of committed tokens that the draft has to catch up with."""
        return 0

    def reads(self) -> None:
        """Note that the draft proposes nothing in this round, because it reads a part of the text that it lacks."""

    def observe(self, outcome: Round) -> None:
        """Learn from a finished round of the model, or a plain one. Its seconds are a share of the pass."""


class LengthPolicy(GraftingPolicy, ABC):
    """Chooses how many tokens the next round drafts. One policy serves a pair, over all sessions.

    ``expected`` is the tokens per second that the policy expects of the round it has just chosen; 0 if it makes no
    forecast. The chosen length holds for ``steady`` rounds: the caller need not ask again before the later ones and may
    report them together. ``tree``: the drafts are trees, and lengths are numbers of nodes. ``clock`` gives the seconds
    of the observed rounds.
    """

    name: str
    expected: float = 0.0
    steady: int = 1
    tree: bool = False

    @abstractmethod
    def next_length(self, limit: int, waiting: int = 0, context: int = 0) -> int:
        """The most tokens the next round drafts, 0 to ``limit`` (the room in context and answer).

        0 is plain decoding. ``waiting`` is the number of committed tokens that the drafter has not seen, without the
        last one, which it is always fed; ``context`` is the number of all committed tokens.
        """

    @property
    def expected_speed_up(self) -> float | None:
        """Expected tokens per second of drafting with the current decisions, relative to plain decoding; None if
        unknown."""
        return None

    @property
    def present_speed_up(self) -> float | None:
        """The same for recent rounds as they were, by any drafter."""
        return self.expected_speed_up

    @abstractmethod
    def observe(self, outcome: Round) -> None:
        """Learn from a finished round of the model, or a plain one."""

    def among(self, scope: Scope) -> SharedLength:
        """A chooser for an answer of this scope, in the rounds that it shares with others."""
        return SharedLength()

    def shared(self, rows: int, seconds: float) -> None:
        """Take in the seconds of a pass over ``rows`` tokens of several answers' rounds."""

    def drafted(self, answers: int, tokens: int, seconds: float) -> None:
        """Take in the seconds of the drafts of ``answers`` answers, of ``tokens`` in all, with dropped ones."""

    def begin(self, scope: Scope, decoded: int = 0) -> None:
        """Start an answer, or go on with one of which ``decoded`` tokens are there, from rounds shared with others."""

    def ended(self, tokens: int) -> None:
        """Take in the length of an answer that has ended, in ``tokens``."""

    def swapped(self, expected: Sequence[float] | None = None) -> None:
        """Discount what was learned about acceptance: the draft was replaced (an adapter swap).

        ``expected`` is the acceptance of the new draft by replay, at every position given that all before it were
        accepted; None if unknown.
        """


class FixedLength(LengthPolicy):
    """The same draft length every round, of a chain or of a ``tree``."""

    steady = 1000

    def __init__(self, length: int, tree: bool = False) -> None:
        self.name = f"{'tree' if tree else 'fixed'}:{length}"
        self.length, self.tree = length, tree
        # Running mean of the model's accepted tokens per round.
        self.accepted = sum(EXPECTED**position for position in range(1, length + 1))

    def next_length(self, limit: int, waiting: int = 0, context: int = 0) -> int:
        """The fixed length, or less if ``limit`` is lower."""
        return min(self.length, limit)

    def observe(self, outcome: Round) -> None:
        """Update the mean of accepted tokens of the model's drafts."""
        if outcome.drafted:
            self.accepted += ACCEPTED_STEP * (outcome.accepted - self.accepted)

    def worth_looking(self, behind: bool = False) -> bool:
        """True before every round that drafts, never before plain decoding."""
        return self.length > 0 and not behind

    def lead(self, reach: Sequence[float], length: int, limit: int, singly: bool = False, passed: int = 0) -> Lead:
        """The other proposal if more accepted tokens are expected of it than of the model's drafts, since it costs no
        more."""
        most = min(self.length, limit, len(reach))
        expected = self.accepted if length else 0.0  # the model cannot draft
        return Lead(most, 0) if sum(reach[:most]) > expected else Lead(0, length)

    def among(self, scope: Scope) -> SharedLength:
        """A chooser with the same length."""
        return SharedFixedLength(self)


class SharedFixedLength(SharedLength):
    """The same draft length, however many answers share the pass."""

    def __init__(self, policy: FixedLength) -> None:
        self._policy = policy

    def next_length(self, limit: int, answers: int, waiting: int = 0) -> int:
        """The fixed length, or less if ``limit`` is lower."""
        return self._policy.next_length(limit)

    def worth_looking(self, behind: bool = False) -> bool:
        """As alone."""
        return self._policy.worth_looking(behind)

    def lead(self, reach: Sequence[float], length: int, limit: int, singly: bool = False, passed: int = 0) -> Lead:
        """As alone."""
        return self._policy.lead(reach, length, limit, singly)

    def observe(self, outcome: Round) -> None:
        """As alone."""
        self._policy.observe(outcome)
