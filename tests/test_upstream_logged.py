"""What the proxy asks a server for and logs, and what it leaves out."""

from __future__ import annotations

import gzip
import json
import shutil
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from conftest import BUNDLED
from served_here import on_a_thread
from test_upstream_proxy import ASK, CHAT, FIRST, TOKENIZER, Make, Stage, logprobs, say, stage
from upstream_server import CLOSE, STREAM, Heard, Script, chunk, plain, scripted, served, until

from adaptive.records.writer import LogWriter
from adaptive.upstream.logbook import MOST_REASONS, Logbook
from adaptive.upstream.proxy import Proxy
from adaptive.upstream.server import Door

__all__ = ["stage"]  # a fixture


@pytest.mark.parametrize(
    ("said", "marks", "counted", "logged"),
    [
        ({"reasoning": " n"}, False, False, False),
        ({"reasoning_content": " n"}, False, False, False),
        ({"reasoning": " n", "reasoning_content": " n"}, False, True, False),
        ({"tool_calls": [{"index": 0, "function": {"name": "f", "arguments": ""}}]}, False, False, False),
        ({"reasoning": " n"}, True, False, True),
        ({"reasoning": " n"}, True, True, True),
    ],
)
def test_a_stream_without_the_marks_of_its_reasoning_is_not_logged(
    stage: Make, said: dict[str, str], marks: bool, counted: bool, logged: bool
) -> None:
    """vLLM shows nothing of the token between reasoning and answer. Older versions do not report it either; newer ones
    do, in an event that they do not send without log-probabilities."""
    mark, end = 400, 1

    def script(heard: Heard, connection: socket.socket) -> None:
        asked = json.loads(heard.body)
        deltas = [(FIRST, said), (mark, {}), (FIRST + 1, {"content": "ic"}), (end, {"content": ""})]
        if not (marks and asked.get("logprobs")):
            del deltas[1]
        made = []
        for token, delta in deltas:
            choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": "stop" if token == end else None}
            if asked.get("logprobs"):
                choice["logprobs"] = json.loads(logprobs(token, 7))
            made.append({"id": "x", "choices": [choice]})
        if counted:
            made.append({"id": "x", "choices": [], "usage": {"completion_tokens": 4}})
        lines = [f"data: {json.dumps(event)}\n\n".encode() for event in made]
        connection.sendall(STREAM + b"".join(map(chunk, [*lines, b"data: [DONE]\n\n"])) + chunk(b""))

    here = stage(script, kind="vllm")
    direct, through = (
        httpx.post(url + CHAT, json={**ASK, "stream": True}, timeout=60) for url in (here.server.url, here.url)
    )
    assert through.content == direct.content
    until(lambda: here.book.counts["logged"] + here.book.counts["missed"] == 1)
    assert here.book.counts["logged"] == logged, here.book.problems
    for record in here.logged(1) if logged else ():
        assert record.output.tolist() == [FIRST, mark, FIRST + 1, end]
        assert record.text == " nic"


def test_an_answer_that_is_not_certain_does_not_keep_the_others_from_the_log(stage: Make) -> None:
    def script(heard: Heard, connection: socket.socket) -> None:
        choices = [{"index": n, "message": {"content": "nicom"}, "finish_reason": "stop"} for n in range(3)]
        for choice in choices[1:]:
            tokens = [json.loads(logprobs(token, 7))["content"][0] for token in range(FIRST, FIRST + 3)]
            choice["logprobs"] = {"content": tokens}
        connection.sendall(plain(json.dumps({"choices": choices}).encode()))

    here = stage(script)
    assert httpx.post(here.url + CHAT, json={**ASK, "n": 3}, timeout=60).status_code == 200
    assert [record.output.tolist() for record in here.logged(2)] == [[FIRST, FIRST + 1, FIRST + 2]] * 2
    assert here.book.counts == {"missed": 1, "logged": 2, "supervised": 2}


def test_logging_waits_while_a_request_is_open_but_not_for_ever(stage: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()

    def script(heard: Heard, connection: socket.socket) -> None:
        if b"wait" in heard.body:
            over.wait(60)
        say(heard, connection)

    here = stage(script)
    with ThreadPoolExecutor(1) as pool:
        for patience_s, logged in ((60.0, 0), (0.2, 2)):  # beside the open request
            monkeypatch.setattr("adaptive.upstream.logbook.PATIENCE_S", patience_s)
            waiting = pool.submit(httpx.post, here.url + CHAT, json={**ASK, "user": "wait"}, timeout=60)
            until(lambda: len(here.server.asked(CHAT)) % 2 == 1)
            httpx.post(here.url + CHAT, json=ASK, timeout=60)
            if logged:
                here.logged(3)
            else:
                time.sleep(0.5)
                assert here.book.counts["logged"] == 0
            over.set()
            assert waiting.result().status_code == 200
            here.logged(2 + logged)
            over.clear()


def test_nothing_is_added_and_nothing_logged_for_who_opts_out(stage: Make) -> None:
    here = stage(say)
    body = json.dumps(ASK).encode()
    httpx.post(here.url + CHAT, content=body, headers={"X-Adaptive-Record": "off"}, timeout=60)
    private = json.dumps({**ASK, "store": False}).encode()
    httpx.post(here.url + CHAT, content=private, timeout=60)
    assert [heard.body for heard in here.server.asked(CHAT)] == [body, private]
    assert "adaptive-record" not in here.server.heard[0].head.lower()
    httpx.post(here.url + CHAT, json=ASK, timeout=60)
    assert len(here.logged(1)) == 1
    assert httpx.get(here.url + "/adaptive/upstream", timeout=60).json()["private"] == 2


def test_what_a_server_does_not_take_is_left_out(
    stage: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The client gets the server's reply to its own request, be it an answer or an error. It is tried again later."""

    def script(heard: Heard, connection: socket.socket) -> None:
        asked = json.loads(heard.body)
        if asked.get("top_logprobs", 0) > 5:
            connection.sendall(plain(b'{"error":"too many"}', status="400 Bad Request"))
        elif asked.get("wrong"):
            connection.sendall(plain(b'{"error":"wrong"}', status="400 Bad Request"))
        else:
            say(heard, connection)

    here = stage(script, kind="vllm")
    wrong = httpx.post(here.url + CHAT, json={**ASK, "wrong": 1}, timeout=60)
    assert (wrong.status_code, wrong.content) == (400, b'{"error":"wrong"}')
    for _ in range(3):
        assert httpx.post(here.url + CHAT, json=ASK, timeout=60).status_code == 200
    assert tops(here) == [20, None, 20, None, 20, None, 5]
    assert here.proxy.status()["alternatives"] == 5
    monkeypatch.setattr("adaptive.upstream.discovery.RETRIED_S", 0.0)
    assert httpx.post(here.url + CHAT, json=ASK, timeout=60).status_code == 200
    monkeypatch.undo()
    assert httpx.post(here.url + CHAT, json=ASK, timeout=60).status_code == 200
    assert tops(here)[-3:] == [20, None, 5]
    assert sum("5 are asked for" in record.getMessage() for record in caplog.records) == 1


def tops(here: Stage) -> list[int | None]:
    """The alternatives that each chat was asked with."""
    return [json.loads(heard.body).get("top_logprobs") for heard in here.server.asked(CHAT)]


def test_a_server_that_fails_now_and_then_is_asked_for_as_many(stage: Make) -> None:
    def script(heard: Heard, connection: socket.socket) -> None:
        if len(here.server.asked(CHAT)) % 3 == 1:
            connection.sendall(plain(b'{"error":"busy"}', status="500 Internal Server Error"))
        else:
            say(heard, connection)

    here = stage(script)
    for _ in range(6):
        assert httpx.post(here.url + CHAT, json=ASK, timeout=60).status_code == 200
    assert tops(here) == [20, None, 20] * 3


def test_what_is_asked_of_a_server_is_not_fixed_while_it_is_loading(stage: Make) -> None:
    loading = plain(b'{"error":"loading"}', status="503 Service Unavailable", more=CLOSE)
    here = stage(lambda h, c: c.sendall(loading) if h.path == "/v1/models" else say(h, c), kind="loading")
    httpx.post(here.url + CHAT, json=ASK, timeout=60)
    here.logged(1)
    assert here.proxy.status()["alternatives"] is None
    assert not here.server.asked("/apply-template")
    here.server.kind = "llama-server"
    httpx.post(here.url + CHAT, json=ASK, timeout=60)
    assert [record.engine for record in here.logged(2)] == ["upstream unknown", "upstream llama-server"]
    assert tops(here) == [20, 20]
    assert here.server.asked("/apply-template")  # its prompts are checked as those of a llama-server


def test_a_log_that_fails_touches_no_request(stage: Make) -> None:
    here = stage(say)
    here.writer.close()  # from now on every write raises
    for _ in range(3):
        assert httpx.post(here.url + CHAT, json=ASK, timeout=60).status_code == 200
    until(lambda: here.book.counts["missed"] == 3)
    assert "RuntimeError" in next(iter(here.book.problems))


def test_what_is_no_chat_of_text_is_not_logged_and_passes(stage: Make) -> None:
    def script(heard: Heard, connection: socket.socket) -> None:
        if heard.body.startswith(b'{"messages": ['):
            say(heard, connection)
        else:
            connection.sendall(plain(b'{"error": "what?"}', status="400 Bad Request"))

    here = stage(script)
    picture = {"type": "image_url", "image_url": {"url": "data:"}}
    answer = httpx.post(
        here.url + CHAT, content=json.dumps({"messages": [{"role": "user", "content": [picture]}]}).encode(), timeout=60
    )
    assert answer.status_code == 200
    broken = [b"", b"[1]", b'{"messages":', b"\xff"]
    for body in broken:
        assert httpx.post(here.url + CHAT, content=body, timeout=60).status_code == 400
    assert [heard.body for heard in here.server.asked(CHAT)[1:]] == broken
    until(lambda: here.book.counts["missed"] == 1)
    assert "more than text" in next(iter(here.book.problems))


def test_answers_of_other_models_pass_and_are_not_logged(stage: Make) -> None:
    """A server with several models, of which the second is another name of the first."""
    listed = [
        {"id": "base", "owned_by": "vllm", "root": "/base", "parent": None},
        {"id": "name", "owned_by": "vllm", "root": "/base", "parent": None},
        {"id": "lora", "owned_by": "vllm", "root": "/lora", "parent": "base"},
    ]
    said = plain(json.dumps({"data": listed}).encode(), more=CLOSE)
    here = stage(lambda h, c: c.sendall(said) if h.path == "/v1/models" else say(h, c), kind="several")
    body = json.dumps({**ASK, "model": "lora"}).encode()
    assert httpx.post(here.url + CHAT, content=body, timeout=60).status_code == 200
    assert here.server.asked(CHAT)[0].body == body
    assert here.proxy.status()["log"]["missed"] == 1
    assert "another model" in next(iter(here.proxy.status()["log"]["why_not"]))
    for more in ({"model": "base"}, {"model": "name"}, {}):
        assert httpx.post(here.url + CHAT, json={**ASK, **more}, timeout=60).status_code == 200
    assert len(here.logged(3)) == 3
    assert here.book.counts["missed"] == 1
    assert len(here.server.asked("/v1/models")) == 1


def listing(models: list[dict[str, str]]) -> Script:
    """A server that lists these models, as they are when it is asked, and answers anything else."""

    def script(heard: Heard, connection: socket.socket) -> None:
        if heard.path == "/v1/models":
            connection.sendall(plain(json.dumps({"data": models}).encode(), more=CLOSE))
        else:
            say(heard, connection)

    return script


def test_a_model_that_a_server_gets_later_is_not_the_target(stage: Make) -> None:
    """LM Studio with a second model that is downloaded later, vLLM with an adapter that is loaded later."""
    listed = [{"id": "first", "owned_by": "llamacpp"}]

    here = stage(listing(listed), kind="several")
    for model in ("any", "any", "first"):
        assert httpx.post(here.url + CHAT, json={**ASK, "model": model}, timeout=60).status_code == 200
    assert len(here.server.asked("/v1/models")) == 1
    here.logged(3)
    listed.insert(0, {"id": "second", "owned_by": "llamacpp"})
    for model in ("second", "first"):
        assert httpx.post(here.url + CHAT, json={**ASK, "model": model}, timeout=60).status_code == 200
    here.logged(4)
    assert here.book.counts["missed"] == 1
    assert here.proxy.discovery.served is not None
    assert here.proxy.discovery.served.name == "first"
    assert len(here.server.asked("/v1/models")) == 2


def test_answers_of_a_model_that_took_the_place_of_the_target_are_not_logged(
    stage: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The server was started again with another model, and answers whatever name a request has."""
    listed = [{"id": "first", "owned_by": "llamacpp"}]

    def ask(name: str | None) -> None:
        assert httpx.post(here.url + CHAT, json={**ASK, "model": name}, timeout=60).status_code == 200

    monkeypatch.setattr("adaptive.upstream.discovery.AGAIN_S", 0.0)
    here = stage(listing(listed), kind="several")
    ask("first")
    here.logged(1)
    for name, gone in (("second", True), ("first", False)):
        listed[0]["id"] = name
        ask("first")  # beside which the list is asked for
        until(lambda gone=gone: here.proxy.discovery.served.gone == gone)  # type: ignore[misc, union-attr]
        before = here.book.counts["missed"]
        for other in ("first", "any", None):
            ask(other)
        until(lambda before=before, gone=gone: here.book.counts["missed"] == before + 3 * gone)  # type: ignore[misc]
    assert len(here.logged(5)) == 5
    said = [record.getMessage() for record in caplog.records if "any more" in record.getMessage()]
    assert len(said) == 1
    assert "does not list first any more, and nothing is logged until it does" in said[0]


def test_a_router_is_asked_about_the_model_that_a_request_names(stage: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tokens, and what it draws with; the latter once more, while it does not say that, and now and then."""
    loading, tokens, heat = True, [5, 6, 7], 0.8

    def script(heard: Heard, connection: socket.socket) -> None:
        path, _, query = heard.path.partition("?")
        asked = json.loads(heard.body) if heard.body else {"model": query.removeprefix("model=")}
        said: dict[str, object] = {"prompt": "another template"} if path == "/apply-template" else {"tokens": tokens}
        if path == "/props":
            said = {"default_generation_settings": {"params": {} if loading else {"temperature": heat, "top_k": 40}}}
        elif path == CHAT:
            choice = {"index": 0, "finish_reason": "stop", "message": {"content": "nicom"}}
            choice["logprobs"] = {"content": [json.loads(logprobs(FIRST + n, 7))["content"][0] for n in range(3)]}
            said = {"choices": [choice], "usage": {"prompt_tokens": len(tokens)}}
        status = "200 OK" if asked.get("model") == "m/m" else "400 Bad Request"
        connection.sendall(plain(json.dumps(said).encode(), status=status, more=CLOSE))

    monkeypatch.setattr("adaptive.upstream.logbook.AGAIN_S", 0.0)
    here = stage(script)
    here.server.missing = ()
    body = {"messages": ASK["messages"], "model": "m/m"}
    httpx.post(here.url + CHAT, json=body, timeout=60)
    here.logged(1)
    loading = False
    httpx.post(here.url + CHAT, json=body, timeout=60)
    first, second = here.logged(2)
    assert first.prompt.tolist() == second.prompt.tolist() == tokens
    assert (first.sampling.temperature, second.sampling.temperature, second.sampling.top_k) == (1.0, 0.8, 40)
    heat = 0.5  # it was started again
    monkeypatch.setattr("adaptive.upstream.logbook.ANEW_S", 0.0)
    httpx.post(here.url + CHAT, json=body, timeout=60)
    assert here.logged(3)[-1].sampling.temperature == 0.5


def test_a_log_that_cannot_be_written_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "state"
    folder.mkdir()
    with scripted(say) as server, LogWriter(folder / "records.db", retry_s=0.05) as writer:
        book = Logbook(writer, TOKENIZER, BUNDLED / "target", server.url)
        shutil.rmtree(folder)
        folder.touch()  # a file is in the place of the folder

        def problem() -> str | None:
            return httpx.get(url + "/adaptive/upstream", timeout=60).json()["log"]["problem"]

        with served(Proxy(server.url, book, 4)) as url:
            assert problem() is None
            httpx.post(url + CHAT, json=ASK, timeout=60)
            until(lambda: "cannot be written" in (problem() or ""))
            for number in range(3):
                httpx.post(url + CHAT, json=ASK, timeout=60)
                until(lambda number=number: book.counts["logged"] == number + 2)
            assert caplog.text.count("cannot be written") == 1
        book.close()
        folder.unlink()


def test_a_compressed_answer_is_counted_with_its_reason(stage: Make) -> None:
    packed = gzip.compress(b'{"choices": []}')
    here = stage(lambda h, c: c.sendall(plain(packed, more=f"Content-Encoding: gzip\r\n{CLOSE}")))
    for asked in (ASK, {**ASK, "logprobs": True}):
        assert httpx.post(here.url + CHAT, json=asked, timeout=60).json() == {"choices": []}
    assert all("accept-encoding: identity" in heard.head.lower() for heard in here.server.asked(CHAT))
    assert list(here.book.problems.values()) == [2]
    assert "compresses" in next(iter(here.book.problems))


@pytest.mark.parametrize(
    "more", [{"echo": True}, {"best_of": 3}, {"use_beam_search": True}, {"continue_final_message": True}]
)
def test_what_is_not_written_as_it_is_shown_is_not_logged(stage: Make, more: dict[str, object]) -> None:
    here = stage(say)
    for path, asked in (("/v1/completions", {"prompt": "Once"}), (CHAT, ASK)):
        body = json.dumps({**asked, **more}).encode()
        direct, through = (httpx.post(url + path, content=body, timeout=60) for url in (here.server.url, here.url))
        assert through.content == direct.content
        assert {heard.body for heard in here.server.asked(path)} == {body}
    httpx.post(here.url + CHAT, json=ASK, timeout=60)
    assert len(here.logged(1)) == 1
    assert here.book.counts["missed"] == 2
    assert next(iter(more)) in next(iter(here.book.problems))


def test_reasons_are_counted_without_their_numbers_and_do_not_become_many(stage: Make) -> None:
    book = stage(say).book
    for number in range(300):
        book.leave_out(f"the server counts {number} tokens")
    assert book.problems == {"the server counts N tokens": 300}
    for number in range(300):
        book.leave_out("x" * number)
    assert len(book.problems) <= MOST_REASONS + 1
    assert sum(book.problems.values()) == book.counts["missed"] == 600


def test_a_preflight_needs_no_key() -> None:
    """A browser cannot send one with it, and the server says what it allows."""
    allowed = plain(b"", more=f"Access-Control-Allow-Origin: *\r\n{CLOSE}")
    with scripted(lambda heard, connection: connection.sendall(allowed)) as server:
        proxy = Proxy(server.url, None, 4)
        with on_a_thread(Door(proxy, "secret"), server_header=False, date_header=False) as url:
            preflight = {"Origin": "http://page.example", "Access-Control-Request-Method": "POST"}
            answer = httpx.options(url + CHAT, headers=preflight, timeout=60)
            assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, "*")
            assert [heard.head.split()[0] for heard in server.heard] == ["OPTIONS"]
            assert httpx.options(url + CHAT, timeout=60).status_code == 401
            assert httpx.post(url + CHAT, json=ASK, headers=preflight, timeout=60).status_code == 401
            assert len(server.heard) == 1


def test_a_session_is_named_as_the_header_says_it(stage: Make) -> None:
    """In UTF-8, which most clients write, or in Latin-1; an empty header names none."""
    here = stage(say)
    for header in ("Käse".encode(), "Käse".encode("latin-1"), b"", None):
        httpx.post(here.url + CHAT, json=ASK, headers={} if header is None else {b"X-Session-Id": header}, timeout=60)
    assert sorted(str(record.session) for record in here.logged(4)) == ["Käse", "Käse", "upstream", "upstream"]


def test_without_a_key_pages_of_other_sites_are_not_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A browser sends some requests without asking first, and only says which page they are from."""
    answers = plain(b"{}", more=CLOSE)
    with scripted(lambda heard, connection: connection.sendall(answers)) as server:
        proxy = Proxy(server.url, None, 4)
        with on_a_thread(Door(proxy, None), server_header=False, date_header=False) as url:
            for method in ("POST", "GET", "OPTIONS"):
                answer = httpx.request(method, url + CHAT, headers={"Origin": "http://page.example"}, timeout=60)
                assert (answer.status_code, "--api-key-file" in answer.text) == (403, True)
            assert not server.heard
            assert httpx.post(url + CHAT, headers={"Origin": "http://localhost:3000"}, timeout=60).status_code == 200
            assert httpx.get(f"{url}/adaptive/answers", timeout=60).status_code == 200
            monkeypatch.setattr("adaptive.upstream.server.same_user", lambda peer, here: False)
            for path in ("answers?limit=3", "sessions/a", "history?by=session"):
                assert httpx.get(f"{url}/adaptive/{path}", timeout=60).status_code == 403
            assert len(server.heard) == 2
