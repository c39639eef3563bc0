"""Real ``adaptive draft-server`` processes for the tests, and servers that imitate one."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
from conftest import BUNDLED
from forked import start
from served_here import on_a_thread
from service_server import Server

from adaptive.draft_server import Desk, Drafts, guarded
from adaptive.settings import Settings, load_settings
from adaptive.vocabulary import Vocabulary
from adaptive.wire import HELLO, VOCABULARY, Hello


class DraftServer(Server):
    """``adaptive draft-server`` of the bundled draft on a port of its own, with one thread, in float32."""

    def __init__(self, folder: Path, *options: str, port: int = 0) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.errors = folder / f"stderr-{time.monotonic_ns()}"
        command = ["draft-server", "--draft", str(BUNDLED / "draft")]
        command += ["--port", str(port), "--threads", "1", "--dtype", "float32", "--state-dir", str(folder), *options]
        with self.errors.open("wb") as stream:
            self.process = start(*command, stderr=stream)
        self.url = self._wait_for_url()


@contextlib.contextmanager
def impostor(real: str, answer: Callable[[Any, bytes], None]) -> Iterator[str]:
    """A server that introduces itself exactly as the ``real`` one does and answers requests for proposals by calling
    ``answer`` with the request's handler and body. Yields its address."""
    known = {path: httpx.get(f"{real}{path}").content for path in (HELLO, VOCABULARY)}

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            say(self, known[self.path])

        def do_POST(self) -> None:
            answer(self, self.rfile.read(int(self.headers["Content-Length"])))

        def log_message(self, *_: object) -> None:
            pass

    class Quiet(ThreadingHTTPServer):
        def handle_error(self, *_: object) -> None:
            pass  # the client has disconnected

    server = Quiet(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


@contextlib.contextmanager
def served_here(
    engine: Any,
    vocabulary: Vocabulary,
    settings: Settings | None = None,
    change: Callable[[Hello], Hello] = lambda hello: hello,
    **options: Any,
) -> Iterator[str]:
    """Serve the draft server's application from a thread, over an engine of this process, by uvicorn with these
    ``options``. ``change`` makes what it says of its draft. Yields its address."""
    drafts = Drafts(engine, 10**9)
    hello = Hello(
        id="here", weights="0", vocab_size=engine.vocab_size, context_length=engine.context_length,
        trees=engine.trees, vocabulary=vocabulary.digest,
    )  # fmt: skip
    desk = Desk(drafts, lambda: change(hello), vocabulary)
    try:
        app = guarded(desk, settings or load_settings({}))
        with on_a_thread(app, timeout_graceful_shutdown=1, **options) as address:
            yield address
    finally:
        desk.thread.shutdown()
        assert desk.worker is not None
        desk.worker.stop()


def say(handler: Any, body: bytes, status: int = 200) -> None:
    """Send a response with this body."""
    handler.send_response(status)
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)
