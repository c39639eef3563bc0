"""What stands before every request: the API key, the size of the body, and who may speak to a loopback port."""

from __future__ import annotations

import hashlib
import hmac
import json
from urllib.parse import urlsplit

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from adaptive.service.responses import error_object

# The page itself and its script hold no data; the page asks for the key before it fetches any.
OPEN = frozenset({"/health", "/", "/plotly.js"})

# What changes nothing.
SAFE = frozenset({"GET", "HEAD", "OPTIONS"})

LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})


class Guard:
    """ASGI middleware. ``key`` None asks for none, and then only a page of this machine may speak to us.

    Without the last rule any web site could have the browser of the person at this machine send
    requests to the port, by a form or by a name that resolves to 127.0.0.1. Pages on other ports of this machine
    pass it, so that without a key whatever is not a mere question must say that it is JSON, body or not: a browser
    lets a page send that header only after this server has agreed to it, which it does not.
    """

    def __init__(self, app: ASGIApp, key: str | None, max_body: int) -> None:
        self.app = app
        self.key = None if key is None else _digest(key.encode())
        self.max_body = max_body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 400, 401, 403, 413 or 415."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = {name.lower(): value for name, value in scope["headers"]}
        refusal = self._refusal(scope, headers)
        if refusal is not None:
            await _refuse(send, *refusal)
            return
        read = 0

        async def limited() -> Message:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > self.max_body:
                raise HTTPException(413, self._too_large())
            return message

        await self.app(scope, limited, send)

    def _refusal(self, scope: Scope, headers: dict[bytes, bytes]) -> tuple[int, str] | None:
        if self.key is None:
            if _name(headers.get(b"host", b"")) not in LOOPBACK:
                return 403, "without an API key the server answers to localhost only; check the Host header"
            origin = headers.get(b"origin")
            if origin is not None and _origin_name(origin) not in LOOPBACK:
                return 403, "another site's page may not speak to this server"
        elif scope["path"] not in OPEN and not self._right_key(headers.get(b"authorization", b"")):
            return 401, "the API key is missing or wrong; send it as Authorization: Bearer KEY"
        if self.key is None and scope["method"] not in SAFE and not _is_json(headers.get(b"content-type", b"")):
            return 415, "send it as Content-Type: application/json, with a body or without"
        length = headers.get(b"content-length", b"0")
        if not length.isdigit():
            return 400, "Content-Length is no number"
        if int(length[:20]) > self.max_body:
            return 413, self._too_large()
        return None

    def _right_key(self, authorization: bytes) -> bool:
        scheme, _, given = authorization.partition(b" ")
        # Digests have one length, so the time of the comparison says nothing about the key.
        right = hmac.compare_digest(_digest(given.strip()), self.key or b"")
        return right and scheme.lower() == b"bearer"

    def _too_large(self) -> str:
        return f"the request is larger than {self.max_body / 1e6:g} MB; send less, or raise max_body_mb"


def _is_json(content_type: bytes) -> bool:
    return content_type.partition(b";")[0].strip().lower() == b"application/json"


def _digest(text: bytes) -> bytes:
    return hashlib.sha256(text).digest()


def _name(host: bytes) -> str:
    """The name in a Host header, without its port."""
    return _origin_name(b"http://" + host)


def _origin_name(origin: bytes) -> str:
    try:
        return urlsplit(origin.decode("latin-1")).hostname or ""
    except ValueError:
        return ""


async def _refuse(send: Send, status: int, message: str) -> None:
    body = json.dumps(error_object(status, message)).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
