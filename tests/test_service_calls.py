"""Tool calls out of an answer: found as it streams and in the whole, and text that is no call is never lost."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import pytest
import torch
from conftest import BUNDLED
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from adaptive.errors import AdaptiveError
from adaptive.grammar import Grammars
from adaptive.service.calls import Call, forced_call, parser_for
from adaptive.service.jobs import Answer, Ask, Done, Event, Job, Piece
from adaptive.service.responses import Shape
from adaptive.service.schemas import ChatMessage
from adaptive.service.streams import Wanted, chunks
from adaptive.types import Timings

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
        },
    }
]
# As the chat templates of the Qwen and Hermes models put it, in two ways.
WITH_JSON = 'answer within <tool_call></tool_call>: {"name": <name>, "arguments": <object>}'
WITH_TAGS = "answer <tool_call>\n<function=name>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>"
TWO = (
    'Let me look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": 3}}\n</tool_call>\n'
    '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>'
)
TAGGED = (
    "Let me look.\n<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n<parameter=days>\n3\n"
    "</parameter>\n</function>\n</tool_call>"
)
NO_CALLS = (
    "1 < 2, and <tool is no mark",
    "A <tool_call>\nnot json\n</tool_call> and more",
    "A <tool_call>\n[1, 2]\n</tool_call> and more",
    'A <tool_call>\n{"name": 7}\n</tool_call>',
    'cut off <tool_call>\n{"name": "weather", "argu',
)


def tokenizer(template: str) -> PreTrainedTokenizerBase:
    loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(BUNDLED / "target")
    loaded.chat_template = template
    return loaded


def parsed(text: str, template: str, size: int) -> tuple[str, list[Call]]:
    parser = parser_for(tokenizer(template), TOOLS)
    assert parser is not None
    said = [part for at in range(0, len(text), size) for part in parser.feed(text[at : at + size])] + parser.finish()
    return "".join(p for p in said if isinstance(p, str)), [p for p in said if isinstance(p, Call)]


@pytest.mark.parametrize("size", [1, 4, 1000])
def test_calls_are_found_however_the_text_comes(size: int) -> None:
    text, calls = parsed(TWO, WITH_JSON, size)
    assert text == "Let me look."
    assert [(call.name, json.loads(call.arguments)) for call in calls] == [
        ("weather", {"city": "Rome", "days": 3}),
        ("weather", {}),
    ]
    assert calls[0].id != calls[1].id
    text, calls = parsed(TAGGED, WITH_TAGS, size)
    assert text == "Let me look."
    assert [json.loads(call.arguments) for call in calls] == [{"city": "Rome", "days": 3}]


@pytest.mark.parametrize("size", [1, 4, 1000])
@pytest.mark.parametrize("text", NO_CALLS)
def test_what_is_no_call_stays_text(text: str, size: int) -> None:
    assert parsed(text, WITH_JSON, size) == (text, [])


@given(st.text(alphabet="<>/tool_cal {}\n", max_size=60))
def test_no_text_without_a_whole_mark_is_changed(text: str) -> None:
    if "<tool_call>" not in text:
        assert parsed(text, WITH_JSON, 3) == (text, [])


def calls_at_random(several: bool, rng: random.Random) -> tuple[str, list[Call]]:
    """What a model says that knows nothing and may only call."""
    place = {"type": "object", "properties": {"place": {"enum": ["Rome", "Oslo"]}}, "required": ["place"]}
    tools = [{"type": "function", "function": {"name": name, "parameters": place}} for name in ("weather", "time")]
    said, known = [], tokenizer(WITH_JSON)
    grammar = forced_call(known, tools, several)
    constraint = Grammars(known, len(known), frozenset([known.eos_token_id])).constraint(grammar)
    while not said or said[-1] != known.eos_token_id:
        may = constraint.mask(torch.zeros(1, len(known)), [])[0].isfinite().nonzero()[:, 0].tolist()
        wanted = known.eos_token_id if known.eos_token_id in may and rng.random() < 0.3 else rng.choice(may)
        constraint.commit([wanted])
        said.append(wanted)
    return parsed(known.decode(said, skip_special_tokens=True), WITH_JSON, 7)


def test_a_model_that_has_to_call_calls() -> None:
    rng = random.Random(4)
    found = [calls_at_random(several, rng) for several in (False, False, *[True] * 8)]
    assert all(not text.strip() for text, _ in found)
    assert all(len(calls) == 1 for _, calls in found[:2])
    assert any(len(calls) > 1 for _, calls in found[2:])
    for _, calls in found:
        for call in calls:
            assert call.name in ("weather", "time")
            assert json.loads(call.arguments)["place"] in ("Rome", "Oslo")
    with pytest.raises(AdaptiveError, match="not known"):
        forced_call(tokenizer(WITH_TAGS), TOOLS, several=True)
    with pytest.raises(AdaptiveError, match="needs a function"):
        forced_call(tokenizer(WITH_JSON), [{"type": "function"}], several=True)


def test_without_tools_or_a_known_way_of_calling_the_text_is_left_alone() -> None:
    assert parser_for(tokenizer(WITH_JSON), None) is None
    assert parser_for(tokenizer("{{ messages }}"), TOOLS) is None


def answer(text: str) -> Answer:
    return Answer(0, text, (5, 6), 3, "stop", (), Timings(3, 0, 0.1, 2, 0.1), None, None)


def test_a_whole_response_and_a_stream_carry_the_same_calls() -> None:
    shape = Shape("chatcmpl-1", 0, "pair", chat=True)
    whole = shape.whole([answer(TWO)], tokenizer(WITH_JSON), None, TOOLS)["choices"][0]
    assert whole["finish_reason"] == "tool_calls"
    assert whole["message"]["content"] == "Let me look."

    async def streamed() -> list[dict[str, Any]]:
        events: asyncio.Queue[Event] = asyncio.Queue()
        for at in range(0, len(TWO), 5):
            events.put_nowait(Piece(0, TWO[at : at + 5]))
        events.put_nowait(answer(TWO))
        events.put_nowait(Done())
        ask: Any = Ask((), None, None, 1, "", None, True, False, True)  # type: ignore[arg-type]
        lines = [
            line
            async for line in chunks(
                Job(ask, events.put_nowait), events, shape, tokenizer(WITH_JSON), Wanted(False, None, TOOLS)
            )
        ]
        assert lines[-1] == "data: [DONE]\n\n"
        return [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines[:-1]]

    choices = asyncio.run(streamed())
    assert "".join(c["delta"].get("content") or "" for c in choices) == "Let me look."
    calls = [call for c in choices for call in c["delta"].get("tool_calls", ())]
    assert [call["index"] for call in calls] == [0, 1]
    assert [call["function"] for call in calls] == [call["function"] for call in whole["message"]["tool_calls"]]
    assert choices[-1]["finish_reason"] == "tool_calls"


def test_arguments_of_earlier_calls_reach_the_template_as_an_object() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    given = ChatMessage(role="assistant", content=None, tool_calls=[call]).for_template()
    assert given["tool_calls"][0]["function"]["arguments"] == {"city": "Rome"}
    broken = {**call, "function": {"name": "weather", "arguments": "{"}}
    assert ChatMessage(role="assistant", tool_calls=[broken]).for_template()["tool_calls"] == [broken]


def test_a_call_that_nobody_could_be_sent_is_mended_and_nonsense_is_left_alone() -> None:
    half = '<tool_call>\n{"name": "weather", "arguments": {"city": "\\ud83d"}}\n</tool_call>'
    _, calls = parsed(half, WITH_JSON, 1000)
    assert json.loads(calls[0].arguments.encode("utf-8")) == {"city": "?"}
    deep = "[" * 100_000 + "]" * 100_000
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": deep}}
    assert ChatMessage(role="assistant", tool_calls=[call]).for_template()["tool_calls"] == [call]
