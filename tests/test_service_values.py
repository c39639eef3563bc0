"""Parameters that a model writes as text get the types of their schemas, also in calls that are forced."""

from __future__ import annotations

import json
from typing import Any, Literal

import pytest
from pydantic import BaseModel
from test_service_formats import FAMILIES, allowed, read, sorted_out, tokenizer

from adaptive.service.calls import Reading, reading_of
from adaptive.service.forced import forced_call
from adaptive.service.formats import format_of
from adaptive.service.values import alternatives, kinds_of


class Size(BaseModel):
    """A schema that others refer to."""

    width: int


class Given(BaseModel):
    """Parameters as programs declare them."""

    text: str | None = None
    line: int | None = None
    dry: bool = False
    unit: Literal["C", "F", "none"] | None = None
    kind: Literal["1", "2"] = "1"
    size: Size | None = None
    many: list[str] | str = ""
    some: int | str = ""


SCHEMA: dict[str, Any] = Given.model_json_schema()
TOOLS = [{"type": "function", "function": {"name": "edit", "parameters": SCHEMA}}]


def written(name: str, arguments: dict[str, str]) -> str:
    """A call in the tags of this family."""
    before, between, after, ends = {
        "Qwen 3.5": ("<tool_call>\n<function=edit>\n", "<parameter=%s>\n%s\n</parameter>\n", "</function>", "\n"),
        "GLM": ("<tool_call>edit\n", "<arg_key>%s</arg_key>\n<arg_value>%s</arg_value>\n", "", ""),
    }[name]
    return before + "".join(between % pair for pair in arguments.items()) + after + ends + "</tool_call>"


@pytest.mark.parametrize("name", ["Qwen 3.5", "GLM"])
@pytest.mark.parametrize(
    ("parameter", "text", "value"),
    [
        ("dry", "True", True),
        ("dry", "false", False),
        ("dry", "FALSE", False),
        ("dry", "perhaps", "perhaps"),
        ("text", "42", "42"),
        ("text", '{"a": 1}', '{"a": 1}'),
        ("text", '"quoted"', '"quoted"'),
        ("text", "True", "True"),
        ("text", "null", None),
        ("text", "None", None),
        ("unit", "none", "none"),
        ("unit", "null", None),
        ("line", "42", 42),
        ("line", "None", None),
        ("line", "NULL", None),
        ("kind", "1", "1"),
        ("size", '{"width": 3}', {"width": 3}),
        ("size", "None", None),
        ("many", '["a", "b"]', ["a", "b"]),
        ("many", "a", "a"),
        ("some", "42", 42),
        ("some", "4.5", "4.5"),
        ("unknown", "3", 3),
        ("unknown", "None", "None"),
    ],
)
def test_a_parameter_has_a_type_of_its_schema(name: str, parameter: str, text: str, value: Any) -> None:
    reading = Reading(format_of(FAMILIES[name].shown), tuple(TOOLS))
    _, _, calls = sorted_out(read(reading, [written(name, {parameter: text})]))
    assert json.dumps(calls) == json.dumps([("edit", {parameter: value})])  # 1 is not True


@pytest.mark.parametrize("name", ["Qwen 3.5", "GLM"])
def test_a_forced_call_writes_parameters_as_they_are_read(name: str) -> None:
    family = FAMILIES[name]
    known = tokenizer(family.shown, family.special)
    reading = reading_of(known, TOOLS)
    grammar = forced_call(reading, reading.marks(known), TOOLS, several=False)
    for given in ({"text": "any text", "unit": "none"}, {"unit": "null", "kind": "2"}, {"line": "3", "dry": "true"}):
        assert allowed(known, grammar, written(name, given)), given
    for wrong in ({"unit": "K"}, {"unit": '"C"'}, {"kind": "3"}, {"line": "three"}):
        assert not allowed(known, grammar, written(name, wrong)), wrong


def test_texts_in_quotes_may_be_left_out_in_a_forced_call() -> None:
    family = FAMILIES["Gemma 4"]
    known = tokenizer(family.shown, family.special)
    properties = {key: SCHEMA["properties"][key] for key in ("text", "unit")}
    tools = [{"type": "function", "function": {"name": "edit", "parameters": {"properties": properties}}}]
    reading = reading_of(known, tools)
    grammar = forced_call(reading, reading.marks(known), tools, several=False)
    assert allowed(known, grammar, '<|tool_call>call:edit{text:<|"|>a<|"|>,unit:null}<tool_call|>')
    assert allowed(known, grammar, '<|tool_call>call:edit{text:null,unit:<|"|>C<|"|>}<tool_call|>')
    assert not allowed(known, grammar, "<|tool_call>call:edit{text:3}<tool_call|>")


def test_types_are_found_wherever_a_schema_tells_them() -> None:
    around = {"$defs": {"a/b": {"enum": ["x", 1, None]}, "Loop": {"anyOf": [{"$ref": "#/$defs/Loop"}, {"const": 1.5}]}}}
    for schema, kinds in (
        ({"type": ["string", "null"]}, {"string", "null"}),
        ({"oneOf": [{"type": "integer"}, {"type": "array"}]}, {"integer", "array"}),
        ({"allOf": [{"$ref": "#/$defs/a~1b"}]}, {"string", "integer", "null"}),
        ({"$ref": "#/$defs/Loop"}, {"number"}),
        ({"$ref": "#/$defs/None"}, set()),
        ({"type": 3}, set()),
        ({"type": [[], "string"]}, {"string"}),
        (True, set()),
        ({}, set()),
    ):
        assert kinds_of(schema, around) == kinds
    assert alternatives({"type": ["string", "null"], "enum": ["a", None]}, {}) == [
        {"type": "string", "enum": ["a"]},
        {"type": "null", "enum": [None]},
    ]
    deep: Any = {"type": "string"}
    for _ in range(100_000):
        deep = {"anyOf": [deep]}
    assert kinds_of(deep, {}) == {"string"}
