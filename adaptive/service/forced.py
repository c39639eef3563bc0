"""Builds the grammar of an answer that must consist of tool calls, in the layout of the model's family, or of an answer
that is either calls or text in a format, or of text in a format behind thinking or marks. ``thinks``: whether the model
may think before that; it does if the prompt has opened its thinking."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from adaptive.errors import AdaptiveError
from adaptive.grammar import WHITESPACE, Grammar, as_json
from adaptive.service.calls import Reading
from adaptive.service.formats import Layout, function_of
from adaptive.service.values import alternatives, members

ANY_TEXT = r"/(.|\n)*/"
# What models write between their thinking and the answer, where no mark stands there.
BREAK = r"/\n{0,2}/"
# Types whose values every family writes as JSON.
BARE = ("integer", "number", "boolean", "null")
# The beginning of a reference to a place in the same schema, as JSON text. Within a text value, which may look alike,
# quotes are escaped.
OWN = re.compile(r'(?<!\\)"\$ref": "#(?=["/])')
# The name, among the definitions of a schema, of the whole schema of the parameters, of which it is a part.
PLACE = "arguments"
# Kinds of grammars that can be a part of another one. llguidance fails on some grammars within a grammar.
NESTED = ("json_schema", "regex")


def forced_call(
    reading: Reading, marks: Mapping[int, str], tools: Sequence[dict[str, Any]], several: bool, thinks: bool = False
) -> Grammar:
    """The grammar of an answer that is a call of one of ``tools``, or ``several`` calls. ``marks`` are special tokens.

    Raises AdaptiveError if the model's call format is unknown, or such a call cannot be forced.
    """
    layout = reading.format.layout
    if layout is None:
        raise AdaptiveError("tool_choice: how this model writes calls is not known, so that none can be forced")
    rules = _Rules(layout, marks)
    return rules.grammar(rules.thinking(reading) if thinks else "", rules.calls(tools, several))


def call_or_text(
    reading: Reading,
    marks: Mapping[int, str],
    tools: Sequence[dict[str, Any]],
    several: bool,
    text: Grammar,
    thinks: bool = False,
) -> Grammar:
    """The grammar of an answer that is a call of one of ``tools``, or ``several`` calls, or a text by the schema or
    regular expression ``text``. Raises AdaptiveError as ``forced_call``, if ``text`` cannot be parsed, or if it is a
    grammar."""
    layout = reading.format.layout
    if layout is None or text.kind not in NESTED:
        kind = (
            "tools and a grammar" if layout else "tools and a format, while how this model writes calls is not known,"
        )
        raise AdaptiveError(f"{kind} do not go together; leave one of them out, or send tool_choice none")
    rules = _Rules(layout, marks)
    before = rules.thinking(reading) if thinks else ""
    return rules.grammar(before, rules.calls(tools, several), f"{rules.text(layout.text)} {rules.nested(text)}")


def marked_text(reading: Reading, marks: Mapping[int, str], text: Grammar, thinks: bool = False) -> Grammar | None:
    """The grammar of an answer that is a text by ``text`` after its thinking and the marks that this family writes
    before visible text; None if there is neither, or if ``text`` is a grammar. Raises AdaptiveError if ``text`` cannot
    be parsed."""
    layout = reading.format.layout or Layout("")
    if not (layout.text or thinks) or text.kind not in NESTED:
        return None
    rules = _Rules(layout, marks)
    before = rules.thinking(reading) if thinks else ""
    return rules.grammar(before, f"{rules.text(layout.text)} {rules.nested(text)}")


class _Rules:
    """Rules of a grammar in Lark's notation."""

    def __init__(self, layout: Layout, marks: Mapping[int, str]) -> None:
        self._rules: list[str] = []
        self._layout = layout
        self._tokens = {mark: token for token, mark in marks.items()}

    def grammar(self, before: str, *answers: str) -> Grammar:
        """The grammar of an answer of one of these kinds, by these rules, with ``before`` before it."""
        return Grammar("lark", "\n".join([f"start: {before} ({' | '.join(answers)})", *self._rules]))

    def thinking(self, reading: Reading) -> str:
        """The model's thinking with its marks, up to the beginning of the answer proper. It can be left out, unless the
        prompt has opened it."""
        region = reading.thought
        assert region is not None
        behind = self.text(region.then) or self._rule(BREAK)
        rest = f"{self._until(region.closes[0])} {behind}"
        return rest if reading.begun is not None else f"({self.text(region.opens)} {rest})?"

    def calls(self, tools: Sequence[dict[str, Any]], several: bool) -> str:
        """Add the rules for a call of one of ``tools``, or ``several``. Returns what such an answer consists of."""
        layout = self._layout
        call = self._rule(" | ".join(self.call(tool) for tool in tools))
        more = "" if layout.between is None or not several else f" ({self.text(layout.between)} {call})*"
        return f"{self.text(layout.begins)} {call}{more} {self.text(layout.ends)}"

    def nested(self, grammar: Grammar) -> str:
        """Add the rule for a text that matches ``grammar``. Returns its name."""
        return self._rule(grammar.rule())

    def call(self, tool: dict[str, Any]) -> str:
        """Add the rule for a call of ``tool``. Returns its name."""
        function, layout = function_of(tool), self._layout
        name = function.get("name")
        if not isinstance(name, str):
            raise AdaptiveError("tools: every tool needs a function with a name")
        arguments = function.get("parameters") or {"type": "object"}
        if layout.parameter:
            held = self._parameters(name, arguments)
        elif layout.key:
            properties = {"name": {"const": name}, layout.key: {"$ref": "#"}}
            call = {"type": "object", "properties": properties, "required": [*properties]}
            held = self._json({**call, "additionalProperties": False}, arguments)
        else:
            held = self._json(arguments, arguments)
        before, after = (self.text(text.replace("{name}", name)) for text in (layout.before, layout.after))
        return self._rule(f"{before} {held} {after}")

    def text(self, text: str) -> str:
        """``text`` in the grammar's notation: special tokens by id, everything else as literals."""
        parts = re.split(f"({'|'.join(map(re.escape, self._tokens))})", text) if self._tokens else [text]
        return " ".join(f"<[{self._tokens[p]}]>" if p in self._tokens else json.dumps(p) for p in parts if p)

    def _parameters(self, name: str, arguments: Any) -> str:
        """All parameters in order; those that are not required are optional."""
        known = members(arguments)
        if not known.listed:
            raise AdaptiveError(
                f"tools: a call of {name[:64]!r} cannot be forced from this model, nor offered beside a format, only "
                "one whose schema lists all parameters in properties, without alternatives"
            )
        held = [
            (self._parameter(key, schema, arguments), key in known.required) for key, schema in known.properties.items()
        ]
        if not self._layout.separator:
            return " ".join(rule if always else f"{rule}?" for rule, always in held)
        return self._separated(held)

    def _separated(self, held: list[tuple[str, bool]]) -> str:
        """The same, with a separator between the parameters that are present."""
        separator = self.text(self._layout.separator)
        first = further = ""  # the rest of the list: without and with a parameter before it
        for rule, always in reversed(held):
            begins = f"{rule} {further}"
            if not always:
                begins = f"({begins} | {first})" if first else f"({begins})?"
            more = f"({separator} {rule})" + ("" if always else "?")
            first, further = self._rule(begins), self._rule(f"{more} {further}")
        return first

    def _parameter(self, key: str, schema: Any, arguments: dict[str, Any]) -> str:
        """The rule of one parameter, including its marks."""
        before, _, after = self._layout.parameter.replace("{key}", key).partition("{value}")
        kinds = alternatives(schema, arguments)
        texts = [kind for kind in kinds if kind.get("type") == "string"]
        others = [kind for kind in kinds if kind.get("type") != "string"]
        if self._layout.quote and any(kind.get("type") not in BARE for kind in others):
            raise AdaptiveError(
                f"tools: a call with a parameter like {key[:64]!r} cannot be forced from this model, nor offered "
                "beside a format, only one with texts, numbers and booleans"
            )
        if not texts:
            return self._rule(f"{self.text(before)} {self._json(schema, arguments)} {self.text(after)}")
        any_text = any("enum" not in kind for kind in texts)
        if any_text and not self._layout.quote:
            others = []  # without quotes, what any other value is written as is a text too
        listed = None if any_text else [str(text) for kind in texts for text in kind["enum"]]
        values = [self._text(before, listed, after)]
        values += [f"{self.text(before)} {self._json(kind, arguments)} {self.text(after)}" for kind in others]
        return self._rule(" | ".join(values))

    def _text(self, before: str, listed: Sequence[str] | None, after: str) -> str:
        """One of the ``listed`` texts (None: any text) between ``before`` and ``after``, in quotes if there are any."""
        before, after = before + self._layout.quote, self._layout.quote + after
        if listed is None:
            return f"{self.text(before)} {self._until(after)}"
        return f"{self.text(before)} ({' | '.join(map(self.text, listed))}) {self.text(after)}"

    def _until(self, end: str) -> str:
        """Any text up to ``end``, and that."""
        if any(mark in end for mark in self._tokens):  # text contains no special tokens
            return f"{self._rule(ANY_TEXT)} {self.text(end)}"
        return self._rule(ANY_TEXT, f"[suffix={json.dumps(end)}]")

    def _json(self, schema: Any, around: Any) -> str:
        """A rule for JSON by ``schema``, in which references are to places of the schema ``around`` it."""
        if not isinstance(schema, dict):
            return self._rule(f"%json {as_json(schema)}")
        whole = {**schema, "x-guidance": {"whitespace_pattern": WHITESPACE}}
        text = as_json(whole)
        if schema is not around and OWN.search(text):
            text = OWN.sub(f'"$ref": "#/$defs/{PLACE}', as_json({**whole, "$defs": {PLACE: around}}))
        return self._rule(f"%json {text}")

    def _rule(self, right: str, attributes: str = "") -> str:
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{attributes}: {right}")
        return name
