"""An answer as a person's text, what the model thought, and calls of tools, while it streams.

In: the text of an answer as it comes. Out: its parts. What is no call after all stays text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from adaptive.encoding import template_text
from adaptive.service.formats import Call, Format, Region, Types, format_of, types_of
from adaptive.service.partial import Arguments, CallBegins, PartialCall

# Tokens at the end of a prompt in which a mark that opens the model's thinking is looked for.
TAIL = 12


@dataclass(frozen=True)
class Thought:
    """What the model thought before it answered."""

    text: str


Part = str | Thought | Call | CallBegins | Arguments


@dataclass(frozen=True)
class Reading:
    """How the answers to one request are read: in ``format``, by calls of ``tools`` where any are offered, at most
    ``most`` of them (None: any number). ``begun`` is the region in which an answer begins, where the prompt opened one.
    """

    format: Format = field(default_factory=Format)
    tools: tuple[dict[str, Any], ...] = ()
    begun: Region | None = None
    most: int | None = None

    @property
    def regions(self) -> tuple[Region, ...]:
        """The regions that are looked for: without tools there are no calls."""
        wanted = self.format.regions
        if self.tools or not self.format.loose:
            return wanted
        return tuple(region for region in wanted if region.kind != "call")

    def reader(self, partial: bool = False) -> AnswerReader:
        """For one answer; with ``partial`` calls are told as they come, where they are written so that they can be."""
        return AnswerReader(self, partial)

    def marks(self, tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
        """Special tokens that have to be seen in the text, which leaves out such tokens otherwise."""
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
    """How answers to a prompt with ``tools`` are read."""
    known = format_of(template_text(tokenizer))
    end = str(tokenizer.decode(list(prompt[-TAIL:]))).rstrip() if prompt else ""
    begun = next((r for r in known.regions if r.kind == "thought" and end.endswith(r.opens)), None)
    return Reading(known, tuple(tools or ()), begun, most)


class AnswerReader:
    """Reads one answer. Text that may be the beginning of a mark, and white space before one, are held back until
    that is decided."""

    def __init__(self, reading: Reading, partial: bool = False) -> None:
        self._head = reading.format.head if partial else None
        self._partial: PartialCall | None = None  # the call that is open
        self._format = reading.format
        self._regions = reading.regions
        self._types: Types = types_of(reading.tools)
        self._left = reading.most
        self._region = reading.begun
        self._text = ""  # not read yet
        self._body: list[str] = []  # of the call that is open
        self._before = ""  # what stood outside of regions and is not for a person
        self._space = ""  # held back: white space that is dropped where a region follows
        self._trim = reading.begun is not None  # white space at the beginning is dropped
        self._said = False

    def feed(self, text: str) -> list[Part]:
        """What has become certain with ``text``."""
        if not self._regions:
            return [text] if text else []
        self._text += text
        return list(self._read(last=False))

    def finish(self) -> list[Part]:
        """What was held back when no more text comes."""
        said = list(self._read(last=True))
        rest, self._space = self._space, ""
        if rest and not self._trim and self._region is None:
            said.append(rest)
        if not self._said and self._before.strip():  # a model that left out every mark
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
                yield from self._show(outside, thought=region is not None and region.kind == "thought")
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

    def _begun(self, parts: Iterator[CallBegins | Arguments]) -> Iterator[Part]:
        """Tell a call as it comes; white space before it is dropped."""
        for part in parts:
            self._space, self._trim, self._said = "", True, True
            yield part

    def _openings(self) -> tuple[str, ...]:
        """The marks that may open a region now."""
        rest = self._text.lstrip()

        def may(region: Region) -> bool:
            begins = rest.startswith(region.opens) or region.opens.startswith(rest)
            return not region.first or (begins and not self._said)

        return tuple(region.opens for region in self._regions if may(region))

    def _show(self, text: str, thought: bool) -> Iterator[Part]:
        """Show text, but for white space at its beginning that is to be dropped and at its end, which may be."""
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
        if mark in {r.opens for r in self._regions}:
            self._text = mark + self._text  # it opens the next one
        before, self._before = self._before, ""
        if region.kind != "call":
            self._space, self._trim = "", True
            return
        body, self._body = "".join(self._body), []
        begun, self._partial = None if self._partial is None else self._partial.begun, None
        try:
            assert self._format.read is not None
            found = self._format.read(before, _with_body(region) + body, self._types)
        except (ValueError, KeyError, TypeError, RecursionError):  # between the marks stands something else
            if begun is not None:  # what has been told of it is all that there is
                self._count()
                return
            raw = self._space + region.opens + body + ("" if self._text.startswith(mark) and mark else mark)
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
        """One more call has been told."""
        self._left = None if self._left is None else self._left - 1


def _with_body(region: Region) -> str:
    """The mark that opens a region where it is part of what stands in it, such as that of bare JSON."""
    return region.opens if region.opens.startswith("{") else ""


def _earliest(text: str, marks: Sequence[str], last: bool) -> tuple[int, str]:
    """Where the first mark begins in ``text``, and which: the longest of those that begin there.

    Without one, where a mark may begin of which the rest is still to come, unless this is the ``last`` of the text,
    and no mark.
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
