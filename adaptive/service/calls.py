"""Splits an answer into visible text, thinking and tool calls, while it streams.

In: the text of an answer, piece by piece. Out: its parts. Text between the marks of a call that is no valid call stays
text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from adaptive.encoding import template_text
from adaptive.service.formats import Call, Format, Region, Types, format_of, types_of
from adaptive.service.partial import Arguments, CallBegins, CallBroken, PartialCall

# Tokens at the end of a prompt that are searched for a mark that opens the model's thinking.
TAIL = 12


@dataclass(frozen=True)
class Thought:
    """A piece of the model's thinking."""

    text: str


Part = str | Thought | Call | CallBegins | Arguments | CallBroken


@dataclass(frozen=True)
class Reading:
    """How to read the answers to one request: the model's ``format``, the offered ``tools``, and the maximum number
    ``most`` of calls to return (None: no limit). ``begun`` is the region that the prompt has opened, in which an answer
    begins.
    """

    format: Format = field(default_factory=Format)
    tools: tuple[dict[str, Any], ...] = ()
    begun: Region | None = None
    most: int | None = None

    @property
    def regions(self) -> tuple[Region, ...]:
        """The regions to detect. Without tools, calls are left out, except in formats that are not ``loose``."""
        wanted = self.format.regions
        if self.tools or not self.format.loose:
            return wanted
        return tuple(region for region in wanted if region.kind != "call")

    @property
    def thought(self) -> Region | None:
        """The region of the model's thinking; None if it does not think."""
        return self.begun or next((region for region in self.format.regions if region.kind == "thought"), None)

    def without_thinking(self) -> Reading:
        """The same for answers that a grammar keeps to calls and visible text."""
        regions = tuple(region for region in self.format.regions if region.kind != "thought")
        return replace(self, format=replace(self.format, regions=regions), begun=None)

    def shown(self, text: str) -> str:
        """The visible part of a whole answer."""
        reader = self.reader()
        return "".join(part for part in (*reader.feed(text), *reader.finish()) if isinstance(part, str))

    def reader(self, partial: bool = False) -> AnswerReader:
        """A reader for one answer. ``partial``: return a call while it is being written, if the format allows that."""
        return AnswerReader(self, partial)

    def marks(self, tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
        """Special tokens that must appear in the decoded text, by id. Decoding omits all other special tokens."""
        used = "".join(text for region in self.regions for text in (region.opens, *region.closes))
        found = {}
        for mark in self.format.marks:
            if self.tools or mark in used or not self.format.loose:
                ids = tokenizer.encode(mark, add_special_tokens=False)
                if len(ids) == 1 and mark not in str(tokenizer.decode(ids, skip_special_tokens=True)):
                    found[int(ids[0])] = mark
        return found


def reading_of(
    tokenizer: PreTrainedTokenizerBase,
    tools: Sequence[dict[str, Any]] | None,
    prompt: Sequence[int] = (),
    most: int | None = None,
) -> Reading:
    """The ``Reading`` for answers to ``prompt``, by the chat template and the offered ``tools``.

    ``most`` is the client's maximum number of calls. It is one if the template accepts only one per message.
    """
    known = format_of(template_text(tokenizer))
    most = 1 if known.single else most
    end = str(tokenizer.decode(list(prompt[-TAIL:]))).rstrip() if prompt else ""
    begun = next((r for r in known.regions if r.kind == "thought" and end.endswith(r.opens)), None)
    return Reading(known, tuple(tools or ()), begun, most)


def thinking_marks(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    """The special tokens that mark the thinking in an answer without calls, by id. Without them the text of such an
    answer does not tell its thinking from the rest."""
    return reading_of(tokenizer, None).marks(tokenizer)


class AnswerReader:
    """Reads one answer. Holds back text that may be the beginning of a mark, and trailing white space, until the
    following text decides."""

    def __init__(self, reading: Reading, partial: bool = False) -> None:
        self._head = reading.format.head if partial else None
        self._partial: PartialCall | None = None  # the call that is open
        self._format = reading.format
        self._regions = reading.regions
        self._reading = reading
        self._types: Types = types_of(reading.tools)
        self._left = reading.most
        self._region = reading.begun
        self._text = ""  # not read yet
        self._body: list[str] = []  # the open call's text
        self._thoughts: list[str] = []  # the text of the open thinking, if there may be calls
        self._before = ""  # text outside regions that is not shown (format not loose)
        self._space = ""  # held back: trailing white space, dropped if a region follows
        self._trim = reading.begun is not None  # drop the next leading white space
        self._said = False

    def feed(self, text: str) -> list[Part]:
        """The parts that are certain after ``text``."""
        if not self._regions:
            return [text] if text else []
        self._text += text
        return list(self._read(last=False))

    def finish(self) -> list[Part]:
        """The parts that were held back, at the end of the answer."""
        said = list(self._read(last=True))
        said += self._calls_in_thinking()
        rest, self._space = self._space, ""
        if rest and not self._trim and self._region is None:
            said.append(rest)
        if not self._said and self._before.strip():  # the model wrote no marks at all: show its text
            said.append(self._before)
        return said

    def _read(self, last: bool) -> Iterator[Part]:
        while True:
            region = self._region
            marks = self._openings() if region is None else region.closes
            place, mark = _earliest(self._text, marks, last)
            outside, self._text = self._text[:place], self._text[place + len(mark) :]
            if region is not None and region.kind == "call":
                self._body.append(outside)
                if self._partial is not None:
                    yield from self._begun(self._partial.feed(outside))
            elif region is None and not self._format.loose:
                self._before += outside
            elif outside:
                thought = region is not None and region.kind == "thought"
                if thought and self._types:
                    self._thoughts.append(outside)
                yield from self._show(outside, thought)
            if region is None and mark:
                self._region = next(r for r in self._regions if r.opens == mark)
                if self._region.kind != "call":
                    self._space, self._trim = "", True
                elif self._head is not None and self._left != 0:
                    self._partial = PartialCall(self._head, self._types.__contains__)
                    yield from self._begun(self._partial.feed(_with_body(self._region)))
            elif region is not None and (mark or (last and region.kind == "call")):
                yield from self._close(region, mark)
            else:
                return

    def _calls_in_thinking(self) -> list[Part]:
        """The calls with which an answer ends that has not ended its thinking, as Qwen 3.5 sometimes calls a tool. What
        looks like one in thinking that goes on is none: models try calls out there."""
        if self._region is None or self._region.kind != "thought":
            return []
        text, reading = "".join(self._thoughts), self._reading.without_thinking()
        openings = [region.opens for region in reading.regions if region.kind == "call" and not region.bare]
        for found in re.finditer("|".join(map(re.escape, openings)) or "(?!)", text):
            reader = reading.reader()
            parts = [*reader.feed(text[found.start() :]), *reader.finish()]
            if parts and all(isinstance(part, Call) and part.name in self._types for part in parts):
                return parts
        return []

    def _begun(self, parts: Iterator[CallBegins | Arguments]) -> Iterator[Part]:
        """Pass on the parts of a call that is being written; drop white space before it."""
        for part in parts:
            self._space, self._trim, self._said = "", True, True
            yield part

    def _openings(self) -> tuple[str, ...]:
        """The marks that can open a region at this point."""
        rest = self._text.lstrip()

        def may(region: Region) -> bool:
            begins = rest.startswith(region.opens) or region.opens.startswith(rest)
            return not region.first or (begins and not self._said)

        return tuple(region.opens for region in self._regions if may(region))

    def _show(self, text: str, thought: bool) -> Iterator[Part]:
        """The text to show: without leading white space if that is dropped here; trailing white space is held back."""
        if self._trim:
            text = text.lstrip()
        if not text:
            return
        self._trim = False
        text = self._space + text
        shown = text.rstrip()
        self._space = text[len(shown) :]
        if shown:
            self._said = True
            yield Thought(shown) if thought else shown

    def _close(self, region: Region, mark: str) -> Iterator[Part]:
        self._region = None
        if reopens := mark in {r.opens for r in self._regions}:
            self._text = mark + self._text
        before, self._before = self._before, ""
        if region.kind != "call":
            self._space, self._trim = "", True
            self._thoughts = []
            return
        body, self._body = "".join(self._body), []
        begun, self._partial = None if self._partial is None else self._partial.begun, None
        try:
            assert self._format.read is not None
            found = self._format.read(before, _with_body(region) + body, self._types, bool(mark))
            if region.bare and any(isinstance(part, Call) and part.name not in self._types for part in found):
                raise ValueError("no call of an offered tool")
        except (ValueError, KeyError, TypeError, RecursionError):  # the text between the marks is no call
            if begun is not None:  # parts were already returned, and cannot be taken back
                self._count()
                yield CallBroken()
                return
            raw = self._space + region.opens + body + ("" if reopens else mark)
            self._space, self._trim, self._said = "", False, True
            yield raw
            return
        self._space, self._trim, self._said = "", True, True
        for number, part in enumerate(found):
            if isinstance(part, str):
                yield from self._show(part, thought=False)
            elif self._left != 0:
                self._count()
                if begun is None or number:
                    yield part

    def _count(self) -> None:
        """Count a returned call against the maximum."""
        self._left = None if self._left is None else self._left - 1


def _with_body(region: Region) -> str:
    """The opening mark if it is part of the region's content, as for bare JSON, else empty."""
    return region.opens if region.bare else ""


def _earliest(text: str, marks: Sequence[str], last: bool) -> tuple[int, str]:
    """The place of the first mark in ``text``, and the mark; of several at one place the longest.

    Without a complete mark: the place where an incomplete one begins, unless this is the ``last`` of the text, else the
    end of the text; and an empty mark.
    """
    place, mark = len(text), ""
    for candidate in marks:
        found = text.find(candidate)
        if found >= 0 and (found < place or (found == place and len(candidate) > len(mark))):
            place, mark = found, candidate
    if last or not marks:
        return place, mark
    longest = max(map(len, marks))
    for start in range(max(0, len(text) - longest + 1), min(place + 1, len(text))):
        rest = text[start:]
        if any(len(m) > len(rest) and m.startswith(rest) for m in marks):
            return start, ""
    return place, mark


def arguments_of(call: Call) -> dict[str, Any]:
    """The arguments of a call as an object."""
    found: dict[str, Any] = json.loads(call.arguments)
    return found
