"""A real server on the bundled pair, driven by the real OpenAI client."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from forked import run
from service_server import Server

from adaptive.errors import AdaptiveError
from adaptive.records.log import Log
from adaptive.service.peers import TABLES
from adaptive.service.server import listen, with_key
from adaptive.settings import load_settings

KEY = "correct-horse"
ASKED = [{"role": "user", "content": "Tell me a story about a small boat."}]
# An answer that does not end by itself.
ENDLESS: dict[str, Any] = {"max_tokens": 800, "extra_body": {"ignore_eos": True}}


# One xdist worker runs these tests, since it starts one server.
pytestmark = pytest.mark.xdist_group("service")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    one = Server(
        tmp_path_factory.mktemp("service"), "--slots", "1", "--queue", "2", "--seed", "5", key=KEY
    ).wait_until_ready()
    try:
        yield one
    finally:
        one.stop()


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0, timeout=60)


def ask(client: openai.OpenAI, **options: Any) -> Any:
    given: dict[str, Any] = {"model": "any", "messages": ASKED, "max_tokens": 24, "temperature": 0, **options}
    return client.chat.completions.create(**given)


def until_idle(server: Server) -> None:
    deadline = time.monotonic() + 30
    with server.http() as http:
        while http.get("/slots").json()[0]["is_processing"]:
            assert time.monotonic() < deadline, "the engine goes on answering nobody"
            time.sleep(0.02)


def test_health_says_loading_and_then_ready(server: Server) -> None:
    assert server.health == [503, 200]
    assert httpx.head(f"{server.url}/health", timeout=60).status_code == 200


def test_a_chat_is_answered_with_usage_timings_and_acceptance(client: openai.OpenAI) -> None:
    answer = ask(client)
    assert answer.choices[0].message.content
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.timings["predicted_n"] == answer.usage.completion_tokens
    assert answer.speculative_decoding["num_draft_tokens"] == answer.timings["draft_n"]


def test_a_stream_says_what_a_whole_answer_says(client: openai.OpenAI) -> None:
    whole = ask(client)
    chunks = list(ask(client, stream=True, stream_options={"include_usage": True}))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == whole.choices[0].finish_reason
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_every_turn_finds_the_turns_before_in_the_cache(client: openai.OpenAI) -> None:
    said = [{"role": "user", "content": "How many legs do three dogs have?"}]
    first = ask(client, messages=said)
    other = ask(client, messages=[{"role": "user", "content": "Name something quite different, please."}])
    said += [
        {"role": "assistant", "content": first.choices[0].message.content},
        {"role": "user", "content": "And four?"},
    ]
    second = ask(client, messages=said)
    assert other.usage.prompt_tokens_details.cached_tokens < first.usage.prompt_tokens
    assert second.usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens


def test_the_same_request_again_finds_its_cache_and_stays_one_session(server: Server, client: openai.OpenAI) -> None:
    said = [{"role": "user", "content": "What swims?"}]
    answers = [ask(client, messages=said, max_tokens=60, extra_body={"ignore_eos": True}, n=n) for n in (1, 1, 4)]
    read = answers[0].usage.prompt_tokens
    *_, last = ask(client, messages=said, max_tokens=2, n=2, stream=True, stream_options={"include_usage": True})
    for answer in (*answers[1:], last):  # the prompt counts once
        assert answer.usage.prompt_tokens == read
        assert answer.usage.prompt_tokens_details.cached_tokens == read - 1
    with Log(server.records) as log:
        assert log.sessions()[0].generations == 8


def test_chats_behind_one_system_message_are_two_sessions(server: Server, client: openai.OpenAI) -> None:
    system = {"role": "system", "content": "You are a patient teacher of small children. " * 12}
    chats: list[list[Any]] = [[system, {"role": "user", "content": f"What is {thing}?"}] for thing in ("ice", "rain")]
    for _ in range(2):
        for chat in chats:
            answer = ask(client, messages=chat)
            said = {"role": "assistant", "content": answer.choices[0].message.content}
            chat += [said, {"role": "user", "content": "And then?"}]
            cached, read = answer.usage.prompt_tokens_details.cached_tokens, answer.usage.prompt_tokens
    assert cached > read - 40  # the last question found all earlier turns in the cache
    with Log(server.records) as log:
        assert [one.generations for one in log.sessions()[:2]] == [2, 2]


def test_nothing_is_said_from_a_stop_string_on(client: openai.OpenAI) -> None:
    plain = ask(client).choices[0].message.content
    stop = plain[len(plain) // 2 :][:4]
    stopped = ask(client, stop=[stop])
    assert stopped.choices[0].message.content == plain[: plain.index(stop)]
    assert stopped.choices[0].finish_reason == "stop"
    streamed = "".join(c.choices[0].delta.content or "" for c in ask(client, stop=stop, stream=True))
    assert streamed == stopped.choices[0].message.content


def test_a_seed_repeats_and_n_answers_differ(client: openai.OpenAI) -> None:
    answers = [ask(client, seed=seed, temperature=1, n=2) for seed in (1, 1, 2)]
    texts = [[choice.message.content for choice in answer.choices] for answer in answers]
    assert texts[0] == texts[1]
    assert texts[0] != texts[2]
    assert texts[0][0] != texts[0][1]


def test_raw_text_is_continued_and_both_token_limits_hold(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="any", prompt=["Once upon", "The sea"], max_tokens=5, temperature=0)
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.usage is not None
    assert answer.usage.completion_tokens <= 10
    newer = ask(client, max_tokens=openai.omit, max_completion_tokens=3)
    assert newer.usage.completion_tokens <= 3


def test_logprobs_are_those_of_the_target(client: openai.OpenAI) -> None:
    answer = ask(client, logprobs=True, top_logprobs=3)
    content = answer.choices[0].logprobs.content
    assert len(content) == answer.usage.completion_tokens
    # Greedy: every token is the most likely one.
    assert all(entry.token == entry.top_logprobs[0].token for entry in content)
    assert all(entry.logprob <= 0 for entry in content)


def test_a_stream_carries_the_logprobs_of_the_whole_answer(client: openai.OpenAI) -> None:
    whole = ask(client, logprobs=True, top_logprobs=3).choices[0].logprobs.content
    chunks = [c.choices[0] for c in ask(client, logprobs=True, top_logprobs=3, stream=True) if c.choices]
    streamed = [entry for c in chunks if c.logprobs for entry in c.logprobs.content]
    assert [entry.token for entry in streamed] == [entry.token for entry in whole]
    for one, other in zip(streamed, whole, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=2e-2)  # logits after a cached prompt round differently
        assert len(one.top_logprobs) == 3
    raw = client.completions.create(model="any", prompt="Once upon", max_tokens=6, logprobs=2, stream=True)
    tokens = [c.choices[0].logprobs for c in raw if c.choices and c.choices[0].logprobs]
    assert all(entry.tokens is not None and len(entry.tokens) == 1 for entry in tokens)
    assert tokens[0].text_offset == [0]


def test_what_cannot_be_served_is_refused_by_name(client: openai.OpenAI) -> None:
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    assert ask(client, tools=[tool], tool_choice="none").choices
    refused = {
        "tools": [tool],  # the bundled model's template has no place for tools
        "functions": [tool["function"]],
        "parallel_tool_calls": "perhaps",
        "response_format": {"type": "json_schema"},
        "tool_choice": "required",
        "top_logprobs": 2,
        "logit_bias": {"99999999": 1},
        "temperature": -1,
        "top_p": 7,
        "messages": [],
        "n": 99,
        "stop": [""],
    }
    for name, value in refused.items():
        with pytest.raises(openai.BadRequestError) as raised:
            ask(client, **{name: value})
        assert name in str(raised.value)


def test_nonsense_is_a_mistake_of_the_client_in_openai_shape(server: Server) -> None:
    bodies: list[bytes] = [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b'{"messages": 3}',
        b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}',
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"messages": [{"role": "user", "content": "a"}], "temperature": NaN}',
        b'{"messages": [{"role": "user", "content": "a"}], "seed": ' + b"9" * 400 + b"}",
        b'{"messages": [{"role": "user", "content": "a"}], "tools": ' + b"[" * 100000 + b"]" * 100000 + b"}",
        json.dumps({"messages": [{"role": "user", "content": "word " * 20000}]}).encode(),
    ]
    with server.http() as http:
        for body in bodies:
            got = http.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
            assert got.status_code == 400, (body[:80], got.text[:200])
            assert got.json()["error"]["message"]
        for path in ("/v1/completions", "/v1/messages"):
            got = http.post(path, content=b'{"prompt": 17', headers={"content-type": "application/json"})
            assert got.status_code == 400
            assert got.json()["error"]["message"] == "the body is not JSON: Expecting ',' delimiter at character 14"
            assert got.json()["error"].get("param") is None
            for headers in ({}, {"content-type": "text/plain"}):
                got = http.post(path, content=b'{"prompt": "x"}', headers=headers)
                assert got.status_code == 415
                assert got.json()["error"]["message"] == "send it as Content-Type: application/json"
        tokens = http.post("/tokenize", json={"content": "a small boat"}).json()["tokens"]
        assert http.post("/detokenize", json={"tokens": tokens}).json()["content"] == "a small boat"
        assert http.post("/detokenize", json={"tokens": [10**9]}).status_code == 400
        assert http.get("/v1/../../etc/passwd").status_code == 404
        assert http.get("/no/such/place").json()["error"]["code"] == 404
        assert http.delete("/v1/models").status_code == 405


@pytest.mark.thorough
def test_who_names_no_limit_is_cut_by_the_context_alone(client: openai.OpenAI) -> None:
    answer = ask(client, max_tokens=None, extra_body={"ignore_eos": True})
    (model,) = client.models.list().data
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.total_tokens == model.model_dump()["max_model_len"] > 512


def ends(server: Server) -> list[str]:
    """How each answer in the log ended."""
    with Log(server.records) as log:
        return [g.generation.finish_reason for g in log.generations(with_supervision=False)]


def test_a_client_that_goes_away_ends_its_answer(server: Server, client: openai.OpenAI) -> None:
    stream = ask(client, stream=True, **ENDLESS)
    next(iter(stream))
    stream.close()
    until_idle(server)
    before = ends(server)
    assert before[-1] == "cancelled"
    impatient = client.with_options(timeout=0.5)
    with pytest.raises(openai.APITimeoutError):
        ask(impatient, n=8, **ENDLESS)
    until_idle(server)
    # A fast machine finishes some of the eight before the client gives up.
    assert "cancelled" in ends(server)[len(before) :]


def test_more_than_may_wait_are_told_429_and_the_others_are_answered(server: Server, client: openai.OpenAI) -> None:
    running = ask(client, stream=True, **ENDLESS)
    next(iter(running))

    def status(number: int) -> int:
        try:
            ask(client, max_tokens=4, user=f"client {number}")
        except openai.RateLimitError as error:
            return error.status_code if "retry-after" in error.response.headers else 0
        return 200

    with ThreadPoolExecutor(6) as pool:
        answers = [pool.submit(status, number) for number in range(6)]
        deadline = time.monotonic() + 30
        while sum(answer.done() for answer in answers) < 4 and time.monotonic() < deadline:
            time.sleep(0.01)
        running.close()
        assert sorted(answer.result() for answer in answers) == [200, 200, 429, 429, 429, 429]


def test_a_wrong_key_a_large_body_and_a_second_server_are_refused(server: Server, client: openai.OpenAI) -> None:
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": KEY}):
        for path in ("/v1/models", "/metrics", "/slots", "/no/such/place"):
            got = httpx.get(server.url + path, headers=headers, timeout=60)
            assert got.status_code == 401
            assert got.json()["error"]["type"] == "authentication_error"
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()
    with server.http() as http:
        assert http.post("/tokenize", content=b"x" * 9_000_000).status_code == 413
        chunks = (b"x" * 100_000 for _ in range(90))
        assert http.post("/tokenize", content=chunks).status_code == 413
    second = run("serve", "--state-dir", str(server.home), "--port", "0")
    assert second.returncode == 2
    assert f"process {server.process.pid}" in second.stderr
    assert server.url in second.stderr


def test_an_open_address_needs_a_key() -> None:
    with pytest.raises(AdaptiveError, match="API key"):
        with_key(load_settings({"host": "0.0.0.0"}))
    key = with_key(load_settings({"host": "0.0.0.0", "api_key": " k\n"})).api_key
    assert key is not None
    assert key.get_secret_value() == "k"  # as a header has it
    with pytest.raises(AdaptiveError, match="line break"):  # which no header has
        with_key(load_settings({"api_key": "k\nk"}))


def test_what_was_asked_is_in_the_log_once_and_what_was_not_to_be_stored_is_not(
    server: Server, client: openai.OpenAI
) -> None:
    with Log(server.records) as log:
        before = log.count()
        kept = ask(client, messages=[{"role": "user", "content": "Keep this."}])
        ask(client, messages=[{"role": "user", "content": "Forget this."}], store=False)
        found = list(log.generations())[before:]
    assert [g.generation.messages[0].content for g in found] == ["Keep this."]
    assert found[0].generation.text == kept.choices[0].message.content
    assert found[0].generation.supervision is not None


def test_metrics_count_what_was_drafted_and_accepted(server: Server, client: openai.OpenAI) -> None:
    def metric(name: str) -> float:
        with server.http() as http:
            lines = http.get("/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(f"adaptive:{name}"))

    names = ("spec_decode_num_draft_tokens_total", "spec_decode_num_accepted_tokens_total")
    before = [metric(name) for name in names]
    timings = ask(client).timings
    after = [metric(name) for name in names]
    assert [b - a for a, b in zip(before, after, strict=True)] == [timings["draft_n"], timings["draft_n_accepted"]]
    assert metric("spec_decode_num_accepted_tokens_per_pos_total") == after[1]
    assert metric("adapter_info") == 1
    refused = metric('requests_refused_total{status="401"}')
    assert httpx.post(f"{server.url}/v1/chat/completions", json={}, timeout=60).status_code == 401
    assert metric('requests_refused_total{status="401"}') == refused + 1


def test_the_page_is_whole_in_itself_and_its_data_is_behind_the_key(server: Server) -> None:
    for path in ("/", "/chat"):
        page = httpx.get(server.url + path, timeout=60)
        assert page.status_code == 200
        assert httpx.head(server.url + path, timeout=60).status_code == 200
        assert "http" not in page.text
        loaded = re.findall(r'(?:src|href)="(assets/[^"]+)"', page.text)
        assert len(loaded) >= 3
        assert [httpx.get(f"{server.url}/{one}", timeout=60).status_code for one in loaded] == [200] * len(loaded)
        assert "default-src 'none'; script-src 'self';" in page.headers["content-security-policy"]
    assert httpx.get(f"{server.url}/assets/dashboard.html", timeout=60).status_code == 401
    assert httpx.get(f"{server.url}/adaptive/answers", timeout=60).status_code == 401
    assert httpx.get(f"{server.url}/adaptive/history", timeout=60).status_code == 401
    assert httpx.post(f"{server.url}/adaptive/adapters/rollback", timeout=60).status_code == 401
    with server.http() as http, Log(server.records) as log:
        found = http.get("/adaptive/history?by=day").json()
        assert found["totals"]["generations"] == log.count()
        assert http.get("/adaptive/trainer").json()["activity"] == "waiting"
        assert http.get("/adaptive/adapters").json() == []
        for path in ("rollback", "0077/promote", "x/promote"):
            refused = http.post(f"/adaptive/adapters/{path}")
            assert refused.status_code == 400, path
            assert refused.json()["error"]["message"]


@pytest.mark.thorough
def test_a_killed_server_starts_again_with_every_answer_it_gave(tmp_path: Path) -> None:
    home = tmp_path / "killed"
    one = Server(home).wait_until_ready()
    client = openai.OpenAI(base_url=f"{one.url}/v1", api_key="none", max_retries=0, timeout=60)
    try:
        # Without a key the server answers only to the names of this machine.
        for refused in ({"Host": "evil.example"}, {"Origin": "https://evil.example"}):
            said = httpx.get(f"{one.url}/slots", headers=refused, timeout=60)
            assert said.status_code == 403
            assert "--api-key-file FILE" in said.json()["error"]["message"]
        given = [ask(client, seed=n).choices[0].message.content for n in range(3)]
        if TABLES[0].exists():  # answers are shown only to programs of the same user, such as this test
            shown = httpx.get(f"{one.url}/adaptive/answers", timeout=60).json()["answers"]
            assert len(shown) == len(given)
        stream = ask(client, stream=True, **ENDLESS)
        next(iter(stream))
    finally:
        one.kill()
    again = Server(home).wait_until_ready()
    try:
        client = openai.OpenAI(base_url=f"{again.url}/v1", api_key="none", max_retries=0, timeout=60)
        given.append(ask(client).choices[0].message.content)
        stream = ask(client, stream=True, **ENDLESS)
        next(iter(stream))
        cut = threading.Thread(target=lambda: [None for _ in stream])
        cut.start()
    finally:
        assert again.stop() == 0
    cut.join()
    with Log(again.records) as log:
        texts = [g.generation.text for g in log.generations(with_supervision=False)]
    assert texts[: len(given)] == given
    with pytest.raises(OSError), socket.create_connection(("127.0.0.1", int(again.url.rsplit(":", 1)[1])), 1):
        pass


def test_what_a_server_writes_is_sent_at_once() -> None:
    """With the system's default the first token of an answer on a kept connection waits 40 ms for an acknowledgement of
    the headers."""
    at_once: list[int] = []

    async def connect() -> None:
        async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            at_once.append(writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        listening = listen("127.0.0.1", 0)
        async with await asyncio.start_server(answer, sock=listening):
            reader, writer = await asyncio.open_connection(*listening.getsockname())
            await reader.read()
            writer.close()

    asyncio.run(connect())
    assert len(at_once) == 1
    assert at_once[0]


def test_a_client_that_is_gone_without_a_word_does_not_keep_its_connection_for_ever() -> None:
    """The system asks, after hours of silence, whether the other end is still there."""
    with listen("127.0.0.1", 0) as listening, socket.create_connection(listening.getsockname()):
        accepted, _ = listening.accept()
        with accepted:
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
