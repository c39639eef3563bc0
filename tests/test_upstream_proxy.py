"""The proxy in front of a server on raw sockets: bytes pass unchanged, and a broken connection breaks on both sides."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import select
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from conftest import BUNDLED
from transformers import AutoTokenizer
from upstream_server import CLOSE, STREAM, Heard, Script, Scripted, chunk, plain, scripted, served, until

from adaptive.records.log import Log
from adaptive.records.writer import LogWriter
from adaptive.types import Generation
from adaptive.upstream.logbook import Logbook
from adaptive.upstream.proxy import Proxy

CHAT = "/v1/chat/completions"
ASK = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0}
TOKENIZER = AutoTokenizer.from_pretrained(BUNDLED / "target")
# The first token of an answer; the following ids are the next ones.
FIRST = 300


class Stage:
    """A server that runs ``script``, the proxy in front of it, and the proxy's log."""

    def __init__(self, stack: ExitStack, log: Path, script: Script, kind: str, most: int) -> None:
        self.server: Scripted = stack.enter_context(scripted(script, kind))
        self.writer = LogWriter(log)
        self.book = Logbook(self.writer, TOKENIZER, BUNDLED / "target", self.server.url)
        stack.callback(self.writer.close)
        stack.callback(self.book.close)
        self.proxy = Proxy(self.server.url, self.book, most)
        self.url = stack.enter_context(served(self.proxy))
        self.log = log

    def logged(self, count: int) -> list[Generation]:
        """The records, once there are ``count`` of them."""
        until(lambda: self.writer.flush(10) and self._count() >= count)
        with Log(self.log) as log:
            return [one.generation for one in log.generations()]

    def _count(self) -> int:
        with Log(self.log) as log:
            return log.count()


Make = Callable[..., Stage]


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Make]:
    with ExitStack() as stack:
        yield lambda script, kind="llama-server", most=64: Stage(stack, tmp_path / "records.db", script, kind, most)


def logprobs(token: int, *others: int) -> str:
    entry = {"id": token, "token": "t", "bytes": [116], "logprob": -0.25}
    top = [entry, *({"id": other, "token": "o", "logprob": -3.0} for other in others)]
    return json.dumps({"content": [{**entry, "top_logprobs": top}]})


def events(count: int, more: bool, end: bool = True) -> list[bytes]:
    """A stream of llama.cpp's server, with log-probabilities or without."""
    made = []
    for token in range(FIRST, FIRST + count):
        extra = f',"logprobs":{logprobs(token, 7)}' if more else ""
        shown = json.dumps(TOKENIZER.decode([token]))
        made.append(
            b'data: {"choices":[{"finish_reason":null,"index":0,"delta":{"content":%b}%b}],"id":"x"}\n\n'
            % (shown.encode(), extra.encode())
        )
    if end:
        timings = b'{"prompt_n":1,"prompt_ms":2.50,"predicted_ms":10.00}'
        made.append(b'data: {"choices":[{"finish_reason":"stop","index":0,"delta":{}}],"timings":%b}\n\n' % timings)
        made.append(b"data: [DONE]\n\n")
    return made


def say(heard: Heard, connection: socket.socket) -> None:
    """Answer a chat of three tokens, streamed or not."""
    asked = json.loads(heard.body)
    more = bool(asked.get("logprobs"))
    if asked.get("stream"):
        connection.sendall(STREAM + b"".join(map(chunk, events(3, more))) + chunk(b""))
        return
    entries = [json.loads(logprobs(FIRST + n, 7))["content"][0] for n in range(3)]
    extra = f', "logprobs" : {json.dumps({"content": entries})}' if more else ""
    said = (
        f'{{ "choices":[{{"finish_reason":"stop","index":0,"message":{{"content":"\\u006eicom"}}{extra}}}], "n":1.50 }}'
    )
    connection.sendall(plain(said.encode(), more="X-Odd: 1\r\n"))


@pytest.mark.parametrize("streamed", [False, True])
def test_an_answer_comes_byte_for_byte_as_without_the_proxy(stage: Make, streamed: bool) -> None:
    here = stage(say)
    body = {**ASK, "stream": streamed}
    direct, through = (httpx.post(url + CHAT, json=body, timeout=60) for url in (here.server.url, here.url))
    assert through.content == direct.content
    assert b"logprobs" not in through.content
    assert dict(through.headers) == dict(direct.headers)
    sent = json.loads(here.server.asked(CHAT)[-1].body)
    assert (sent["logprobs"], sent["top_logprobs"]) == (True, 20)
    (record,) = here.logged(1)
    assert record.output.tolist() == [FIRST, FIRST + 1, FIRST + 2]
    assert record.finish_reason == "stop"
    assert record.engine == "upstream llama-server"
    assert record.messages[0].content == "hi"
    assert record.supervision is not None
    assert record.supervision.ids.tolist() == [[FIRST, 7], [FIRST + 1, 7], [FIRST + 2, 7]]


def test_a_client_that_asks_for_log_probabilities_gets_its_own(stage: Make) -> None:
    here = stage(say)
    body = {**ASK, "logprobs": True, "top_logprobs": 2}
    direct, through = (httpx.post(url + CHAT, json=body, timeout=60) for url in (here.server.url, here.url))
    assert through.content == direct.content
    assert b"logprobs" in through.content
    assert here.server.asked(CHAT)[0].body == here.server.asked(CHAT)[1].body
    assert here.logged(1)[0].output.tolist() == [FIRST, FIRST + 1, FIRST + 2]


def test_everything_else_passes_unchanged(stage: Make) -> None:
    packed = gzip.compress(b"x" * 500)

    def script(heard: Heard, connection: socket.socket) -> None:
        if heard.path.startswith("/missing"):
            connection.sendall(
                plain(b"no such thing", "text/plain", "404 Not Found", f"X-Why: a\r\nX-Why: b\r\n{CLOSE}")
            )
        elif heard.path.startswith("/packed"):
            connection.sendall(plain(packed, "text/plain", more=f"Content-Encoding: gzip\r\n{CLOSE}"))
        else:
            connection.sendall(plain(heard.body, "application/octet-stream", more=CLOSE))

    here = stage(script)
    with httpx.Client(base_url=here.url) as client:
        missing = client.get("/missing/%7Ea%2Fb?x=1&x=%20")
        assert (missing.status_code, missing.content) == (404, b"no such thing")
        assert missing.headers.get_list("x-why") == ["a", "b"]
        with client.stream("GET", "/packed") as answer:
            assert b"".join(answer.iter_raw()) == packed
        data = bytes(range(256)) * 3000
        assert client.put("/any", content=data, headers={"X-Mine": "ü".encode()}).content == data
        assert client.post("/any", content=iter([b"a", b"b" * 70_000])).content == b"a" + b"b" * 70_000
        client.delete("/any")
    first = here.server.heard[0].head
    assert first.startswith("GET /missing/%7Ea%2Fb?x=1&x=%20 HTTP/1.1")
    assert f"host: {here.server.url[7:]}" in first.lower()
    put = here.server.asked("/any")[0]
    assert "x-mine: \xc3\xbc" in put.head
    assert [heard.head.split()[0] for heard in here.server.heard] == ["GET", "GET", "PUT", "POST", "DELETE"]


def test_a_head_without_end_is_refused(stage: Make) -> None:
    """Many requests in one connection, or one with a long body, are not taken for one."""
    here = stage(lambda heard, connection: connection.sendall(plain(heard.body, more=CLOSE)))
    with httpx.Client(base_url=here.url) as client:
        for _ in range(40):
            assert client.post("/any", content=b"a", headers={"X-Long": 3000 * "a"}).content == b"a"
        assert len(client.post("/any", content=300_000 * b"a", headers={"X-Long": 3000 * "a"}).content) == 300_000
        assert client.get("/any").status_code == 200
    host, port = here.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), 10.0) as connection:
        connection.sendall(b"GET /any HTTP/1.1\r\nHost: a\r\nX-Long: ")
        said, sent = b"", 0
        with contextlib.suppress(OSError):  # refused while it goes on
            while sent < 4 << 20 and not select.select([connection], [], [], 0.01)[0]:
                connection.sendall(4096 * b"a")
                sent += 4096
            said = connection.recv(1000)
    assert sent <= 1 << 20
    assert said.startswith(b"HTTP/1.1 400") or not said
    assert not here.server.asked("/any")[42:]


def spoken(url: str, *parts: bytes) -> bytes:
    """All that comes back, until the connection ends, where ``parts`` are sent one after the other."""
    parsed = httpx.URL(url)
    with socket.create_connection((parsed.host, parsed.port), timeout=10) as client:
        for number, part in enumerate(parts):
            time.sleep(0.05 * (number > 0))
            client.sendall(part)
        return b"".join(iter(lambda: client.recv(1 << 16), b""))


@pytest.mark.parametrize("cut", [None, -5, 20])
def test_an_offer_of_http_2_is_not_taken_up_and_its_body_stays(stage: Make, cut: int | None) -> None:
    """Java's client makes it with every request; its body may come with the head, or behind it."""
    here = stage(say)
    body = json.dumps(ASK).encode()
    head = (
        f"POST {CHAT} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"
        f"HTTP2-Settings: AAEAAEAA\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    ).encode()
    last = b"GET /v1/models HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"
    whole = head + body
    parts = [whole] if cut is None else [whole[:cut], whole[cut:]]
    found = spoken(here.url, *parts, last)
    assert found.startswith(b"HTTP/1.1 200 ")
    assert found.count(b"HTTP/1.1 ") == 2  # the next request in the same connection is answered, too
    sent = here.server.asked(CHAT)[-1]
    assert json.loads(sent.body)["messages"] == ASK["messages"]
    assert "http2-settings" not in sent.head.lower()
    assert len(here.logged(1)) == 1


def test_a_client_of_http_1_0_gets_no_chunks(stage: Make) -> None:
    here = stage(say)
    body = json.dumps({**ASK, "stream": True}).encode()
    head = f"POST {CHAT} HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    wanted = httpx.post(here.url + CHAT, json={**ASK, "stream": True}, timeout=60).content
    for parts in ([head.encode() + body], [head[:7].encode(), head[7:].encode() + body]):
        top, _, found = spoken(here.url, *parts).partition(b"\r\n\r\n")
        assert b"transfer-encoding" not in top.lower()
        assert found == wanted


def test_blanks_around_a_header_are_no_part_of_it(stage: Make) -> None:
    here = stage(say)
    body = json.dumps(ASK).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer k \t\r\nConnection: close\r\n"
    found = spoken(here.url, f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    assert found.startswith(b"HTTP/1.1 200 ")
    assert "\r\nauthorization: bearer k\r\n" in here.server.asked(CHAT)[-1].head.lower()


def test_a_stream_that_says_its_length_has_another_one_without_what_was_added(stage: Make) -> None:
    def said(heard: Heard, connection: socket.socket) -> None:
        body = b"".join(events(3, bool(json.loads(heard.body).get("logprobs"))))
        connection.sendall(plain(body, kind="text/event-stream"))

    here = stage(said)
    answered = httpx.post(here.url + CHAT, json={**ASK, "stream": True}, timeout=60)
    assert answered.content == b"".join(events(3, more=False))
    assert len(here.logged(1)) == 1


def test_an_answer_that_has_not_changed_may_name_a_length(stage: Make) -> None:
    here = stage(
        lambda heard, connection: connection.sendall(b"HTTP/1.1 304 Not Modified\r\nContent-Length: 9\r\n\r\n")
    )
    last = b"GET /slots HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
    assert spoken(here.url, b"GET /slots HTTP/1.1\r\nHost: a\r\n\r\n" + last).count(b"HTTP/1.1 304 ") == 2


def test_without_a_log_requests_pass_as_they_are() -> None:
    body = json.dumps(ASK).encode()
    with scripted(say) as server, served(Proxy(server.url, None, 4)) as url:
        httpx.post(url + CHAT, content=body, timeout=60)
        assert server.asked(CHAT)[0].body == body


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_server_that_breaks_off_breaks_off_for_the_client(stage: Make, at: int) -> None:
    def script(heard: Heard, connection: socket.socket) -> None:
        connection.sendall(STREAM + b"".join(map(chunk, events(at, more=True, end=False))))
        connection.sendall(b"40\r\n" + events(1, more=True)[0][:40])  # half of a chunk

    here = stage(script)
    got: list[bytes] = []
    with ExitStack() as stack:
        answer = stack.enter_context(httpx.stream("POST", here.url + CHAT, json={**ASK, "stream": True}))
        with pytest.raises(httpx.RemoteProtocolError):
            got.extend(answer.iter_raw())
    assert b"".join(got) == b"".join(events(at, more=False, end=False))
    if at:
        (record,) = here.logged(1)
        assert record.finish_reason == "cancelled"
        assert record.output.tolist() == [FIRST + n for n in range(at)]


@pytest.mark.thorough
def test_a_server_may_break_off_at_any_byte(stage: Make) -> None:
    """Complete events are passed on and the record is marked as cancelled; without a complete header comes a 502."""
    whole = STREAM + b"".join(map(chunk, events(3, more=True))) + chunk(b"")

    def script(heard: Heard, connection: socket.socket) -> None:
        connection.sendall(whole[: json.loads(heard.body)["cut"]])

    here = stage(script)
    sent = [len(STREAM + b"".join(map(chunk, events(3, more=True)[:count]))) for count in range(6)]
    cuts = [
        *range(1, len(whole) - 1, 29),
        *(place - 2 for place in sent[1:]),
    ]  # after an event, before its chunk's end
    ended = []
    for cut in cuts:
        got: list[bytes] = []
        with httpx.stream("POST", here.url + CHAT, json={**ASK, "stream": True, "cut": cut}) as answer:
            if cut < len(STREAM):
                assert answer.status_code == 502
                continue
            with pytest.raises(httpx.RemoteProtocolError):
                got.extend(answer.iter_raw())
        came = sum(place - 2 <= cut for place in sent[1:])
        assert b"".join(got) == b"".join(events(3, more=False)[:came])
        ended += ["stop" if came == 5 else "cancelled"] * (came > 0)
    assert [record.finish_reason for record in here.logged(len(ended))] == ended


def test_a_server_that_breaks_off_an_answer_in_one_piece_is_said(stage: Make) -> None:
    said = plain(b'{"choices":[{"index":0,"message":{"content":"all of it"}}]}')
    here = stage(lambda heard, connection: connection.sendall(said[:-20]))
    answer = httpx.post(here.url + CHAT, json=ASK, timeout=60)
    assert answer.status_code == 502
    assert here.server.url in answer.json()["error"]["message"]
    assert here.proxy.counts.cut == 1


def test_a_client_that_closes_a_stream_at_its_last_event_has_had_all_of_it(stage: Make) -> None:
    """OpenAI's own client does this, since nothing after ``[DONE]`` is of use to it."""

    def script(heard: Heard, connection: socket.socket) -> None:
        connection.sendall(STREAM + b"".join(map(chunk, events(3, more=True))))
        connection.recv(1)  # returns when the connection is closed

    here = stage(script)
    with httpx.stream("POST", here.url + CHAT, json={**ASK, "stream": True}) as answer:
        for line in answer.iter_lines():
            if line == "data: [DONE]":
                break
    (record,) = here.logged(1)
    assert record.finish_reason == "stop"
    assert here.proxy.counts.cut == 0


def test_a_client_that_goes_ends_the_server_s_work(stage: Make) -> None:
    ended: list[float] = []

    def script(heard: Heard, connection: socket.socket) -> None:
        connection.sendall(STREAM)
        try:
            for number in range(3000):
                connection.sendall(chunk(events(number + 1, more=True, end=False)[-1] if number < 50 else b": .\n\n"))
                time.sleep(0.01)
        except OSError:
            ended.append(time.monotonic())

    here = stage(script)
    with httpx.stream("POST", here.url + CHAT, json={**ASK, "stream": True}) as answer:
        next(answer.iter_raw())
    until(lambda: bool(ended))
    (record,) = here.logged(1)
    assert record.finish_reason == "cancelled"
    assert record.output.tolist()[:1] == [FIRST]
    assert here.proxy.counts.cut == 1


def test_a_client_that_goes_before_the_answer_ends_the_server_s_work(stage: Make) -> None:
    gone: list[bool] = []

    def script(heard: Heard, connection: socket.socket) -> None:
        connection.settimeout(20)
        gone.append(connection.recv(1) == b"")

    here = stage(script)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(here.url + CHAT, json=ASK, timeout=0.5)
    until(lambda: bool(gone))
    assert gone == [True]


def test_an_error_of_the_server_is_passed_on(stage: Make) -> None:
    said = plain(b'{"error":{"message":"busy"}}', status="503 Service Unavailable", more="Retry-After: 7\r\n")
    here = stage(lambda heard, connection: connection.sendall(said))
    answer = httpx.post(here.url + CHAT, json=ASK, timeout=60)
    assert (answer.status_code, answer.json(), answer.headers["retry-after"]) == (
        503, {"error": {"message": "busy"}}, "7",
    )  # fmt: skip
    assert len(here.server.asked(CHAT)) == 1


def test_an_answer_that_never_begins_is_said_and_its_request_is_not_sent_twice(stage: Make) -> None:
    here = stage(lambda asked, connection: None)
    answer = httpx.post(here.url + CHAT, json=ASK, timeout=60)
    assert answer.status_code == 502
    assert "closed the connection without an answer" in answer.json()["error"]["message"]
    assert len(here.server.asked(CHAT)) == 1


def test_a_server_that_is_down_is_said_in_one_line() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with served(Proxy(url, None, 4)) as here:
            answer = httpx.post(here + CHAT, json=ASK, timeout=60)
    assert answer.status_code == 502
    assert url in answer.json()["error"]["message"]


def test_the_login_of_the_servers_address_is_said_to_nobody(caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        place = f"127.0.0.1:{taken.getsockname()[1]}"
        with served(Proxy(f"http://me:secret@{place}", None, 4)) as here:
            answer = httpx.post(here + CHAT, json=ASK, timeout=60)
            status = httpx.get(here + "/adaptive/upstream")
    assert status.json()["upstream"] == f"http://{place}"
    assert f"http://{place} cannot be reached" in answer.json()["error"]["message"]
    assert "secret" not in answer.text + status.text + caplog.text


def _many(stage: Make, requests: int, most: int) -> None:
    def script(heard: Heard, connection: socket.socket) -> None:
        time.sleep(0.002)
        say(heard, connection)

    here = stage(script, most=most)

    async def ask() -> list[bytes]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(limits=limits, timeout=120) as client:
            answers = await asyncio.gather(
                *(client.post(here.url + CHAT, json={**ASK, "stream": n % 2 == 0}) for n in range(requests))
            )
        return [answer.content for answer in answers]

    said = asyncio.run(ask())
    assert set(said[0::2]) == {b"".join(events(3, more=False))}
    assert len(set(said[1::2])) == 1
    assert here.server.most <= most + 1  # plus one request by the log itself
    until(lambda: here.book.counts["logged"] + here.book.counts["missed"] == requests, 120)
    assert len(here.logged(requests)) == requests


def test_many_requests_at_once_lose_none(stage: Make) -> None:
    _many(stage, 100, 8)


@pytest.mark.long
def test_a_thousand_requests_at_once_lose_none(stage: Make) -> None:
    _many(stage, 1000, 16)
