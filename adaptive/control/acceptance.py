"""How likely the draft's tokens are to be accepted: by position, as observed so far.

**What is estimated.** For position i the probability that the i-th drafted token is accepted *given*
that all before it were. A round that accepted a of k tokens says: positions 1 to a accepted,
position a + 1 rejected if it was drafted, and nothing about the rest, which was never judged.

**How.** Counts of accepted and rejected (a Beta posterior's mean), every observation of a position
weighing a little less with each later one of it. Three levels: everything; this drafter at this
temperature; the present session. Each is shrunk towards the one above it by a number of imaginary
observations, so that a new session starts from what is known and soon speaks for itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from adaptive.control.costs import LONGEST
from adaptive.types import Round

# Imaginary observations of the level above in each level's mean. Larger is slower to see that a
# session differs, smaller makes the first rounds of a session jump about.
WEIGHT = 6.0
# How much of a count is left after one later observation: of everything and of a drafter at a
# temperature about 1,000 observations are remembered, of a session about 100. A
# longer session memory is late after a change of subject; a shorter one takes chance for a change.
KEEP_ALL, KEEP_SESSION = 0.999, 0.99
# What is left of the past at a swap of the draft: enough to start from, little enough that some 20
# observations outweigh it.
KEEP_AT_SWAP = 0.05
# Observations that the promise of replay counts for at every position, after a swap. More are slow to see that this
# person's text differs from the held-out answers; fewer leave the first answers to chance.
PROMISED = 30.0
# Before anything is known: an acceptance at which speculation usually pays, so that it is tried.
PRIOR = 0.6


@dataclass
class Counts:
    """Discounted counts by position (0 is the first drafted token)."""

    keep: float
    accepted: list[float] = field(default_factory=lambda: [0.0] * LONGEST)
    rejected: list[float] = field(default_factory=lambda: [0.0] * LONGEST)

    def add(self, accepted: list[int], rejected: list[int]) -> None:
        """What some rounds saw: how often each position, from the first, was accepted and rejected."""
        for i, (hits, misses) in enumerate(zip(accepted, rejected, strict=True)):
            keep = self.keep ** (hits + misses)
            self.accepted[i] = self.accepted[i] * keep + hits
            self.rejected[i] = self.rejected[i] * keep + misses

    def scale(self, factor: float) -> None:
        """Remember only ``factor`` of everything."""
        self.accepted = [n * factor for n in self.accepted]
        self.rejected = [n * factor for n in self.rejected]

    def means(self, priors: list[float]) -> list[float]:
        """Posterior mean at every position, ``priors`` being those of the level above."""
        return [
            (a + WEIGHT * p) / (a + r + WEIGHT) for a, r, p in zip(self.accepted, self.rejected, priors, strict=True)
        ]

    def chained(self, first: float) -> list[float]:
        """Posterior means where each position's prior is the mean of the one before it: with no level
        above, a position that was never reached is believed to be like its neighbour."""
        means = []
        for a, r in zip(self.accepted, self.rejected, strict=True):
            first = (a + WEIGHT * first) / (a + r + WEIGHT)
            means.append(first)
        return means


def by_position(first: float, mean_length: float, draft_length: int) -> list[float]:
    """Acceptance at each of ``LONGEST`` positions given that all before it were accepted.

    ``first`` is that of the first one, and a round of ``draft_length`` tokens commits ``mean_length`` on average: the
    later positions, taken to be alike, have the p with 1 + first * (1 + p + … + p^(draft_length - 1)) = mean_length.
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
    """What estimates are kept apart by: who drafts, at which temperature (to a tenth)."""
    return f"{drafter}@{temperature:.1f}"


class Acceptance:
    """The three levels. ``estimate`` is their answer for the present session."""

    def __init__(self) -> None:
        self.everything = Counts(KEEP_ALL)
        self.kinds: dict[str, Counts] = {}
        self.session = Counts(KEEP_SESSION)
        self.kind = kind_of("model", 0.0)
        self.session_id: str | None = None

    def begin(self, session: str, drafter: str, temperature: float) -> None:
        """An answer of ``session`` starts. Another session, drafter or temperature starts a new lowest level."""
        kind = kind_of(drafter, temperature)
        if (session, kind) != (self.session_id, self.kind):
            self.session = Counts(KEEP_SESSION)
        self.session_id, self.kind = session, kind

    def beside(self, session: str, drafter: str, temperature: float) -> Acceptance:
        """For an answer that is decoded beside others: the upper levels are these, the lowest is its own."""
        other = Acceptance()
        other.everything, other.kinds = self.everything, self.kinds
        other.begin(session, drafter, temperature)
        return other

    def observe(self, rounds: Sequence[Round]) -> None:
        """Some rounds. Positions after the rejected one were not judged."""
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
        """The draft is another one: what was counted is a weak hint of what it will do, and worth nothing where
        ``expected`` says it, by position."""
        for counts in (self.everything, self.session, *self.kinds.values()):
            counts.scale(KEEP_AT_SWAP if expected is None else 0.0)
        if expected is not None:
            self.everything.accepted = [PROMISED * p for p in expected]
            self.everything.rejected = [PROMISED * (1.0 - p) for p in expected]

    def changed(self) -> None:
        """The text is of another kind than it was: the session's past says little."""
        self.session.scale(KEEP_AT_SWAP)

    def estimate(self) -> list[float]:
        """Conditional acceptance at every position from the first, ``LONGEST`` of them."""
        return self.session.means(self._kind.means(self.everything.chained(PRIOR)))

    @property
    def _kind(self) -> Counts:
        return self.kinds.setdefault(self.kind, Counts(KEEP_ALL))
