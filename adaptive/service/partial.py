"""A call of a tool while it is written: its name, and then its arguments as they come.

A call can be told before it is whole where its arguments are written as the JSON object that they are, behind its name
(``Format.head``). They are passed on as they stand.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from adaptive.service.formats import Call

# Characters of a region in which the beginning of a call is looked for. A name is shorter.
LONGEST_HEAD = 512


@dataclass(frozen=True)
class CallBegins:
    """A ``call`` whose arguments are still to come."""

    call: Call


@dataclass(frozen=True)
class Arguments:
    """More of the arguments of the call that has begun."""

    text: str


class PartialCall:
    """Reads the region of a call as it comes. ``begun`` is the call once its name is known."""

    def __init__(self, head: re.Pattern[str], may: Callable[[str], bool]) -> None:
        """Its beginning looks like ``head``: the name, and the id if it has one. It ``may`` be one of that name."""
        self.begun: Call | None = None
        self._head, self._may = head, may
        self._text = ""  # as long as it has not begun
        self._depth, self._string, self._escaped, self._ended = 0, False, False, False

    def feed(self, text: str) -> Iterator[CallBegins | Arguments]:
        """What has become certain with ``text``."""
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
        """What of ``text`` belongs to the object, which ends with the brace that closes its first one."""
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
