"""``adaptive learn``: the proxy on a port, the log behind it, and training while it runs."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any
from urllib.parse import urlsplit

import httpx
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from adaptive.errors import AdaptiveError
from adaptive.pair import load_tokenizer, sources
from adaptive.printable import refused_address, without_login
from adaptive.records.deletion import finish
from adaptive.records.retention import Keep
from adaptive.records.writer import LogWriter
from adaptive.service.guard import LOOPBACK, Guard, host_name, of_another_site, refuse
from adaptive.service.peers import same_user
from adaptive.service.server import GRACE_S, address, listen, only_server, server_config, until_signalled, with_key
from adaptive.service.trainer import Trainer, background
from adaptive.settings import Settings
from adaptive.state import PairState
from adaptive.upstream.kinds import KINDS, Kind
from adaptive.upstream.logbook import Logbook
from adaptive.upstream.parsing import Parsing
from adaptive.upstream.proxy import Proxy
from checkpoints.store import AdapterStore

logger = logging.getLogger("adaptive.upstream")

# Paths at which ``adaptive serve`` shows what was said, or an adapter is chosen. Without a key these are for its own
# user's programs only, and it takes the proxy for one of them.
PRIVATE = ("/adaptive/answers", "/adaptive/sessions", "/adaptive/history", "/adaptive/adapters/")
# Options of uvicorn: nothing is added to what the server says.
AS_IT_IS: dict[str, Any] = {"http": Parsing, "server_header": False, "date_header": False}


def checked_url(url: str) -> str:
    """The address of a server, without the ``/v1`` that clients are given. Raises AdaptiveError for what is none."""
    try:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        known = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        found = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/v1')}"
        httpx.URL(found)
    except (ValueError, httpx.InvalidURL):
        known = False
    if not known:
        raise AdaptiveError(
            f"--upstream is {refused_address(url)}; it must be an address such as http://127.0.0.1:8000"
        )
    return found


def checked_kind(name: str | None) -> Kind | None:
    """The kind of server of this name, None where it is to be found out. Raises AdaptiveError."""
    if name is None or name in KINDS:
        return None if name is None else KINDS[name]
    raise AdaptiveError(f"--engine is {name!r}; it must be one of {', '.join(KINDS)}")


def learn(
    settings: Settings, state: PairState, url: str, kind: Kind | None, most: int, model: str | None = None
) -> None:
    """Serve the proxy in front of ``url`` until SIGTERM or ctrl-C, with at most ``most`` requests there at a time.
    ``model`` is the target's name there, None for the first one that the server lists.

    Raises AdaptiveError where the pair's folder is in use, the port is taken, or the pair's tokenizers differ.
    """
    settings = with_key(settings)
    with only_server(state) as note:
        listening = listen(settings.host, settings.port)
        with (
            contextlib.closing(listening),
            background(settings, state) as trainer,
            logbook(settings, state, url) as book,
        ):
            here = address(settings.host, listening.getsockname()[1])
            note(here)
            logger.info("listening on %s, in front of %s", here, without_login(url))
            proxy = Proxy(url, book, most, kind, model)
            proxy.training = lambda: asdict(trainer.status)
            key = settings.api_key.get_secret_value() if settings.api_key else None
            app = Door(Resting(proxy, trainer), key)
            config = server_config(app, timeout_graceful_shutdown=int(GRACE_S), **AS_IT_IS)
            trainer.idle()
            until_signalled(_Server(config, proxy), listening)


class _Server(uvicorn.Server):
    """uvicorn, which closes the proxy's connections when it has ended."""

    def __init__(self, config: uvicorn.Config, proxy: Proxy) -> None:
        super().__init__(config)
        self._proxy = proxy

    async def shutdown(self, sockets: list[object] | None = None) -> None:  # type: ignore[override]
        await super().shutdown(sockets)  # type: ignore[arg-type]
        self._proxy.close()


@contextlib.contextmanager
def logbook(settings: Settings, state: PairState, url: str) -> Iterator[Logbook | None]:
    """The log of what passes; None where nothing is to be kept."""
    tokenizer = load_tokenizer(settings)
    if not settings.record:
        yield None
        return
    after = AdapterStore(state.adapters).last_record()
    keep = Keep(settings.keep_days, settings.keep_gb)
    if left := finish(state):
        logger.warning("%s", left)
    with LogWriter(state.records, after=after, keep=keep) as writer:
        book = Logbook(writer, tokenizer, sources(settings)[0].folder, url)
        try:
            yield book
        finally:
            book.close()
            if writer.problem:
                logger.warning("log: %s", writer.problem)


class Door:
    """Who may ask: with a key whoever sends it, else programs and pages of this machine only.

    Without the latter any web site could reach the server through a browser here, by a name that resolves to this
    machine or by a request that browsers send without asking: the server sees our own name in its Host header, and
    cannot tell. With a key, what pages may read is the server's say, so that a browser's preflight, which cannot carry
    a key, is passed on.
    """

    def __init__(self, app: ASGIApp, key: str | None) -> None:
        self._guarded = Guard(app, key, max_body=2**62, patience=math.inf)
        self._app, self._key = app, key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or refuse it."""
        if scope["type"] != "http" or not self._free(scope["method"], headers := dict(scope["headers"])):
            await self._guarded(scope, receive, send)
        elif self._key is None and (reason := _unwelcome(scope, headers)) is not None:
            await refuse(send, scope["path"], 403, reason)
        else:
            await self._app(scope, receive, send)

    def _free(self, method: str, headers: dict[bytes, bytes]) -> bool:
        """Whether the request passes without the guard."""
        if self._key is not None:
            return method == "OPTIONS" and b"access-control-request-method" in headers
        return host_name(headers.get(b"host", b"")) in LOOPBACK


def _unwelcome(scope: Scope, headers: dict[bytes, bytes]) -> str | None:
    """The reason why a request to this machine is refused without a key; None if it is not."""
    if of_another_site(headers):
        return "another site's page may not ask here; start the proxy with --api-key-file FILE, and send the key"
    peer, here = scope.get("client"), scope.get("server")
    if scope["path"].startswith(PRIVATE) and not (peer and here and same_user(tuple(peer), tuple(here))):
        return "this is for programs of the user who runs the server, which the one that asks may not be"
    return None


class Resting:
    """Pauses training while the server has a request of any client. Only requests with a body (``POST``) count."""

    def __init__(self, app: ASGIApp, trainer: Trainer) -> None:
        self._app, self._trainer, self._open = app, trainer, 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        self._open += 1
        if self._open == 1:
            self._trainer.busy()
        try:
            await self._app(scope, receive, send)
        finally:
            self._open -= 1
            if self._open == 0:
                self._trainer.idle()
