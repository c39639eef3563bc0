"""Searches a text for several stop strings at once, one character after the other (Aho and Corasick, 1975).

The cost per character does not depend on the number of strings. Libraries for this do not report how much of the end
of a text may still become a stop string, which a stream has to hold back; here it is the depth of a state.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import lru_cache


class StopStrings:
    """The automaton of ``strings``. A state is a number, 0 before any text.

    ``depth[state]`` is the length of the longest suffix of the text that is the beginning of a string. ``ends[state]``
    is the length of the longest string that ends here, 0 if none does.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self.depth, self.ends = [0], [0]
        self._next: list[dict[str, int]] = [{}]
        for string in strings:
            self._add(string)
        self._shorter = [0] * len(self._next)  # the state of the longest proper suffix that begins a string
        waiting = deque([0])
        while waiting:
            state = waiting.popleft()
            for character, longer in self._next[state].items():
                waiting.append(longer)
                shorter = self.step(self._shorter[state], character) if state else 0
                self._shorter[longer] = shorter
                self.ends[longer] = self.ends[longer] or self.ends[shorter]

    def step(self, state: int, character: str) -> int:
        """The state after one more character."""
        while (found := self._next[state].get(character)) is None:
            if state == 0:
                return 0
            state = self._shorter[state]
        return found

    def _add(self, string: str) -> None:
        state = 0
        for character in string:
            if character not in self._next[state]:
                self._next[state][character] = len(self._next)
                self._next.append({})
                self.depth.append(self.depth[state] + 1)
                self.ends.append(0)
            state = self._next[state][character]
        self.ends[state] = len(string)


# The answers to one request, and to one client, have the same strings.
@lru_cache(maxsize=8)
def stop_strings(strings: tuple[str, ...]) -> StopStrings:
    """The automaton of ``strings``; several streams may share it."""
    return StopStrings(strings)
