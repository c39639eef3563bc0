"""A server keeps out pages of other sites, and clients that only hold connections open take nothing from others."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
from collections.abc import AsyncIterator

import httpx
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse
from served_here import on_a_thread

from adaptive.service import crowd
from adaptive.service.guard import Guard
from adaptive.service.peers import TABLES
from adaptive.upstream.parsing import Parsing
from adaptive.upstream.server import Door

app = FastAPI()


@app.api_route("/said", methods=["GET", "POST"])
async def said(request: Request) -> str:
    return (await request.body()).decode()


@app.get("/endless")
async def endless() -> StreamingResponse:
    async def lines() -> AsyncIterator[str]:
        import asyncio

        while True:
            yield "more\n"
            await asyncio.sleep(0.01)

    return StreamingResponse(lines())


def opened(url: str, sent: bytes = b"") -> socket.socket:
    place = httpx.URL(url)
    one = socket.create_connection((place.host, place.port), timeout=10)
    one.sendall(sent)
    return one


def is_closed(one: socket.socket) -> bool:
    one.settimeout(0.01)
    try:
        return one.recv(1) == b""
    except TimeoutError:
        return False
    except OSError:
        return True


@pytest.mark.parametrize("http", [crowd.Connection, Parsing])
def test_connections_without_a_request_keep_nobody_out(http: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crowd, "MOST", 20)
    with on_a_thread(Guard(app, None, 100), http=http) as url, contextlib.ExitStack() as stack:
        running = stack.enter_context(httpx.stream("GET", f"{url}/endless", timeout=10)).iter_lines()
        assert next(running) == "more"
        begun = b"GET /said HTTP/1.1\r\nHost: localhost\r\nX-Long: "
        crowd_of = [stack.enter_context(opened(url, begun if n % 2 else b"")) for n in range(40)]
        assert httpx.post(f"{url}/said", json=1, timeout=10).json() == "1"
        assert sum(map(is_closed, crowd_of)) >= 20
        assert not is_closed(crowd_of[-1])
        assert [next(running) for _ in range(100)] == ["more"] * 100  # the answer that was running goes on


def test_a_body_that_does_not_come_is_not_waited_for() -> None:
    with on_a_thread(Guard(app, None, 100, patience=0.2)) as url:
        head = b"POST /said HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n1"
        with opened(url, head) as slow:
            assert slow.recv(1 << 12).startswith(b"HTTP/1.1 408 ")
        with httpx.stream("GET", f"{url}/endless", timeout=10) as answer:  # which may take as long as it likes
            lines = answer.iter_lines()
            assert [next(lines) for _ in range(60)] == ["more"] * 60


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        ({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors", "Sec-Fetch-Dest": "image"}, 403),
        ({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "iframe"}, 403),
        ({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}, 200),
        ({"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "no-cors", "Sec-Fetch-Dest": "image"}, 200),
        ({"Sec-Fetch-Site": "none", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}, 200),
        ({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Dest": "empty", "Origin": "http://127.0.0.1:3000"}, 200),
    ],
    ids=["image", "frame", "link", "own image", "address bar", "own page by another name"],
)
def test_what_a_page_of_another_site_loads_without_an_origin_is_refused(sent: dict[str, str], status: int) -> None:
    with on_a_thread(Guard(app, None, 100)) as url:
        assert httpx.get(f"{url}/said", headers=sent, timeout=10).status_code == status
        assert httpx.get(f"{url}/said", headers={**sent, "Host": "evil.example"}, timeout=10).status_code == 403


@pytest.mark.skipif(not TABLES[0].exists() or os.getuid() != 0, reason="only Linux tells users apart, and root is each")
@pytest.mark.skipif(shutil.which("curl") is None, reason="another user's program is curl")
def test_by_the_proxy_another_user_of_this_machine_neither_sees_answers_nor_chooses_an_adapter() -> None:
    def status(url: str, user: int) -> str:
        json = ["-X", "POST", "-H", "Content-Type: application/json"]
        command = ["curl", "-s", "-o", "/dev/null", "-w", "%{http_code}", *json, url]
        return subprocess.run(command, user=user, cwd="/", capture_output=True, text=True, check=True).stdout

    with on_a_thread(Door(app, None), http=Parsing) as url:
        for path in ("answers/1", "sessions/me", "adapters/rollback", "adapters/0001/promote"):
            passed = "404"  # by the server behind the door, which has no such path
            assert (status(f"{url}/adaptive/{path}", 0), status(f"{url}/adaptive/{path}", 65534)) == (passed, "403")
