"""Parameters that a model writes as text get the types of their schemas, also in calls that are forced."""

from __future__ import annotations

import json
from typing import Any, Literal

import pytest
from pydantic import BaseModel
from test_forced_calls import allowed
from test_service_formats import FAMILIES, read, sorted_out, tokenizer

from adaptive.errors import AdaptiveError
from adaptive.service.calls import Reading, reading_of
from adaptive.service.forced import forced_call
from adaptive.service.formats import Layout, format_of
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
        ("unknown", "NaN", "NaN"),
        ("unknown", "1e999", "1e999"),
        ("line", "-Infinity", "-Infinity"),
        ("size", '{"width": NaN}', '{"width": NaN}'),
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


def tool(parameters: dict[str, Any]) -> list[dict[str, Any]]:
    """The offered tools: one with these parameters."""
    return [{"type": "function", "function": {"name": "edit", "parameters": parameters}}]


def laid_out(layout: Layout, arguments: dict[str, Any]) -> str:
    """A forced call of the tool with these arguments, none of them a text."""
    if layout.parameter:
        pairs = ((key, json.dumps(value)) for key, value in arguments.items())
        held = "".join(layout.parameter.replace("{key}", key).replace("{value}", value) for key, value in pairs)
    else:
        held = json.dumps({"name": "edit", layout.key: arguments} if layout.key else arguments)
    before, after = (text.replace("{name}", "edit") for text in (layout.before, layout.after))
    return f"{layout.begins}{before}{held}{after}{layout.ends}"


# A list as pydantic writes it: the schema at the top is a reference, and refers to itself.
LINKED: dict[str, Any] = {
    "$defs": {
        "Node": {
            "type": "object",
            "properties": {
                "label": {"type": "string"},
                "next": {"anyOf": [{"$ref": "#/$defs/Node"}, {"type": "null"}]},
            },
            "required": ["label"],
        }
    },
    "$ref": "#/$defs/Node",
}
EITHER: dict[str, Any] = {"anyOf": [{"properties": {"label": {"type": "string"}}}, {"properties": {"line": {}}}]}


@pytest.mark.parametrize("name", ["Qwen 3.5", "GLM"])
@pytest.mark.parametrize("schema", [LINKED, EITHER, {"allOf": [LINKED["$defs"]["Node"]]}], ids=["ref", "any", "all"])
def test_parameters_are_found_behind_references_and_alternatives(name: str, schema: dict[str, Any]) -> None:
    reading = Reading(format_of(FAMILIES[name].shown), tuple(tool(schema)))
    _, _, calls = sorted_out(read(reading, [written(name, {"label": "12345"})]))
    assert calls == [("edit", {"label": "12345"})]


@pytest.mark.parametrize("name", ["Qwen 3.5", "GLM"])
def test_a_forced_call_has_the_parameters_behind_a_reference(name: str) -> None:
    known, tools = tokenizer(FAMILIES[name].shown, FAMILIES[name].special), tool(LINKED)
    reading = reading_of(known, tools)
    grammar = forced_call(reading, reading.marks(known), tools, several=False)
    assert allowed(known, grammar, written(name, {"label": "a", "next": '{"label": "b"}'}))
    assert not allowed(known, grammar, written(name, {}))
    assert not allowed(known, grammar, written(name, {"label": "a", "next": '{"label": 3}'}))


@pytest.mark.parametrize(
    "schema",
    [EITHER, {"additionalProperties": {"type": "string"}}, {"properties": {"line": {}}, "required": ["line", "dry"]}],
    ids=["alternatives", "a map", "one that is not listed"],
)
def test_parameters_that_are_not_listed_cannot_be_forced_one_by_one(schema: dict[str, Any]) -> None:
    for name, family in FAMILIES.items():
        layout = format_of(family.shown).layout
        assert layout is not None
        reading = reading_of(tokenizer(family.shown, family.special), tool(schema))
        if not layout.parameter:
            forced_call(reading, {}, tool(schema), several=False)
            continue
        with pytest.raises(AdaptiveError, match="a call of 'edit' cannot be forced"):
            forced_call(reading, {}, tool(schema), several=False)
        assert name in ("Qwen 3.5", "GLM", "Gemma 4", "FunctionGemma")


ANN, BOB = {"first": "Ann"}, {"first": "Bob"}
# References to a property and to the whole, as zod-to-json-schema writes them.
REFERRING: dict[str, Any] = {
    "$schema": "http://json-schema.org/draft-07/schema#",
    "type": "object",
    "properties": {
        "name": {
            "type": "object",
            "properties": {"first": {"enum": ["Ann", "Bob"]}},
            "required": ["first"],
            "additionalProperties": False,
        },
        "second": {"$ref": "#/properties/name"},
        "third": {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
        "fourth": {"$ref": "#/properties/third/anyOf/1"},
    },
    "required": ["name", "second"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("name", [name for name in FAMILIES if "Gemma" not in name])
def test_references_are_to_places_in_the_schema_of_the_parameters(name: str) -> None:
    family, tools = FAMILIES[name], tool(REFERRING)
    known = tokenizer(family.shown, family.special)
    reading = reading_of(known, tools)
    grammar, layout = forced_call(reading, reading.marks(known), tools, several=False), reading.format.layout
    assert layout is not None
    pair = {"name": ANN, "second": BOB}
    for right in (pair, {**pair, "third": pair}, {**pair, "third": None, "fourth": None}):
        assert allowed(known, grammar, laid_out(layout, right)), right
    for wrong in ({**pair, "second": {"first": "Eve"}}, {**pair, "second": "edit"}, {**pair, "third": {"name": ANN}}):
        assert not allowed(known, grammar, laid_out(layout, wrong)), wrong


def test_types_are_found_wherever_a_schema_tells_them() -> None:
    around = {
        "type": "object",
        "$defs": {"a/b": {"enum": ["x", 1, None]}, "Loop": {"anyOf": [{"$ref": "#/$defs/Loop"}, {"const": 1.5}]}},
    }
    for schema, kinds in (
        ({"type": ["string", "null"]}, {"string", "null"}),
        ({"oneOf": [{"type": "integer"}, {"type": "array"}]}, {"integer", "array"}),
        ({"allOf": [{"$ref": "#/$defs/a~1b"}]}, {"string", "integer", "null"}),
        ({"$ref": "#/$defs/Loop"}, {"number"}),
        ({"$ref": "#/$defs/None"}, set()),
        ({"$ref": "#/$defs/Loop/anyOf/1"}, {"number"}),
        ({"$ref": "#"}, {"object"}),
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


@pytest.mark.parametrize("name", ["Qwen 3.5", "GLM", "Gemma 4"])
def test_a_list_of_values_that_is_null_lists_none(name: str) -> None:
    """Some clients write every field of a schema."""
    family, text = FAMILIES[name], {"type": "string", "enum": None}
    known, tools = tokenizer(family.shown, family.special), tool({"type": "object", "properties": {"text": text}})
    reading = reading_of(known, tools)
    assert forced_call(reading, reading.marks(known), tools, several=False)
    assert alternatives(text, {}) == [{"type": "string"}]
