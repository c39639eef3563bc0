"""Reads an answer as it passes through, by events or as one object, and removes the log-probabilities that were
added."""

from __future__ import annotations

from adaptive.upstream.asking import Asked
from adaptive.upstream.kinds import Kind
from adaptive.upstream.reports import Collected
from adaptive.upstream.surgery import Cut, cut

ENDS = (b"\n\n", b"\r\n\r\n")
# Longest event in bytes that is read. A longer one passes unread; no server needs that much for a token.
LONGEST_EVENT = 8 << 20


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
        self._held = b""

    def feed(self, data: bytes) -> bytes:
        """The bytes that can be passed on after ``data``."""
        self._held += data
        if not self._streamed:
            return b""
        out = b""
        while (end := _end(self._held)) is not None:
            event, self._held = self._held[:end], self._held[end:]
            out += self._event(event)
        if len(self._held) > LONGEST_EVENT:
            out, self._held = out + self._held, b""
        return out

    def rest(self, whole: bool) -> bytes:
        """The remaining bytes at the end. ``whole``: the answer was not cut. An incomplete event is dropped if it
        contains log-probabilities that the client did not ask for; clients ignore incomplete events anyway."""
        held, self._held = self._held, b""
        if self._streamed:
            return b"" if self._added and b'"logprobs"' in held else held
        if not whole:
            return held if not self._added else b""
        found = self._read(held)
        self.ended = found is not None
        return held if found is None or not self._added else found.text.encode()

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
        try:
            found = cut(said.decode(), self._absent)
        except (ValueError, RecursionError):  # not JSON, or nested too deeply
            return None
        self.collected.add(found)
        return found


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
