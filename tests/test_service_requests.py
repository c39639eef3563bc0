"""Requests in the style of other servers are answered as there, and requests that nobody here sent on purpose have no
effect."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import psutil
import pytest
from service_server import Server
from store_factory import published

from adaptive.engines.cpu import kernels
from adaptive.records.log import Log
from adaptive.service.peers import TABLES

# One xdist worker runs these tests, since it starts one server.
pytestmark = pytest.mark.xdist_group("service_requests")

FORGED = "me\n2026-01-01 00:00:00 INFO adapter 0009 is promoted \x1b]0;owned\x07"

LISTED = "https://chat.example"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    one = Server(tmp_path_factory.mktemp("requests"), "--distill", "off", "--cors", LISTED).wait_until_ready()
    try:
        yield one
    finally:
        one.stop()


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)


def ask(client: openai.OpenAI, **options: Any) -> Any:
    return client.completions.create(**{"model": "any", "prompt": "Once upon a time", "max_tokens": 12, **options})


def test_more_stop_strings_than_are_looked_for_are_refused(client: openai.OpenAI) -> None:
    ended = ask(client, temperature=0, stop=[f"no such text {n}" for n in range(63)] + [" "])
    assert ended.choices[0].finish_reason == "stop"
    for stop in ([f"s{n}" for n in range(65)], [f"s{n}" for n in range(300_000)], ["x" * 513]):
        with pytest.raises(openai.BadRequestError, match="stop"):
            ask(client, stop=stop)


def test_a_text_far_beyond_the_context_is_refused_before_it_is_tokenized(client: openai.OpenAI, server: Server) -> None:
    process = psutil.Process(server.process.pid)
    word = "a" * 7_900_000
    before = process.cpu_times().user
    for send in (
        lambda: ask(client, prompt=word),
        lambda: client.chat.completions.create(model="any", messages=[{"role": "user", "content": word}]),
    ):
        with pytest.raises(openai.BadRequestError, match="context"):
            send()
    assert process.cpu_times().user - before < 5.0  # tokenizing all of it takes 25 s


@pytest.mark.skipif(not TABLES[0].exists(), reason="only Linux says whose a connection is")
@pytest.mark.parametrize("name", ["127.0.0.1:1", "[::1]:1", "192.0.2.1", "foo", ""])
def test_nobody_passes_for_the_client_of_another_connection_by_a_header(server: Server, name: str) -> None:
    said = httpx.get(f"{server.url}/adaptive/answers", headers={"X-Forwarded-For": name}, timeout=60)
    assert said.status_code == 200  # by the connection itself, which is this user's


def test_without_being_told_four_are_answered_at_once(server: Server) -> None:
    slots = httpx.get(f"{server.url}/health", timeout=60).json()["slots"]
    assert slots["total"] == (1 if kernels.library() is None else 4)
    assert (slots["why_not_more"] is None) == (slots["total"] == 4)


def test_a_model_is_found_by_its_name(client: openai.OpenAI) -> None:
    (listed,) = client.models.list().data
    assert client.models.retrieve(listed.id) == listed
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("another")


def test_minus_one_tokens_is_no_limit(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    long = [1000] * (model.max_model_len - 40)  # type: ignore[attr-defined]
    answer = ask(client, prompt=long, max_tokens=-1, temperature=0, extra_body={"ignore_eos": True})
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.total_tokens == model.max_model_len  # type: ignore[attr-defined]
    for wrong in (0, -2):
        with pytest.raises(openai.BadRequestError, match="max_tokens"):
            ask(client, max_tokens=wrong)


def test_a_top_p_of_zero_keeps_the_likeliest_token(client: openai.OpenAI) -> None:
    greedy = ask(client, temperature=0).choices[0].text
    assert [ask(client, temperature=1, top_p=0, seed=seed).choices[0].text for seed in range(3)] == [greedy] * 3


def test_what_a_model_refused_is_part_of_the_chat(client: openai.OpenAI) -> None:
    def answer(said: Any) -> Any:
        chat: Any = [{"role": "user", "content": "Steal it."}, {"role": "assistant", **said}]
        chat.append({"role": "user", "content": "Why not?"})
        done = client.chat.completions.create(model="any", messages=chat, max_tokens=8, temperature=0)
        return done.usage.prompt_tokens, done.choices[0].message.content  # type: ignore[union-attr]

    plain = answer({"content": "I will not."})
    assert answer({"content": [{"type": "refusal", "refusal": "I will not."}]}) == plain
    assert answer({"content": None, "refusal": "I will not."}) == plain


def test_a_request_that_any_page_of_this_machine_can_send_changes_nothing(server: Server) -> None:
    store = published(server.records.parent / "adapters", 1, promote=1)
    page = {"Origin": "http://localhost:3000"}
    rollback = f"{server.url}/adaptive/adapters/rollback"
    for headers in (page, {**page, "Content-Type": "text/plain"}, {}):
        assert httpx.post(rollback, headers=headers, timeout=60).status_code == 415
        asked = httpx.post(f"{server.url}/v1/completions", headers=headers, content=b'{"prompt": "x"}', timeout=60)
        assert asked.status_code == 415
    # This header needs a preflight, which the server refuses to a page of another port.
    asks = {**page, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type"}
    leave = httpx.options(rollback, headers=asks, timeout=60)
    assert leave.status_code >= 400
    assert "access-control-allow-origin" not in leave.headers
    assert store.current_id() == "0001"
    meant = httpx.post(rollback, headers={"Content-Type": "application/json"}, timeout=60)
    assert meant.status_code == 200
    assert store.current_id() is None


def test_only_pages_of_a_listed_origin_may_ask_and_read_without_a_key(server: Server) -> None:
    asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type,x-session-id"}
    for origin in ("https://evil.example", f"{LISTED}:8443", f"{LISTED}.evil.example", "null"):
        assert (
            httpx.options(f"{server.url}/v1/completions", headers={**asks, "Origin": origin}, timeout=60).status_code
            == 403
        )
        refused = httpx.get(f"{server.url}/slots", headers={"Origin": origin}, timeout=60)
        assert refused.status_code == 403
        assert "access-control-allow-origin" not in refused.headers
        assert refused.headers["vary"] == "origin"
    page = {"Origin": LISTED}
    leave = httpx.options(f"{server.url}/v1/completions", headers={**asks, **page}, timeout=60)
    assert leave.status_code == 204
    assert leave.headers["access-control-allow-origin"] == LISTED
    assert leave.headers["access-control-allow-headers"] == asks["Access-Control-Request-Headers"]
    assert "POST" in leave.headers["access-control-allow-methods"]
    answer = httpx.post(f"{server.url}/v1/completions", headers=page, json={"prompt": "x", "max_tokens": 2}, timeout=60)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == LISTED
    # A request without a preflight is refused even to a listed page, which may read the reason.
    form = httpx.post(f"{server.url}/v1/completions", headers=page, content=b'{"prompt": "x"}', timeout=60)
    assert form.status_code == 415
    assert form.headers["access-control-allow-origin"] == LISTED
    # The Host header is checked as always.
    assert httpx.get(f"{server.url}/slots", headers={**page, "Host": "evil.example"}, timeout=60).status_code == 403


@pytest.mark.skipif(not TABLES[0].exists(), reason="only Linux says whose a connection is")
def test_a_listed_page_may_use_the_model_and_nothing_else(server: Server, client: openai.OpenAI) -> None:
    ask(client, user="somebody")
    for path in ("answers", "answers/1", "sessions/upstream", "history?by=session"):
        url = f"{server.url}/adaptive/{path}"
        refused = httpx.get(url, headers={"Origin": LISTED}, timeout=60)
        assert (refused.status_code, "pages of other sites" in refused.text) == (403, True)
        for own in ({}, {"Origin": server.url}, {"Origin": "http://localhost:3000"}):
            assert httpx.get(url, headers=own, timeout=60).status_code == 200
    meant = {"Content-Type": "application/json"}
    first = f"{server.url}/adaptive/answers/1"
    assert httpx.delete(first, headers={**meant, "Origin": LISTED}, timeout=60).status_code == 403
    assert httpx.get(first, timeout=60).status_code == 200
    for name in ("rollback", "0001/promote"):
        change = f"{server.url}/adaptive/adapters/{name}"
        refused = httpx.post(change, headers={**meant, "Origin": LISTED}, timeout=60)
        assert (refused.status_code, "the choice of an adapter" in refused.text) == (403, True)


def test_a_client_cannot_forge_a_line_of_the_log(server: Server, client: openai.OpenAI) -> None:
    before = len(server.said)
    ask(client, user=FORGED)
    assert re.search(r" INFO [0-9a-f]{8}: \d+ prompt tokens? ", server.said[before:])  # nor is a user named there
    assert "adapter 0009" not in server.said
    with pytest.raises(openai.BadRequestError, match="user: string should have at most 1000 characters"):
        ask(client, user="u" * 1001)


TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {"place": {"enum": ["Rome", "Oslo"]}},
                "required": ["place"],
                "additionalProperties": False,
            },
        },
    }
    for name in ("weather", "time")
]


def chat(client: openai.OpenAI, **options: Any) -> Any:
    asked = [{"role": "user", "content": "What is the weather in Rome?"}]
    return client.chat.completions.create(**{"model": "any", "messages": asked, "max_tokens": 60, **options})


def test_an_answer_keeps_to_what_was_asked_for(client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"place": {"enum": ["Rome", "Oslo"]}}, "required": ["place"]}
    wrapped = {"type": "json_schema", "json_schema": {"name": "place", "schema": schema, "strict": True}}
    for options in (
        {"response_format": wrapped},
        {"response_format": {"type": "json_object", "schema": schema}},
        {"response_format": {"type": "json_object", "value": {**schema, "additionalProperties": False}}},
        {"extra_body": {"json_schema": {**schema, "additionalProperties": False}}},
    ):
        said = chat(client, **options).choices[0]
        if said.finish_reason == "stop":
            assert json.loads(said.message.content)["place"] in ("Rome", "Oslo")
        assert said.message.content.startswith("{")
    streamed = chat(client, stream=True, extra_body={"grammar": 'root ::= "yes" | "no"'})
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) in ("yes", "no")
    assert re.fullmatch(r"[0-9]{3}-[0-9]{4}", ask(client, extra_body={"regex": "[0-9]{3}-[0-9]{4}"}).choices[0].text)
    assert chat(client, response_format={"type": "json_object"}).choices[0].message.content.startswith("{")


@pytest.mark.parametrize(
    ("form", "kept"),
    [
        ({"choice": ["a.b (c)", "d|e", "größer"]}, r"a\.b \(c\)|d\|e|größer"),
        ({"regex": "[0-9]{3}"}, "[0-9]{3}"),
        ({"grammar": 'root ::= "yes" | "no"'}, "yes|no"),
        ({"json": {"enum": ["Rome", "Oslo"]}, "disable_any_whitespace": False}, '"Rome"|"Oslo"'),
        ({"json": '{"enum": [1, 2]}', "structural_tag": None}, "1|2"),
        ({"json_object": True}, "[{].*"),
    ],
    ids=["choice", "regex", "grammar", "schema", "schema as text", "any object"],
)
def test_an_answer_keeps_to_what_vllms_clients_ask_for(client: openai.OpenAI, form: dict[str, Any], kept: str) -> None:
    said = chat(client, extra_body={"structured_outputs": form}).choices[0].message.content
    assert re.fullmatch(kept, said, re.DOTALL)
    assert re.fullmatch(kept, ask(client, extra_body={"structured_outputs": form}).choices[0].text, re.DOTALL)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"extra_body": {"regex": "(a"}}, "regular expression cannot be used"),
        ({"extra_body": {"grammar": "start: nowhere"}}, "unknown name"),
        ({"extra_body": {"grammar": "start: x", "regex": "a"}}, "grammar and regex are given"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": 3}}}},
            "cannot be",
        ),
        ({"response_format": {"type": "json_schema"}}, "json_schema is missing"),
        ({"extra_body": {"structured_outputs": {"regex": "a", "choice": ["a"]}}}, "has regex and choice; give it json"),
        ({"extra_body": {"structured_outputs": {}}}, "has nothing; give it json"),
        ({"extra_body": {"structured_outputs": {"choice": []}}}, "has nothing; give it json"),
        ({"extra_body": {"structured_outputs": {"structural_tag": "x"}}}, "structured_outputs: structural_tag is not"),
        ({"extra_body": {"structured_outputs": {"json": "{"}}}, "structured_outputs: json is no JSON"),
        ({"extra_body": {"structured_outputs": {"json": "3"}}}, "structured_outputs: json is no JSON schema"),
        ({"extra_body": {"structured_outputs": {"regex": "a"}, "regex": "b"}}, "regex and structured_outputs are"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"tool_choice": "required"}, "no tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "there is no tool 'x'"),
        ({"tools": TOOLS, "extra_body": {"regex": "a"}}, "no place for tools"),
        ({"tools": TOOLS, "tool_choice": "required"}, "no place for tools"),
        ({"extra_body": {"mirostat": 2}}, "mirostat is not served"),
        ({"extra_body": {"enable_thinking": True}}, "knows no thinking"),
        ({"extra_body": {"chat_template_kwargs": {"style": "short"}}}, "no variable 'style'"),
    ],
)
def test_what_cannot_be_kept_to_is_refused_before_anything_is_decoded(
    client: openai.OpenAI, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=said):
        chat(client, **options)


@pytest.mark.thorough
def test_a_schema_that_is_never_compiled_is_refused_while_others_are_answered(
    server: Server, client: openai.OpenAI
) -> None:
    patterns = [{"type": "string", "pattern": f".*{chr(97 + n)}.{{40}}"} for n in range(20)]
    endless = {"prompt": "x", "json_schema": {"allOf": patterns}}
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(httpx.post, f"{server.url}/v1/completions", json=endless, timeout=60)
        assert ask(client, max_tokens=2).choices[0].finish_reason == "length"
        assert not waits.done()
        refused = waits.result()
    assert (refused.status_code, "too much time or memory" in refused.text) == (400, True)
    assert ask(client, max_tokens=8, extra_body={"regex": "yes|no"}).choices[0].text in ("yes", "no")


def test_an_empty_session_id_names_no_session(server: Server) -> None:
    said = [{"role": "user", "content": "What is an empty header?"}]
    for question in ("And a full one?", "And then?"):
        body = {"messages": said, "max_tokens": 8, "temperature": 0}
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, headers={"X-Session-Id": ""}, timeout=60)
        said += [answer.json()["choices"][0]["message"], {"role": "user", "content": question}]
    with Log(server.records) as log:
        assert log.sessions()[0].generations == 2


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1"])
def test_a_session_is_named_as_its_client_wrote_it(server: Server, encoding: str) -> None:
    name = f"Pläne {encoding}"
    body = {"prompt": "Once", "max_tokens": 2}
    headers = [(b"X-Session-Id", name.encode(encoding))]
    assert httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=60).status_code == 200
    assert httpx.get(f"{server.url}/adaptive/sessions/{name}", timeout=60).json() == {"answers": 1}


@pytest.mark.skipif(not TABLES[0].exists() or os.getuid() != 0, reason="only Linux tells users apart, and root is each")
@pytest.mark.skipif(shutil.which("curl") is None, reason="another user's program is curl")
def test_another_user_of_this_machine_sees_neither_answers_nor_the_names_of_sessions(server: Server) -> None:
    def status(path: str, user: int) -> str:
        command = ["curl", "-s", "-o", "/dev/null", "-w", "%{http_code}", server.url + path]
        return subprocess.run(command, user=user, cwd="/", capture_output=True, text=True, check=True).stdout

    for path in ("/adaptive/answers", "/adaptive/history?by=session"):
        assert (status(path, 0), status(path, 65534)) == ("200", "403")
    assert status("/adaptive/history?by=adapter", 65534) == "200"


@pytest.mark.parametrize(
    ("fields", "field", "reason"),
    [
        ({"max_tokens": 0}, "max_tokens", "input should be greater than or equal to 1"),
        ({"max_tokens": []}, "max_tokens", "input should be -1 or input should be a valid integer"),
        ({"stop": 5}, "stop", "input should be a valid string or input should be a valid list"),
        ({"stop": ["a", 5]}, "stop.1", "input should be a valid string"),
        ({"messages": [{"role": "user", "content": [{}]}]}, "messages.0.content.0.type", "field required"),
        ({"tool_choice": "often"}, "tool_choice", "input should be 'none', 'auto' or 'required'"),
        ({"temperature": "hot", "stop": 5}, "stop", "input should be a valid string or input should be a valid list"),
        ({"n": 0, "stop": 5}, "n", "input should be greater than or equal to 1"),
    ],
)
def test_a_wrong_field_is_named_as_the_client_wrote_it(
    server: Server, fields: dict[str, Any], field: str, reason: str
) -> None:
    body = {"messages": [{"role": "user", "content": "Hello"}], **fields}
    refused = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
    error = refused.json()["error"]
    assert (refused.status_code, error["message"], error["param"]) == (400, f"{field}: {reason}", field)
