"""Reads a tool call while the model writes it: its name, and then its arguments piece by piece.

This needs a format that writes the arguments as a JSON object after the name (``Format.head``). The arguments are
passed on unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from adaptive.service.formats import Call

# Characters of a region after which the search for the beginning of a call ends. Names are shorter.
LONGEST_HEAD = 512


@dataclass(frozen=True)
class CallBegins:
    """A ``call`` has begun; its arguments follow."""

    call: Call


@dataclass(frozen=True)
class Arguments:
    """A piece of the arguments of the call that has begun."""

    text: str


@dataclass(frozen=True)
class CallBroken:
    """The call that has begun has ended and is none: its arguments were cut, or are no JSON object."""


class PartialCall:
    """Reads the region of a call piece by piece. ``begun`` is the call once its name is known, else None."""

    def __init__(self, head: re.Pattern[str], may: Callable[[str], bool]) -> None:
        """``head`` matches the beginning of a call, with its name and id. ``may``: whether a name is that of a tool."""
        self.begun: Call | None = None
        self._head, self._may = head, may
        self._text = ""  # the region so far, until the call has begun
        self._depth, self._string, self._escaped, self._ended = 0, False, False, False

    def feed(self, text: str) -> Iterator[CallBegins | Arguments]:
        """The parts that are certain after ``text``."""
        if self.begun is None:
            if len(self._text) > LONGEST_HEAD:
                return
            self._text += text
            found = self._head.match(self._text)
            name = None if found is None else next((group for group in found.groups() if group), None)
            if found is None or name is None or not self._may(name):
                return
            named = found.groupdict().get("id")
            self.begun = Call(name, "", named) if named else Call(name, "")
            yield CallBegins(self.begun)
            text = self._text[found.end() :]
        if said := self._of_object(text):
            yield Arguments(said)

    def _of_object(self, text: str) -> str:
        """The part of ``text`` that belongs to the arguments' object, which ends at the brace that closes its first."""
        if self._ended:
            return ""
        for place, character in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif self._string:
                self._escaped, self._string = character == "\\", character != '"'
            elif character == '"':
                self._string = True
            else:
                self._depth += (character in "{[") - (character in "}]")
                if not self._depth:
                    self._ended = True
                    return text[: place + 1]
        return text
