"""The connections to the server: HTTP/1.1 by h11 over asyncio's streams.

In: a request. Out: the server's answer, whose body is read piece by piece as it comes. Connections stay open for a
while and serve further requests. httpx, which is used elsewhere, takes 1.7 ms more of a processor for each request,
and a client of the proxy waits for that (docs/notes/2026-11-upstream.md).
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from urllib.parse import quote, unquote, urlsplit

import h11

from adaptive.printable import without_login
from adaptive.tls import trusted

# Seconds to reach the server, and between an answer and the end of an idle connection to it: less than servers keep
# one (5 s with most), so that few requests go into one that has just been closed.
CONNECT_S, IDLE_S = 10.0, 3.0
# Seconds after an answer in which the server shows whether it closes the connection (llama-server does so behind every
# stream, without saying so). If it does, one is opened for the next request. Too low: a connection is opened in vain.
AHEAD_S = 0.05
# Bytes that are read at once, and most bytes of the headers of an answer.
READ, HEADERS = 64 << 10, 100 << 10
# Bytes of a path that are sent as they are.
PRINTABLE = bytes(range(0x21, 0x7F))

Headers = Sequence[tuple[bytes, bytes]]


class UnreachableError(Exception):
    """The server cannot be reached, or does not answer in HTTP/1.1."""


class UnsendableError(Exception):
    """The request cannot be sent in HTTP/1.1 as it is."""


class ServerCutError(Exception):
    """The server has ended its answer before its end."""


@dataclass(eq=False)
class Answer:
    """The server's answer: its ``status`` and ``headers``, with their names in lower case. ``whole``: all of it was
    read."""

    status: int
    headers: list[tuple[bytes, bytes]]
    _connection: _Connection
    whole: bool = False

    def header(self, name: bytes) -> str:
        """The value of a header, empty if there is none."""
        return next((value.decode("latin-1") for found, value in self.headers if found == name), "")

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body, as it is on the wire. Raises ServerCutError."""
        try:
            while isinstance(event := await self._connection.event(), h11.Data):
                yield bytes(event.data)
        except (h11.RemoteProtocolError, OSError) as error:
            raise ServerCutError(_reason(error)) from error
        self.whole = True

    async def read(self) -> bytes:
        """All of the body. Raises ServerCutError."""
        return b"".join([piece async for piece in self.pieces()])


class Connections:
    """The connections to the server at ``url``, of which at most ``most`` are kept while they are idle."""

    def __init__(self, url: str, most: int) -> None:
        self.url = without_login(url)  # for people
        parts = urlsplit(url)
        self._host, self._prefix = parts.hostname or "", quote(parts.path.rstrip("/"), safe=PRINTABLE)
        self._tls = trusted() if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._tls else 80)
        _, _, place = parts.netloc.rpartition("@")
        self._own = [(b"host", place.encode("idna" if not place.isascii() else "ascii"))]
        if parts.username is not None:
            login = f"{unquote(parts.username)}:{unquote(parts.password or '')}".encode()
            self._own.append((b"authorization", b"Basic " + base64.b64encode(login)))
        self._own_names = {name for name, _ in self._own}
        self._most = most
        self._idle: list[_Connection] = []  # the one that was used last at the end
        self._opening: asyncio.Task[None] | None = None  # of a connection for the next request
        self._closed = False

    @contextlib.asynccontextmanager
    async def ask(
        self, method: str, target: bytes, headers: Headers, body: bytes | AsyncIterator[bytes] = b""
    ) -> AsyncIterator[Answer]:
        """The server's answer to this request; ``target`` is the path with its query. A ``body`` of bytes gets its
        length as a header, one in pieces has it among ``headers``. Raises UnreachableError, UnsendableError."""
        sent = [*self._own, *(one for one in headers if one[0] not in self._own_names)]
        if isinstance(body, bytes) and (body or method in ("POST", "PUT", "PATCH")):
            sent.append((b"content-length", b"%d" % len(body)))
        try:
            request = h11.Request(method=method, target=self._prefix + quote(target, safe=PRINTABLE), headers=sent)
        except h11.LocalProtocolError as error:
            raise UnsendableError(str(error)) from error
        # An idle connection may be closed by the server at the very moment when it is taken, so that a request in it is
        # sent again. A body in pieces cannot be, and gets a connection of its own.
        for new in (not isinstance(body, bytes), True):
            connection = await self._take(new)
            try:
                answer = await connection.ask(request, body)
                break
            except (h11.RemoteProtocolError, OSError) as error:
                connection.close()
                if not connection.kept:
                    raise UnreachableError(_reason(error)) from error
            except BaseException:
                connection.close()
                raise
        try:
            yield answer
        finally:
            self._give_back(connection, answer)

    def close(self) -> None:
        """Close the idle connections, when all answers have ended."""
        self._closed = True
        if self._opening is not None:
            self._opening.cancel()
        self._sweep(0.0)

    async def _take(self, new: bool) -> _Connection:
        self._sweep(IDLE_S)
        if not new and not self._idle and self._opening is not None:
            await asyncio.wait([self._opening])
        return self._idle.pop() if self._idle and not new else await self._open()

    async def _open(self) -> _Connection:
        opening = asyncio.open_connection(self._host, self._port, ssl=self._tls, limit=READ)
        try:
            return _Connection(*await asyncio.wait_for(opening, CONNECT_S))
        except TimeoutError as error:  # which is an OSError, too
            raise UnreachableError(f"no connection within {CONNECT_S:.0f} s") from error
        except OSError as error:
            raise UnreachableError(_reason(error)) from error

    def _give_back(self, connection: _Connection, answer: Answer) -> None:
        if not (answer.whole and connection.again()) or len(self._idle) >= self._most:
            connection.close()
        else:
            self._keep(connection)
        if answer.whole:
            asyncio.get_running_loop().call_later(AHEAD_S, self._look_ahead)

    def _keep(self, connection: _Connection) -> None:
        connection.kept, connection.since = True, time.monotonic()
        self._idle.append(connection)
        asyncio.get_running_loop().call_later(IDLE_S, self._sweep, IDLE_S)

    def _look_ahead(self) -> None:
        """Open a connection for the next request if none is left."""
        self._sweep(IDLE_S)
        if not self._idle and self._opening is None and not self._closed:
            self._opening = asyncio.create_task(self._open_ahead())

    async def _open_ahead(self) -> None:
        try:
            self._keep(await self._open())
        except UnreachableError:
            pass  # the next request says so
        finally:
            self._opening = None

    def _sweep(self, seconds: float) -> None:
        """Close what was idle for so long, or was closed by the server."""
        until = time.monotonic() - seconds
        idle, self._idle = self._idle, []
        for one in idle:
            if one.since <= until or one.ended:
                one.close()
            else:
                self._idle.append(one)


class _Connection:
    """One connection. ``kept``: it was open before the request came, and idle ``since`` then."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._state = h11.Connection(h11.CLIENT, max_incomplete_event_size=HEADERS)
        self.kept, self.since = False, 0.0

    @property
    def ended(self) -> bool:
        """Whether the server has closed it."""
        return self._reader.at_eof() or self._writer.transport.is_closing()

    async def ask(self, request: h11.Request, body: bytes | AsyncIterator[bytes]) -> Answer:
        """Send a request, and read the head of its answer."""
        send, write = self._state.send, self._writer.write
        head = send(request) or b""
        if isinstance(body, bytes):
            write(b"".join((head, send(h11.Data(body)) or b"" if body else b"", send(h11.EndOfMessage()) or b"")))
        else:
            write(head)
            async for piece in body:
                write(send(h11.Data(piece)) or b"")
                await self._writer.drain()
            write(send(h11.EndOfMessage()) or b"")
        await self._writer.drain()
        while not isinstance(event := await self.event(), h11.Response):
            pass  # 1xx
        return Answer(event.status_code, list(event.headers), self)

    async def event(self) -> object:
        """What comes next from the server."""
        while (event := self._state.next_event()) is h11.NEED_DATA:
            data = await self._reader.read(READ)
            if not data and self._state.their_state is h11.SEND_RESPONSE:
                raise ConnectionResetError("it closed the connection without an answer")
            self._state.receive_data(data)
        return event

    def again(self) -> bool:
        """Whether another request may be sent. Call it when the answer has ended."""
        if self.ended or self._state.our_state is not h11.DONE or self._state.their_state is not h11.DONE:
            return False
        self._state.start_next_cycle()
        return True

    def close(self) -> None:
        """End it at once."""
        self._writer.transport.abort()


def _reason(error: BaseException) -> str:
    """The error in words. asyncio says only that a call failed, and of which kind by number."""
    if isinstance(error, OSError) and error.errno and "Connect call failed" in str(error):
        return os.strerror(error.errno)
    return str(error) or type(error).__name__
