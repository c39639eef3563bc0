"""History as a drafter: what followed the same words before, in the running text and in the records.

A proposal takes no forward, and nothing of it is drawn: verification meets it as point masses (``proposal.py``).
"""

from __future__ import annotations

from adaptive.control.matches import Bins, Matches, reach
from adaptive.control.policy import Adviser
from adaptive.drafting.proposal import Proposal
from adaptive.drafting.protocol import WithoutForward
from adaptive.drafting.suffixes import LONGEST, Suffixes, suffixes
from adaptive.types import Round

# Who proposed, in rounds, records and figures.
HISTORY = "history"
# The sources of a match, apart in the calibration.
RUNNING, RECORDS = "text", "records"


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
        new = tokens[len(self.tokens) if held is None else held :]
        if held is not None:
            del self.tokens[held:]
        self.index.append(new)
        self.tokens += new


def _common(one: list[int], other: list[int]) -> int:
    """Tokens at the beginning that both have."""
    length = min(len(one), len(other))
    if one[:length] == other[:length]:
        return length
    return next(i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)


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
        self._sources: list[tuple[Suffixes, Bins, bool]] = [(text.index, matches.of(RUNNING, temperature), True)]
        if records is not None:
            self._sources.append((records, matches.of(RECORDS, temperature), False))
        self._begun = False
        self._tokens: list[int] = []
        self._bins: list[int] = []
        self._source = self._sources[0][1]
        self._proposed: list[int] = []  # bins of the proposal that is being verified

    def look(self, committed: list[int]) -> list[float]:
        """Find what may follow ``committed``; of each of its tokens the probability that all up to it are accepted."""
        if self._begun:
            self.text.go_on(committed)
        else:
            self.text.follow(committed)
            self._begun = True
        context = committed[-LONGEST:]
        best: list[float] = []
        self._tokens = []
        for index, calibration, grows in self._sources:
            tokens, bins = index.follow(context, grows)
            if not tokens:
                continue
            found = reach(calibration.table, bins)
            if sum(found) > sum(best):
                best, self._tokens, self._bins, self._source = found, tokens, bins, calibration
        return best

    def propose(self, committed: list[int], length: int, advise: Adviser | None = None) -> Proposal | None:
        """The first ``length`` tokens of what ``look`` has found behind ``committed``."""
        self._proposed = self._bins[:length]
        return Proposal(self.name, self._tokens[:length], None)

    def observe(self, outcome: Round) -> None:
        """What became of the last proposal."""
        self._source.observe(self._proposed, outcome.accepted)

    def limit(self, committed: int) -> int:
        """Any number: there is no cache."""
        return len(self._tokens)
