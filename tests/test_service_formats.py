"""Each family's notation of tool calls and thoughts: parsed however the text is split, and enforced by a grammar."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import pytest
from conftest import BUNDLED
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from adaptive.decoding.text import TextStream
from adaptive.service.calls import Part, Reading, Thought, reading_of
from adaptive.service.formats import Call, format_of
from adaptive.service.partial import Arguments, CallBegins, CallBroken

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer"},
                    "unit": {"type": "string", "enum": ["C", "F"]},
                },
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    },
    {"type": "function", "function": {"name": "time"}},
]
ROME = ("weather", {"city": "Rome", "days": 3})
OSLO = ("weather", {"city": "Oslo"})


@dataclass(frozen=True)
class Family:
    """A piece of a chat template that identifies the family, one of its answers, and the parts of that answer."""

    shown: str
    answer: str
    text: str = "Let me look."
    thoughts: str = ""
    calls: tuple[tuple[str, dict[str, Any]], ...] = (ROME, OSLO)
    special: tuple[str, ...] = field(default=())


FAMILIES = {
    "Hermes": Family(
        "<tool_call> <think>",
        "<think>\nIs it\nwarm?\n</think>\n\nLet me look.\n"
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": 3}}\n</tool_call>\n'
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>',
        thoughts="Is it\nwarm?",
    ),
    "Qwen 3.5": Family(
        "<tool_call> <function=name>",
        "Let me look.\n\n<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n<parameter=days>\n3\n"
        "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n"
        "</function>\n</tool_call>",
    ),
    "GLM": Family(
        "<tool_call> <arg_key> </think>",
        "<think>Warm?</think>Let me look.\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call><tool_call>weather\n<arg_key>city</arg_key>\n"
        "<arg_value>Oslo</arg_value>\n</tool_call>",
        thoughts="Warm?",
        special=("<arg_key>", "</arg_key>", "</arg_value>"),
    ),
    "Mistral": Family(
        "[TOOL_CALLS] [ARGS] [THINK]",
        '[THINK]Warm?[/THINK]Let me look.[TOOL_CALLS]weather[ARGS]{"city": "Rome", "days": 3}'
        '[TOOL_CALLS]weather[CALL_ID]a1b2c3d4e[ARGS]{"city": "Oslo"}',
        thoughts="Warm?",
        special=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]"),
    ),
    "Mistral before 2025": Family(
        "[TOOL_CALLS]",
        'Let me look.[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Rome", "days": 3}}, '
        '{"name": "weather", "arguments": {"city": "Oslo"}, "id": "a1b2c3d4e"}]',
        special=("[TOOL_CALLS]",),
    ),
    "Llama 3": Family(
        "<|start_header_id|> tools",
        '<|python_tag|>{"name": "weather", "parameters": {"city": "Rome", "days": 3}}; '
        '{"type": "function", "name": "weather", "parameters": {"city": "Oslo"}}',
        text="",
        special=("<|python_tag|>",),
    ),
    "Llama 3, bare": Family(
        "<|start_header_id|> tools",
        '{"name": "weather", "parameters": {"city": "Rome", "days": 3}}',
        text="",
        calls=(ROME,),
    ),
    "Gemma 4": Family(
        "<|tool_call> <|channel>",
        "<|channel>thought\nWarm?<channel|>Let me look."
        '<|tool_call>call:weather{city:<|"|>Rome<|"|>,days:3}<tool_call|>'
        '<|tool_call>call:weather{city:<|"|>Oslo<|"|>}<tool_call|>',
        thoughts="Warm?",
        special=("<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>"),
    ),
    "FunctionGemma": Family(
        "<start_function_call>",
        "Let me look.<start_function_call>call:weather{city:<escape>Rome<escape>,days:3}<end_function_call>"
        "<start_function_call>call:weather{city:<escape>Oslo<escape>}<end_function_call>",
        special=("<start_function_call>", "<end_function_call>", "<escape>"),
    ),
    "gpt-oss": Family(
        "<|channel|> <|message|>",
        "<|channel|>analysis<|message|>Warm?<|end|><|start|>assistant<|channel|>commentary<|message|>Let me look."
        "<|end|><|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
        '{"city": "Rome", "days": 3}<|call|><|start|>assistant to=functions.weather<|channel|>commentary json'
        '<|message|>{"city": "Oslo"}',
        thoughts="Warm?",
        special=("<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|call|>", "<|constrain|>"),
    ),
}
SHOWN_AS = pytest.mark.parametrize("family", FAMILIES.values(), ids=list(FAMILIES))


def tokenizer(template: str, special: tuple[str, ...] = ()) -> PreTrainedTokenizerBase:
    loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(BUNDLED / "target")
    loaded.chat_template = template
    loaded.add_special_tokens({"additional_special_tokens": list(special)})  # type: ignore[dict-item]
    return loaded


def read(reading: Reading, pieces: list[str]) -> list[Part]:
    reader = reading.reader()
    return [part for piece in pieces for part in reader.feed(piece)] + reader.finish()


def sorted_out(parts: list[Part]) -> tuple[str, str, list[tuple[str, Any]]]:
    """Text, thoughts and calls."""
    text = "".join(part for part in parts if isinstance(part, str))
    thoughts = "".join(part.text for part in parts if isinstance(part, Thought))
    return text, thoughts, [(part.name, json.loads(part.arguments)) for part in parts if isinstance(part, Call)]


@SHOWN_AS
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_an_answer_is_sorted_out_however_it_comes(family: Family, size: int) -> None:
    reading = Reading(format_of(family.shown), tuple(TOOLS))
    pieces = [family.answer[at : at + size] for at in range(0, len(family.answer), size)]
    assert sorted_out(read(reading, pieces)) == (family.text, family.thoughts, list(family.calls))


@SHOWN_AS
def test_an_answer_is_sorted_out_by_its_tokens(family: Family) -> None:
    """For marks that are special tokens, which decoded text omits, and for other marks."""
    known = tokenizer(family.shown, family.special)
    reading = reading_of(known, TOOLS)
    stream = TextStream(known, marks=reading.marks(known))
    tokens = known.encode(family.answer, add_special_tokens=False)
    pieces = [stream.push(token) for token in tokens] + [stream.finish()]
    assert sorted_out(read(reading, pieces)) == (family.text, family.thoughts, list(family.calls))


@pytest.mark.parametrize("name", ["Hermes", "Qwen 3.5", "GLM", "Mistral", "Gemma 4", "FunctionGemma"])
def test_a_call_comes_as_soon_as_it_is_whole(name: str) -> None:
    reader = Reading(format_of(FAMILIES[name].shown), tuple(TOOLS)).reader()
    answer = FAMILIES[name].answer
    found = [part for letter in answer[: answer.rindex("weather")] for part in reader.feed(letter)]
    assert [json.loads(part.arguments) for part in found if isinstance(part, Call)] == [ROME[1]]


@SHOWN_AS
@pytest.mark.parametrize("size", [1, 7])
def test_a_stream_tells_calls_as_they_are_written(family: Family, size: int) -> None:
    """Only where the answer's arguments are JSON; other families' arguments come in one piece."""
    reader = Reading(format_of(family.shown), tuple(TOOLS)).reader(partial=True)
    calls: list[tuple[str, str]] = []
    rest: list[Part] = []
    for place in [*range(0, len(family.answer), size), None]:
        text = "" if place is None else family.answer[place : place + size]
        for part in reader.finish() if place is None else reader.feed(text):
            if isinstance(part, CallBegins):
                calls.append((part.call.name, ""))
            elif isinstance(part, Arguments):
                assert len(part.text) <= size + 1  # at most one added brace
                calls[-1] = (calls[-1][0], calls[-1][1] + part.text)
            elif isinstance(part, Call):
                calls.append((part.name, part.arguments))
            else:
                rest.append(part)
    assert [(name, json.loads(arguments)) for name, arguments in calls] == list(family.calls)
    assert sorted_out(rest)[:2] == (family.text, family.thoughts)


def test_of_a_call_that_is_cut_a_stream_has_what_was_written() -> None:
    reader = Reading(format_of(FAMILIES["Hermes"].shown), tuple(TOOLS)).reader(partial=True)
    cut = 'Look. <tool_call>{"name": "weather", "arguments": {"city": "Ro'
    first, begins, said, broken = [*reader.feed(cut), *reader.finish()]
    assert first == "Look."
    assert isinstance(begins, CallBegins)
    assert said == Arguments('{"city": "Ro')
    assert broken == CallBroken()
    other = Reading(format_of(FAMILIES["Hermes"].shown), tuple(TOOLS)).reader(partial=True)
    unknown = '<tool_call>{"name": "nobody", "arguments": {"city": "Ro'
    assert "".join(map(str, [*other.feed(unknown), *other.finish()])) == unknown


@SHOWN_AS
def test_of_calls_that_may_not_be_several_the_first_is_told(family: Family) -> None:
    reading = Reading(format_of(family.shown), tuple(TOOLS), most=1)
    text, _, calls = sorted_out(read(reading, [family.answer]))
    assert (text, calls) == (family.text, [family.calls[0]])


def test_thinking_that_the_prompt_began_ends_at_its_mark() -> None:
    known = tokenizer("<think> enable_thinking", ("<|mark|>",))
    prompt = known.encode("What? <think>\n", add_special_tokens=False)
    reading = reading_of(known, None, prompt)
    assert sorted_out(read(reading, list("\nWarm?\n</think>\n\nYes. \n"))) == ("Yes. \n", "Warm?", [])
    assert sorted_out(read(reading, ["Warm? And"])) == ("", "Warm? And", [])
    closed = reading_of(known, None, known.encode("What? <think>\n\n</think>\n\n", add_special_tokens=False))
    assert sorted_out(read(closed, ["Yes."])) == ("Yes.", "", [])


QWEN, GLM = "<tool_call> <function=", "<tool_call> <arg_key>"


@pytest.mark.parametrize(
    ("shown", "answer"),
    [
        ("<tool_call>", "A <tool_call>\nnot json\n</tool_call> and more"),
        ("<tool_call>", '<tool_call>\n{"name": "weather", "arguments": 3}\n</tool_call>'),
        ("<tool_call>", '<tool_call>\n{"name": "weather", "arguments": {"days": NaN}}\n</tool_call>'),
        ("<tool_call> <arg_key>", "A <tool_call>word</tool_call>"),
        ("<|start_header_id|> tools", '{"name": "Ann", "age'),
        ("<|start_header_id|> tools", '{"name": "Ann", "age": 3}'),
        ("<|start_header_id|> tools", 'Say {"name": "weather", "parameters": {}}'),
        ("[TOOL_CALLS]", "[TOOL_CALLS] something else"),
        ("<|tool_call>", "<|tool_call>weather(3)<tool_call|>!"),
        ("<|tool_call>", "<|tool_call>call:weather{days:1e999}<tool_call|>"),
        (QWEN, "A <tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n<parameter=days>\n3"),
        (QWEN, "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>"),
        (QWEN, "<tool_call>\n<function=time>"),
        (QWEN, "<tool_call><function=weather><parameter=city>Rome</function></tool_call>"),
        (GLM, "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n<arg_key>days</arg_key>"),
        (GLM, "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>"),
        (GLM, "<tool_call>time"),
        (GLM, "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Rome</tool_call>"),
    ],
)
def test_what_is_no_call_stays_text(shown: str, answer: str) -> None:
    reading = Reading(format_of(shown), tuple(TOOLS))
    for size in (1, 1000):
        pieces = [answer[at : at + size] for at in range(0, len(answer), size)]
        assert sorted_out(read(reading, pieces)) == (answer, "", [])


def tagged(city: str) -> str:
    return f"<function=weather>\n<parameter=city>\n{city}\n</parameter>\n</function>"


@pytest.mark.parametrize("size", [1, 1000])
def test_a_call_may_lack_the_mark_before_it(size: int) -> None:
    """Qwen 3 Coder often leaves it out, mostly behind a sentence."""
    rome, oslo, end = ("weather", {"city": "Rome"}), ("weather", {"city": "Oslo"}), "</tool_call>"
    for answer, text, calls in (
        (f"Let me look.\n\n{tagged('Rome')}\n{end}", "Let me look.", [rome]),
        (f"{tagged('Rome')}\n", "", [rome]),
        (f"{tagged('Rome')}\n{tagged('Oslo')}", "", [rome, oslo]),
        (f"{tagged('Rome')}\n{end}\n{tagged('Oslo')}\n{end}", "", [rome, oslo]),
        (f"{tagged('Rome')}\n{end}\n<tool_call>\n{tagged('Oslo')}\n{end}", "", [rome, oslo]),
        (tagged("</function>"), "", [("weather", {"city": "</function>"})]),
        (f"Write {tagged('Rome')} for it.", f"Write {tagged('Rome')} for it.", []),
        ("The tag <function=weather> is", "The tag <function=weather> is", []),
        (tagged("Rome")[:-12], tagged("Rome")[:-12], []),
        (tagged("Rome").replace("weather", "nobody"), tagged("Rome").replace("weather", "nobody"), []),
    ):
        pieces = [answer[at : at + size] for at in range(0, len(answer), size)]
        assert sorted_out(read(Reading(format_of(QWEN), tuple(TOOLS)), pieces)) == (text, "", calls), answer


@pytest.mark.parametrize(
    ("shown", "call"),
    [
        (f"{QWEN} <think> </think>", f"<tool_call>\n{tagged('Oslo')}\n</tool_call>"),
        ("<tool_call> <think>", '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'),
    ],
    ids=["Qwen 3.5", "Qwen 3"],
)
@pytest.mark.parametrize("partial", [False, True])
def test_an_answer_that_ends_with_a_call_within_its_thinking_calls(shown: str, call: str, partial: bool) -> None:
    def found(answer: str) -> tuple[str, str, list[tuple[str, Any]]]:
        reader = Reading(format_of(shown), tuple(TOOLS)).reader(partial)
        return sorted_out([part for letter in answer for part in reader.feed(letter)] + reader.finish())

    text, thoughts, calls = found(f"<think>\nWhere? {call} or {call}\n{call}\n")
    assert (text, calls) == ("", [OSLO, OSLO])
    assert thoughts.startswith("Where? ")
    assert found(f"<think>\n{call}, perhaps")[2] == []
    assert found(f"<think>\n{call}\n</think>\n\nNo.")[::2] == ("No.", [])
    assert found(f"<think>\n{call.replace('weather', 'nobody')}")[2] == []


def test_a_call_that_is_whole_needs_no_mark_after_it() -> None:
    answer = "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n</function>"
    found = sorted_out(read(Reading(format_of(QWEN), tuple(TOOLS)), [answer]))
    assert found == ("", "", [("weather", {"city": "Rome"})])


@pytest.mark.parametrize(
    ("shown", "opens", "closes"),
    [
        ("<think> </think>", "<think>", "</think>"),
        ("<think>", "<think>", "</think>"),
        ("[THINK]", "[THINK]", "[/THINK]"),
        ("<|channel>", "<|channel>thought", "<channel|>"),
    ],
)
def test_only_what_an_answer_begins_with_is_thinking(shown: str, opens: str, closes: str) -> None:
    text = f"The mark {opens} begins it, and {closes} ends it."
    for thoughts, answer in (("", text), ("Warm?", f"{opens}Warm?{closes}{text}")):
        for size in (1, 1000):
            pieces = [answer[at : at + size] for at in range(0, len(answer), size)]
            assert sorted_out(read(Reading(format_of(shown)), pieces)) == (text, thoughts, [])


def test_a_template_that_takes_one_call_is_sent_one() -> None:
    llama = FAMILIES["Llama 3"]
    known = tokenizer(f"{llama.shown} This model only supports single tool-calls at once!", llama.special)
    assert sorted_out(read(reading_of(known, TOOLS), [llama.answer])) == ("", "", [ROME])


def test_after_what_is_no_call_calls_are_found_again() -> None:
    answer = 'A <tool_call>no</tool_call> or <tool_call>{"name": "time"}</tool_call>'
    found = sorted_out(read(Reading(format_of("<tool_call>"), tuple(TOOLS)), [answer]))
    assert found == ("A <tool_call>no</tool_call> or", "", [("time", {})])


def test_a_value_may_hold_the_tags_around_it() -> None:
    code = "</parameter>\nand </function> too"
    answer = f"<tool_call>\n<function=weather>\n<parameter=city>\n{code}\n</parameter>\n</function>\n</tool_call>"
    found = sorted_out(read(Reading(format_of("<tool_call> <function="), tuple(TOOLS)), [answer]))
    assert found == ("", "", [("weather", {"city": code})])
