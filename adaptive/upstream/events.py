"""Reads an answer as it passes through, by events or as one object, and removes the log-probabilities that were
added."""

from __future__ import annotations

from adaptive.upstream.asking import Asked
from adaptive.upstream.kinds import Kind
from adaptive.upstream.pieces import Cutter
from adaptive.upstream.reports import Collected
from adaptive.upstream.surgery import Cut, cut

ENDS = (b"\n\n", b"\r\n\r\n")
# Longest event in bytes that is read. A longer one passes unread; no server needs that much for a token.
LONGEST_EVENT = 8 << 20
# Bytes of an answer in one object that are held and read. A longer one passes without being held or logged. Too low:
# long answers, some 3 kB a token, are not logged. Too high: many such answers at a time need much memory.
MOST_HELD = 32 << 20


class Passage:
    """One answer. In: the server's bytes. Out: the bytes for the client, and the answer as data in ``collected``."""

    def __init__(self, asked: Asked, kind: Kind, streamed: bool) -> None:
        """``streamed``: whether the server's answer is a stream of events."""
        self.collected = Collected()
        self.ended = False  # the answer is complete: the last event or the whole object was read
        self._added = asked.added
        self._absent = kind.absent and asked.chat
        self._quiet = kind.quiet_chat if asked.chat else kind.quiet_text
        self._streamed = streamed
        self._held = b""  # of a stream: an incomplete event
        self._pieces: list[bytes] = []  # of an answer in one object
        self.held = 0  # bytes in them
        self._cutter: Cutter | None = None  # of an object that is too long to be held

    @property
    def long(self) -> bool:
        """Whether the answer is one object that is too long to be held. It is passed on from then on."""
        return self.collected.long

    def too_long(self, data: bytes) -> bool:
        """Whether ``feed(data)`` makes it ``long``, and takes seconds."""
        return not self._streamed and not self.long and self.held + len(data) > MOST_HELD

    def feed(self, data: bytes) -> bytes:
        """The bytes that can be passed on after ``data``."""
        if not self._streamed:
            return self._object(data)
        self._held += data
        out = b""
        while (end := _end(self._held)) is not None:
            event, self._held = self._held[:end], self._held[end:]
            out += self._event(event)
        if len(self._held) > LONGEST_EVENT:
            out, self._held = out + self._held, b""
        return out

    def _object(self, data: bytes) -> bytes:
        """The same for an answer in one object, which is held until its end."""
        if self.too_long(data):
            self.collected.long = True
            self._cutter = Cutter(self._absent) if self._added else None
            data, self._pieces, self.held = b"".join((*self._pieces, data)), [], 0
        if self.long:
            return data if self._cutter is None else self._cutter.feed(data)
        self._pieces.append(data)
        self.held += len(data)
        return b""

    def rest(self, whole: bool) -> bytes:
        """The remaining bytes at the end. ``whole``: the answer was not cut. An incomplete event is dropped if it
        contains log-probabilities that the client did not ask for; clients ignore incomplete events anyway."""
        if self._streamed:
            held, self._held = self._held, b""
            return b"" if self._added and b'"logprobs"' in held else held
        if self.long:
            self.ended = whole
            return b"" if self._cutter is None else self._cutter.rest()
        if not whole:
            return b"" if self._added else b"".join(self._pieces)
        return self.end(self.read())

    def read(self) -> Cut | None:
        """A whole answer in one object, read; None if it is not understood. It takes a second for some MB, and changes
        nothing, so that another thread may do it."""
        return self._cut(b"".join(self._pieces))

    def end(self, found: Cut | None) -> bytes:
        """The bytes of a whole answer in one object, of which ``found`` was read."""
        self.ended = found is not None
        if found is not None:
            self.collected.add(found)
        return b"".join(self._pieces) if found is None or not self._added else found.text.encode()

    def _event(self, event: bytes) -> bytes:
        line = event.strip()
        if not line.startswith(b"data:") or b"\n" in line:
            return event
        said = line[5:].strip()
        if said == b"[DONE]":
            self.ended = True
            return event
        found = self._read(said)
        if found is None or not (self._added and found.found):
            return event
        if self._quiet and _silent(found):
            return b""
        begins = event.index(said)
        return event[:begins] + found.text.encode() + event[begins + len(said) :]

    def _read(self, said: bytes) -> Cut | None:
        found = self._cut(said)
        if found is not None:
            self.collected.add(found)
        return found

    def _cut(self, said: bytes) -> Cut | None:
        try:
            return cut(said.decode(), self._absent)
        except (ValueError, RecursionError):  # not JSON, or nested too deeply
            return None


def _end(held: bytes) -> int | None:
    """The end of the first complete event; None if there is none."""
    places = [(held.find(end) + len(end)) for end in ENDS if end in held]
    return min(places, default=None)


def _silent(found: Cut) -> bool:
    """Whether the event contains nothing but log-probabilities."""
    return all(
        choice.get("finish_reason") is None and not choice.get("text") and not choice.get("delta")
        for choice in found.whole["choices"]
    )
