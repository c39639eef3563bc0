"""The proxy: every request goes to the server as it came, and its answer back, byte for byte.

Only requests for an answer are looked into. They are asked with log-probabilities, which are taken out of the answer
again, and what was said goes to the logbook when it has ended, by itself or because either side has gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from starlette.types import Message, Receive, Scope, Send

from adaptive.headers import session_name
from adaptive.service.errors import error_object
from adaptive.upstream.asking import PATHS, Asked, read, with_logprobs
from adaptive.upstream.connections import (
    Answer,
    Connections,
    ServerCutError,
    UnreachableError,
    UnsendableError,
)
from adaptive.upstream.discovery import Discovery
from adaptive.upstream.events import Passage
from adaptive.upstream.kinds import Kind
from adaptive.upstream.logbook import Exchange, Logbook
from adaptive.upstream.models import model_of

logger = logging.getLogger("adaptive.upstream")

# Headers that are between two neighbours only (RFC 9110), and what each of the two connections sets for itself.
HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
        b"http2-settings",
        b"expect",
    }
)
# Whoever sends it with "off" is not logged.
OPT_OUT = b"x-adaptive-record"
# Bytes of a request that is looked into. A longer one passes without being held in memory.
MOST_READ = 32 << 20
# Bytes of an answer that are read without a thread. Too low: short answers are later. Too high: other requests wait.
QUICK = 256 << 10
# What a server answers that does not take the fields that were added: llama.cpp's some of it with 500.
REFUSALS = frozenset({400, 404, 422, 500, 501})
STATUS = "/adaptive/upstream"
# Says of an answer's length that it is the server's.
SAME = -1
# Has no body, whatever length it names: that of another answer.
NOT_MODIFIED = 304


class ClientGoneError(Exception):
    """Nobody reads the answer any more."""


@dataclass
class Counts:
    """Requests so far: all, those that passed without being logged on purpose, and those that were cut."""

    requests: int = 0
    private: int = 0
    cut: int = 0
    failed: int = 0


class Proxy:
    """The ASGI application in front of the server at ``url``."""

    def __init__(
        self, url: str, logbook: Logbook | None, most: int, kind: Kind | None = None, model: str | None = None
    ) -> None:
        """``logbook`` None logs nothing. At most ``most`` requests are with the server at a time; others wait. ``kind``
        None finds it out. ``model``: the target's name at the server, whose other models are not logged; None takes the
        first one that the server lists."""
        self.logbook = logbook
        self.counts = Counts()
        self.training: Callable[[], dict[str, Any]] | None = None  # what background training does, for people
        self._places = asyncio.Semaphore(most)
        self.connections = Connections(url.rstrip("/"), most)
        self.discovery = Discovery(self.connections, kind, model)

    def close(self) -> None:
        """Close the connections to the server."""
        self.discovery.close()
        self.connections.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return
        if scope["path"] == STATUS and scope["method"] == "GET":
            await _say(send, 200, self.status())
            return
        self.counts.requests += 1
        passing = _Passing(self, scope, receive, send)
        if self.logbook is not None:
            self.logbook.begins()
        try:
            async with self._places:
                await passing.run()
        except UnreachableError as error:
            self.counts.failed += 1
            await passing.fail(502, f"the server at {self.connections.url} cannot be reached: {error}")
        except UnsendableError as error:
            self.counts.failed += 1
            await passing.fail(400, f"the request cannot be passed on: {error}")
        except ServerCutError as error:
            self.counts.cut += 1  # an answer that has begun is not completed, so that the client's connection ends, too
            await passing.fail(502, f"the server at {self.connections.url} broke off its answer: {error}")
        except ClientGoneError:
            self.counts.cut += 1
        except asyncio.CancelledError:
            if not passing.gone:
                raise
            self.counts.cut += not passing.whole
        finally:
            passing.unwatch()
            if self.logbook is not None:
                self.logbook.ends()

    def status(self) -> dict[str, Any]:
        """What has passed and what was logged, for people."""
        logged = None if self.logbook is None else self.logbook.status()
        kind = self.discovery.kind
        return {
            "upstream": self.connections.url,
            "engine": None if kind is None else kind.name,
            "alternatives": None if kind is None else self.discovery.alternatives(kind),
            **vars(self.counts),
            "log": logged,
            "training": None if self.training is None else self.training(),
        }


class _Passing:
    """One request on its way."""

    def __init__(self, proxy: Proxy, scope: Scope, receive: Receive, send: Send) -> None:
        self.proxy, self.scope, self.receive, self.send = proxy, scope, receive, send
        # What is around a value is no part of it, and may not be sent on.
        self.headers = [(name, value.strip(b" \t")) for name, value in scope["headers"] if name not in HOP]
        self.started = self.gone = False
        self.whole = False  # the answer came to its end, whatever became of the connections behind it
        self._watcher: asyncio.Task[None] | None = None
        self.created, self.began = time.time(), time.perf_counter()

    async def run(self) -> None:
        """Ask the server and hand its answer on. Raises UnreachableError where it cannot be asked."""
        headers = dict(self.headers)
        private = headers.get(OPT_OUT, b"").strip().lower() in (b"off", b"no", b"0", b"false")
        self.headers = [(name, value) for name, value in self.headers if name != OPT_OUT]
        chat = PATHS.get(self.scope["path"])
        short = int(headers.get(b"content-length", b"0") or 0) <= MOST_READ
        if self.scope["method"] != "POST" or chat is None or self.proxy.logbook is None or private or not short:
            self.proxy.counts.private += private
            await self._pass(self._incoming())
            return
        incoming = self._incoming()
        pieces, size = [], 0
        async for piece in incoming:
            pieces.append(piece)
            size += len(piece)
            if size > MOST_READ:  # its length was not said
                await self._pass(_behind(pieces, incoming))
                return
        body = b"".join(pieces)
        asked = read(body, chat)
        if asked is None or asked.said.get("store") is False:
            self.proxy.counts.private += asked is not None
            await self._pass(body)
            return
        await self._ask(asked, headers)

    async def fail(self, status: int, reason: str) -> None:
        """Tell the client that there is no answer, or end the one that has begun."""
        if not self.started:
            await _say(self.send, status, error_object(status, reason))

    async def _ask(self, asked: Asked, headers: dict[bytes, bytes]) -> None:
        key = headers[b"authorization"].decode("latin-1") if b"authorization" in headers else None
        kind = await self.proxy.discovery.known(key, model_of(asked.said))
        assert self.proxy.logbook is not None
        if (why := self.proxy.discovery.unlogged(asked.said)) is not None:
            self.proxy.logbook.leave_out(why)
            await self._pass(asked.body)
            return
        wanted = self.proxy.discovery.alternatives(kind)
        more = with_logprobs(asked, kind, wanted)
        async with self._sent(more.body, plain=True) as answer:
            if not (more.added and answer.status in REFUSALS):
                if more.added and answer.status == 200:
                    self.proxy.discovery.taken()
                await self._answer(more, kind, headers, key, answer)
                return
        # Whatever the reason was, the client is told what the server says to its own request.
        async with self._sent(asked.body, plain=True) as answer:
            if answer.status < 400:
                self.proxy.discovery.refused(wanted)
            await self._answer(asked, kind, headers, key, answer)

    async def _answer(
        self, asked: Asked, kind: Kind, headers: dict[bytes, bytes], key: str | None, answer: Answer
    ) -> None:
        content = answer.header(b"content-type")
        encoded = (answer.header(b"content-encoding") or "identity") != "identity"
        if answer.status != 200 or encoded or not content.startswith(("application/json", "text/event-stream")):
            if answer.status == 200 and encoded and self.proxy.logbook is not None:
                self.proxy.logbook.leave_out("the server compresses it, although it was asked not to")
            await self._relay(answer)
            return
        streamed = content.startswith("text/event-stream")
        passage = Passage(asked, kind, streamed)
        first: float | None = None
        try:
            if streamed:
                await self._start(answer, None if asked.added else SAME)
            async for data in answer.pieces():
                first = first or time.perf_counter() - self.began
                if not passage.too_long(data):
                    out = passage.feed(data)
                else:
                    out = await asyncio.to_thread(passage.feed, data)
                    await self._start(answer, None if asked.added else SAME)
                if out:
                    await self._send_body(out)
            out = await _rest(passage)
            if not self.started:
                await self._start(answer, len(out))
            await self._send_body(out)
            await self._finish()
        finally:
            # Clients close a stream once they have read its last event, before it ends.
            self.whole = passage.ended
            self._note(asked, kind, headers, key, passage, first)

    def _note(
        self,
        asked: Asked,
        kind: Kind,
        headers: dict[bytes, bytes],
        key: str | None,
        passage: Passage,
        first: float | None,
    ) -> None:
        book = self.proxy.logbook
        taken = time.perf_counter() - self.began
        session = session_name(headers.get(b"x-session-id", b"")) or "upstream"
        assert book is not None
        try:
            book.put(
                Exchange(asked, passage.collected, kind, self.created, first or taken, taken, self.whole, session, key)
            )
        except Exception:  # a failing log never touches a request
            logger.exception("an answer could not be handed to the log")

    async def _pass(self, body: bytes | AsyncIterator[bytes]) -> None:
        async with self._sent(body, plain=False) as answer:
            await self._relay(answer)

    async def _relay(self, answer: Answer) -> None:
        """The answer as it comes."""
        await self._start(answer)
        async for data in answer.pieces():
            await self._send_body(data)
        await self._finish()

    def _sent(self, body: bytes | AsyncIterator[bytes], plain: bool) -> contextlib.AbstractAsyncContextManager[Answer]:
        """The server's answer to this request; with ``plain`` not compressed."""
        headers = [(name, value) for name, value in self.headers if name not in (b"host", b"content-length")]
        if plain:
            headers = [(name, value) for name, value in headers if name != b"accept-encoding"]
            headers.append((b"accept-encoding", b"identity"))
        if not isinstance(body, bytes):
            framing = [one for one in self.scope["headers"] if one[0] in (b"content-length", b"transfer-encoding")]
            headers += framing
            body = body if framing else b""
        if isinstance(body, bytes):
            self._watch()  # else when it has been read
        target = self.scope["raw_path"]
        if self.scope["query_string"]:
            target += b"?" + self.scope["query_string"]
        return self.proxy.connections.ask(self.scope["method"], target, headers, body)

    async def _incoming(self) -> AsyncIterator[bytes]:
        """The body of the client's request. Raises ClientGoneError where it does not come to its end."""
        while True:
            message = await self.receive()
            if message["type"] == "http.disconnect":
                raise ClientGoneError
            yield message.get("body", b"")
            if not message.get("more_body"):
                self._watch()
                return

    def _watch(self) -> None:
        """From now on end this task where the client goes away; its request has been read."""
        task = asyncio.current_task()
        assert task is not None

        async def watch() -> None:
            while (await self.receive())["type"] != "http.disconnect":
                pass
            if self._watcher is not None:
                self.gone = True
                task.cancel()

        if self._watcher is None:
            self._watcher = asyncio.create_task(watch())

    def unwatch(self) -> None:
        """The answer has ended, which looks to who receives as if the client had gone."""
        watcher, self._watcher = self._watcher, None
        if watcher is not None:
            watcher.cancel()

    async def _start(self, answer: Answer, length: int | None = SAME) -> None:
        """Begin the answer with the server's status and headers; ``length`` is that of the body, where it is another
        than the server's, and None where it is not known yet."""
        headers = [(name, value) for name, value in answer.headers if name not in HOP]
        if length is None or answer.status == NOT_MODIFIED:
            headers = [(name, value) for name, value in headers if name != b"content-length"]
        elif length != SAME:
            headers = [(n, b"%d" % length if n == b"content-length" else value) for n, value in headers]
        self.started = True
        await self.send({"type": "http.response.start", "status": answer.status, "headers": headers})

    async def _send_body(self, data: bytes) -> None:
        await self.send({"type": "http.response.body", "body": data, "more_body": True})

    async def _finish(self) -> None:
        self.unwatch()
        await self.send({"type": "http.response.body", "body": b""})


async def _behind(pieces: list[bytes], more: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The ``pieces``, and then ``more``."""
    for piece in pieces:
        yield piece
    async for piece in more:
        yield piece


async def _rest(passage: Passage) -> bytes:
    """The remaining bytes of a whole answer. A long one is read on another thread, so that no other request waits."""
    if passage.held <= QUICK:
        return passage.rest(whole=True)
    return passage.end(await asyncio.to_thread(passage.read))


async def _say(send: Send, status: int, said: dict[str, Any]) -> None:
    body = json.dumps(said).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    start: Message = {"type": "http.response.start", "status": status, "headers": headers}
    await send(start)
    await send({"type": "http.response.body", "body": body})
