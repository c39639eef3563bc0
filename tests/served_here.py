"""Serves an application from a thread of this process."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import uvicorn

from adaptive.service.server import listen, server_config


@contextlib.contextmanager
def on_a_thread(app: Any, **options: Any) -> Iterator[str]:
    """Serve ``app`` by uvicorn with these ``options``. Yields the address."""
    listening = listen("127.0.0.1", 0)
    server = uvicorn.Server(server_config(app, **options))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        listening.close()
