"""What coding agents send: the parts of real requests by which the server failed them, against a real server."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from conftest import DIALECTS_KEY
from service_server import Server

from adaptive.pair import load_tokenizer
from adaptive.records.log import Log
from adaptive.service.calls import Reading
from adaptive.service.dialects.response_request import ResponsesRequest
from adaptive.service.dialects.response_writer import ResponseWriter
from adaptive.service.formats import format_of
from adaptive.service.items import KeptItems
from adaptive.service.jobs import Piece
from adaptive.service.streams import Served
from adaptive.settings import load_settings

# By one process, which starts one server.
pytestmark = pytest.mark.xdist_group("dialects")

PLACE = {
    "type": "object",
    "properties": {"place": {"enum": ["Rome", "Oslo"]}},
    "required": ["place"],
    "additionalProperties": False,
}
ASKED = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "How warm is it?"}]}]


@pytest.fixture
def client(dialects: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{dialects.url}/v1", api_key=DIALECTS_KEY, max_retries=0, timeout=60) as one:
        yield one


def respond(client: openai.OpenAI, tools: list[dict[str, Any]], **options: Any) -> Any:
    """A response that calls one of the tools, unless ``options`` say otherwise."""
    given: dict[str, Any] = {"model": "any", "input": ASKED, "max_output_tokens": 200, "temperature": 0}
    given |= {"tools": tools, "tool_choice": "required", "parallel_tool_calls": False}
    return client.responses.create(**{**given, **options})


def test_a_tool_in_a_namespace_is_called_by_both_names(client: openai.OpenAI, dialects: Server) -> None:
    """As Codex offers the tools of its own agents and of MCP servers."""
    tool = {"type": "function", "name": "read", "description": "How warm it is", "strict": False, "parameters": PLACE}
    tools = [{"type": "namespace", "name": "weather", "description": "The weather", "tools": [tool]}]
    (call,) = respond(client, tools).output
    assert (call.type, call.name, call.namespace) == ("function_call", "read", "weather")
    assert json.loads(call.arguments)["place"] in ("Rome", "Oslo")
    done = [e.item for e in respond(client, tools, stream=True) if e.type == "response.output_item.done"]
    assert [(item.name, item.namespace) for item in done] == [("read", "weather")]
    # In the next prompt the call has the name that the model has used.
    back = [*ASKED, call.model_dump(), {"type": "function_call_output", "call_id": call.call_id, "output": "warm"}]
    respond(client, tools, input=back, tool_choice="auto", max_output_tokens=2)
    with Log(dialects.records) as log:
        said = list(log.generations(with_supervision=False))[-1].generation.messages
    assert '"weather__read"' in said[-2].content


def test_a_custom_tool_is_called_with_a_text(client: openai.OpenAI) -> None:
    """As Codex offers its patches to the models that it knows."""
    grammar = {"type": "grammar", "syntax": "lark", "definition": 'start: "wish"'}
    tools = [{"type": "custom", "name": "wish", "description": "Say a wish", "format": grammar}]
    body = ResponsesRequest.model_validate({"input": "Hello", "tools": tools, "stream": True})
    asked = body.translated(KeptItems()).tools or []
    assert asked[0]["function"]["description"].endswith('start: "wish"')
    reading = Reading(format_of("<tool_call>"), tuple(asked))
    writer = ResponseWriter(Served("x", 0, "m", load_tokenizer(load_settings({})), reading, 3), body)
    written = '<tool_call>{"name": "wish", "arguments": {"input": "to \\"swim\\"\\nfar"}}</tool_call> Then it swims.'
    events = [*writer.begin()]
    for start in range(0, len(written), 5):
        events += writer.piece(Piece(0, written[start : start + 5]))
    found = [json.loads(event.partition("data: ")[2]) for event in events]
    kinds = [event["type"].removeprefix("response.") for event in found[2:]]
    call = ["output_item.added", "custom_tool_call_input.delta", "custom_tool_call_input.done", "output_item.done"]
    assert kinds[:4] == call
    item = found[5]["item"]
    assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", "wish", 'to "swim"\nfar')
    back = [*ASKED, item, {"type": "custom_tool_call_output", "call_id": item["call_id"], "output": "granted"}]
    plain, more = (
        respond(client, tools, input=given, tool_choice="auto", max_output_tokens=2).usage.input_tokens
        for given in (ASKED, back)
    )
    assert more > plain + 10


def test_a_prompt_that_is_too_long_is_refused_in_words_that_agents_know(
    client: openai.OpenAI, dialects: Server
) -> None:
    """By them Claude Code, opencode and pi shorten the conversation; others by OpenAI's code."""
    known = r"prompt is too long[^0-9]*(\d+)\s*tokens?\s*>\s*(\d+)"
    for words in (1_500, 200_000):  # tokenized in full, and in part
        text = "herring " * words
        with dialects.http() as http:
            asked = {"max_tokens": 5, "messages": [{"role": "user", "content": text}]}
            refused = http.post("/v1/messages", json=asked)
        assert refused.status_code == 400
        assert re.match(known, refused.json()["error"]["message"])
        with pytest.raises(openai.BadRequestError, match=known) as raised:
            client.chat.completions.create(model="any", messages=[{"role": "user", "content": text}])
        assert raised.value.code == "context_length_exceeded"


def test_an_agent_that_never_wants_to_be_stored_is_recorded_if_its_user_says_so(
    client: openai.OpenAI, dialects: Server
) -> None:
    """Codex and pi send ``store: false`` with every request."""

    def recorded(**headers: str) -> int:
        with Log(dialects.records) as log:
            before = log.count()
            respond(client, [], tool_choice="auto", max_output_tokens=2, store=False, extra_headers=headers)
            return log.count() - before

    assert recorded() == 0
    assert "; not recorded, as the client asked" in dialects.said.splitlines()[-1]
    assert recorded(**{"X-Store": "true"}) == 1
    assert recorded(**{"X-Store": "false"}) == 0
    with pytest.raises(openai.BadRequestError, match="X-Store: send true or false"):
        recorded(**{"X-Store": "maybe"})


def test_a_picture_in_the_result_of_a_tool_does_not_end_the_session(dialects: Server) -> None:
    """An agent that has read one sends it again in every later request."""
    question = {"role": "user", "content": "What is on it?"}
    block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    url = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    call = {"type": "tool_use", "id": "t1", "name": "read", "input": {}}
    function = {"id": "t1", "type": "function", "function": {"name": "read", "arguments": "{}"}}
    picture = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}
    results: list[tuple[str, str, str, list[dict[str, Any]], list[dict[str, Any]]]] = [
        ("/v1/messages", "messages", "image", [question, {"role": "assistant", "content": [call]}],
         [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": [block]}]}]),
        ("/v1/chat/completions", "messages", "image_url", [question, {"role": "assistant", "tool_calls": [function]}],
         [{"role": "tool", "tool_call_id": "t1", "content": [{"type": "text", "text": "Here: "}, url]}]),
        ("/v1/responses", "input", "input_image",
         [question, {"type": "function_call", "call_id": "t1", "name": "read", "arguments": "{}"}],
         [{"type": "function_call_output", "call_id": "t1", "output": [picture]}]),
    ]  # fmt: skip
    with dialects.http() as http:
        for path, field, kind, before, result in results:
            limit = "max_output_tokens" if field == "input" else "max_tokens"
            answer = http.post(path, json={"model": "any", limit: 2, field: before + result})
            assert answer.status_code == 200, answer.text
            with Log(dialects.records) as log:
                said = list(log.generations(with_supervision=False))[-1].generation.messages[-1]
            assert said.role == "tool"
            assert said.content.endswith(f"[{kind}: not shown, as the model reads only text]")
        asked = {"model": "any", "max_tokens": 2, "messages": [{"role": "user", "content": [url]}]}
        assert http.post("/v1/chat/completions", json=asked).status_code == 400
