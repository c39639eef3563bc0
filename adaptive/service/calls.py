"""Tool calls out of an answer, for models that write them between ``<tool_call>`` marks (Qwen, Hermes and kin).

In: the text of an answer as it comes. Out: text for a person, and calls. What is no call after all stays text.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from adaptive.errors import AdaptiveError
from adaptive.grammar import Grammar, as_json
from adaptive.service.schemas import function_of

MARK = "<tool_call>"
# In a grammar, behind a call.
MORE_CALLS = r' ("\n" call)*'
# What transformers' parser has to know: how a call begins and ends, and what stands in it.
_CONTENT = {"content": "text"}
_JSON = {
    "open_pattern": r"\s*<tool_call>",
    "close": "</tool_call>",
    "repeats": True,
    "content": "json",
    "transform": {"type": "function", "function": "{content}"},
}
_TAGS = {
    "open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>",
    "close_pattern": r"</function>\s*</tool_call>",
    "repeats": True,
    "content": "xml-inline",
    "content_args": {"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>"},
    "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
}


@dataclass(frozen=True)
class Call:
    """A call that the model asks for. ``arguments`` is JSON."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}")

    def object(self) -> dict[str, Any]:
        """In OpenAI's shape."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


def call_template(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any] | None:
    """How this model writes calls, by its chat template; None where that is not known."""
    template = tokenizer.chat_template
    if not isinstance(template, str) or MARK not in template:
        return None
    ids = tokenizer.encode(MARK, add_special_tokens=False)
    if MARK not in str(tokenizer.decode(ids, skip_special_tokens=True)):
        return None  # the mark would not be in the text
    calls = _TAGS if "<function=" in template else _JSON
    return {"start_anchor": "\n", "fields": {"tool_calls": calls, "content": _CONTENT}}


def forced_call(tokenizer: PreTrainedTokenizerBase, tools: Sequence[dict[str, Any]], several: bool) -> Grammar:
    """The grammar of an answer that is a call of one of ``tools``, or ``several`` calls.

    Raises AdaptiveError for a model whose calls are not known, or not JSON.
    """
    template = call_template(tokenizer)
    if template is None or template["fields"]["tool_calls"] is not _JSON:
        raise AdaptiveError("tool_choice: how this model writes calls is not known, so that none can be forced")
    calls: list[str] = []
    for tool in tools:
        function = function_of(tool)
        if not isinstance(function.get("name"), str):
            raise AdaptiveError("tools: every tool needs a function with a name")
        arguments = function.get("parameters") or {"type": "object"}
        properties = {"name": {"const": function["name"]}, "arguments": arguments}
        call = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
        calls.append(f"call_{len(calls)}: %json {as_json(call)}")
    names = " | ".join(f"call_{number}" for number in range(len(calls)))
    start = f"start: call{MORE_CALLS if several else ''}\n" + r'call: "<tool_call>\n" any "\n</tool_call>"'
    return Grammar("lark", "\n".join([start, f"any: {names}", *calls]))


class CallParser:
    """Reads one answer. Text that may be the beginning of a call is held back until that is decided."""

    def __init__(self, template: dict[str, Any], tools: Sequence[dict[str, Any]]) -> None:
        from transformers.utils.chat_parsing import ResponseParser

        self._parser = ResponseParser(template, prefix="", tools=list(tools))
        self._held = ""  # not shown yet
        self._given_up = False

    def feed(self, text: str) -> list[str | Call]:
        """What has become certain with ``text``."""
        if self._given_up or not text:
            return [text] if text else []
        self._held += text
        return self._said(lambda: self._parser.feed(text))

    def finish(self) -> list[str | Call]:
        """What was held back when no more text comes."""
        return [] if self._given_up else self._said(lambda: self._parser.finalize()[1])

    def _said(self, parse: Callable[[], list[dict[str, Any]]]) -> list[str | Call]:
        said: list[str | Call] = []
        try:
            for event in parse():
                if event["type"] == "region_chunk" and event["field"] == "content":
                    said.append(event["text"])
                    self._held = self._held.partition(event["text"])[2]
                elif event["type"] == "region_close" and event["field"] == "tool_calls":
                    said.append(_call(event["value"]["function"]))
                    self._held = self._held.partition("</tool_call>")[2]
        except (ValueError, KeyError, TypeError, RecursionError):  # between the marks stands something else
            return said + self._give_up()
        return said

    def _give_up(self) -> list[str | Call]:
        """Show what was held back as it is, and everything from now on."""
        self._given_up, held, self._held = True, self._held, ""
        return [held] if held else []


def _call(function: dict[str, Any]) -> Call:
    """Raises KeyError or TypeError for what is none."""
    name, arguments = function["name"], function.get("arguments", {})
    if not isinstance(name, str):
        raise TypeError("the name of a call is no text")
    said = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    # A model may write half of a surrogate pair, which nobody could be sent.
    return Call(*(text.encode("utf-8", "replace").decode("utf-8") for text in (name, said)))


def parser_for(tokenizer: PreTrainedTokenizerBase, tools: Sequence[dict[str, Any]] | None) -> CallParser | None:
    """A parser for an answer to a request with ``tools``, None where none are offered or none can be read."""
    template = call_template(tokenizer) if tools else None
    if template is None or tools is None:
        return None
    try:
        return CallParser(template, tools)
    except ImportError:  # an older transformers has no such parser
        return None
