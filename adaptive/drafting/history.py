"""History as a drafter: what followed the same words before, in the running text and in the records.

A proposal takes no forward, and nothing of it is drawn: verification meets it as point masses (``proposal.py``).
"""

from __future__ import annotations

from array import array
from typing import Any, NamedTuple

from adaptive.control.matches import ANEW_EVERY, KEEP, PRIORS, Bins, Matches
from adaptive.control.policy import Adviser
from adaptive.drafting.proposal import Proposal
from adaptive.drafting.protocol import WithoutForward
from adaptive.drafting.suffixes import Suffixes, compiled, follower, suffixes
from adaptive.types import HISTORY

# The sources of a match, apart in the calibration; AGREED: what the model proposes too.
RUNNING, RECORDS, AGREED = "text", "records", "agreed"


class RunningText:
    """The text of the conversation under way and its index, which goes on token by token.

    The next prompt usually repeats it: only what differs is taken back and appended.
    """

    def __init__(self) -> None:
        self.index: Suffixes = suffixes()
        self.index.begin(0)
        self.tokens: list[int] = []

    def follow(self, tokens: list[int]) -> None:
        """Hold these tokens from now on."""
        held = self.tokens
        same = _common(held, tokens)
        self.index.take_back(len(held) - same)
        self.go_on(tokens, same)

    def go_on(self, tokens: list[int], held: int | None = None) -> None:
        """The same, where ``tokens`` begin with what is held, or with ``held`` tokens of it."""
        if held is not None:
            del self.tokens[held:]
        self.index.append(self.beyond(tokens))

    def beyond(self, tokens: list[int]) -> list[int]:
        """The part of ``tokens`` behind the held ones, with which they must begin. It counts as held from now on; the
        caller appends it to the index."""
        new = tokens[len(self.tokens) :]
        self.tokens += new
        return new


def _common(one: list[int], other: list[int]) -> int:
    """Tokens at the beginning that both have."""
    length = min(len(one), len(other))
    if one[:length] == other[:length]:
        return length
    for i in range(length):
        if one[i] != other[i]:
            return i
    return length


class Counting:
    """A calibration whose tokens are counted by the compiled module if there is one, else in Python."""

    def __init__(self, bins: Bins) -> None:
        self.bins = bins
        module: Any = compiled()
        self._counter = (
            None
            if module is None
            else module.Counter(bins.accepted, bins.rejected, bins.tally, array("d", PRIORS), KEEP)
        )

    def observe(self, tokens: list[int], bins: list[int], said: list[int]) -> None:
        """Count found ``tokens`` with their ``bins``; the target produced ``said`` in their place."""
        count = min(len(tokens), len(said))
        if not count:
            return
        if self._counter is None:
            self.bins.observe(bins[:count], _common(tokens, said))
        else:
            self._counter.observe(tokens[:count], bins[:count], said)
            self.bins.counted()


class Found(NamedTuple):
    """Tokens that may follow, of each the bin of its match and the probability that all up to it are accepted, and the
    calibration that says so."""

    tokens: list[int]
    bins: list[int]
    reach: list[float]
    calibration: Counting

    def observe(self, said: list[int]) -> None:
        """What was said in their place."""
        self.calibration.observe(self.tokens, self.bins, said)


class Outcome(NamedTuple):
    """What was found for a round, before it and behind a ``draft``, of which the first ``agreed`` tokens were found
    before it too; and the tokens that the round committed."""

    found: Found
    agreed: int
    behind: Found
    draft: list[int]
    said: list[int]


class HistoryDrafter(WithoutForward):
    """Proposes what ``look`` has found. One serves one answer; texts, records and calibration outlive it."""

    name = HISTORY

    def __init__(
        self,
        text: RunningText,
        records: Suffixes | None,
        matches: Matches,
        temperature: float,
    ) -> None:
        """``records`` is what was said earlier, if it is to be used."""
        self.text = text
        sources = [(text.index, matches.of(RUNNING, temperature))]
        if records is not None:
            sources.append((records, matches.of(RECORDS, temperature)))
        self._calibrations = [Counting(bins) for _, bins in sources]
        self._follower = follower(text.index, [(index, bins.table) for index, bins in sources])
        self._nothing = Found([], [], [], self._calibrations[0])
        self._together = Counting(matches.of(AGREED, temperature))
        self._begun = False
        self._found = self._behind = self._nothing
        self._draft: list[int] = []  # which this looked behind
        self._agreed = 0  # tokens at the beginning of a draft that were found too
        self._outcomes: list[Outcome] = []  # that nothing has been learned from yet

    def look(self, committed: list[int]) -> list[float]:
        """Find what may follow ``committed``; of each of its tokens the probability that all up to it are accepted."""
        self._found, self._behind, self._agreed = self._best(self._unread(committed)), self._nothing, 0
        return self._found.reach

    def look_away(self) -> list[float]:
        """Have found nothing for the next round, for which this does not look."""
        self._found = self._behind = self._nothing
        self._agreed = 0
        return self._found.reach

    def _unread(self, committed: list[int]) -> list[int]:
        """The tokens at the end of ``committed`` that the running text's index lacks."""
        if self._begun:
            return self.text.beyond(committed)
        self.text.follow(committed)
        self._begun = True
        return []

    def agreed(self, drafted: list[int]) -> list[float]:
        """Of the first tokens of a draft that were found too, how likely such a token is accepted."""
        self._agreed = _common(self._found.tokens, drafted)
        return self._together.bins.shares(self._found.bins[: self._agreed]) if self._agreed else []

    def look_behind(self, committed: list[int], drafted: list[int]) -> list[float]:
        """Find what may follow the tokens of a draft behind ``committed``, as ``look``."""
        self._draft, unread = drafted, self._unread(committed)
        if unread:
            self.text.index.append(unread)
        try:
            self._behind = self._best(drafted)
        finally:
            self.text.index.take_back(len(drafted))
        return self._behind.reach

    def _best(self, tokens: list[int]) -> Found:
        """The best continuation of the running text and these ``tokens``, from all sources."""
        source, found = self._follower.look(tokens)
        return self._nothing if source < 0 else Found(*found, self._calibrations[source])

    def propose(self, committed: list[int], length: int, advise: Adviser | None = None) -> Proposal | None:
        """The first ``length`` tokens of what ``look`` has found behind ``committed``."""
        return Proposal(self.name, self._found.tokens[:length], None)

    def propose_behind(self, length: int) -> Proposal:
        """The first ``length`` tokens of what ``look_behind`` has found."""
        return Proposal(self.name, self._behind.tokens[:length], None)

    def observe(self, said: list[int]) -> None:
        """What the round committed for which this looked, whoever had proposed it. Learned from as often as the
        calibration changes: between two passes of the models the code that learns has left the processor's caches."""
        if self._found.tokens or self._behind.tokens:
            self._outcomes.append(Outcome(self._found, self._agreed, self._behind, self._draft, said))
            if len(self._outcomes) >= ANEW_EVERY:
                self.settle()

    def settle(self) -> None:
        """Learn from all that was observed."""
        outcomes, self._outcomes = self._outcomes, []
        for found, agreed, behind, draft, said in outcomes:
            found.observe(said)
            if agreed:
                self._together.observe(found.tokens[:agreed], found.bins[:agreed], said)
            if behind.tokens and said[: len(draft)] == draft:
                behind.observe(said[len(draft) :])

    def limit(self, committed: int) -> int:
        """Any number: there is no cache."""
        return len(self._found.tokens)
