"""The proxy's side towards clients: uvicorn with httptools, whose parser is compiled.

h11, which our other servers use, takes a client of the proxy 0.5 ms more until the first token, and twice that behind a
pass of the model, which has emptied the processor's caches (docs/notes/2026-11-upstream.md). What h11 does and uvicorn
does not with httptools is done here: the head of a request has a limit, and a connection of HTTP/1.0, or one whose
client offers to change to another protocol, is handed over to h11.
"""

from __future__ import annotations

from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from adaptive.service.crowd import Bounded, Connection

# Most bytes of a request's first line and headers, as in h11.
MOST_HEAD = 64 << 10
# Headers that offer another protocol (RFC 9110, and RFC 7540 for HTTP/2). The offer is not taken up, so that the
# request is answered as if they were not there.
OFFERS = frozenset({b"upgrade", b"http2-settings"})


class Parsing(Bounded, HttpToolsProtocol):
    """Refuses a request with status 400 if its head does not end within some ``MOST_HEAD`` bytes."""

    def __init__(self, config: Any, server_state: Any, app_state: Any, _loop: Any = None) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._first: bytes | None = b""  # what has come of the connection's first line
        self._in_head, self._head = False, 0  # whether a head has begun; bytes of it behind the first piece

    def data_received(self, data: bytes) -> None:
        """See ``asyncio.Protocol``."""
        if self._first is not None:
            self._first += data
            line, ended, _ = self._first.partition(b"\n")
            if not ended and len(self._first) <= MOST_HEAD:
                return
            data, self._first = self._first, None
            if line.rstrip().endswith(b"HTTP/1.0"):  # its client knows no chunks, which uvicorn would send
                self._hand_over(data)
                return
        self._unset_keepalive_if_required()
        inside = self._in_head
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            self._decline(data[offer.args[0] :])
            return
        except httptools.HttpParserError:
            self._refuse()
            return
        self._head = self._head + len(data) if inside and self._in_head else 0
        if self._head > MOST_HEAD and not self.transport.is_closing():
            self._refuse()

    def on_message_begin(self) -> None:
        """A request begins."""
        self._in_head = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Its head has ended."""
        self._in_head = False
        super().on_headers_complete()

    def _should_upgrade(self) -> bool:
        """Whether uvicorn leaves the parsed request alone, if it offers another protocol."""
        return True

    def _refuse(self) -> None:
        self.send_400_response("Invalid HTTP request received.")

    def _decline(self, rest: bytes) -> None:
        """Answer the request that offers another protocol as if it did not. ``rest`` is what came behind its head: its
        body, which httptools would take for the other protocol."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.keep_alive = False  # the request before is answered, and this one has to be sent again
            return
        head = [self.parser.get_method(), b" ", self.url, b" HTTP/", self.scope["http_version"].encode(), b"\r\n"]
        for name, value in self.headers:
            if name not in OFFERS and (name != b"connection" or b"close" in value.lower()):
                head += [name, b": ", value, b"\r\n"]
        self._hand_over(b"".join([*head, b"\r\n", rest]))

    def _hand_over(self, data: bytes) -> None:
        """Have h11 read the connection, beginning with ``data``."""
        self._unset_keepalive_if_required()
        self.connections.discard(self)
        other = Connection(self.config, self.server_state, self.app_state, self.loop)
        other.connection_made(self.transport)
        self.transport.set_protocol(other)
        other.data_received(data)
