"""Removes log-probabilities from an answer that is too long to be held: from each piece as it comes.

The bytes that are left are those of ``surgery.cut``, which is faster and reads the answer, too, but needs all of it.
"""

from __future__ import annotations

import re

# What decides about the structure of JSON, one at a time, and what is between. No byte of a character beyond ASCII is
# like one of these.
TOKEN = re.compile(rb'[^"\\{}\[\],:]+|.', re.DOTALL)
# What is passed over at once within a value that is removed: all but brackets, and texts with a backslash.
DULL = re.compile(rb'[^{}\[\]"]*(?:"[^"\\]*"[^{}\[\]"]*)*')
# Open objects and arrays where a member of a choice is: the answer, its choices, the choice.
IN_CHOICE = 3


class Cutter:
    """One answer, an object. In: its bytes in pieces. Out: the bytes without the log-probabilities of its choices,
    where these are objects or arrays, as all servers write them."""

    def __init__(self, absent: bool) -> None:
        """``absent``: the member goes as a whole, else its value becomes null."""
        self._absent = absent
        self._out = bytearray()
        self._open = bytearray()  # the brackets that are open
        self._text = self._escaped = False  # within a text; behind its backslash
        self._name = bytearray()  # the last text that may be the name of a member, in quotes
        self._choices = False  # within the member "choices" of the answer
        self._member: bytearray | None = None  # of a choice, up to its value, from the comma or the brace before it
        self._valued = False  # the colon behind its name has come
        self._cutting = False  # within a value that is removed
        self._first = False  # the member that was removed had no comma before it, so that the one behind it goes

    def feed(self, data: bytes) -> bytes:
        """The bytes that can be passed on after ``data``."""
        at = 0
        while at < len(data):
            if self._cutting and not self._text:
                at = _end(DULL, data, at)
            begins, at = at, _end(TOKEN, data, at)
            self._take(data[begins:at])
        out, self._out = bytes(self._out), bytearray()
        return out

    def rest(self) -> bytes:
        """The remaining bytes at the end."""
        held, self._member = self._member, None
        return bytes(held or b"")

    def _take(self, token: bytes) -> None:
        if self._text:
            self._within(token)
        elif token in (b"}", b"]"):
            self._close(token)
        else:
            self._structure(token)

    def _within(self, token: bytes) -> None:
        """A part of a text."""
        if self._escaped:
            self._escaped = False
        elif token == b"\\":
            self._escaped = True
        elif token == b'"':
            self._text = False
        if len(self._open) in (1, IN_CHOICE) and len(self._name) < 16:
            self._name += token
        self._write(token)

    def _structure(self, token: bytes) -> None:
        if self._valued and not token.isspace():
            self._decide(token)
        if token == b'"':
            self._text, self._name = True, bytearray(token)
        elif token in (b"{", b"["):
            self._open += token
        elif token == b":":
            self._named()
        elif token == b"," and self._in_choice and not self._cutting:
            self._member, first, self._first = bytearray(), self._first, False
            if first:
                return
        self._write(token)
        if token == b"{" and self._in_choice and not self._cutting:
            self._member = bytearray()

    def _named(self) -> None:
        if len(self._open) == 1:
            self._choices = self._name == b'"choices"'
        elif self._member is not None and self._in_choice:
            self._valued = True

    def _decide(self, token: bytes) -> None:
        """The value of a choice's member begins with ``token``: remove it, or pass the member on."""
        member, self._member, self._valued = self._member or bytearray(), None, False
        if self._name != b'"logprobs"' or token not in (b"{", b"["):
            self._out += member
            return
        self._cutting = True
        self._first = self._absent and not member.startswith(b",")
        if not self._absent:
            self._out += member + b"null"

    def _close(self, token: bytes) -> None:
        """The end of an object or array."""
        if self._in_choice and not self._cutting:
            self._out += self._member or b""  # white space
            self._member, self._first = None, False
        del self._open[-1:]
        self._write(token)
        if self._cutting and len(self._open) == IN_CHOICE:
            self._cutting = False
            self._member = bytearray() if self._first else None

    def _write(self, token: bytes) -> None:
        if self._member is not None:
            self._member += token
        elif not self._cutting:
            self._out += token

    @property
    def _in_choice(self) -> bool:
        return self._choices and self._open == b"{[{"


def _end(what: re.Pattern[bytes], data: bytes, at: int) -> int:
    found = what.match(data, at)
    return at if found is None else found.end()
