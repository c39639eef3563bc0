"""Single answers at a real server: which drafter proposed their tokens, deleting them for good, and the page's
events."""

from __future__ import annotations

import json
import os
import socket
import sqlite3
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from service_server import Server

from adaptive.records.origins import origins
from adaptive.service.peers import TABLES, same_user
from adaptive.types import Round

KEY = "correct-horse"
pytestmark = pytest.mark.xdist_group("service_answers")  # one xdist worker, since it starts one server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    one = Server(tmp_path_factory.mktemp("answers"), "--distill", "off", key=KEY).wait_until_ready()
    try:
        yield one
    finally:
        one.stop()


@pytest.fixture
def http(server: Server) -> Iterator[httpx.Client]:
    with server.http() as client:
        yield client


def chat(http: httpx.Client, *said: str, session: str) -> dict[str, Any]:
    """The answer to a chat of alternating user and model messages."""
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(said)]
    body = {"messages": messages, "max_tokens": 24}
    answer = http.post("/v1/chat/completions", json=body, headers={"X-Session-Id": session})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def text_of(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["message"]["content"])


def on_disk(folder: Path) -> bytes:
    return b"".join(file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file())


def test_tokens_come_from_their_rounds() -> None:
    rounds = [Round("model", 4, 2, 0, 0), Round("none", 0, 0, 0, 0), Round("history", 3, 3, 0, 0)]
    assert origins(rounds, 9) == [None, "model", "model", None, None, "history", "history", "history", None]
    both = [Round("model+history", 4, 3, 0, 0, 2), Round("history+model", 4, 1, 0, 0, 2)]
    assert origins(both, 7) == [None, "model", "model", "history", None, "history", None]
    assert origins(rounds, 3) == [None, "model", "model"]  # a stop cut the last round
    assert origins((), 3) == [None, None, None]


def test_an_answer_shows_which_of_its_tokens_were_drafted(http: httpx.Client) -> None:
    given = chat(http, "What is seven plus five? It is 12, so what is twelve plus five?", session="one")
    newest = http.get("/adaptive/answers?limit=1").json()["answers"][0]
    assert newest["session"] == "one"
    assert newest["asked"].startswith("What is seven plus five?")
    whole = http.get(f"/adaptive/answers/{newest['id']}").json()
    assert "".join(token["text"] for token in whole["tokens"]) == whole["text"] == text_of(given)
    assert len(whole["tokens"]) == given["usage"]["completion_tokens"]
    accepted: dict[str, int] = {}
    for token in whole["tokens"]:
        if token["drafter"] is not None:
            accepted[token["drafter"]] = accepted.get(token["drafter"], 0) + 1
    told = {name: one["accepted"] for name, one in given["drafters"].items() if one["accepted"]}
    assert accepted == told
    assert sum(accepted.values()) == given["timings"]["draft_n_accepted"] > 0
    tokens_a_round = (len(whole["tokens"]) - 1) / given["rounds"]
    assert given["tokens_per_round"] == newest["tokens_per_round"] == pytest.approx(tokens_a_round)
    assert whole["tokens"][0]["drafter"] is None  # comes from the prompt's own pass


def test_a_stream_says_of_each_token_whether_it_was_drafted_when_it_is_asked_to(http: httpx.Client) -> None:
    def chunks(**options: bool) -> list[dict[str, Any]]:
        body = {"messages": [{"role": "user", "content": "Count from one to nine."}], "max_tokens": 24, "stream": True}
        with http.stream("POST", "/v1/chat/completions", json={**body, "stream_options": options}) as stream:
            lines = [line.removeprefix("data: ") for line in stream.iter_lines() if line.startswith("data: {")]
        return [json.loads(line) for line in lines]

    marked = chunks(include_drafted=True)
    said = [chunk["choices"][0] for chunk in marked if chunk["choices"][0]["delta"].get("content")]
    timings = marked[-1]["timings"]
    assert 0 < sum(choice["drafted"] for choice in said) <= timings["draft_n_accepted"]
    assert not said[0]["drafted"]
    assert not any("drafted" in chunk["choices"][0] for chunk in chunks())


def test_a_forgotten_answer_is_nowhere_and_what_holds_it_goes_with_it(server: Server, http: httpx.Client) -> None:
    secret = "Aurelian-Vandermeer-4711"
    first = chat(http, f"My name is {secret}. Greet me.", session="greeting")
    chat(http, f"My name is {secret}. Greet me.", text_of(first), "Again!", session="greeting")
    chat(http, "Name three colours.", session="colours")
    shown = http.get("/adaptive/answers?limit=3").json()["answers"]
    assert [one["session"] for one in shown] == ["colours", "greeting", "greeting"]
    last, number = (one["id"] for one in shown[1:])
    assert http.get(f"/adaptive/answers/{number}/holders").json() == {"held_by": [last]}
    assert secret.encode() in on_disk(server.home)

    assert http.delete(f"/adaptive/answers/{number}").json() == {"deleted": 2}
    assert secret.encode() not in on_disk(server.home)
    assert http.get(f"/adaptive/answers/{number}").status_code == 404
    assert http.get(f"/adaptive/answers/{number}/holders").status_code == 404
    assert http.delete(f"/adaptive/answers/{number}").status_code == 404
    assert http.get("/adaptive/answers").json()["answers"][0]["session"] == "colours"
    deadline = time.monotonic() + 30
    while http.get("/slots").json()[0]["conversations_cached"]:
        assert time.monotonic() < deadline, "the caches still hold it"
        time.sleep(0.05)
    # The next turn of a chat that still contains it.
    chat(http, f"My name is {secret}. Greet me.", text_of(first), "And again!", session="still open")
    assert http.get("/adaptive/answers").json()["answers"][0]["session"] == "colours"
    assert secret.encode() not in on_disk(server.home)


def test_a_session_is_forgotten_by_its_name(http: httpx.Client) -> None:
    name = "plans / 2026?"
    for question in ("One?", "Two?"):
        chat(http, question, session=name)
    path = "/adaptive/sessions/plans%20%2F%202026%3F"
    assert http.get(path).json() == {"answers": 2}
    assert http.delete(path).json() == {"deleted": 2}
    assert http.get(path).json() == {"answers": 0}
    assert all(one["session"] != name for one in http.get("/adaptive/answers").json()["answers"])


def test_a_session_takes_the_turns_of_its_chat_with_it_that_have_another_name(
    server: Server, http: httpx.Client
) -> None:
    secret = "Aurelian-Vandermeer-4712"
    first = chat(http, f"My name is {secret}. Greet me.", session="a1")
    chat(http, f"My name is {secret}. Greet me.", f" {text_of(first).strip()} ", "Again!", session="b2")
    chat(http, "Name three colours.", session="b2")
    assert http.get("/adaptive/sessions/a1").json() == {"answers": 2}
    assert http.delete("/adaptive/sessions/a1").json() == {"deleted": 2}
    assert secret.encode() not in on_disk(server.home)
    assert http.get("/adaptive/sessions/b2").json() == {"answers": 1}


@pytest.mark.thorough
@pytest.mark.parametrize("whole_session", [False, True])
def test_an_answer_in_progress_does_not_bring_a_forgotten_one_back(
    server: Server, http: httpx.Client, whole_session: bool
) -> None:
    secret = f"Aurelian-Vandermeer-{whole_session}"
    asked = {"role": "user", "content": f"My name is {secret}. Greet me."}
    first = chat(http, asked["content"], session="greeting")
    number = http.get("/adaptive/answers?limit=1").json()["answers"][0]["id"]
    said = [asked, {"role": "assistant", "content": text_of(first)}, {"role": "user", "content": "Again!"}]
    path = "/adaptive/sessions/greeting" if whole_session else f"/adaptive/answers/{number}"

    def ask(client: httpx.Client, messages: list[dict[str, str]], name: str) -> None:
        body = {"messages": messages, "max_tokens": 600, "ignore_eos": True, "stream": True}
        with client.stream("POST", "/v1/chat/completions", json=body, headers={"X-Session-Id": name}) as stream:
            for line in stream.iter_lines():
                if line.startswith("data: {"):
                    begun.release()

    begun = threading.Semaphore(0)
    requests = [(said, "turn"), ([{"role": "user", "content": "Else?"}], "greeting"), (said[-1:], "other")]
    requests += reversed(requests)
    with server.http() as client, ThreadPoolExecutor(len(requests)) as threads:  # four are answered, two wait
        answers = [threads.submit(ask, client, *request) for request in requests]
        assert begun.acquire(timeout=30)
        deadline = time.monotonic() + 30
        while not http.get("/slots").json()[0]["waiting"] and time.monotonic() < deadline:
            time.sleep(0.01)
        assert http.delete(path).status_code == 200
        assert not any(answer.done() for answer in answers)
        for answer in answers:
            answer.result()
    assert secret.encode() not in on_disk(server.home)
    named = [one["session"] for one in http.get("/adaptive/answers?limit=4").json()["answers"]]
    expected = ["other"] * 2 if whole_session else ["greeting", "greeting", "other", "other"]
    assert sorted(named[: len(expected)]) == expected
    assert whole_session or http.delete("/adaptive/sessions/greeting").json() == {"deleted": 2}


@pytest.mark.thorough
def test_a_deletion_that_meets_a_reader_is_finished_by_the_next_one(server: Server, http: httpx.Client) -> None:
    chat(http, "What is it?", session="read")
    number = http.get("/adaptive/answers?limit=1").json()["answers"][0]["id"]
    beside = [server.records.parent / name for name in (f"features/{number}.safetensors", "caches/1")]
    for file in beside:
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(b"what was said")
    reader = sqlite3.connect(server.records, isolation_level=None)
    reader.execute("BEGIN")
    reader.execute("SELECT * FROM generations").fetchone()
    refused = http.delete(f"/adaptive/answers/{number}")
    assert (refused.status_code, "then purge again" in refused.text) == (400, True)
    assert not any(file.exists() for file in beside)
    wal = server.records.with_name("records.db-wal")
    assert wal.stat().st_size
    reader.execute("COMMIT")
    assert http.get(f"/adaptive/answers/{number}/holders").json() == {"held_by": []}
    assert http.delete(f"/adaptive/answers/{number}").json() == {"deleted": 0}
    assert wal.stat().st_size == 0
    assert http.delete(f"/adaptive/answers/{number}").status_code == 404
    reader.close()


def test_answers_come_page_by_page(http: httpx.Client) -> None:
    for question in ("One?", "Two?", "Three?"):
        chat(http, question, session="pages")
    first = http.get("/adaptive/answers?limit=2").json()
    assert [one["asked"] for one in first["answers"]] == ["Three?", "Two?"]
    assert first["more"]
    then = http.get(f"/adaptive/answers?limit=100&before={first['answers'][-1]['id']}").json()
    assert then["answers"][0]["asked"] == "One?"
    assert not then["more"]


@pytest.mark.skipif(not TABLES[0].exists(), reason="only Linux says whose a connection is")
@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_a_connection_of_another_user_is_told_from_one_of_this_user(family: socket.AddressFamily) -> None:
    host = "127.0.0.1" if family == socket.AF_INET else "::1"
    with socket.socket(family) as listening:
        try:
            listening.bind((host, 0))
        except OSError:
            pytest.skip("this machine has no such addresses")
        listening.listen(2)
        port = listening.getsockname()[1]
        with socket.create_connection((host, port)), listening.accept()[0] as ours:
            assert same_user(ours.getpeername()[:2], ours.getsockname()[:2])
            assert not same_user((host, 1), ours.getsockname()[:2])
        if os.getuid() != 0:
            pytest.skip("only root can be another user")
        child = os.fork()
        if child == 0:  # another user's program, which stays connected until it has been checked
            os.setuid(65534)
            socket.create_connection((host, port)).recv(1)
            os._exit(0)
        with listening.accept()[0] as theirs:
            seen = same_user(theirs.getpeername()[:2], theirs.getsockname()[:2])
        os.waitpid(child, 0)
        assert not seen


@pytest.mark.skipif(not TABLES[0].exists(), reason="only Linux says whose a connection is")
def test_a_connection_that_its_program_has_closed_is_nobodys() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        gone = socket.create_connection(listening.getsockname())
        with listening.accept()[0] as ours:
            ends = ours.getpeername(), ours.getsockname()
            assert same_user(*ends)
            gone.close()  # the table now shows root as its user, whoever it was
            assert ours.recv(1) == b""
            assert not same_user(*ends)


@pytest.mark.thorough
def test_the_page_is_told_what_changes_and_a_server_that_ends_ends_its_streams(server: Server) -> None:
    """Must be the last test of this file: it stops the server."""
    with server.http() as http, server.http() as other, http.stream("GET", "/adaptive/events") as stream:
        names: list[str] = []
        asked = False
        lines = stream.iter_lines()
        for line in lines:
            if line.startswith("event: "):
                names.append(line.removeprefix("event: "))
            if len(names) >= 4 and not asked:
                asked = True
                assert sorted(names) == ["adapters", "log", "now", "trainer"]
                names.clear()
                other.post("/v1/completions", json={"prompt": "Once", "max_tokens": 8})
            if asked and "log" in names and line.startswith("data: "):
                break
        # The measured speed of a promotion comes long after the change of the store.
        store = next(server.home.glob("*/records.db")).parent
        (store / "promotions.json").write_text("[]", encoding="utf-8")
        assert "event: adapters" in lines
        sizes = other.get("/adaptive/storage").json()
        assert "answers" in {size["name"] for size in sizes["disk"]}
        assert sizes["memory"][0]["bytes"] > 50e6
        assert server.stop() == 0
        list(lines)  # raises if the stream was cut, which uvicorn does after 12 s with one that does not end
