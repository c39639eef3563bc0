"""The index of history drafting: texts of token ids, and the tokens that followed the longest suffix of a context.

In: texts, each with an id. The tokens of one may be appended step by step, and taken back. Out: for a context, the
tokens that followed its longest suffixes before, and for each token a bin: the length of the match and the agreement of
the matches.

``suffixes`` returns the compiled index (``native/suffixes.h``), which handles ten million tokens, or, if that was not
built, the plain one of this module, which defines the behaviour of both.
"""

from __future__ import annotations

import bisect
import importlib
import itertools
import operator
import threading
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from adaptive.compiled import fingerprint
from adaptive.control.matches import LENGTHS

NATIVE = Path(__file__).parent / "native"
# Tokens of context by which matches are found, the most first. Fewer than two are followed by anything. Matches found
# with one of these numbers are compared by up to LONGEST tokens.
ORDERS = (16, 8, 4, 2)
# Most tokens by which two contexts are compared: nearly all matches of that length continue as before.
LONGEST = 32
# Most tokens of a continuation, most matches used (the latest), and most places checked that turn out not to match.
# Higher: lookups take longer, and older matches hardly change the result.
AHEAD, MATCHES, FAILURES = 16, 16, 64
# Lengths of a match at which the next bin begins.
LENGTH_EDGES = (4, 6, 8, 12, 16, 24, 32)
# A continuation ends when the probability that all its tokens are accepted falls below this: no further token pays.
LEAST_REACH = 0.01
NO_TOKEN = -1


class Continuation(NamedTuple):
    """Tokens that followed, and the bin of each (agreement * LENGTHS + length)."""

    tokens: list[int]
    bins: list[int]


class Expected(NamedTuple):
    """The same, with the probability that all tokens up to each are accepted."""

    tokens: list[int]
    bins: list[int]
    reach: list[float]


class Suffixes(Protocol):
    """The index. Several threads may use it at once."""

    def begin(self, id: int) -> None:
        """Start a new last text with this id."""

    def append(self, tokens: list[int]) -> None:
        """Append tokens to the last text."""

    def add(self, id: int, tokens: npt.NDArray[np.int32]) -> None:
        """Add a whole text. If there is no room, the oldest texts are removed."""

    def take_back(self, count: int) -> None:
        """Remove the last ``count`` tokens of the last text."""

    def remove(self, ids: list[int]) -> int:
        """Remove the texts with these ids, overwriting their tokens. Returns the number of removed texts."""

    def follow(self, context: list[int], grows: bool = False) -> Continuation:
        """The tokens that followed the longest suffix of ``context`` in the index; nothing while another thread uses
        the index. ``grows``: the context is the end of the last text, to which the found tokens are appended."""

    def follow_end(self, of: Suffixes, table: array[float]) -> Expected:
        """As ``follow``, for the end of the last text of ``of``; if that is this index, the text grows. ``table`` is,
        by bin, the probability that a token is accepted, given that those before it were."""

    def __len__(self) -> int:
        """The number of tokens held."""

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""


class Follower(Protocol):
    """Finds the best continuation of a running text in several indexes. Each index comes with its table of acceptance
    by bin, as ``Suffixes.follow_end`` takes it."""

    def look(self, tokens: list[int]) -> tuple[int, Expected]:
        """Append ``tokens`` to the text. Returns the number of the index whose continuation has the highest expected
        number of accepted tokens (-1 if no index has a continuation), and that continuation."""


class PlainFollower:
    """``Follower`` in Python, for any kind of index."""

    def __init__(self, text: Suffixes, sources: Sequence[tuple[Suffixes, array[float]]]) -> None:
        self._text, self._sources = text, sources

    def look(self, tokens: list[int]) -> tuple[int, Expected]:
        """See ``Follower``."""
        if tokens:
            self._text.append(tokens)
        best, most, found = -1, 0.0, Expected([], [], [])
        for number, (index, table) in enumerate(self._sources):
            expected = index.follow_end(self._text, table)
            promised = sum(expected[2])
            if promised > most:
                best, most, found = number, promised, Expected(*expected)
        return best, found


@cache
def compiled() -> Any:
    """The compiled module; None if it was not built, or was built from other sources than those beside it."""
    try:
        module = importlib.import_module("adaptive.drafting.native.suffixes")
    except ImportError:
        return None
    return module if fingerprint(NATIVE) in (None, module.sources) else None


def suffixes(most: int = 0) -> Suffixes:
    """An empty index of at most ``most`` tokens (0: any number)."""
    module = compiled()
    index: Suffixes = PlainSuffixes(most) if module is None else module.Suffixes(most)
    return index


def follower(text: Suffixes, sources: Sequence[tuple[Suffixes, array[float]]]) -> Follower:
    """A follower that looks up all sources in one native call if all of these indexes are compiled."""
    module = compiled()
    if module is None or not all(isinstance(index, module.Suffixes) for index in (text, *(s[0] for s in sources))):
        return PlainFollower(text, sources)
    found: Follower = module.Follower(text, list(sources))
    return found


def length_bin(length: int) -> int:
    """The bin of a match's length."""
    return bisect.bisect_right(LENGTH_EDGES, length)


def agreement_bin(agreeing: int, matches: int) -> int:
    """The bin of ``agreeing`` out of ``matches`` matches that have the same next token: 0 if fewer than half, 1 if not
    all, 2 if there is only one match, 3 for all of two or three, 4 for all of more."""
    if matches == 1:
        return 2
    if agreeing == matches:
        return 3 if matches < 4 else 4
    return 0 if 2 * agreeing < matches else 1


@dataclass
class _Text:
    id: int
    first: int
    end: int


@dataclass
class _Match:
    position: int
    length: int


class PlainSuffixes:
    """The index in Python, with a dictionary from context to positions. It is the reference for the compiled one."""

    def __init__(self, most: int = 0) -> None:
        self._most = most
        self._lock = threading.RLock()
        self._tokens: list[int] = []  # all texts, each after a NO_TOKEN
        self._texts: list[_Text] = []
        self._places: dict[tuple[int, ...], list[int]] = {}
        self._held = 0

    def begin(self, id: int) -> None:
        """See ``Suffixes``, as for the other methods."""
        with self._lock:
            self._tokens.append(NO_TOKEN)
            self._texts.append(_Text(id, len(self._tokens), len(self._tokens)))

    def append(self, tokens: list[int]) -> None:
        with self._lock:
            for token in tokens:
                for context in self._contexts():
                    self._places.setdefault(context, []).append(len(self._tokens))
                self._tokens.append(token)
            self._texts[-1].end = len(self._tokens)
            self._held += len(tokens)
            while self._most and self._held > self._most and len(self._texts) > 1:
                self.remove([self._texts[0].id])

    def add(self, id: int, tokens: npt.NDArray[np.int32]) -> None:
        with self._lock:
            self.begin(id)
            self.append(tokens.tolist())

    def take_back(self, count: int) -> None:
        with self._lock:
            last = self._texts[-1]
            for _ in range(min(count, last.end - last.first)):
                self._tokens.pop()
                for context in self._contexts():
                    places = self._places[context]
                    places.pop()
                    if not places:  # the running text goes back with every draft and every other conversation
                        del self._places[context]
                self._held -= 1
            last.end = len(self._tokens)

    def remove(self, ids: list[int]) -> int:
        doomed = set(ids)
        with self._lock:
            removed = [text for text in self._texts if text.id in doomed]
            for text in removed:
                self._tokens[text.first : text.end] = [NO_TOKEN] * (text.end - text.first)
                self._held -= text.end - text.first
            self._texts = [text for text in self._texts if text.id not in doomed]
            if len(self._tokens) > 2 * (self._held + len(self._texts)):
                self._begin_anew()
        return len(removed)

    def _begin_anew(self) -> None:
        """Rebuild the index without the places of removed texts."""
        kept = [(text.id, self._tokens[text.first : text.end]) for text in self._texts]
        self._tokens, self._texts, self._places, self._held = [], [], {}, 0
        for number, tokens in kept:
            self.begin(number)
            self.append(tokens)

    def follow(self, context: list[int], grows: bool = False) -> Continuation:
        if not self._lock.acquire(blocking=False):
            return Continuation([], [])
        try:
            return self._vote(self._matches(context), grows)
        finally:
            self._lock.release()

    def follow_end(self, of: Suffixes, table: array[float]) -> Expected:
        assert isinstance(of, PlainSuffixes)
        with of._lock:
            last = of._texts[-1]
            context = of._tokens[max(last.first, last.end - LONGEST) : last.end]
        tokens, bins = self.follow(context, of is self)
        reach = list(itertools.accumulate((table[b] for b in bins), operator.mul))
        count = next((i for i, sure in enumerate(reach) if sure < LEAST_REACH), len(reach))
        return Expected(tokens[:count], bins[:count], reach[:count])

    def _matches(self, context: list[int]) -> list[_Match]:
        """The latest places that match at the highest order that has any."""
        found: list[_Match] = []
        for order in ORDERS:
            failures = 0
            places = self._places.get(tuple(context[-order:]), ()) if len(context) >= order else ()
            for place in reversed(places):
                same = self._same(context[-LONGEST:], place)
                if same >= order and self._tokens[place] != NO_TOKEN:
                    found.append(_Match(place, same))
                else:
                    failures += 1
                if len(found) == MATCHES or failures == FAILURES:
                    break
            if found:
                break
        return found

    def __len__(self) -> int:
        return self._held

    @property
    def nbytes(self) -> int:
        """An estimate, for Python objects."""
        return 500 * len(self._tokens)

    def _contexts(self) -> list[tuple[int, ...]]:
        """The contexts of the next position, within its text."""
        first = self._texts[-1].first
        return [tuple(self._tokens[-order:]) for order in ORDERS if len(self._tokens) - first >= order]

    def _same(self, context: Sequence[int], place: int) -> int:
        """The number of tokens before ``place`` that equal the last ones of ``context``."""
        same = 0
        while same < len(context) and self._tokens[place - 1 - same] == context[-1 - same]:
            same += 1
        return same

    def _vote(self, matches: list[_Match], grows: bool) -> Continuation:
        """The continuation, token by token: the token of most of the longest matches, or, in a tie, of the latest of
        these. Matches with another token are dropped."""
        found = Continuation([], [])
        while len(found.tokens) < AHEAD:
            said = [(match, self._token(match.position + len(found.tokens), grows, found.tokens)) for match in matches]
            said = [(match, token) for match, token in said if token != NO_TOKEN]
            if not said:
                break
            longest = max(match.length for match, _ in said)
            votes = [token for match, token in said if match.length == longest]
            best = max(votes, key=votes.count)  # in a tie the first, which is the latest
            matches = [match for match, token in said if token == best]
            agreement = agreement_bin(len(matches), len(said))
            found.bins.append(agreement * LENGTHS + length_bin(longest + len(found.tokens)))
            found.tokens.append(best)
        return found

    def _token(self, place: int, grows: bool, proposed: list[int]) -> int:
        beyond = place - len(self._tokens)
        if beyond < 0:
            return self._tokens[place]
        return proposed[beyond] if grows and beyond < len(proposed) else NO_TOKEN
