"""Anthropic's own client against ``/v1/messages``."""

from __future__ import annotations

from typing import Any, Literal

import httpx
import pytest
from conftest import DIALECTS_KEY
from pydantic import BaseModel
from service_server import Server

anthropic = pytest.importorskip("anthropic", reason="anthropic is not installed")

# One xdist worker runs these tests, since it starts one server.
pytestmark = pytest.mark.xdist_group("dialects")

ASKED: list[Any] = [{"role": "user", "content": "Tell me a story."}]
TOOL: Any = {
    "name": "weather",
    "description": "How warm it is",
    "input_schema": {
        "type": "object",
        "properties": {"place": {"enum": ["Rome", "Oslo"]}},
        "required": ["place"],
        "additionalProperties": False,
    },
}


@pytest.fixture
def client(dialects: Server) -> Any:
    return anthropic.Anthropic(base_url=dialects.url, api_key=DIALECTS_KEY, max_retries=0, timeout=60)


def ask(client: Any, **options: Any) -> Any:
    return client.messages.create(
        **{"model": "any", "messages": ASKED, "max_tokens": 16, "extra_body": {"temperature": 0}, **options}
    )


def text(message: Any) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def test_a_message_is_that_of_the_chat(client: Any, dialects: Server) -> None:
    chat = {"messages": [{"role": "system", "content": "Be brief."}, *ASKED], "max_tokens": 16, "temperature": 0}
    with dialects.http() as http:
        same = http.post("/v1/chat/completions", json=chat).json()
    for system in ("Be brief.", [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]):
        message = ask(client, system=system)
        assert text(message) == same["choices"][0]["message"]["content"]
    usage = message.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == same["usage"]["prompt_tokens"]
    assert usage.cache_read_input_tokens > 0  # from the same question asked before
    assert usage.output_tokens == same["usage"]["completion_tokens"]
    cut = same["choices"][0]["finish_reason"] == "length"
    assert message.stop_reason == ("max_tokens" if cut else "end_turn")
    counted = client.messages.count_tokens(model="any", messages=ASKED, system="Be brief.")
    assert counted.input_tokens == same["usage"]["prompt_tokens"]
    begun = [*ASKED, {"role": "assistant", "content": "Once upon a time"}]
    more = client.messages.count_tokens(model="any", messages=begun, system="Be brief.")
    assert more.input_tokens > counted.input_tokens


def test_a_streamed_message_is_the_whole_one(client: Any) -> None:
    whole = ask(client)
    with client.messages.stream(model="any", messages=ASKED, max_tokens=16, extra_body={"temperature": 0}) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert text(final) == text(whole)
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)
    assert final.usage.cache_read_input_tokens == whole.usage.input_tokens + whole.usage.cache_read_input_tokens - 1
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]


def test_a_stop_sequence_is_named(client: Any) -> None:
    whole = text(ask(client))
    word = whole[8:14]
    stopped = ask(client, stop_sequences=["no such", word])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", word)
    assert text(stopped) == whole[: whole.index(word)]
    events = list(ask(client, stop_sequences=[word], stream=True))
    assert [e.delta.stop_sequence for e in events if e.type == "message_delta"] == [word]


def test_tools_are_called_and_their_results_read(client: Any) -> None:
    one = {"type": "any", "disable_parallel_tool_use": True}
    asked: Any = {"tools": [TOOL], "max_tokens": 200, "messages": ASKED}
    message = ask(client, tool_choice=one, **asked)
    (call,) = message.content
    assert message.stop_reason == "tool_use"
    assert (call.type, call.name) == ("tool_use", "weather")
    assert call.input["place"] in ("Rome", "Oslo")
    named = {"type": "tool", "name": "weather"}
    with client.messages.stream(model="any", tool_choice=named, **asked) as stream:
        kinds = [event.type for event in stream]
        (streamed,) = stream.get_final_message().content
    assert "input_json" in kinds
    assert streamed.input["place"] in ("Rome", "Oslo")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "21 degrees"}]}
    back: list[Any] = [
        *ASKED,
        {"role": "assistant", "content": [block.model_dump() for block in message.content]},
        {"role": "user", "content": [result, {"type": "text", "text": "And?"}]},
    ]
    counted = [
        client.messages.count_tokens(model="any", messages=m, tools=[TOOL]).input_tokens for m in (back, back[:1])
    ]
    assert counted[0] > counted[1] + 10
    assert ask(client, **{**asked, "messages": back, "max_tokens": 4}).usage.output_tokens <= 4
    # Tools that may not be used are not shown to the model.
    none = ask(client, **{**asked, "max_tokens": 4}, tool_choice={"type": "none"})
    assert none.usage.input_tokens + none.usage.cache_read_input_tokens < counted[1]


def test_a_tool_runner_sends_the_whole_conversation_as_the_server_keeps_none(client: Any) -> None:
    def weather(place: Literal["Rome", "Oslo"]) -> str:
        """How warm it is"""
        return f"21 degrees in {place}"

    one: Any = {"type": "any", "disable_parallel_tool_use": True}
    asked: Any = {"model": "any", "messages": ASKED, "tools": [anthropic.beta_tool(weather)], "max_tokens": 200}
    first, second = client.beta.messages.tool_runner(**asked, tool_choice=one, max_iterations=2)
    assert [message.stop_reason for message in (first, second)] == ["tool_use", "tool_use"]
    sizes = [m.usage.input_tokens + m.usage.cache_read_input_tokens for m in (first, second)]
    assert sizes[1] > sizes[0] + 20  # with the call and its result
    with pytest.raises(anthropic.BadRequestError, match="send the whole conversation"):
        client.beta.messages.create(**{**asked, "tools": []}, extra_body={"thread": {"type": "create"}})


def test_what_the_model_thinks_is_a_block_of_its_own(client: Any) -> None:
    thinking: Any = {"type": "enabled", "budget_tokens": 1024}
    (block,) = ask(client, thinking=thinking).content
    assert block.type == "thinking"
    events = list(ask(client, thinking=thinking, stream=True))
    deltas = [e.delta.thinking for e in events if e.type == "content_block_delta"]
    assert "".join(deltas) == block.thinking
    assert text(ask(client, thinking={"type": "disabled"})) == text(ask(client))
    back = [*ASKED, {"role": "assistant", "content": [block.model_dump()]}, {"role": "user", "content": "Go on."}]
    assert ask(client, messages=back).content


class Place(BaseModel):
    """The required form of an answer."""

    place: Literal["Rome", "Oslo"]


def test_an_answer_keeps_to_a_schema(client: Any) -> None:
    found = client.messages.parse(model="any", messages=ASKED, max_tokens=60, output_format=Place)
    assert found.parsed_output.place in ("Rome", "Oslo")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "run by Anthropic"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "send text"),
        ({"messages": [*ASKED, {"role": "assistant", "content": "Once"}]}, "go on with it is not served"),
        ({"extra_body": {"mcp_servers": [{"url": "x"}]}}, "mcp_servers is not served"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "x"}}, "there is no tool 'x'"),
        ({"stop_sequences": [""]}, "stop"),
        ({"max_tokens": 0}, "max_tokens"),
    ],
)
def test_what_is_not_served_is_refused_in_anthropics_shape(client: Any, fields: dict[str, Any], said: str) -> None:
    with pytest.raises(anthropic.BadRequestError, match=said) as raised:
        ask(client, **fields)
    assert raised.value.body["type"] == "error"
    assert raised.value.body["error"]["type"] == "invalid_request_error"


def test_errors_have_anthropics_types(client: Any, dialects: Server) -> None:
    with pytest.raises(anthropic.AuthenticationError) as raised:
        ask(client.with_options(api_key="wrong"))
    assert raised.value.body["error"]["type"] == "authentication_error"
    lost = httpx.get(f"{dialects.url}/v1/messages/lost", headers={"x-api-key": DIALECTS_KEY}, timeout=60)
    assert lost.json() == {
        "type": "error",
        "error": {"type": "not_found_error", "message": "GET /v1/messages/lost: Not Found"},
    }


def test_the_model_is_listed_as_anthropics_are(client: Any) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.display_name, model.type) == ("Talkative-1B", "Talkative-1B", "model")
    assert client.models.retrieve(model.id).max_input_tokens == 2048
