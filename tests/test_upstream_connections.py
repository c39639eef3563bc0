"""The connections of the proxy to its server: which one a request gets, and what is made of what comes back."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import ssl
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from adaptive.upstream import connections
from adaptive.upstream.connections import Connections, ServerCutError, UnreachableError, UnsendableError

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
LENGTH = [(b"content-length", b"5")]


@dataclass
class Server:
    """Answers the requests of each connection with the next ones of its ``answers``, and closes it behind the last. An
    empty answer closes it at once. ``heard``: the requests of each connection, as they came."""

    answers: list[list[bytes]]
    heard: list[list[bytes]] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)
    url: str = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = len(self.heard)
        self.heard.append([])
        for answer in self.answers[number] if number < len(self.answers) else ():
            if not (request := await _request(reader)):
                break
            self.heard[number].append(request)
            writer.write(answer)
        with contextlib.suppress(ConnectionError):
            writer.close()
            await reader.read()
        self.ended.append(number)


async def _request(reader: asyncio.StreamReader) -> bytes:
    """A request with a body of known length, or in chunks."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except (asyncio.IncompleteReadError, ConnectionError):
        return b""
    if b"chunked" in head:
        return head + await reader.readuntil(b"0\r\n\r\n")
    lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    return head + await reader.readexactly(int(lengths[0].split(b":")[1]) if lengths else 0)


Test = Callable[[Connections, Server], Awaitable[None]]


def run(answers: list[list[bytes]], test: Test, change: Callable[[str], str] = str, **options: object) -> Server:
    """Run ``test`` against a server with these answers; ``change`` makes the address that it is reached by."""
    there = Server(answers)

    async def both() -> None:
        server = await asyncio.start_server(there.serve, "127.0.0.1", 0, **options)  # type: ignore[arg-type]
        async with server:
            there.url = change(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
            here = Connections(there.url, 8)
            await test(here, there)
            here.close()

    asyncio.run(asyncio.wait_for(both(), 60))
    return there


async def get(here: Connections, target: bytes = b"/") -> bytes:
    async with here.ask("GET", target, []) as answer:
        assert answer.status == 200
        return await answer.read()


async def post(here: Connections, body: bytes | AsyncIterator[bytes], headers: connections.Headers = ()) -> bytes:
    async with here.ask("POST", b"/", headers, body) as answer:
        return await answer.read()


async def pieces(*some: bytes) -> AsyncIterator[bytes]:
    for one in some:
        yield one


async def until(true: Callable[[], bool]) -> None:
    while not true():  # ``run`` ends a test that waits for too long
        await asyncio.sleep(0.005)


def test_a_connection_serves_one_request_after_the_other() -> None:
    async def test(here: Connections, there: Server) -> None:
        assert [await get(here), await post(here, b"hello"), await get(here)] == [b"ok"] * 3

    there = run([[OK] * 3], test)
    assert [one.split(b" ")[0] for one in there.heard[0]] == [b"GET", b"POST", b"GET"]


def test_two_requests_at_a_time_have_a_connection_each() -> None:
    async def test(here: Connections, there: Server) -> None:
        assert await asyncio.gather(get(here), get(here)) == [b"ok"] * 2
        assert await get(here) == b"ok"

    there = run([[OK] * 3] * 2, test)
    assert sorted(map(len, there.heard)) == [1, 2]


def test_a_request_in_a_connection_that_is_being_closed_is_sent_again() -> None:
    async def test(here: Connections, there: Server) -> None:
        assert await get(here) == b"ok"
        assert await post(here, b"hello") == b"ok"

    there = run([[OK, b""], [OK]], test)
    assert there.heard[0][1] == there.heard[1][0]


def test_a_request_in_a_new_connection_is_sent_once() -> None:
    async def test(here: Connections, there: Server) -> None:
        with pytest.raises(UnreachableError, match="closed the connection without an answer"):
            await post(here, b"hello")

    assert len(run([[b""], [OK]], test).heard) == 1


def test_a_body_in_pieces_has_a_connection_of_its_own_and_its_framing() -> None:
    async def test(here: Connections, there: Server) -> None:
        assert await get(here) == b"ok"
        assert await post(here, pieces(b"he", b"llo"), LENGTH) == b"ok"
        assert await post(here, pieces(b"he", b"llo"), [(b"transfer-encoding", b"chunked")]) == b"ok"

    there = run([[OK]] * 3, test)
    assert there.heard[1][0].endswith(b"\r\n\r\nhello")
    assert there.heard[2][0].endswith(b"\r\n\r\n2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n")


def test_a_connection_that_the_server_closed_or_that_was_idle_for_long_is_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def closed(here: Connections, there: Server) -> None:
        assert await get(here) == b"ok"
        await asyncio.sleep(0.05)  # the server closes it behind its only answer
        assert await post(here, b"hello") == b"ok"

    there = run([[OK]] * 4, closed)
    assert sorted(map(len, there.heard))[-2:] == [1, 1]

    async def old(here: Connections, there: Server) -> None:
        assert await get(here) == b"ok"
        await until(lambda: there.ended == [0])  # without another request
        assert await get(here) == b"ok"

    monkeypatch.setattr(connections, "IDLE_S", 0.2)
    assert list(map(len, run([[OK] * 2] * 2, old).heard)) == [1, 1]


def test_where_the_server_closes_each_connection_the_next_one_is_opened_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(here: Connections, there: Server) -> None:
        for number in range(1, 4):
            assert await post(here, b"hello") == b"ok"
            await until(lambda number=number: len(there.heard) > number)  # type: ignore[misc]
        await asyncio.sleep(0.1)
        assert len(there.heard) == 4  # one waits for the next request

    monkeypatch.setattr(connections, "IDLE_S", 60.0)
    assert list(map(len, run([[OK]] * 4, test).heard)) == [1, 1, 1, 0]
    monkeypatch.setattr(connections, "IDLE_S", 0.1)

    async def unused(here: Connections, there: Server) -> None:
        assert await post(here, b"hello") == b"ok"
        await until(lambda: sorted(there.ended) == [0, 1])  # it does not stay for long
        assert len(there.heard) == 2

    run([[OK]] * 4, unused)


def test_an_answer_that_is_not_read_to_its_end_ends_its_connection() -> None:
    async def test(here: Connections, there: Server) -> None:
        async with here.ask("GET", b"/", []) as answer:
            async for piece in answer.pieces():
                assert piece == b"ab"
                break
        await until(lambda: there.ended == [0])

    run([[CHUNKED + b"2\r\nab\r\n", OK]], test)


@pytest.mark.parametrize(
    ("said", "body"),
    [
        (b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + OK, b"ok"),
        (b"HTTP/1.0 200 OK\r\n\r\nuntil it is closed", b"until it is closed"),
        (CHUNKED + b"2\r\nab\r\n3\r\ncde\r\n0\r\n\r\n", b"abcde"),
        (b"HTTP/1.1 204 No Content\r\n\r\n", b""),
    ],
    ids=["1xx", "until-closed", "chunked", "none"],
)
def test_bodies_of_every_kind_are_read(said: bytes, body: bytes) -> None:
    async def test(here: Connections, there: Server) -> None:
        async with here.ask("GET", b"/", []) as answer:
            assert await answer.read() == body

    run([[said]], test)


@pytest.mark.parametrize(
    "said", [OK.replace(b": 2", b": 3"), CHUNKED + b"5\r\nab", CHUNKED + b"2\r\nab\r\n", CHUNKED + b"x"]
)
def test_a_body_that_is_broken_off_is_told_apart(said: bytes) -> None:
    async def test(here: Connections, there: Server) -> None:
        with pytest.raises(ServerCutError):
            await get(here)

    run([[said]], test)


@pytest.mark.parametrize("said", [b"SSH-2.0\r\n\r\n", b"HTTP/1.1 200 OK\r\nX: " + b"x" * 200_000, b"HTTP/1.1 2"])
def test_what_is_no_answer_is_an_error_of_the_server(said: bytes) -> None:
    async def test(here: Connections, there: Server) -> None:
        with pytest.raises(UnreachableError):
            await get(here)

    run([[said]], test)


def test_the_address_may_have_a_path_and_a_login() -> None:
    async def test(here: Connections, there: Server) -> None:
        async with here.ask("GET", "/a/ü?q=1 2".encode(), [(b"authorization", b"Bearer x"), (b"host", b"y")]) as answer:
            assert await answer.read() == b"ok"

    there = run([[OK]], test, lambda url: url.replace("//", "//me:p%40ss@") + "/under")
    head = there.heard[0][0].split(b"\r\n")
    assert head[0] == b"GET /under/a/%C3%BC?q=1%202 HTTP/1.1"
    named = {name.lower(): value for name, _, value in (line.partition(b": ") for line in head[1:-2])}
    assert named == {
        b"host": there.url.partition("@")[2].partition("/")[0].encode(),
        b"authorization": b"Basic " + base64.b64encode(b"me:p@ss"),
    }


def test_a_path_with_other_characters_is_quoted() -> None:
    async def test(here: Connections, server: Server) -> None:
        assert await get(here, b"/v1/models") == b"ok"

    server = run([[OK]], test, change=lambda url: f"{url}/mod\u00e8le a")
    assert server.heard[0][0].startswith(b"GET /mod%C3%A8le%20a/v1/models HTTP/1.1\r\n")


def test_what_http_cannot_carry_is_refused() -> None:
    async def test(here: Connections, server: Server) -> None:
        with pytest.raises(UnsendableError):
            async with here.ask("GET", b"/", [(b"x", b"a\nb")]):
                pass

    run([[]], test)


def test_https_servers_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, key = tmp_path / "own.pem", tmp_path / "key.pem"
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    made += ["-addext", "subjectAltName=IP:127.0.0.1", "-out", str(own), "-keyout", str(key)]
    try:
        subprocess.run(made, check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("openssl is not installed")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(own, key)

    async def refused(here: Connections, there: Server) -> None:
        with pytest.raises(UnreachableError, match="certificate"):
            await get(here)

    async def taken(here: Connections, there: Server) -> None:
        assert [await get(here), await get(here)] == [b"ok"] * 2

    def secure(url: str) -> str:
        return url.replace("http", "https")

    run([[OK]], refused, secure, ssl=context)
    monkeypatch.setenv("SSL_CERT_FILE", str(own))
    assert list(map(len, run([[OK, OK]], taken, secure, ssl=context).heard)) == [2]


def test_nobody_there() -> None:
    async def test(here: Connections, there: Server) -> None:
        with pytest.raises(UnreachableError, match=r"^Connection refused$"):
            await get(here)

    run([], test, lambda url: "http://127.0.0.1:1")
