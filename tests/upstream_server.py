"""A test server on raw sockets that answers byte for byte as a test's script says and can break off anywhere; and the
proxy in front of it."""

from __future__ import annotations

import contextlib
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from served_here import on_a_thread

from adaptive.upstream.proxy import Proxy
from adaptive.upstream.server import AS_IT_IS


@dataclass(frozen=True)
class Heard:
    """A request as received: its first line and headers, and its body."""

    head: str
    body: bytes

    @property
    def path(self) -> str:
        return self.head.split()[1]


Script = Callable[[Heard, socket.socket], None]

MODELS = {"llama-server": "llamacpp", "vllm": "vllm", "sglang": "sglang", "adaptive": "adaptive"}


def plain(body: bytes, kind: str = "application/json", status: str = "200 OK", more: str = "") -> bytes:
    """A complete answer with its length."""
    head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n{more}\r\n"
    return head.encode() + body


# Tells a client with further requests that a connection takes only one here.
CLOSE = "Connection: close\r\n"
STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    """One chunk of a chunked answer; empty data ends it."""
    return b"%x\r\n%b\r\n" % (len(data), data)


@dataclass
class Scripted:
    """The server. ``heard`` holds the requests; ``most`` is the largest number of them in progress at a time;
    ``missing`` are paths that it does not have."""

    script: Script
    kind: str = "llama-server"
    heard: list[Heard] = field(default_factory=list)
    most: int = 0
    missing: tuple[str, ...] = ("/props", "/apply-template", "/tokenize")
    _now: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    url: str = ""

    def asked(self, path: str) -> list[Heard]:
        """The requests of a path."""
        return [heard for heard in self.heard if heard.path.partition("?")[0] == path]

    def answer(self, connection: socket.socket) -> None:
        heard = _read(connection)
        if heard is None:
            return
        with self._lock:
            self.heard.append(heard)
            self._now += 1
            self.most = max(self.most, self._now)
        try:
            if heard.path == "/v1/models" and self.kind in MODELS:
                said = b'{"data": [{"id": "m", "owned_by": "%b"}]}' % MODELS[self.kind].encode()
                connection.sendall(plain(said, more=CLOSE))
            elif heard.path.partition("?")[0] in self.missing:
                connection.sendall(plain(b"{}", status="404 Not Found", more=CLOSE))
            else:
                self.script(heard, connection)
        except OSError:
            pass  # the client has disconnected
        finally:
            with self._lock:
                self._now -= 1


def _read(connection: socket.socket) -> Heard | None:
    held = b""
    while b"\r\n\r\n" not in held:
        data = connection.recv(65536)
        if not data:
            return None
        held += data
    head, _, body = held.partition(b"\r\n\r\n")
    lines = {line.lower().partition(b":")[0]: line.partition(b":")[2] for line in head.split(b"\r\n")}
    if b"chunked" in lines.get(b"transfer-encoding", b""):
        while not body.endswith(b"\r\n0\r\n\r\n"):
            if not (data := connection.recv(65536)):
                return None
            body += data
        body = _joined(body)
    while len(body) < int(lines.get(b"content-length", b"0")):
        if not (data := connection.recv(65536)):
            return None
        body += data
    return Heard(head.decode("latin-1"), body)


def _joined(chunks: bytes) -> bytes:
    """The content of a chunked body."""
    found = b""
    while chunks:
        length, _, chunks = chunks.partition(b"\r\n")
        found, chunks = found + chunks[: int(length, 16)], chunks[int(length, 16) + 2 :]
    return found


@contextlib.contextmanager
def scripted(script: Script, kind: str = "llama-server") -> Iterator[Scripted]:
    """A running server that runs ``script`` for each request for an answer, and closes the connection."""
    server = Scripted(script, kind)

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            server.answer(self.request)

    class Listening(socketserver.ThreadingTCPServer):
        daemon_threads = True
        request_queue_size = 1024

    with Listening(("127.0.0.1", 0), Handler) as listening:
        server.url = f"http://127.0.0.1:{listening.server_address[1]}"
        thread = threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            listening.shutdown()
            thread.join()


@contextlib.contextmanager
def served(proxy: Proxy) -> Iterator[str]:
    """Serve the proxy on a port of its own; yields its address."""
    with on_a_thread(proxy, **AS_IT_IS) as address:
        yield address


def until(true: Callable[[], bool], seconds: float = 30.0) -> None:
    """Wait until ``true()`` holds, at most ``seconds``."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.01)
