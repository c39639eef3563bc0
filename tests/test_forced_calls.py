"""Calls of tools that a request demands, or beside which it demands a format: the answer is held to what the model's
family writes, and is read as any other."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
import torch
from test_service_formats import FAMILIES, OSLO, TOOLS, Family, read, sorted_out, tokenizer
from transformers import PreTrainedTokenizerBase

from adaptive.decoding.text import TextStream
from adaptive.errors import AdaptiveError
from adaptive.grammar import Grammar, Grammars, json_schema, notation
from adaptive.service.calls import reading_of
from adaptive.service.chats import prepare
from adaptive.service.forced import call_or_text, forced_call
from adaptive.service.schemas import ChatRequest

ENDS = ('"', "}", "\n</parameter>\n", "</arg_value>\n", '<|"|>', "<escape>")


def forced_at_random(
    family: Family, several: bool, rng: random.Random, text: Grammar | None = None
) -> tuple[str, str, list[tuple[str, Any]]]:
    """The answer of a model that picks random tokens and is forced to call, or to write ``text``."""
    known = tokenizer(family.shown, family.special)
    reading = reading_of(known, TOOLS)
    marks = reading.marks(known)
    if text is None:
        grammar = forced_call(reading, marks, TOOLS[:1], several)
    else:
        grammar = call_or_text(reading, marks, TOOLS[:1], several, text)
        reading = reading.without_thinking()
    end = known.eos_token_id
    assert isinstance(end, int)
    constraint = Grammars(known, len(known), frozenset([end])).constraint(grammar)
    stream, pieces, token = TextStream(known, marks=marks), [], -1
    # Ends of strings are tried now and then, since a random token nearly always continues a string.
    closing = [known.encode(text, add_special_tokens=False) for text in ENDS]
    meant: list[int] = []
    while token != end:
        may = constraint.mask(torch.zeros(1, len(known)), [])[0].isfinite().nonzero()[:, 0].tolist()
        if not meant and rng.random() < 0.3:
            meant = list(rng.choice(closing))
        token = rng.choice(may)
        if meant and (wanted := meant.pop(0)) in may:
            token = wanted
        else:
            meant = []
        if end in may and rng.random() < 0.5:
            token = end
        constraint.commit([token])
        if token != end:
            pieces.append(stream.push(token))
        assert len(pieces) < 3000
    pieces.append(stream.finish())
    return sorted_out(read(reading, pieces))


def allowed(known: PreTrainedTokenizerBase, grammar: Grammar, answer: str) -> bool:
    """Whether the grammar allows this answer."""
    end = known.eos_token_id
    assert isinstance(end, int)
    constraint = Grammars(known, len(known), frozenset([end])).constraint(grammar)
    for token in [*known.encode(answer, add_special_tokens=False), end]:
        if not constraint.mask(torch.zeros(1, len(known)), [])[0].isfinite()[token]:
            return False
        constraint.commit([token])
    return True


def test_a_format_alone_applies_to_the_text_behind_its_marks() -> None:
    family, text = FAMILIES["gpt-oss"], '{"name": "Ann"}'
    known = tokenizer("{{ messages[0].content }} <|channel|> <|message|>", family.special)
    for wanted in ({"json_schema": NAMED}, {"regex": TEXTS["regex"].text}):
        asked = ChatRequest.model_validate({"messages": [{"role": "user", "content": "Who?"}], **wanted})
        ready = prepare(asked, known, 2048)
        assert ready.grammar is not None
        assert allowed(known, ready.grammar, f"<|channel|>final<|message|>{text}")
        assert not allowed(known, ready.grammar, text)
        assert ready.marks == ready.reading.marks(known)
        assert sorted_out(read(ready.reading, [f"<|channel|>final<|message|>{text}"])) == (text, "", [])


THINKING = {
    "Hermes": ("<think>\nWarm?\n", "</think>\n\n"),
    "GLM": ("<think>Warm?", "</think>"),
    "Mistral": ("[THINK]Warm?", "[/THINK]"),
    "Gemma 4": ("<|channel>thought\nWarm?", "<channel|>"),
    "gpt-oss": ("<|channel|>analysis<|message|>Warm?", "<|end|><|start|>assistant"),
}
ASKED = "{% if enable_thinking %} {% endif %}"


@pytest.mark.parametrize("name", THINKING)
@pytest.mark.parametrize("form", ["format", "format or call", "call"])
def test_who_asks_for_thinking_gets_it_before_the_format(name: str, form: str) -> None:
    family, (thoughts, ends) = FAMILIES[name], THINKING[name]
    known = tokenizer(f"{{{{ messages[0].content }}}} {{# tools {family.shown} #}}{ASKED}", family.special)
    known.add_special_tokens({"eos_token": "<|return|>"})  # the bundled one ends a thought in gpt-oss
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": "Who?"}], "enable_thinking": True}
    if form != "call":
        asked["json_schema"] = NAMED
    if form != "format":
        asked |= {"tools": TOOLS, "tool_choice": "required" if form == "call" else "auto"}
    ready = prepare(ChatRequest.model_validate(asked), known, 2048)
    layout = ready.reading.format.layout
    assert layout is not None
    assert ready.grammar is not None
    answers = [layout.text + '{"name": "Ann"}'] * (form != "call") + [CALLS[name]] * (form != "format")
    for answer in answers:
        assert allowed(known, ready.grammar, thoughts + ends + answer)
        assert allowed(known, ready.grammar, answer)
        assert not allowed(known, ready.grammar, thoughts + answer)
        assert not allowed(known, ready.grammar, thoughts + ends + thoughts + ends + answer)
        text, thought, calls = sorted_out(read(ready.reading, [thoughts + ends + answer]))
        assert thought == "Warm?"
        assert (text, calls) == (("", [OSLO]) if answer == CALLS[name] else ('{"name": "Ann"}', []))


@pytest.mark.parametrize("form", ["format", "format or call", "call"])
def test_thinking_that_the_prompt_has_opened_ends_before_the_format(form: str) -> None:
    known = tokenizer("{{ messages[0].content }}{# tools <tool_call> #}<think>\n")
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": "Who?"}]}
    if form != "call":
        asked["json_schema"] = NAMED
    if form != "format":
        asked |= {"tools": TOOLS, "tool_choice": "required" if form == "call" else "auto"}
    ready = prepare(ChatRequest.model_validate(asked), known, 2048)
    assert ready.grammar is not None
    answer = '{"name": "Ann"}' if form != "call" else CALLS["Hermes"]
    assert allowed(known, ready.grammar, f"Warm?\n</think>\n\n{answer}")
    assert allowed(known, ready.grammar, f"</think>{answer}")
    assert not allowed(known, ready.grammar, answer)
    assert not allowed(known, ready.grammar, f"Warm?\n</think>\n\nSure: {answer}")
    text, thought, calls = sorted_out(read(ready.reading, list(f"Warm?\n</think>\n\n{answer}")))
    assert thought == "Warm?"
    assert (text, calls) == (("", [OSLO]) if form == "call" else (answer, []))


def test_a_grammar_applies_from_the_first_token() -> None:
    known = tokenizer("{{ messages[0].content }}<think>\n")
    asked = {"messages": [{"role": "user", "content": "Who?"}], "grammar": 'root ::= "yes"'}
    ready = prepare(ChatRequest.model_validate(asked), known, 2048)
    assert ready.grammar == notation('root ::= "yes"')
    assert sorted_out(read(ready.reading, ["yes"])) == ("yes", "", [])


CALLING = [
    "Hermes", "Qwen 3.5", "GLM", "Mistral", "Mistral before 2025", "Llama 3", "Gemma 4", "FunctionGemma", "gpt-oss",
]  # fmt: skip


@pytest.mark.parametrize("name", CALLING)
def test_a_model_that_has_to_call_calls(name: str) -> None:
    rng = random.Random(4)
    for several in (False, True, True):
        text, _, calls = forced_at_random(FAMILIES[name], several, rng)
        assert not text.strip()
        assert len(calls) >= 1 if several else len(calls) == 1
        for called, arguments in calls:
            assert called == "weather"
            assert isinstance(arguments["city"], str)
            assert isinstance(arguments.get("days", 0), int)
            assert arguments.get("unit", "C") in ("C", "F")


NAMED = {"type": "object", "properties": {"name": {"enum": ["Ann", "<think>"]}, "age": {"type": "integer"}},
         "required": ["name"], "additionalProperties": False}  # fmt: skip
CALLS = {
    "Hermes": '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>',
    "GLM": "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n</tool_call>",
    "Mistral": '[TOOL_CALLS]weather[ARGS]{"city": "Oslo"}',
    "Gemma 4": '<|tool_call>call:weather{city:<|"|>Oslo<|"|>}<tool_call|>',
    "gpt-oss": '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Oslo"}',
}
TEXTS = {
    "schema": json_schema(NAMED),
    "regex": Grammar("regex", '[{]"name": ?"(Ann|<think>)"[}]'),
}


@pytest.mark.parametrize("kind", TEXTS)
@pytest.mark.parametrize("name", CALLING)
def test_beside_tools_a_format_leaves_the_choice_between_a_call_and_a_text(name: str, kind: str) -> None:
    rng, texts, called = random.Random(4), 0, 0
    while not texts or not called:
        text, thoughts, calls = forced_at_random(FAMILIES[name], True, rng, TEXTS[kind])
        assert not thoughts
        if calls:
            called += 1
            assert not text.strip()
            assert all(who == "weather" and isinstance(given["city"], str) for who, given in calls)
        else:
            texts += 1
            assert json.loads(text)["name"] in ("Ann", "<think>")
        assert texts + called < 50


def test_calls_whose_writing_is_not_known_cannot_be_forced() -> None:
    with pytest.raises(AdaptiveError, match="not known"):
        forced_call(reading_of(tokenizer("{{ messages }}"), TOOLS), {}, TOOLS, several=True)
    with pytest.raises(AdaptiveError, match="tools and a format, while how this model writes calls is not known"):
        call_or_text(reading_of(tokenizer("{{ messages }}"), TOOLS), {}, TOOLS, True, TEXTS["schema"])
    with pytest.raises(AdaptiveError, match="tools and a grammar do not go together"):
        call_or_text(reading_of(tokenizer("<tool_call>"), TOOLS), {}, TOOLS, True, notation('root ::= "yes"'))
    nested = {"name": "f", "parameters": {"type": "object", "properties": {"places": {"type": "array"}}}}
    with pytest.raises(AdaptiveError, match="'places'"):
        forced_call(reading_of(tokenizer(FAMILIES["Gemma 4"].shown), TOOLS), {}, [{"function": nested}], several=True)


@pytest.mark.parametrize("name", ["Hermes", "Qwen 3.5", "gpt-oss"])
def test_a_schema_may_refer_to_what_it_defines(name: str) -> None:
    family = FAMILIES[name]
    place = {"type": "object", "properties": {"place": {"$ref": "#/$defs/Place"}}, "required": ["place"]}
    defined = {**place, "$defs": {"Place": {"enum": ["Rome", "Oslo"]}}}
    tools = [{"type": "function", "function": {"name": "weather", "parameters": defined}}]
    known = tokenizer(family.shown, family.special)
    reading = reading_of(known, tools)
    grammar = forced_call(reading, reading.marks(known), tools, several=False)
    assert isinstance(known.eos_token_id, int)
    Grammars(known, len(known), frozenset([known.eos_token_id])).compile(grammar)


def test_a_tool_without_a_name_is_refused() -> None:
    reading = reading_of(tokenizer(FAMILIES["Hermes"].shown), TOOLS)
    with pytest.raises(AdaptiveError, match="needs a function"):
        forced_call(reading, {}, [{"type": "function"}], several=True)
