"""History as a drafter: it proposes the tokens that followed the same words before, in the running text or the records.

A proposal takes no forward pass and no token of it is drawn, so verification treats it as point masses
(``proposal.py``).
"""

from __future__ import annotations

from array import array
from typing import Any, NamedTuple

from adaptive.control.matches import KEEP, PRIORS, Bins, Matches
from adaptive.control.policy import Adviser
from adaptive.drafting.proposal import Proposal
from adaptive.drafting.protocol import WithoutForward
from adaptive.drafting.suffixes import Suffixes, compiled, follower, suffixes
from adaptive.tokens import common_prefix
from adaptive.types import HISTORY

# The sources of a match, each with its own calibration. AGREED: tokens that the model proposes too.
RUNNING, RECORDS, AGREED = "text", "records", "agreed"


class RunningText:
    """The text of the current conversation and its index, which grows token by token.

    The next prompt usually repeats the text: only the part that differs is removed and appended.
    """

    def __init__(self) -> None:
        self.index: Suffixes = suffixes()
        self.index.begin(0)
        self.tokens: list[int] = []

    def follow(self, tokens: list[int]) -> None:
        """Replace the text by these tokens."""
        held = self.tokens
        same = common_prefix(held, tokens)
        self.index.take_back(len(held) - same)
        self.go_on(tokens, same)

    def go_on(self, tokens: list[int], held: int | None = None) -> None:
        """``follow`` for ``tokens`` that begin with the held text, or with its first ``held`` tokens."""
        if held is not None:
            del self.tokens[held:]
        self.index.append(self.beyond(tokens))

    def beyond(self, tokens: list[int]) -> list[int]:
        """The part of ``tokens`` behind the held ones, with which they must begin. It counts as held from now on; the
        caller appends it to the index."""
        new = tokens[len(self.tokens) :]
        self.tokens += new
        return new


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
            self.bins.observe(bins[:count], common_prefix(tokens, said))
        else:
            self._counter.observe(tokens[:count], bins[:count], said)
            self.bins.counted()


class Found(NamedTuple):
    """Tokens that may follow. For each: the bin of its match, and the probability that all tokens up to it are
    accepted, by the ``calibration``."""

    tokens: list[int]
    bins: list[int]
    reach: list[float]
    calibration: Counting

    def observe(self, said: list[int]) -> None:
        """Learn from the tokens that were ``said`` in their place."""
        self.calibration.observe(self.tokens, self.bins, said)


class LookedUp(NamedTuple):
    """The results of a round's lookups, before it and behind its ``draft``, and the tokens ``said`` that it committed.
    The first ``agreed`` tokens of the draft were found before the round too."""

    found: Found
    agreed: int
    behind: Found
    draft: list[int]
    said: list[int]


class HistoryDrafter(WithoutForward):
    """Proposes the tokens that ``look`` has found. It serves one answer; texts, records and calibration outlive it."""

    name = HISTORY

    def __init__(
        self,
        text: RunningText,
        records: Suffixes | None,
        matches: Matches,
        temperature: float,
    ) -> None:
        """``records``: the index of logged texts; None to use the running text only."""
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
        self._draft: list[int] = []  # the draft behind which ``look_behind`` looked
        self._agreed = 0  # tokens at the beginning of the draft that were found too
        self._outcomes: list[LookedUp] = []  # not learned from yet

    def look(self, committed: list[int]) -> list[float]:
        """Find what may follow ``committed``. Returns, for each token found, the probability that all tokens up to it
        are accepted."""
        self._found, self._behind, self._agreed = self._best(self._unread(committed)), self._nothing, 0
        return self._found.reach

    def look_away(self) -> list[float]:
        """Skip the lookup for the next round: nothing is found."""
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
        """The acceptance of each of the first tokens of a draft that were found too."""
        self._agreed = common_prefix(self._found.tokens, drafted)
        return self._together.bins.shares(self._found.bins[: self._agreed]) if self._agreed else []

    def look_behind(self, committed: list[int], drafted: list[int]) -> list[float]:
        """As ``look``, behind the tokens of a draft that follows ``committed``."""
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
        """The first ``length`` tokens that ``look`` has found behind ``committed``."""
        return Proposal(self.name, self._found.tokens[:length], None)

    def propose_behind(self, length: int) -> Proposal:
        """The first ``length`` tokens that ``look_behind`` has found."""
        return Proposal(self.name, self._behind.tokens[:length], None)

    def observe(self, said: list[int]) -> None:
        """Take in the tokens ``said`` that a round with a lookup committed, whichever drafter proposed them. They are
        learned from by ``settle``, in batches: a pass of the models evicts its code from the processor's caches."""
        if self._found.tokens or self._behind.tokens:
            self._outcomes.append(LookedUp(self._found, self._agreed, self._behind, self._draft, said))

    @property
    def unlearned(self) -> int:
        """The number of rounds that were observed and not learned from yet."""
        return len(self._outcomes)

    def settle(self) -> None:
        """Learn from all rounds observed since the last time."""
        outcomes, self._outcomes = self._outcomes, []
        for found, agreed, behind, draft, said in outcomes:
            found.observe(said)
            if agreed:
                self._together.observe(found.tokens[:agreed], found.bins[:agreed], said)
            if behind.tokens and said[: len(draft)] == draft:
                behind.observe(said[len(draft) :])
