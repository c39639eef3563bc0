"""A measurement warms the server's prompt cache, waits while it loads, and leaves out prompts that it refuses."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from upstream_server import CLOSE, Heard, plain, scripted

from adaptive.errors import AdaptiveError
from adaptive.upstream.kinds import ADAPTIVE
from adaptive.upstream.measure import DRAFTED, LENGTH, Answered, Measured, counted, find_kind, measure
from adaptive.upstream.models import served
from cli.publish_trial import worse_than

PROMPTS = [[1, 2], [3, 4, 5], [6]]


def answering(refuse: Callable[[dict[str, Any]], bytes | None]) -> Callable[[Heard, socket.socket], None]:
    """A script that answers prompts, unless ``refuse`` gives another answer."""

    def script(heard: Heard, connection: socket.socket) -> None:
        if heard.path != "/v1/completions":
            connection.sendall(plain(b"{}", status="404 Not Found", more=CLOSE))
            return
        asked = json.loads(heard.body)
        said = {"choices": [{"text": "x"}], "usage": {"completion_tokens": asked["max_tokens"]}}
        connection.sendall(refuse(asked) or plain(json.dumps(said).encode(), more=CLOSE))

    return script


def test_each_prompt_is_in_the_prompt_cache_when_it_is_measured() -> None:
    with scripted(answering(lambda asked: None), "vllm") as server:
        measured = measure(server.url, None, PROMPTS, 8)
        bodies = [json.loads(heard.body) for heard in server.asked("/v1/completions")]
    assert [(body["prompt"], body["max_tokens"]) for body in bodies] == [(p, n) for p in PROMPTS for n in (1, 8)]
    assert [one.tokens for one in measured.answers] == [8, 8, 8]


def test_several_ranks_of_a_server_have_one_mean_of_tokens_a_round() -> None:
    """SGLang with data parallelism: each rank tells its own mean, and its own counts."""
    text = "".join(f'sglang:{LENGTH}{{dp_rank="{rank}"}} {value}\n' for rank, value in enumerate((2.4, 2.0, 0.0)))
    text += "".join(f'sglang:{DRAFTED}{{dp_rank="{rank}"}} 100\n' for rank in range(2))
    found = counted(text)
    assert found.length == pytest.approx(2.2)  # the third has not drafted yet
    assert found.drafted == 200


def test_a_server_that_still_loads_is_waited_for() -> None:
    loading = plain(b'{"error":"loading"}', status="503 Service Unavailable", more=CLOSE)
    left = [3]

    def refuse(asked: dict[str, Any]) -> bytes | None:
        left[0] -= 1
        return loading if left[0] >= 0 else None

    with scripted(answering(refuse), "vllm") as server:
        assert len(measure(server.url, None, PROMPTS, 8, wait_s=30).answers) == 3
        left[0] = 3
        with pytest.raises(AdaptiveError, match="503"):
            measure(server.url, None, PROMPTS, 8)
        left[0] = 3
        with pytest.raises(AdaptiveError, match="503 Service Unavailable") as refused:
            measure(server.url.replace("//", "//me:secret@"), None, PROMPTS, 8)
        assert "secret" not in str(refused.value)


def test_a_prompt_that_is_too_long_is_left_out() -> None:
    refusal = plain(b'{"error":{"message":"context is 10"}}', status="400 Bad Request", more=CLOSE)
    most = [10]

    def refuse(asked: dict[str, Any]) -> bytes | None:
        return refusal if len(asked["prompt"]) + asked["max_tokens"] > most[0] else None

    with scripted(answering(refuse), "vllm") as server:
        measured = measure(server.url, None, PROMPTS, 8)
        assert measured.prompts == ((1, 2), (6,))
        assert len(measured.answers) == 2
        most[0] = 5
        with pytest.raises(AdaptiveError, match=r"refuses every prompt.*context is 10"):
            measure(server.url, None, PROMPTS, 8)


def test_a_server_that_refuses_what_it_answered_is_worse() -> None:
    one = Answered(10, 1.0, None, None)
    assert worse_than(Measured((one,), None, None, None), Measured((one,), None, None, None)) is None
    worse = worse_than(Measured((one, one), None, None, None), Measured((one,), None, None, None))
    assert worse is not None
    assert "refuses" in worse


def test_a_server_that_drafts_nothing_is_worse_whatever_it_did_before() -> None:
    one = (Answered(10, 1.0, None, None),)
    for drafted in (None, 0, 8):
        assert worse_than(Measured(one, drafted, drafted, None), Measured(one, 0, 0, None)) == "it drafts nothing"


VLLM_MODELS = [
    {"id": "lora", "root": "/lora", "parent": "one"},
    {"id": "one", "root": "/model", "parent": None},
    {"id": "two", "root": "/model", "parent": None},
]
ROUTER_MODELS = [{"id": "a", "aliases": ["c"]}, {"id": "b"}]


@pytest.mark.parametrize(
    ("listed", "model", "name", "names"),
    [
        (VLLM_MODELS, None, "one", {"one", "two"}),
        (VLLM_MODELS, "two", "two", {"one", "two"}),
        (VLLM_MODELS, "lora", "lora", {"lora"}),
        (ROUTER_MODELS, None, "a", {"a", "c"}),
        (ROUTER_MODELS, "c", "c", {"a", "c"}),
        (ROUTER_MODELS, "z", "z", {"z"}),
        ([{"id": "only"}], None, "only", {"only"}),
        ([{"id": "text-embedding-x"}, {"id": "only"}], None, "only", {"only"}),
        ([], None, "", set()),
    ],
)
def test_the_target_is_found_among_a_servers_models(
    listed: list[dict[str, Any]], model: str | None, name: str, names: set[str]
) -> None:
    found = served({"data": listed}, model)
    assert (found.name, found.names) == (name, names)
    assert found.is_target(name)
    assert found.is_target("")
    assert found.is_target("another") == found.alone == (len(listed) < 2 or name == "only")
    assert served("no list").is_target("another")


def test_the_target_is_what_is_measured() -> None:
    listed = plain(json.dumps({"data": VLLM_MODELS}).encode(), more=CLOSE)
    answer = answering(lambda asked: None)
    with scripted(lambda h, c: c.sendall(listed) if h.path == "/v1/models" else answer(h, c), "several") as server:
        for model in (None, "two"):
            measure(server.url, None, PROMPTS[:1], 8, model)
        names = [json.loads(heard.body)["model"] for heard in server.asked("/v1/completions")]
    assert names == ["one", "one", "two", "two"]


def test_a_server_that_cannot_list_its_models_yet_is_waited_for() -> None:
    """As ``adaptive serve`` while it loads."""
    left = [2]

    class Loading(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            left[0] -= 1
            self.send_response(503 if left[0] >= 0 else 200)
            self.end_headers()
            self.wfile.write(b'{"data": [{"id": "m", "owned_by": "adaptive"}]}')

    with HTTPServer(("127.0.0.1", 0), Loading) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        with pytest.raises(AdaptiveError, match="does not answer"):
            find_kind(url, None)
        assert find_kind(url, None, 30.0) is ADAPTIVE
        server.shutdown()
    assert left[0] == -1
