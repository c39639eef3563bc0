"""Tool calls and thoughts in OpenAI's responses, whole and streamed, and in chats that clients send back."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import BUNDLED
from hypothesis import given
from hypothesis import strategies as st
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletionChunk
from test_text_stream import by_bytes
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from adaptive.encoding import render_chat
from adaptive.errors import AdaptiveError
from adaptive.service import streams
from adaptive.service.calls import Reading
from adaptive.service.chats import prepare, rendered
from adaptive.service.dialects.completions import Completion
from adaptive.service.dialects.llama_server import LlamaCompletion
from adaptive.service.dialects.messages import MessagesRequest, MessageWriter
from adaptive.service.dialects.responses import ResponsesRequest, ResponseWriter
from adaptive.service.formats import Call, format_of
from adaptive.service.jobs import Answer, Ask, Done, Event, Job, Piece
from adaptive.service.schemas import ChatMessage, ChatRequest, RequestBody, StreamOptions
from adaptive.types import SamplingParams, StopParams, Supervision, Timings

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
        },
    }
]
HERMES = Reading(format_of("<think> <tool_call>"), tuple(TOOLS))
TWO = (
    "<think>\nWarm?\n</think>\n\nLet me look.\n<tool_call>\n"
    '{"name": "weather", "arguments": {"city": "Rome", "days": 3}}\n</tool_call>\n'
    '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>'
)


def tokenizer(template: str) -> PreTrainedTokenizerBase:
    loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(BUNDLED / "target")
    loaded.chat_template = template
    return loaded


@given(st.text(alphabet="<>/tool_cal {}\n", max_size=60))
def test_no_text_without_a_whole_mark_is_changed(text: str) -> None:
    if "<tool_call>" not in text:
        reader = HERMES.reader()
        said = [part for at in range(0, len(text), 3) for part in reader.feed(text[at : at + 3])] + reader.finish()
        assert "".join(str(part) for part in said) == text


@pytest.mark.parametrize("step", [1, 100])
def test_a_mark_that_follows_by_chance_is_not_lost(step: int) -> None:
    text, reader = "get<tool_call>a</tool_call></tool_call></tool_call>", HERMES.reader()
    said = [part for at in range(0, len(text), step) for part in reader.feed(text[at : at + step])] + reader.finish()
    assert "".join(str(part) for part in said) == text


ASK = Ask((), SamplingParams(), StopParams(8), 1, "", None, True, False, True)


def answer(text: str) -> Answer:
    return Answer(0, text, (5, 6), 3, "stop", (), Timings(3, 0, 0.1, 2, 0.1), None, None)


def test_a_whole_response_and_a_stream_carry_the_same() -> None:
    served = streams.Served("1", 0, "pair", tokenizer("{{ messages }}"), HERMES, 3)
    whole = Completion(served, chat=True, top=None, options=StreamOptions()).whole([answer(TWO)])["choices"][0]
    assert whole["finish_reason"] == "tool_calls"
    assert whole["message"]["content"] == "Let me look."
    assert whole["message"]["reasoning_content"] == "Warm?"

    async def streamed() -> list[dict[str, Any]]:
        events: asyncio.Queue[Event] = asyncio.Queue()
        for at in range(0, len(TWO), 5):
            events.put_nowait(Piece(0, TWO[at : at + 5]))
        events.put_nowait(answer(TWO))
        events.put_nowait(Done())
        writer = Completion(served, chat=True, top=None, options=StreamOptions())
        lines = [line async for line in streams.chunks(Job(ASK, events.put_nowait), events, writer)]
        assert lines[-1] == "data: [DONE]\n\n"
        return [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines[:-1]]

    choices = asyncio.run(streamed())
    assert choices[0]["delta"]["role"] == "assistant"
    assert "".join(c["delta"].get("content") or "" for c in choices) == "Let me look."
    assert "".join(c["delta"].get("reasoning_content") or "" for c in choices) == "Warm?"
    calls = [call for c in choices for call in c["delta"].get("tool_calls", ())]
    assert [call["index"] for call in calls if "id" in call] == [0, 1]
    for number, wanted in enumerate(whole["message"]["tool_calls"]):
        parts = [call["function"] for call in calls if call["index"] == number]
        assert parts[0]["name"] == wanted["function"]["name"]
        assert len(parts) > 2, "the arguments came in one piece"
        said = "".join(part["arguments"] for part in parts)
        assert json.loads(said) == json.loads(wanted["function"]["arguments"])
    assert choices[-1]["finish_reason"] == "tool_calls"


def test_several_answers_of_a_stream_begin_in_the_order_of_their_numbers() -> None:
    """openai's own helper fails, or mixes the answers, where the second one begins first."""
    served = streams.Served("1", 0, "pair", tokenizer(""), Reading(), 3, 3)
    writer = Completion(served, chat=True, top=None, options=StreamOptions())
    lines = list(writer.begin())
    for number in (2, 0, 1):
        lines += writer.piece(Piece(number, f"Answer {number}"))
    for number in (1, 2, 0):
        lines += writer.answer(replace(answer(""), index=number))
    state: ChatCompletionStreamState[None] = ChatCompletionStreamState()
    for line in lines:
        state.handle_chunk(ChatCompletionChunk.model_validate_json(line.removeprefix("data: ")))
    said = [(choice.index, choice.message.content) for choice in state.get_final_completion().choices]
    assert said == [(0, "Answer 0"), (1, "Answer 1"), (2, "Answer 2")]


def test_an_answer_with_half_a_call_is_not_said_to_call() -> None:
    """A stop string has cut it."""
    half = "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n<parameter=days>\n1"
    served = streams.Served("1", 0, "pair", tokenizer(""), Reading(format_of(SHOWN), tuple(TOOLS)), 3)
    (choice,) = Completion(served, chat=True, top=None, options=StreamOptions()).whole([answer(half)])["choices"]
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["content"] == half


def streamed(writer: streams.Writer, pieces: list[str], said: Answer) -> list[dict[str, Any]]:
    """The objects of a stream of these pieces."""
    lines = [*writer.begin(), *(line for text in pieces for line in writer.piece(Piece(0, text))), *writer.answer(said)]
    found = [line.split("data: ", 1)[1] for line in [*lines, *writer.end([said])]]
    return [json.loads(line) for line in found if line.strip() != "[DONE]"]


def test_a_stream_with_half_a_call_is_not_said_to_call() -> None:
    """Its beginning was sent already: a client must not run it."""
    half = 'Look. <tool_call>\n{"name": "weather", "arguments": {"city": "Ro'
    served = streams.Served("1", 0, "pair", tokenizer(""), HERMES, 3)
    pieces, said = [half[at : at + 9] for at in range(0, len(half), 9)], answer(half)
    chat = streamed(Completion(served, chat=True, top=None, options=StreamOptions()), pieces, said)
    assert any("tool_calls" in one["choices"][0]["delta"] for one in chat)
    assert chat[-1]["choices"][0]["finish_reason"] == "stop"
    anthropic = streamed(MessageWriter(served), pieces, said)
    assert any(one.get("content_block", {}).get("type") == "tool_use" for one in anthropic)
    assert [one["delta"]["stop_reason"] for one in anthropic if one["type"] == "message_delta"] == ["end_turn"]
    asked = ResponsesRequest.model_validate({"model": "m", "input": "?"})
    items = streamed(ResponseWriter(served, asked), pieces, said)[-1]["response"]["output"]
    assert [(item["type"], item["status"]) for item in items] == [
        ("message", "completed"),
        ("function_call", "incomplete"),
    ]
    whole = streamed(Completion(served, chat=True, top=None, options=StreamOptions()), [TWO], answer(TWO))
    assert whole[-1]["choices"][0]["finish_reason"] == "tool_calls"


def logprobs_of(known: PreTrainedTokenizerBase, ids: list[int], chat: bool) -> dict[str, Any]:
    """The logprobs of an answer of these tokens; all of them are alternatives at each place."""
    alternatives = np.tile(np.array(ids, np.int32), (len(ids), 1))
    same = np.zeros(alternatives.shape, np.float16)
    rows = Supervision(alternatives, same, same[0], same[0])
    said = Answer(0, "", tuple(ids), 3, "stop", (), Timings(3, 0, 0.1, 2, 0.1), rows, None)
    served = streams.Served("1", 0, "pair", known, Reading(), 3)
    written = Completion(served, chat=chat, top=len(ids), options=StreamOptions()).whole([said])
    return dict(written["choices"][0]["logprobs"])


@pytest.mark.parametrize(
    ("known", "forms"),
    [
        (tokenizer(""), ["ĠA", "â", "ĺ", "ĥ", "B"]),
        (by_bytes(), ["▁B", "<0xE2>", "<0x98>", "<0x83>", "B"]),
    ],
    ids=["byte level", "byte fallback"],
)
def test_a_token_is_named_by_its_own_bytes_also_within_a_character(
    known: PreTrainedTokenizerBase, forms: list[str]
) -> None:
    ids, space = [known.convert_tokens_to_ids(form) for form in forms], forms[0][1:]
    content = logprobs_of(known, ids, chat=True)["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in content) == f" {space}☃B".encode()
    found = logprobs_of(known, ids, chat=False)
    assert found["tokens"] == [f" {space}", "bytes:\\xe2", "bytes:\\x98", "bytes:\\x83", "B"]
    assert [list(names) for names in found["top_logprobs"]] == [found["tokens"]] * len(ids)
    assert found["text_offset"] == [0, 2, 3, 3, 3]


def test_bytes_that_a_tokenizer_does_not_tell_are_none() -> None:
    known = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"\ufffd": 0, "A": 1}, "A")))
    content = logprobs_of(known, [0, 1], chat=True)["content"]
    assert [entry["bytes"] for entry in content] == [None, [65]]


# A model that writes arguments as tags: a call is streamed only once it is complete.
SHOWN = "<tool_call> <function="


def test_a_stream_says_so_while_a_long_call_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "PING_S", 0.05)
    tool = {"type": "function", "function": {"name": "write"}}
    served = streams.Served("x", 0, "m", tokenizer("{{ messages }}"), Reading(format_of(SHOWN), (tool,)), 3)

    async def read() -> list[str]:
        events: asyncio.Queue[Event] = asyncio.Queue()
        asking = Job(ASK, events.put_nowait)
        lines = streams.chunks(asking, events, Completion(served, chat=True, top=None, options=StreamOptions()))

        async def decode() -> None:
            events.put_nowait(Piece(0, "Look. <tool_call><function=write><parameter=text>"))
            for _ in range(20):
                await asyncio.sleep(0.02)  # pieces keep coming, but there is nothing to send
                events.put_nowait(Piece(0, "x"))
            events.put_nowait(Piece(0, "</parameter></function></tool_call>"))
            events.put_nowait(Done())

        decoding = asyncio.create_task(decode())
        said = [line async for line in lines]
        await decoding
        return said

    said = asyncio.run(read())
    told = next(place for place, line in enumerate(said) if "Look." in line)
    called = next(place for place, line in enumerate(said) if "tool_calls" in line)
    assert streams.PING in said[told:called]


def test_arguments_of_earlier_calls_reach_the_template_as_an_object() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    given = ChatMessage(role="assistant", content=None, tool_calls=[call]).for_template()
    assert given["tool_calls"][0]["function"]["arguments"] == {"city": "Rome"}
    empty = {**call, "function": {"name": "weather", "arguments": ""}}
    given = ChatMessage(role="assistant", tool_calls=[empty]).for_template()
    assert given["tool_calls"][0]["function"]["arguments"] == {}
    broken = {**call, "function": {"name": "weather", "arguments": "{"}}
    assert ChatMessage(role="assistant", tool_calls=[broken]).for_template()["tool_calls"] == [broken]


def test_a_call_that_nobody_could_be_sent_is_mended_and_nonsense_is_left_alone() -> None:
    half = '<tool_call>\n{"name": "weather", "arguments": {"city": "\\ud83d"}}\n</tool_call>'
    (call,) = HERMES.reader().feed(half)
    assert isinstance(call, Call)
    assert json.loads(call.arguments.encode("utf-8")) == {"city": "?"}
    deep = "[" * 100_000 + "]" * 100_000
    nested = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": deep}}
    assert ChatMessage(role="assistant", tool_calls=[nested]).for_template()["tool_calls"] == [nested]
    (text,) = HERMES.reader().feed(f"<tool_call>{deep}</tool_call>")
    assert isinstance(text, str)


def chat(*messages: dict[str, Any], **fields: Any) -> ChatRequest:
    return ChatRequest.model_validate({"messages": messages or [{"role": "user", "content": "Hello"}], **fields})


ROLES = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"


def test_the_developer_is_the_system_where_a_template_does_not_know_better() -> None:
    asked = chat({"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Hello"})
    assert rendered(asked, tokenizer(ROLES)) == "[system]Be brief.[user]Hello"
    knows = tokenizer("{# developer #}" + ROLES)
    assert rendered(asked, knows) == "[developer]Be brief.[user]Hello"


@pytest.mark.parametrize("asked", [ChatRequest, LlamaCompletion, MessagesRequest, ResponsesRequest])
def test_what_is_passed_over_stands_in_the_page(asked: type[RequestBody]) -> None:
    page = (Path(__file__).resolve().parent.parent / "docs" / "service.md").read_text(encoding="utf-8")
    assert [name for name in sorted(asked.passed_over) if f"`{name}`" not in page] == []


THINKS = ROLES + "{% if enable_thinking is defined %}({{ enable_thinking }}){% endif %}"
MARKS = "{# <think> </think> #}"
TALKS = THINKS + "{# tools #}"
EFFORT = ROLES + "({{ reasoning_effort }})"


@pytest.mark.parametrize(
    ("template", "fields", "end"),
    [
        (THINKS, {}, "Hello"),
        (THINKS, {"enable_thinking": False}, "(False)"),
        (THINKS, {"chat_template_kwargs": {"enable_thinking": True}}, "(True)"),
        (THINKS, {"reasoning_effort": "none"}, "(False)"),
        (THINKS, {"reasoning_effort": "high"}, "(True)"),
        (THINKS, {"response_format": {"type": "json_object"}}, "(False)"),
        (THINKS, {"response_format": {"type": "json_object"}, "enable_thinking": True}, "(True)"),
        (THINKS, {"response_format": {"type": "json_object"}, "reasoning_effort": "high"}, "(False)"),
        (TALKS, {"tools": TOOLS, "tool_choice": "required", "reasoning_effort": "high"}, "(False)"),
        (THINKS + MARKS, {"response_format": {"type": "json_object"}}, "(False)"),
        (THINKS + MARKS, {"response_format": {"type": "json_object"}, "reasoning_effort": "low"}, "(True)"),
        (THINKS + MARKS, {"response_format": {"type": "json_object"}, "reasoning_effort": "none"}, "(False)"),
        (THINKS + MARKS, {"grammar": 'root ::= "yes"', "reasoning_effort": "low"}, "(False)"),
        (TALKS + MARKS, {"tools": TOOLS, "tool_choice": "required"}, "(False)"),
        (TALKS + MARKS, {"tools": TOOLS, "tool_choice": "required", "reasoning_effort": "high"}, "(True)"),
        (THINKS + EFFORT, {"reasoning_effort": "none"}, "(False)[user]Hello(none)"),
        (THINKS + EFFORT, {"reasoning_effort": "high"}, "Hello[user]Hello(high)"),
        (EFFORT, {"reasoning_effort": "high"}, "(high)"),
        (EFFORT + "{# <|channel|> <|message|> #}", {"reasoning_effort": "minimal"}, "(low)"),
        (ROLES, {"reasoning_effort": "high"}, "Hello"),  # the template has no switch for it
        (ROLES, {"enable_thinking": False}, "Hello"),
        (ROLES, {"chat_template_kwargs": {"enable_thinking": False}}, "Hello"),
    ],
)
def test_a_template_is_told_how_much_to_think(template: str, fields: dict[str, Any], end: str) -> None:
    assert rendered(chat(**fields), tokenizer(template)).endswith(end)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"enable_thinking": True}, "knows no thinking"),
        ({"chat_template_kwargs": {"enable_thinking": True}}, "no variable 'enable_thinking'"),
        ({"chat_template_kwargs": {"style": 1}}, "no variable 'style'"),
        ({"chat_template_kwargs": {"messages": []}}, "no variable 'messages'"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "no variable 'chat_template'"),
        ({"tools": TOOLS}, "no place for tools"),
    ],
)
def test_what_a_template_does_not_read_is_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(AdaptiveError, match=said):
        rendered(chat(**fields), tokenizer(ROLES + "{# chat_template #}"))


def test_an_answer_in_a_format_is_all_text() -> None:
    known = tokenizer("<think>" + THINKS)
    for asked in (chat(response_format={"type": "json_object"}), chat(grammar='root ::= "{}"', enable_thinking=True)):
        ready = prepare(asked, known, 2048)
        assert ready.grammar is not None
        assert ready.reading.regions == ()


def test_thoughts_and_ids_of_calls_reach_the_template_in_its_words() -> None:
    call = {"id": "toolu_0123456789", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    said = {"role": "assistant", "content": "", "reasoning_content": "Warm?", "tool_calls": [call]}
    result = {"role": "tool", "content": "warm", "tool_call_id": call["id"]}
    shown = "{{ m.thinking }}{{ m.tool_calls[0].id if m.tool_calls }}{{ m.tool_call_id }};"
    template = f"{{% for m in messages %}}{shown}{{% endfor %}}"
    harmony = rendered(chat(said, result), tokenizer(template + "{# <|channel|> <|message|> #}"))
    assert harmony == f"Warm?{call['id']};{call['id']};"
    newer = {**said, "reasoning": said["reasoning_content"], "reasoning_content": None}  # vLLM's name for it
    assert rendered(chat(newer, result), tokenizer(template + "{# <|channel|> <|message|> #}")) == harmony
    mistral = rendered(chat(said, result), tokenizer(template + "{# [TOOL_CALLS] #}"))
    first, second, _ = mistral.replace("Warm?", "").split(";")
    assert first == second
    assert len(first) == 9
    assert first.isalnum()


def a_call(number: int) -> dict[str, Any]:
    return {"id": f"id{number}", "type": "function", "function": {"name": f"tool{number}", "arguments": "{}"}}


def a_result(number: int, **fields: Any) -> dict[str, Any]:
    return {"role": "tool", "content": f"result{number}", "tool_call_id": f"id{number}", **fields}


def test_the_result_of_a_call_reaches_the_template_with_the_name_of_the_tool() -> None:
    template = tokenizer("{% for m in messages if m.role == 'tool' %}{{ m.name }};{% endfor %}")
    said = {"role": "assistant", "content": None, "tool_calls": [a_call(1), a_call(2)]}
    results = [a_result(2), a_result(1), a_result(1, name="own")]
    assert rendered(chat(said, *results), template) == "tool2;tool1;own;"
    assert rendered(chat(said, a_result(3)), template) == ";"


SINGLE = (
    "{% for m in messages %}{% if 'tool_calls' in m %}{% if m.tool_calls | length != 1 %}"
    "{{ raise_exception('This model only supports single tool-calls at once!') }}{% endif %}"
    "({{ m.content }}{{ m.tool_calls[0].function.name }}){% else %}[{{ m.content }}]{% endif %}{% endfor %}"
)


def test_a_template_that_takes_one_call_per_message_is_given_one() -> None:
    several = {"role": "assistant", "content": "Look. ", "tool_calls": [a_call(1), a_call(2)]}
    last = {"role": "assistant", "content": "Warm.", "tool_calls": []}
    asked = chat(several, a_result(2), a_result(1), last, several, a_result(2), a_result(9))
    known = tokenizer(SINGLE + "{# <|start_header_id|> tool #}")
    once = "(Look. tool1)[result1](tool2)[result2][Warm.](Look. tool1)(tool2)[result2][result9]"
    assert rendered(asked, known) == once
    others = tokenizer("{% for m in messages %}{{ m.tool_calls | length if m.tool_calls is defined }};{% endfor %}")
    assert rendered(asked, others) == "2;;;;2;;;"


def test_a_chat_that_is_nested_too_deeply_is_refused() -> None:
    deep: dict[str, Any] = {}
    for _ in range(5000):
        deep = {"properties": deep}
    with pytest.raises(AdaptiveError, match=r"too deep|refuses"):
        render_chat(tokenizer("{{ tools }}"), [{"role": "user", "content": "Hello"}], 2048, [deep])
