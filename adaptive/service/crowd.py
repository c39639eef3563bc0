"""Bounds the number of connections of a server, so that it always has file descriptors left for requests and its log.

A connection costs its client nothing, and neither a key nor a whole request is needed to keep one open.
"""

from __future__ import annotations

import asyncio
import logging
import resource
from functools import cache
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

logger = logging.getLogger("adaptive.service")

# Most connections. Too few: clients that keep theirs open between two requests have to connect anew. Too many: memory.
MOST = 512


def most_connections() -> int:
    """The most connections at a time: MOST, or half of the process's file descriptors if these are fewer."""
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return MOST if allowed == resource.RLIM_INFINITY else min(MOST, allowed // 2)


class Bounded(asyncio.Protocol):
    """Part of a protocol of uvicorn. One connection too many closes the one that has waited longest for a whole head
    of a request: the new one, if all others are being answered."""

    # Those of uvicorn's protocols.
    connections: set[Any]
    loop: asyncio.AbstractEventLoop
    transport: asyncio.Transport
    cycle: Any
    since = 0.0  # when its last request was answered, or else when it was opened, by the loop's clock

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See ``asyncio.Protocol``."""
        super().connection_made(transport)
        self.since = self.loop.time()
        open_ones = [one for one in self.connections if not one.transport.is_closing()]
        if len(open_ones) > most_connections():
            _say_once()
            min((one for one in open_ones if one.waits), key=lambda one: one.since, default=self).transport.abort()

    def on_response_complete(self) -> None:
        """Called by uvicorn."""
        self.since = self.loop.time()
        super().on_response_complete()  # type: ignore[misc]

    @property
    def waits(self) -> bool:
        """Whether no request is being answered."""
        return self.cycle is None or bool(self.cycle.response_complete)


class Connection(Bounded, H11Protocol):
    """uvicorn's protocol for HTTP/1.1 by h11, bounded."""


@cache
def _say_once() -> None:
    logger.warning(
        "more than %d connections are open; of those without a request the oldest are closed", most_connections()
    )
