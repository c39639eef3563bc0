"""The types of a tool's parameters, by their JSON schemas, and the values of parameters that a model wrote as text."""

from __future__ import annotations

import json
import math
from collections.abc import Set
from dataclasses import dataclass
from typing import Any

# Python's words for JSON's values. Chat templates write them in earlier calls, and models do the same.
WORDS: dict[str, Any] = {"True": True, "False": False, "None": None, "Null": None}
# By Python's type: the types of JSON schemas that have such a value.
NAMES: dict[type, frozenset[str]] = {
    bool: frozenset({"boolean"}),
    int: frozenset({"integer", "number"}),
    float: frozenset({"number"}),
    str: frozenset({"string"}),
    list: frozenset({"array"}),
    dict: frozenset({"object"}),
    type(None): frozenset({"null"}),
}


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is no number of JSON")
    return number


# Reads JSON, and raises ValueError for numbers that JSON has not: NaN, Infinity, and those too large for a float.
DECODER = json.JSONDecoder(parse_float=_finite, parse_constant=_finite)


def kinds_of(schema: Any, around: Any) -> frozenset[str]:
    """The types that a value of ``schema`` may have; empty if unknown. ``around``: see ``alternatives``."""
    return frozenset(one["type"] for one in alternatives(schema, around) if isinstance(one.get("type"), str))


def alternatives(schema: Any, around: Any) -> list[dict[str, Any]]:
    """Schemas of one type each, of which a value of ``schema`` matches at least one.

    ``around`` is the schema that holds ``schema``, and in which its references are resolved. An alternative whose type
    is unknown has no ``type``. The parts of ``allOf`` count as alternatives too.
    """
    found: list[dict[str, Any]] = []
    seen: set[str] = set()  # references, which may lead back to themselves
    waiting = [schema]
    while waiting:
        one = waiting.pop()
        if not isinstance(one, dict):
            found.append({})
        elif typed_ones := _by_type(one):
            found += typed_ones
        elif isinstance(name := one.get("$ref"), str):
            if name not in seen:
                seen.add(name)
                waiting.append(_referred(name, around))
        elif inner := [part for key in ("anyOf", "oneOf", "allOf") for part in _list(one.get(key))]:
            waiting += reversed(inner)
        else:
            found.append({key: value for key, value in one.items() if key != "type"})
    return found or [{}]


@dataclass(frozen=True)
class Members:
    """The ``properties`` of an object (schemas by name), and the names of those that are ``required``.

    ``listed``: whether any set of properties with the required ones is an object of the schema. It is False if the
    schema has alternatives, requires a property that it does not list, or lists none and describes others (a map).
    """

    properties: dict[str, Any]
    required: frozenset[str]
    listed: bool


def members(schema: Any) -> Members:
    """The members of an object by ``schema``, its references, and all its parts and alternatives."""
    properties: dict[str, Any] = {}
    required: set[str] = set()
    seen: set[str] = set()  # as in ``alternatives``
    listed, others = True, False
    waiting = [schema]
    for one in waiting:  # which grows
        if not isinstance(one, dict):
            listed = False
            continue
        if isinstance(name := one.get("$ref"), str) and name not in seen:
            seen.add(name)
            waiting.append(_referred(name, schema))
        either = [part for key in ("anyOf", "oneOf") for part in _list(one.get(key))]
        listed = listed and not either
        waiting += [*_list(one.get("allOf")), *either]
        own = one.get("properties")
        for key, value in own.items() if isinstance(own, dict) else ():
            properties[key] = {"allOf": [properties[key], value]} if key in properties else value
        required |= {key for key in _list(one.get("required")) if isinstance(key, str)}
        others = others or any(isinstance(one.get(key), dict) for key in ("additionalProperties", "patternProperties"))
    listed = listed and required <= properties.keys() and not (others and not properties)
    return Members(properties, frozenset(required), listed)


def typed(text: str, kinds: Set[str]) -> Any:
    """The value of a parameter that was written as plain ``text``, with one of the types ``kinds``; none: unknown.

    If it may be a text, it is one unless it is a value of another of the types.
    """
    try:
        value = DECODER.decode(text)
    except ValueError:
        word = text if "string" in kinds else text.capitalize()  # a text such as "none" keeps its meaning
        value = WORDS.get(word, text) if kinds else text
    return text if "string" in kinds and not (kinds - {"string"}) & NAMES[type(value)] else value


def _by_type(schema: dict[str, Any]) -> list[dict[str, Any]]:
    """The schema once for each type that it names or whose values it lists."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    named = schema.get("type")
    if named is None:
        named = sorted({min(NAMES[type(value)]) for value in _list(values)})
    found = []
    for kind in [named] if isinstance(named, str) else _list(named):
        if not isinstance(kind, str):
            continue
        one = {**schema, "type": kind}
        if isinstance(values, list):
            one = {key: value for key, value in one.items() if key != "const"}
            one["enum"] = [value for value in values if kind in NAMES[type(value)]]
        elif "enum" in one:  # null, as some clients write a field that is not set
            del one["enum"]
        if one.get("enum") != []:
            found.append(one)
    return found


def _referred(name: str, around: Any) -> Any:
    """The schema to which ``#``, ``#/$defs/Name`` and the like refer; None if there is none."""
    for part in name.removeprefix("#").split("/")[1:]:
        if isinstance(around, list):
            around = around[int(part)] if part.isdecimal() and int(part) < len(around) else None
        else:
            around = around.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(around, dict) else None
    return around


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
