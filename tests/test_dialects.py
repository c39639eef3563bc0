"""One server, called through llama.cpp's API and by OpenAI's client through ``/v1/responses``."""

from __future__ import annotations

import json
from typing import Any, Literal

import httpx
import openai
import pytest
from conftest import BUNDLED, DIALECTS_KEY
from pydantic import BaseModel
from service_server import Server
from transformers import AutoTokenizer

# By one process, which starts one server.
pytestmark = pytest.mark.xdist_group("dialects")

STORY = "Once upon a time"
TOOL: Any = {
    "type": "function",
    "name": "weather",
    "description": "How warm it is",
    "parameters": {
        "type": "object",
        "properties": {"place": {"enum": ["Rome", "Oslo"]}},
        "required": ["place"],
        "additionalProperties": False,
    },
    "strict": True,
}


@pytest.fixture
def client(dialects: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{dialects.url}/v1", api_key=DIALECTS_KEY, max_retries=0, timeout=60)


def respond(client: openai.OpenAI, **options: Any) -> Any:
    given = {"model": "any", "input": "Tell me a story.", "max_output_tokens": 16, "temperature": 0, **options}
    return client.responses.create(**given)


def test_the_model_has_a_short_name(client: openai.OpenAI, dialects: Server) -> None:
    (listed,) = client.models.list().data
    assert listed.id == "Talkative-1B"
    assert respond(client).model == listed.id
    with dialects.http() as http:
        assert http.get("/props").json()["model"] == listed.id


def test_the_key_is_taken_in_either_header(dialects: Server) -> None:
    url = f"{dialects.url}/v1/models"
    assert httpx.get(url, headers={"x-api-key": DIALECTS_KEY}, timeout=60).status_code == 200
    for headers in ({}, {"x-api-key": "wrong"}, {"Authorization": "Bearer wrong", "x-api-key": DIALECTS_KEY}):
        assert httpx.get(url, headers=headers, timeout=60).status_code == 401


def test_a_completion_as_llama_cpp_has_it(dialects: Server, client: openai.OpenAI) -> None:
    asked = {"prompt": STORY, "n_predict": 12, "temperature": 0, "samplers": ["top_k"], "seed": -1, "mirostat": 0}
    with dialects.http() as http:
        whole = http.post("/completion", json={**asked, "return_tokens": True}).json()
        assert (whole["stop_type"], whole["tokens_predicted"], len(whole["tokens"])) == ("limit", 12, 12)
        same = client.completions.create(model="any", prompt=STORY, max_tokens=12, temperature=0)
        assert whole["content"] == same.choices[0].text
        word = whole["content"][8:14]
        stopped = http.post("/completion", json={**asked, "stop": ["no such", word]}).json()
        assert (stopped["stop_type"], stopped["stopping_word"]) == ("word", word)
        assert whole["content"].startswith(stopped["content"] + word)
        streamed = http.post("/completion", json={**asked, "stream": True})
        lines = [json.loads(line.removeprefix("data: ")) for line in streamed.text.split("\n\n") if line]
        assert "".join(line["content"] for line in lines) == whole["content"]
        assert [line["stop"] for line in lines] == [False] * (len(lines) - 1) + [True]
        assert lines[-1]["timings"]["predicted_n"] == 12
        banned = {"logit_bias": [[whole["tokens"][0], False]]}
        other = http.post("/completion", json={**asked, **banned, "return_tokens": True}).json()
        assert other["tokens"][0] != whole["tokens"][0]
        for wrong in ({"mirostat": 2}, {"typical_p": 0.5}, {"n_probs": 3}, {"logit_bias": [["a", 1.0]]}):
            refused = http.post("/completion", json={**asked, **wrong})
            assert refused.status_code == 400
            assert next(iter(wrong)) in refused.json()["error"]["message"]


def test_a_chat_is_shown_as_its_template_writes_it(dialects: Server) -> None:
    chat = {"messages": [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Hello"}]}
    with dialects.http() as http:
        said = http.post("/apply-template", json={**chat, "enable_thinking": True}).json()["prompt"]
        assert said == "<|bos|><|system|>Be brief.<|end|><|user|>Hello<|end|><|assistant|><think>\n"
        counted = http.post("/tokenize", json={"content": said}).json()["tokens"]
        answer = http.post("/v1/chat/completions", json={**chat, "enable_thinking": True, "max_tokens": 4}).json()
        assert answer["usage"]["prompt_tokens"] == len(counted)


def test_embeddings_are_refused_with_a_sentence(client: openai.OpenAI, dialects: Server) -> None:
    with pytest.raises(openai.BadRequestError, match="embeddings are not served"):
        client.embeddings.create(model="any", input="text")
    with dialects.http() as http:
        assert http.post("/embedding", json={"content": "text"}).status_code == 400


def test_what_a_client_sends_without_wanting_anything_does_nothing(client: openai.OpenAI) -> None:
    def ask(**fields: Any) -> Any:
        messages: Any = [{"role": "user", "content": "What swims?"}]
        return client.chat.completions.create(model="any", messages=messages, max_tokens=8, temperature=0, **fields)

    plain = ask().choices[0].message.content
    harmless = {"cache_prompt": True, "logit_bias": None, "audio": None, "chat_id": "7", "functions": []}
    same = ask(metadata={"a": "b"}, service_tier="auto", prompt_cache_key="k", extra_body=harmless)
    assert same.choices[0].message.content == plain
    for name, value in {"functions": [{"name": "f"}], "audio": {"voice": "x"}, "no_such_field": 1}.items():
        with pytest.raises(openai.BadRequestError, match=f"{name} is not served"):
            ask(extra_body={name: value})


def test_what_a_model_thinks_is_told_apart(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "What swims?"}]
    asked: Any = {"model": "any", "messages": messages, "max_tokens": 12, "temperature": 0}
    thinking: Any = {**asked, "extra_body": {"chat_template_kwargs": {"enable_thinking": True}}}
    answered: Any = client.chat.completions.create(**thinking)
    whole = answered.choices[0].message
    assert not whole.content
    assert answered.usage.completion_tokens_details.reasoning_tokens in (11, 12)  # of 12, tokenized again
    chunks: Any = list(client.chat.completions.create(**thinking, stream=True, stream_options={"include_usage": True}))
    streamed = "".join(getattr(c.choices[0].delta, "reasoning_content", None) or "" for c in chunks[:-1])
    assert streamed == whole.reasoning_content
    assert chunks[-1].usage.completion_tokens_details == answered.usage.completion_tokens_details
    plain: Any = client.chat.completions.create(**asked)
    assert plain.usage.completion_tokens_details.reasoning_tokens == 0
    effort = client.chat.completions.create(**asked, reasoning_effort="none").choices[0].message
    assert effort.content == client.chat.completions.create(**asked).choices[0].message.content


def test_thinking_before_a_format_is_free(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "What swims?"}]
    asked: Any = {"model": "any", "messages": messages, "max_tokens": 12, "temperature": 0}
    kept: Any = {**asked, "response_format": {"type": "json_object"}}
    thinking: Any = {"extra_body": {"enable_thinking": True}}
    free = client.chat.completions.create(**asked, **thinking).choices[0].message
    before: Any = client.chat.completions.create(**kept, **thinking).choices[0].message
    assert before.reasoning_content == free.reasoning_content  # type: ignore[attr-defined]
    assert not before.content
    effort: Any = client.chat.completions.create(**kept, reasoning_effort="low").choices[0].message
    assert effort.reasoning_content == before.reasoning_content
    assert (client.chat.completions.create(**kept).choices[0].message.content or "").startswith("{")


def test_a_tool_is_called_by_a_chat_and_its_result_read(client: openai.OpenAI) -> None:
    function = {key: TOOL[key] for key in ("name", "description", "parameters")}
    tools: Any = [{"type": "function", "function": function}]
    messages: Any = [{"role": "user", "content": "How warm is it?"}]
    asked: Any = {"model": "any", "messages": messages, "tools": tools, "tool_choice": "required", "max_tokens": 200}
    one = client.chat.completions.create(**asked, parallel_tool_calls=False)
    assert one.choices[0].finish_reason == "tool_calls"
    (call,) = one.choices[0].message.tool_calls or ()
    assert json.loads(call.function.arguments)["place"] in ("Rome", "Oslo")  # type: ignore[union-attr]
    messages += [
        one.choices[0].message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "21 degrees"},
    ]
    assert client.chat.completions.create(model="any", messages=messages, tools=tools, max_tokens=4).choices


def test_beside_tools_a_format_leaves_the_model_the_choice_of_a_call(client: openai.OpenAI) -> None:
    known = AutoTokenizer.from_pretrained(BUNDLED / "target")
    function = {key: TOOL[key] for key in ("name", "description", "parameters")}
    schema = {**Place.model_json_schema(), "additionalProperties": False}
    wanted = {"type": "json_schema", "json_schema": {"name": "place", "schema": schema}}

    def ask(but: str, **options: Any) -> Any:
        """The answer of a model that prefers tokens that do not begin with ``but``."""
        bias = {str(token): -100.0 for token in range(len(known)) if known.decode([token]).startswith(but)}
        messages: Any = [{"role": "user", "content": "How warm is it?"}]
        asked: Any = {"model": "any", "messages": messages, "temperature": 0, "max_tokens": 300, "logit_bias": bias}
        tools: Any = [{"type": "function", "function": function}]
        one: Any = {"tools": tools, "parallel_tool_calls": False}  # this model would never stop to call
        return client.chat.completions.create(**asked, **one, response_format=wanted, **options)

    written = ask("<").choices[0]
    assert written.message.tool_calls is None
    assert Place.model_validate_json(written.message.content)
    called = ask("{").choices[0]
    assert called.finish_reason == "tool_calls"
    assert not called.message.content
    assert json.loads(called.message.tool_calls[0].function.arguments)["place"] in ("Rome", "Oslo")
    deltas = [chunk.choices[0].delta for chunk in ask("{", stream=True)]
    calls = [call for delta in deltas for call in delta.tool_calls or ()]
    assert len(calls) > 2  # its arguments come piece by piece
    assert not any(delta.content for delta in deltas)
    wanted_there = {"format": {"type": "json_schema", "name": "place", "schema": schema}}
    given = {"tools": [TOOL], "parallel_tool_calls": False, "max_output_tokens": 300, "text": wanted_there}
    (item,) = respond(client, **given).output
    if item.type == "message":
        assert Place.model_validate_json(item.content[0].text)
    else:
        assert json.loads(item.arguments)["place"] in ("Rome", "Oslo")
    forced = ask("<", tool_choice="required").choices[0]  # no text, to which the format would apply
    assert forced.finish_reason == "tool_calls"
    with pytest.raises(openai.BadRequestError, match="tools and a grammar do not go together"):
        client.chat.completions.create(
            model="any", messages=[{"role": "user", "content": "Hello"}],
            tools=[{"type": "function", "function": function}], extra_body={"grammar": 'root ::= "yes"'},
        )  # fmt: skip


def test_a_response_is_that_of_the_chat(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Tell me a story."}]
    chat = client.chat.completions.create(model="any", messages=messages, max_tokens=16, temperature=0)
    for given in (
        {"input": "Tell me a story.", "instructions": "Be brief."},
        {"input": messages},
        {"input": [{**m, "content": [{"type": "input_text", "text": m["content"]}]} for m in messages]},
    ):
        response = respond(client, **given)
        assert response.output_text == chat.choices[0].message.content
    assert chat.usage is not None
    assert (response.usage.input_tokens, response.usage.output_tokens) == (
        chat.usage.prompt_tokens,
        chat.usage.completion_tokens,
    )
    cut = chat.choices[0].finish_reason == "length"
    assert response.status == ("incomplete" if cut else "completed")
    assert (response.incomplete_details is not None) == cut


def test_a_streamed_response_is_the_whole_one(client: openai.OpenAI) -> None:
    whole = respond(client)
    events = list(respond(client, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:4]] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == whole.output_text
    assert events[-1].type == f"response.{whole.status}"
    assert events[-1].response.output_text == whole.output_text
    with client.responses.stream(model="any", input="Hello", max_output_tokens=400, text_format=Place) as stream:
        kinds = [event.type for event in stream]
        parsed = stream.get_final_response().output_parsed
    assert "response.output_text.done" in kinds
    assert parsed is not None
    assert parsed.place in ("Rome", "Oslo")


class Place(BaseModel):
    """The schema of an answer."""

    place: Literal["Rome", "Oslo"]
    warm: bool


def test_a_response_is_parsed_into_what_was_asked_for(client: openai.OpenAI) -> None:
    found = client.responses.parse(model="any", input="Where is it warm?", text_format=Place, max_output_tokens=400)
    assert found.output_parsed is not None
    assert found.output_parsed.place in ("Rome", "Oslo")
    chat = client.chat.completions.parse(
        model="any", messages=[{"role": "user", "content": "Where?"}], response_format=Place, max_tokens=400
    )
    assert chat.choices[0].message.parsed is not None


def test_a_response_calls_tools_and_reads_their_results(client: openai.OpenAI) -> None:
    asked = {"tools": [TOOL], "max_output_tokens": 200, "parallel_tool_calls": False}
    given: list[Any] = [{"role": "user", "content": "How warm is it?"}]
    whole = respond(client, input=given, tool_choice={"type": "function", "name": "weather"}, **asked)
    (call,) = whole.output
    assert (call.type, call.name) == ("function_call", "weather")
    assert json.loads(call.arguments)["place"] in ("Rome", "Oslo")
    events = list(respond(client, input=given, tool_choice="required", stream=True, **asked))
    done = next(e for e in events if e.type == "response.function_call_arguments.done")
    assert json.loads(done.arguments)["place"] in ("Rome", "Oslo")
    assert events[-1].response.output[0].arguments == done.arguments
    given += [call.model_dump(), {"type": "function_call_output", "call_id": call.call_id, "output": "21 degrees"}]
    assert respond(client, input=given, **{**asked, "max_output_tokens": 4}).usage.input_tokens > 40


def test_what_a_response_thought_is_an_item_and_goes_back(client: openai.OpenAI) -> None:
    thought = respond(client, reasoning={"effort": "high"})
    (item,) = thought.output
    assert item.type == "reasoning"
    assert thought.usage.output_tokens_details.reasoning_tokens > 0
    events = list(respond(client, reasoning={"effort": "high"}, stream=True))
    said = "".join(e.delta for e in events if e.type == "response.reasoning_text.delta")
    assert said == item.content[0].text
    again: list[Any] = [{"role": "user", "content": "Go on."}, item.model_dump(), {"role": "user", "content": "And?"}]
    assert respond(client, input=again).status in ("completed", "incomplete")


def test_who_asks_for_a_summary_of_the_thinking_gets_all_of_it(client: openai.OpenAI) -> None:
    (thought,) = respond(client, reasoning={"effort": "high"}).output
    asked: Any = {"effort": "high", "summary": "auto"}
    whole = respond(client, reasoning=asked)
    (item,) = whole.output
    assert (item.summary[0].text, item.content) == (thought.content[0].text, None)
    assert (whole.reasoning.summary, whole.usage.output_tokens_details.reasoning_tokens > 0) == ("auto", True)
    events = list(respond(client, reasoning=asked, stream=True))
    said = [event.delta for event in events if event.type == "response.reasoning_summary_text.delta"]
    assert "".join(said) == item.summary[0].text
    assert {event.summary_index for event in events if "summary" in event.type} == {0}
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[2:5] == ["output_item.added", "reasoning_summary_part.added", "reasoning_summary_text.delta"]
    assert kinds[-4:-1] == ["reasoning_summary_text.done", "reasoning_summary_part.done", "output_item.done"]


@pytest.mark.thorough
def test_items_of_a_response_can_be_referred_to(client: openai.OpenAI, dialects: Server) -> None:
    """As the AI SDK does with the thinking before a call, and with earlier messages."""
    asked: list[Any] = [{"role": "user", "content": "How warm is it?"}]

    def prompt_tokens(*items: Any) -> int:
        return int(respond(client, input=[*asked, *items, {"role": "user", "content": "And?"}]).usage.input_tokens)

    (thought,) = respond(client, input=asked, reasoning={"effort": "high"}).output
    (message,) = respond(client, input=asked).output
    choice: Any = {"type": "function", "name": "weather"}
    (call,) = respond(client, input=asked, tools=[TOOL], tool_choice=choice, max_output_tokens=200).output
    for item in (message, call):
        reference = {"type": "item_reference", "id": item.id}
        assert prompt_tokens(reference) == prompt_tokens(item.model_dump()) > prompt_tokens()
    assert prompt_tokens({"type": "item_reference", "id": thought.id}) > 0
    (unkept,) = respond(client, input=asked, store=False).output
    with pytest.raises(openai.BadRequestError, match=f"no item '{unkept.id}' is kept"):
        prompt_tokens({"type": "item_reference", "id": unkept.id})
    with dialects.http() as http:  # what is forgotten cannot be referred to any more
        (newest,) = http.get("/adaptive/answers", params={"limit": 1}).json()["answers"]
        forgotten = http.delete(f"/adaptive/answers/{newest['id']}", headers={"content-type": "application/json"})
        assert forgotten.status_code == 200, forgotten.text
    with pytest.raises(openai.BadRequestError, match="is kept"):
        prompt_tokens({"type": "item_reference", "id": message.id})


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"previous_response_id": "resp_1"}, "no response is kept"),
        ({"background": True}, "while somebody waits"),
        ({"truncation": "auto"}, "shorten the input"),
        ({"tools": [{"type": "web_search"}]}, "run by OpenAI"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "no item 'x' is kept"),
        ({"input": [{"type": "computer_call"}]}, "not understood"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "send text"),
        ({"include": ["file_search_call.results"]}, "is not served"),
        ({"prompt": {"id": "p"}}, "prompt is not served"),
        ({"input": []}, "messages"),
    ],
)
def test_what_a_response_cannot_be_is_refused(client: openai.OpenAI, fields: dict[str, Any], said: str) -> None:
    with pytest.raises(openai.BadRequestError, match=said):
        respond(client, **fields)
    with pytest.raises(openai.BadRequestError, match="no response is kept"):
        client.responses.retrieve("resp_1")


def test_half_a_character_that_is_told_again_does_no_harm(dialects: Server) -> None:
    body = '{"input": "Hello", "max_output_tokens": 2, "text": {"format": {"type": "text", "name": "\\ud83d"}}%s}'
    headers = {"content-type": "application/json"}
    with dialects.http() as http:
        for more in ("", ', "stream": true', ', "user": "\\ud83d"'):
            answer = http.post("/v1/responses", content=(body % more).encode(), headers=headers)
            assert answer.status_code == 200, answer.text
            assert '"name": "?"' in answer.text


def test_what_is_not_to_be_stored_is_not_in_the_log(client: openai.OpenAI, dialects: Server) -> None:
    from adaptive.records.log import Log

    with Log(dialects.records) as log:
        before = log.count()
        assert respond(client, store=False).store is False
        assert log.count() == before
        assert respond(client).store is False  # responses are not stored for later retrieval
        assert log.count() == before + 1
        asked: dict[str, dict[str, Any]] = {
            "/v1/messages": {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4},
            "/completion": {"prompt": "Hello", "n_predict": 4},
        }
        key = {"x-api-key": DIALECTS_KEY}
        for number, (path, body) in enumerate(asked.items(), before + 2):
            for more, logged in (({"store": False}, number - 1), ({}, number)):
                answer = httpx.post(dialects.url + path, json={**body, **more}, headers=key, timeout=60)
                assert answer.status_code == 200, answer.text
                assert log.count() == logged
