"""The grammar of an answer that has to be calls of tools, in the layout of the model's family."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from adaptive.errors import AdaptiveError
from adaptive.grammar import WHITESPACE, Grammar, as_json
from adaptive.service.calls import Reading
from adaptive.service.formats import Layout, function_of, properties_of


def forced_call(reading: Reading, marks: Mapping[int, str], tools: Sequence[dict[str, Any]], several: bool) -> Grammar:
    """The grammar of an answer that is a call of one of ``tools``, or ``several`` calls. ``marks`` are special tokens.

    Raises AdaptiveError for a model that is not known to write calls, or whose calls cannot be forced.
    """
    layout = reading.format.layout
    if layout is None:
        raise AdaptiveError("tool_choice: how this model writes calls is not known, so that none can be forced")
    rules = _Rules(layout, {mark: token for token, mark in marks.items()})
    calls = [rules.call(tool) for tool in tools]
    more = "" if layout.between is None or not several else f" ({rules.text(layout.between)} call)*"
    start = f"start: {rules.text(layout.begins)} call{more} {rules.text(layout.ends)}"
    return Grammar("lark", "\n".join([start, f"call: {' | '.join(calls)}", *rules.rules]))


class _Rules:
    """Rules of a grammar in Lark's notation."""

    def __init__(self, layout: Layout, tokens: Mapping[str, int]) -> None:
        self.rules: list[str] = []
        self._layout = layout
        self._tokens = tokens

    def call(self, tool: dict[str, Any]) -> str:
        """The name of the rule for a call of ``tool``."""
        function, layout = function_of(tool), self._layout
        name = function.get("name")
        if not isinstance(name, str):
            raise AdaptiveError("tools: every tool needs a function with a name")
        arguments = function.get("parameters") or {"type": "object"}
        if layout.parameter:
            held = self._parameters(function, arguments)
        elif layout.key:
            properties = {"name": {"const": name}, layout.key: arguments}
            held = self._json({"type": "object", "properties": properties, "required": [*properties]}, closed=True)
        else:
            held = self._json(arguments)
        before, after = (self.text(text.replace("{name}", name)) for text in (layout.before, layout.after))
        return self._rule(f"{before} {held} {after}")

    def text(self, text: str) -> str:
        """What stands for ``text`` in a rule: special tokens as such, everything else letter by letter."""
        parts = re.split(f"({'|'.join(map(re.escape, self._tokens))})", text) if self._tokens else [text]
        return " ".join(f"<[{self._tokens[p]}]>" if p in self._tokens else json.dumps(p) for p in parts if p)

    def _parameters(self, function: dict[str, Any], arguments: Any) -> str:
        """One parameter after the other, those that are not required perhaps."""
        required = arguments.get("required") if isinstance(arguments, dict) else None
        held = []
        for key, schema in properties_of(function).items():
            before, _, after = self._layout.parameter.replace("{key}", key).partition("{value}")
            value = f"{self._value(schema, arguments)} {self.text(after)}"
            if _is_text(schema) and "enum" not in schema:
                value = self._rule(r"/(.|\n)*/", f"[suffix={json.dumps(after)}]")
            optional = "" if isinstance(required, list) and key in required else "?"
            held.append(f"({self.text(before)} {value}){optional}")
        return " ".join(held)

    def _value(self, schema: Any, arguments: dict[str, Any]) -> str:
        """A parameter that is no free text: one of several texts as they are, everything else as JSON."""
        if _is_text(schema) and isinstance(schema.get("enum"), list):
            return "(" + " | ".join(self.text(str(text)) for text in schema["enum"]) + ")"
        shared = {key: arguments[key] for key in ("$defs", "definitions") if key in arguments}
        return self._json({**schema, **shared} if isinstance(schema, dict) else schema)

    def _json(self, schema: Any, closed: bool = False) -> str:
        if closed:
            schema = {**schema, "additionalProperties": False}
        known = {**schema, "x-guidance": {"whitespace_pattern": WHITESPACE}} if isinstance(schema, dict) else schema
        return self._rule(f"%json {as_json(known)}")

    def _rule(self, right: str, attributes: str = "") -> str:
        name = f"r{len(self.rules)}"
        self.rules.append(f"{name}{attributes}: {right}")
        return name


def _is_text(schema: Any) -> bool:
    return isinstance(schema, dict) and schema.get("type") == "string"
