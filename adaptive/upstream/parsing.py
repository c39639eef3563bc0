"""The proxy's side towards clients: uvicorn with httptools, whose parser is compiled.

h11, which our other servers use, takes a client of the proxy 0.5 ms more until the first token, and twice that behind a
pass of the model, which has emptied the processor's caches (docs/notes/2026-11-upstream.md). In return it limits the
head of a request, which is done here.
"""

from __future__ import annotations

from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

# Most bytes of a request's first line and headers, as in h11.
MOST_HEAD = 64 << 10


class Parsing(HttpToolsProtocol):
    """Refuses a request with status 400 if its head does not end within some ``MOST_HEAD`` bytes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_head, self._head = False, 0  # whether a head has begun; bytes of it behind the first piece

    def data_received(self, data: bytes) -> None:
        """See ``asyncio.Protocol``."""
        inside = self._in_head
        super().data_received(data)
        self._head = self._head + len(data) if inside and self._in_head else 0
        if self._head > MOST_HEAD and not self.transport.is_closing():
            self.send_400_response("Invalid HTTP request received.")

    def on_message_begin(self) -> None:
        """A request begins."""
        self._in_head = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Its head has ended."""
        self._in_head = False
        super().on_headers_complete()
