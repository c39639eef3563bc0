"""Runs the server: one per pair, by a lock, with its socket, its signals and its shutdown."""

from __future__ import annotations

import contextlib
import logging
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from pydantic import SecretStr
from starlette.types import ASGIApp

from adaptive.control.memory import current_costs
from adaptive.errors import AdaptiveError, why_unread
from adaptive.opened import OpenedPair
from adaptive.service import notices
from adaptive.service.api import Api
from adaptive.service.app import create_app
from adaptive.service.crowd import Connection
from adaptive.service.engine import EngineThread
from adaptive.service.guard import LOOPBACK
from adaptive.service.metrics import Metrics
from adaptive.service.trainer import background
from adaptive.settings import Settings
from adaptive.state import PairState

logger = logging.getLogger("adaptive.service")
SIGNALS = (signal.SIGINT, signal.SIGTERM)  # that end a server

# Seconds after SIGTERM or ctrl-C until running answers are cancelled. Must be well below the 45 s after which systemd
# kills the process (``cli/managers.py``).
GRACE_S = 10.0


def serve(
    settings: Settings,
    state: PairState,
    open_session: Callable[[], contextlib.AbstractContextManager[OpenedPair]],
) -> None:
    """Serve until SIGTERM or ctrl-C. ``open_session`` loads the pair, on the engine's thread.

    Raises AdaptiveError if another server uses the pair's folder, the port is taken, or the pair cannot be loaded.
    """
    settings = with_key(settings)
    with only_server(state) as note:
        listening = listen(settings.host, settings.port)
        with contextlib.closing(listening), background(settings, state) as trainer:
            url = address(settings.host, listening.getsockname()[1])
            note(url)
            logger.info("listening on %s", url)
            metrics = Metrics()
            engine = EngineThread(open_session, metrics, settings.queue, settings.slots)
            engine.listen(trainer)
            trainer.costs = lambda: current_costs(engine.policy, state.controller)
            api = Api(engine, settings, metrics, trainer)
            config = server_config(create_app(api), timeout_graceful_shutdown=int(GRACE_S) + 2)
            server = _Server(config, engine)
            api.leaving = lambda: server.should_exit
            try:
                _run(server, engine, listening)
            finally:
                api.trials.close()
    if engine.failure is not None:
        raise engine.failure


def _run(server: _Server, engine: EngineThread, listening: socket.socket) -> None:
    restore = _ignore_signals()
    try:
        engine.start(when_over=server.end)
        server.run(sockets=[listening])
    finally:
        if engine.state == "loading":  # ``close`` waits for the loading; another signal then ends the process
            restore()
        else:
            for number in SIGNALS:
                signal.signal(number, lambda *_: engine.hurry())
        engine.close()
        restore()
        logger.info("stopped")


class _Server(uvicorn.Server):
    """uvicorn, which cancels the engine's jobs shortly before it closes the connections."""

    def __init__(self, config: uvicorn.Config, engine: EngineThread) -> None:
        super().__init__(config)
        self._engine = engine

    def end(self) -> None:
        """Stop serving, because the engine thread has ended."""
        self.should_exit = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """First signal: let running answers end within GRACE_S. Second: cancel them, or, while the models are loading,
        kill the process."""
        if self._engine.state == "loading":
            if self.should_exit:
                signal.signal(sig, signal.SIG_DFL)
                signal.raise_signal(sig)
            logger.info("stopping when the models are loaded; once more ends it at once")
        else:
            logger.info("stopping: running answers have %.0f s", GRACE_S)
        timer = threading.Timer(0 if self.should_exit else GRACE_S, self._engine.close)
        timer.daemon = True
        timer.start()
        self.should_exit = True


def server_config(app: ASGIApp, **options: Any) -> uvicorn.Config:
    """uvicorn's configuration for any of our servers. Forwarded headers are ignored: every program of this machine
    could use them to pass for the client of another connection (``peers.py``)."""
    options = {"http": Connection, "ws": "none", **options}
    return uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", proxy_headers=False, **options)


def until_signalled(server: uvicorn.Server, listening: socket.socket) -> None:
    """Serve on a socket until SIGTERM or ctrl-C."""
    restore = _ignore_signals()
    try:
        server.run(sockets=[listening])
    finally:
        restore()
        logger.info("stopped")


def _ignore_signals() -> Callable[[], None]:
    """Ignore SIGTERM and ctrl-C until the returned function is called. At its end uvicorn raises the signals again that
    it caught; by then there is nothing left to interrupt."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in SIGNALS}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    return restore


def with_key(settings: Settings) -> Settings:
    """Settings with the key read from ``api_key_file``. Raises AdaptiveError if other machines can reach the address
    and there is no key, or if the key is empty, cannot be read or cannot be sent."""
    if settings.api_key_file is not None:
        try:
            text = settings.api_key_file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = why_unread(error)
            raise AdaptiveError(f"API key file {settings.api_key_file} cannot be read: {reason}") from error
        settings = settings.model_copy(update={"api_key": SecretStr(text)})
    if settings.api_key is not None:  # what is around a key is no part of it, as in a request's header
        settings = settings.model_copy(update={"api_key": SecretStr(settings.api_key.get_secret_value().strip())})
    if settings.api_key is not None and not settings.api_key.get_secret_value():
        raise AdaptiveError("the API key is empty; give at least one character, or leave the option out")
    if settings.api_key is not None and not settings.api_key.get_secret_value().isprintable():
        raise AdaptiveError(
            "the API key has a line break or another control character, which nobody can send; give one line"
        )
    if settings.api_key is None and settings.host not in LOOPBACK:
        raise AdaptiveError(
            f"host {settings.host} can be reached from other machines; set an API key (--api-key-file FILE), "
            "or serve 127.0.0.1"
        )
    return settings


@contextlib.contextmanager
def only_server(state: PairState) -> Iterator[Callable[[str], None]]:
    """Hold ``server.lock`` in the pair's folder. Yields a function that writes the address to ``server.json``.

    The system frees the lock of a killed server. Raises AdaptiveError, naming the process, if another holds the lock.
    """
    from filelock import FileLock, Timeout

    try:
        # `adaptive service status` takes the lock for a moment.
        with FileLock(state.root / "server.lock", timeout=1, mode=0o600):
            try:
                yield lambda url: _note(state.root, url)
            finally:
                with contextlib.suppress(OSError):
                    notices.place(state.root).unlink()
    except Timeout as error:
        raise AdaptiveError(
            f"{state.root} is served already, {_holder(state.root)}; use that server or stop it"
        ) from error


def _note(root: Path, url: str) -> None:
    try:
        notices.write(root, url)
    except OSError as error:  # the file only helps others to find this server
        place = notices.place(root)
        logger.warning("%s cannot be written (%s); a second server would not say where this one is", place, error)


def _holder(root: Path) -> str:
    held = notices.read(root)
    return "by a process that has just started" if held is None else f"by process {held.pid} at {held.url}"


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free port. Raises AdaptiveError if the port cannot be used."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sets TCP_NODELAY only on sockets that name their protocol. Without it the first token of an answer on a
    # kept connection waits 40 ms, until the client's system acknowledges the headers.
    opened = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Accepted connections inherit it. Else one whose client lost its network within a request stays for ever.
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        opened.bind((host, port))
        opened.listen(128)
    except OSError as error:
        opened.close()
        raise AdaptiveError(f"cannot listen on {host}:{port} ({error.strerror}); choose another with --port") from error
    return opened


def address(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
