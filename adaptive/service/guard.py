"""Middleware that checks every request: the API key, the body's size, and access to a loopback port by web pages."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
from collections.abc import Callable, Collection
from urllib.parse import urlsplit

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from adaptive.service.errors import error_object
from adaptive.service.pages import ASSETS

# Paths without a key. The pages, their scripts and their style contain no data, and ask for the key before they fetch
# any.
OPEN = frozenset({"/health", "/", "/chat", *(f"/assets/{name}" for name in ASSETS)})

# Methods that change nothing.
SAFE = frozenset({"GET", "HEAD", "OPTIONS"})

LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})

# Seconds for which a browser may cache the answer to a preflight. An origin that is removed from the list is refused
# at once all the same, because the request itself is checked too.
PREFLIGHT_S = 600

# Seconds for a request's body to arrive. Too few: a long chat over a slow network is refused. Too many: connections
# whose clients send nothing stay open.
BODY_S = 120.0

JSON = frozenset({b"application/json"})


class Guard:
    """ASGI middleware. With ``key`` None no key is required, and only pages of this machine may send requests.

    Without that rule any web site could make the user's browser send requests to the port, by a form or by a name that
    resolves to 127.0.0.1. Pages on other ports of this machine pass the rule. So without a key every request that may
    change something must have a Content-Type of ``types``, even without a body: a browser lets a page send such a
    header only after a preflight that this server has allowed.

    Preflights are allowed for pages of ``origins`` (``https://chat.example``), which may also read the responses,
    including refusals. A preflight cannot carry a key and is answered without one.
    """

    def __init__(
        self,
        app: ASGIApp,
        key: str | None,
        max_body: int,
        origins: Collection[str] = (),
        types: Collection[bytes] = JSON,
        counted: Callable[[int], None] = lambda status: None,
        patience: float = BODY_S,
    ) -> None:
        """``max_body``: most bytes of a body; ``patience``: seconds for it to arrive. ``types``: allowed Content-Types.
        Browsers must not let pages send any of them without a preflight. ``counted`` receives the status of every
        refusal."""
        self.app, self.types, self.counted = app, types, counted
        self.origins = frozenset(origin.encode() for origin in origins)
        self.key = None if key is None else _digest(key.encode())
        self.max_body, self.patience = max_body, patience

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 400, 401, 403, 408, 413 or 415."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = {name.lower(): value for name, value in scope["headers"]}
        if headers.get(b"origin") in self.origins:
            send = _readable_by(headers[b"origin"], send)
            if scope["method"] == "OPTIONS" and b"access-control-request-method" in headers:
                await _allow(send, headers)
                return
        elif self.origins:
            send = _varied(send)
        refusal = self._refusal(scope, headers)
        if refusal is not None:
            self.counted(refusal[0])
            await refuse(send, scope["path"], *refusal)
            return
        read, until = 0, asyncio.get_running_loop().time() + self.patience
        whole = False

        async def limited() -> Message:
            nonlocal read, whole
            try:
                async with asyncio.timeout_at(None if whole else until):
                    message = await receive()
            except TimeoutError as error:
                raise HTTPException(408, f"the request's body has not come within {self.patience:g} s") from error
            whole = not message.get("more_body", False)
            read += len(message.get("body", b""))
            if read > self.max_body:
                raise HTTPException(413, self._too_large())
            return message

        await self.app(scope, limited, send)

    def _refusal(self, scope: Scope, headers: dict[bytes, bytes]) -> tuple[int, str] | None:
        if self.key is None:
            if host_name(headers.get(b"host", b"")) not in LOOPBACK:
                return 403, (
                    "without an API key the server answers to localhost only, and this request names another host; "
                    "to allow it, start the server with --api-key-file FILE, and send the key"
                )
            if headers.get(b"origin") not in self.origins and of_another_site(headers):
                return 403, (
                    "another site's page may not use this server; start it with --cors ORIGIN for that site, or "
                    "with --api-key-file FILE and send the key"
                )
        elif scope["path"] not in OPEN and not self._right_key(headers):
            return 401, "the API key is missing or wrong; send it as Authorization: Bearer KEY, or as x-api-key: KEY"
        if self.key is None and scope["method"] not in SAFE and _type(headers) not in self.types:
            known = " or ".join(sorted(name.decode() for name in self.types))
            return 415, f"send it as Content-Type: {known}, with a body or without"
        length = headers.get(b"content-length", b"0")
        if not length.isdigit():
            return 400, "Content-Length is no number"
        if int(length[:20]) > self.max_body:
            return 413, self._too_large()
        return None

    def _right_key(self, headers: dict[bytes, bytes]) -> bool:
        """Whether OpenAI's header or Anthropic's has the right key."""
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() != b"bearer":
            given = headers.get(b"x-api-key", b"")
        # Digests all have the same length, so the time of the comparison reveals nothing about the key.
        return hmac.compare_digest(_digest(given.strip()), self.key or b"")

    def _too_large(self) -> str:
        return f"the request is larger than {self.max_body / 1e6:g} MB; send less, or raise max_body_mb"


def _type(headers: dict[bytes, bytes]) -> bytes:
    return headers.get(b"content-type", b"").partition(b";")[0].strip().lower()


def _digest(text: bytes) -> bytes:
    return hashlib.sha256(text).digest()


def host_name(host: bytes) -> str:
    """The name in a Host header, without its port."""
    return _origin_name(b"http://" + host)


def of_another_site(headers: dict[bytes, bytes]) -> bool:
    """Whether a browser says that a page of another machine sends the request. A link that the user has followed counts
    as the user's own request."""
    origin = headers.get(b"origin")
    if origin is not None:
        return _origin_name(origin) not in LOOPBACK
    # What a page loads as an image, a script or a frame has no Origin.
    return headers.get(b"sec-fetch-site") == b"cross-site" and headers.get(b"sec-fetch-dest") != b"document"


def _origin_name(origin: bytes) -> str:
    try:
        return urlsplit(origin.decode("latin-1")).hostname or ""
    except ValueError:
        return ""


def _with(send: Send, *more: tuple[bytes, bytes]) -> Send:
    """``send`` that adds these headers to the response."""

    async def answer(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message["headers"], *more]}
        await send(message)

    return answer


def _readable_by(origin: bytes, send: Send) -> Send:
    exposed = (b"access-control-expose-headers", b"retry-after")
    return _with(_varied(send), (b"access-control-allow-origin", origin), exposed)


def _varied(send: Send) -> Send:
    """``send`` with ``Vary: Origin``, so that a cache does not give one page's response to another."""
    return _with(send, (b"vary", b"origin"))


async def _allow(send: Send, asked: dict[bytes, bytes]) -> None:
    """Answer a preflight: allow whatever is requested, because the request itself is checked later."""
    headers = [
        (b"access-control-allow-methods", b"GET, POST, DELETE, OPTIONS"),
        (b"access-control-allow-headers", asked.get(b"access-control-request-headers", b"")),
        (b"access-control-max-age", str(PREFLIGHT_S).encode()),
    ]
    if asked.get(b"access-control-request-private-network") == b"true":  # from a public page to a private address
        headers.append((b"access-control-allow-private-network", b"true"))
    await send({"type": "http.response.start", "status": 204, "headers": headers})
    await send({"type": "http.response.body", "body": b""})


async def refuse(send: Send, path: str, status: int, message: str) -> None:
    """Answer with an error in the form that the path's dialect has."""
    body = json.dumps(error_object(status, message, path=path)).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
