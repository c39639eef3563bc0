"""Estimates how likely drafted tokens are to be accepted, by position, from the rounds observed so far.

**What is estimated.** For position i, the probability that the i-th drafted token is accepted *given* that all tokens
before it were. A round that accepted a of k tokens shows that positions 1 to a were accepted and that position a + 1,
if drafted, was rejected. It shows nothing about the later positions, which were not judged.

**How.** Counts of accepted and rejected tokens give the mean of a Beta posterior. At each position an observation loses
weight with every later one. There are three levels: all rounds; this drafter at this temperature; the current session.
Each is shrunk towards the level above it by imaginary observations, so a new session starts from prior knowledge and
soon depends on its own rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from weakref import WeakSet

from adaptive.control.costs import LONGEST
from adaptive.types import Round

# Imaginary observations of the level above in each level's mean. Too high: it is slow to notice that a session differs.
# Too low: the estimates jump in the first rounds of a session.
WEIGHT = 6.0
# Factor on a count at each later observation: about 1,000 observations are remembered for all rounds and for a drafter
# at a temperature, about 100 for a session. A longer session memory reacts late to a change of subject; a shorter one
# takes chance for a change.
KEEP_ALL, KEEP_SESSION = 0.999, 0.99
# Factor on all counts when the draft is swapped: high enough to start from the past, low enough that some 20
# observations outweigh it.
KEEP_AT_SWAP = 0.05
# Observations that replay's expectation counts for at every position after a swap. Too high: it is slow to notice that
# this user's text differs from the held-out answers. Too low: the first answers are left to chance.
PROMISED = 30.0
# Acceptance before anything is observed: one at which speculation usually pays, so that it is tried.
PRIOR = 0.6


@dataclass
class Counts:
    """Discounted counts by position (0 is the first drafted token)."""

    keep: float
    accepted: list[float] = field(default_factory=lambda: [0.0] * LONGEST)
    rejected: list[float] = field(default_factory=lambda: [0.0] * LONGEST)

    def add(self, accepted: list[int], rejected: list[int]) -> None:
        """Add the counts of some rounds: how often each position, from the first, was accepted and rejected."""
        for i, (hits, misses) in enumerate(zip(accepted, rejected, strict=True)):
            keep = self.keep ** (hits + misses)
            self.accepted[i] = self.accepted[i] * keep + hits
            self.rejected[i] = self.rejected[i] * keep + misses

    def scale(self, factor: float) -> None:
        """Multiply all counts by ``factor``."""
        self.accepted = [n * factor for n in self.accepted]
        self.rejected = [n * factor for n in self.rejected]

    def means(self, priors: list[float]) -> list[float]:
        """The posterior mean at every position. ``priors`` are the means of the level above."""
        return [
            (a + WEIGHT * p) / (a + r + WEIGHT) for a, r, p in zip(self.accepted, self.rejected, priors, strict=True)
        ]

    def chained(self, first: float) -> list[float]:
        """Posterior means if there is no level above: each position's prior is the mean of the position before it
        (``first`` for the first one), so a position that was never reached gets its neighbour's estimate."""
        means = []
        for a, r in zip(self.accepted, self.rejected, strict=True):
            first = (a + WEIGHT * first) / (a + r + WEIGHT)
            means.append(first)
        return means


def by_position(first: float, mean_length: float, draft_length: int) -> list[float]:
    """Acceptance at each of ``LONGEST`` positions, given that all tokens before it were accepted.

    ``first`` is the acceptance of the first position. A round of ``draft_length`` tokens commits ``mean_length`` tokens
    on average. The later positions are assumed to share one p: the solution of
    1 + first * (1 + p + … + p^(draft_length - 1)) = mean_length.
    """
    first = min(max(first, 0.0), 1.0)
    low, high = 0.0, 1.0
    for _ in range(40):
        p = (low + high) / 2
        if 1 + first * sum(p**i for i in range(draft_length)) < mean_length:
            low = p
        else:
            high = p
    return [first, *[low] * (LONGEST - 1)]


def kind_of(drafter: str, temperature: float) -> str:
    """The key of separate estimates: the drafter and the temperature, to a tenth."""
    return f"{drafter}@{temperature:.1f}"


class Acceptance:
    """The three levels. ``estimate`` combines them for the current session."""

    def __init__(self) -> None:
        self.everything = Counts(KEEP_ALL)
        self.kinds: dict[str, Counts] = {}
        self.session = Counts(KEEP_SESSION)
        self.kind = kind_of("model", 0.0)
        self.session_id: str | None = None
        self._beside: WeakSet[Acceptance] = WeakSet()  # those of answers that are decoded beside others

    def begin(self, session: str, drafter: str, temperature: float) -> None:
        """Start an answer of ``session``. A new session, drafter or temperature starts a new lowest level."""
        kind = kind_of(drafter, temperature)
        if (session, kind) != (self.session_id, self.kind):
            self.session = Counts(KEEP_SESSION)
        self.session_id, self.kind = session, kind

    def beside(self, session: str, drafter: str, temperature: float) -> Acceptance:
        """Estimates for an answer that is decoded beside others: it shares the upper levels and has its own lowest."""
        other = Acceptance()
        other.everything, other.kinds = self.everything, self.kinds
        other.begin(session, drafter, temperature)
        self._beside.add(other)
        return other

    def observe(self, rounds: Sequence[Round]) -> None:
        """Count some rounds. Positions after the rejected one were not judged."""
        reach = min(LONGEST, max((r.accepted + (r.accepted < r.drafted) for r in rounds), default=0))
        accepted, rejected = [0] * reach, [0] * reach
        for r in rounds:
            for i in range(min(r.accepted, reach)):
                accepted[i] += 1
            if r.accepted < min(r.drafted, reach):
                rejected[r.accepted] += 1
        for counts in (self.everything, self._kind, self.session):
            counts.add(accepted, rejected)

    def swapped(self, expected: Sequence[float] | None = None) -> None:
        """Adjust to a swapped draft: the old counts become a weak prior. If ``expected`` gives the new draft's
        acceptance by position, that replaces them."""
        sessions = (self.session, *(other.session for other in self._beside))
        for counts in (self.everything, *self.kinds.values(), *sessions):
            counts.scale(KEEP_AT_SWAP if expected is None else 0.0)
        if expected is not None:
            self.everything.accepted = [PROMISED * p for p in expected]
            self.everything.rejected = [PROMISED * (1.0 - p) for p in expected]

    def changed(self) -> None:
        """Forget most of the session's past: the kind of text has changed."""
        self.session.scale(KEEP_AT_SWAP)

    def estimate(self) -> list[float]:
        """Conditional acceptance at each of the ``LONGEST`` positions."""
        return self.session.means(self._kind.means(self.everything.chained(PRIOR)))

    @property
    def _kind(self) -> Counts:
        return self.kinds.setdefault(self.kind, Counts(KEEP_ALL))
