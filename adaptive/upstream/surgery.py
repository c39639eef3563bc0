"""Takes log-probabilities out of an answer again, and leaves every other byte as the server wrote it.

An answer that is read and written anew has other bytes (spaces, escapes, the digits of a number). So its JSON is gone
through from value to value, and only the stretch of text that was asked for is cut out.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

_decoder = json.JSONDecoder()
_WHITE = " \t\n\r"


@dataclass(frozen=True)
class Members:
    """The members of a JSON object: their ``values``, and by their names where they stand in the text.

    ``places`` are (begin of the name, begin of the value, end of the value); ``before`` is where the comma, or the
    brace, before a member stands.
    """

    values: dict[str, Any]
    places: dict[str, tuple[int, int, int]]
    before: dict[str, int]
    end: int


@dataclass(frozen=True)
class Cut:
    """An answer read, and its ``text`` without log-probabilities. ``whole`` are its values as they came, ``reported``
    the text of the log-probabilities of each of its choices, None where it has none."""

    text: str
    whole: dict[str, Any]
    reported: tuple[str | None, ...]

    @property
    def found(self) -> bool:
        """Whether there were any."""
        return any(said is not None for said in self.reported)


def cut(text: str, absent: bool) -> Cut:
    """``text``, one JSON object of an answer, without the log-probabilities of its choices.

    They become null, or with ``absent`` their key goes, too. Raises ValueError for what is no JSON object.
    """
    choices: list[Members] = []
    top = _members(text, _skip(text, 0), choices)
    if _skip(text, top.end) != len(text):
        raise ValueError("something stands behind the object")
    pieces, copied = [], 0
    reported: list[str | None] = []
    for choice in choices:
        place = choice.places.get("logprobs")
        if place is None or choice.values["logprobs"] is None:
            reported.append(None)
            continue
        _, begins, ends = place
        reported.append(text[begins:ends])
        if not absent:
            pieces += [text[copied:begins], "null"]
            copied = ends
            continue
        before = choice.before["logprobs"]
        if text[before] == "{":  # the first member: the comma behind it goes with it
            behind = _skip(text, ends)
            pieces.append(text[copied : before + 1])
            copied = behind + 1 if text[behind] == "," else ends
        else:
            pieces.append(text[copied:before])
            copied = ends
    return Cut("".join((*pieces, text[copied:])), top.values, tuple(reported))


def _choices(text: str, at: int, found: list[Members]) -> tuple[list[Any], int]:
    """The values of the array that begins at ``at``, and where it ends; its objects with their places in ``found``."""
    values: list[Any] = []
    at = _skip(text, at + 1)
    while text[at] != "]":
        if text[at] == "{":
            choice = _members(text, at)
            found.append(choice)
            value, at = choice.values, choice.end
        else:
            value, at = _decoder.raw_decode(text, at)
        values.append(value)
        at = _skip(text, at)
        if text[at] == ",":
            at = _skip(text, at + 1)
    return values, at + 1


def _members(text: str, at: int, choices: list[Members] | None = None) -> Members:
    """The members of the object that begins at ``at``; what its array ``choices`` holds is added to the list of that
    name, where there is one. Raises ValueError for what is none."""
    try:
        return _read(text, at, choices)
    except (IndexError, StopIteration) as error:
        raise ValueError("the object does not end") from error


def _read(text: str, at: int, choices: list[Members] | None) -> Members:
    if text[at] != "{":
        raise ValueError("no object")
    values: dict[str, Any] = {}
    places: dict[str, tuple[int, int, int]] = {}
    before: dict[str, int] = {}
    mark, at = at, _skip(text, at + 1)
    while text[at] != "}":
        if text[at] != '"':
            raise ValueError("no name")
        name, behind = _decoder.raw_decode(text, at)
        colon = _skip(text, behind)
        if text[colon] != ":":
            raise ValueError("no value")
        begins = _skip(text, colon + 1)
        if name == "choices" and choices is not None:
            choices.clear()  # a name that stands twice counts as it stood last
        if name == "choices" and choices is not None and text[begins] == "[":
            value, ends = _choices(text, begins, choices)
        else:
            value, ends = _decoder.raw_decode(text, begins)
        values[name], places[name], before[name] = value, (at, begins, ends), mark
        at = _skip(text, ends)
        if text[at] == ",":
            mark, at = at, _skip(text, at + 1)
        elif text[at] != "}":
            raise ValueError("no end")
    return Members(values, places, before, at + 1)


def _skip(text: str, at: int) -> int:
    while at < len(text) and text[at] in _WHITE:
        at += 1
    return at
