"""The types of a tool's parameters, by their JSON schemas, and the values of parameters that a model wrote as text."""

from __future__ import annotations

import json
from collections.abc import Set
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


def typed(text: str, kinds: Set[str]) -> Any:
    """The value of a parameter that was written as plain ``text``, with one of the types ``kinds``; none: unknown.

    If it may be a text, it is one unless it is a value of another of the types.
    """
    try:
        value = json.loads(text)
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
        if one.get("enum") != []:
            found.append(one)
    return found


def _referred(name: str, around: Any) -> Any:
    """The schema to which ``#/$defs/Name`` and the like refer; None if there is none."""
    for part in name.removeprefix("#/").split("/"):
        around = around.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(around, dict) else None
    return around


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
