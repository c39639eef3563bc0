"""The formats in which families of models write tool calls and thinking, recognised by the chat template.

An answer is text with regions, each between two marks; one of the functions below reads the region of a call. A
further family needs one more row in ``FAMILIES``.
"""

from __future__ import annotations

import functools
import json
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

from adaptive.service.values import DECODER, kinds_of, members, typed

# Contents of a region: a call, thinking, or visible text.
Kind = Literal["call", "thought", "text"]


@dataclass(frozen=True)
class Call:
    """A tool call of the model. ``arguments`` is a JSON object, as text."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}")

    def object(self) -> dict[str, Any]:
        """The call in OpenAI's form."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True)
class Region:
    """A part of an answer between two marks.

    The first mark of ``closes`` ends it, and is removed unless it opens the next region. The end of the answer ends it
    too. ``first``: it can only open at the beginning of an answer. ``bare``: a call without a mark before it: the text
    that opens it is part of it, and it must be a call of an offered tool. ``then``: what the model writes between its
    thinking and the marks of what follows.
    """

    kind: Kind
    opens: str
    closes: tuple[str, ...] = ()
    first: bool = False
    bare: bool = False
    then: str = ""


# By tool name and parameter name: the types that the parameter may have; empty if the schema has none.
Types = Mapping[str, Mapping[str, frozenset[str]]]
# Converts the text before a region and the text in it to calls, or to visible text. The last argument is whether a mark
# has closed the region, and not the end of the answer. Raises ValueError for neither.
Read = Callable[[str, str, Types, bool], list["Call | str"]]


@dataclass(frozen=True)
class Layout:
    """The layout of an answer that must consist of calls: ``begins``, calls separated by ``between``, ``ends``.

    With ``between`` None there is only one call. Each call is ``before``, its contents, ``after``, with ``{name}``
    replaced by the tool's name. The contents are a JSON object of name and arguments under ``key``; the arguments alone
    if ``key`` is empty; or, if ``parameter`` is set, the parameters, with ``separator`` between them and ``quote``
    around texts. ``text`` stands before visible text, in answers that are text instead.
    """

    before: str
    after: str = ""
    key: str = ""
    parameter: str = ""
    separator: str = ""
    quote: str = ""
    begins: str = ""
    between: str | None = ""
    ends: str = ""
    text: str = ""


@dataclass(frozen=True)
class Format:
    """The format of one family. ``marks`` are texts that must not be omitted when decoding if they are special tokens.

    Text outside regions is visible unless ``loose`` is False. ``short_ids``: the template only accepts call ids of nine
    letters and digits. ``single``: it only accepts one call per message; ``first_only``: it shows only the first one.
    ``thoughts`` is the field of a message from which the template reads thinking. ``head`` matches the beginning of a
    call's region, including the opening mark if that is part of the contents, up to arguments that are written as JSON
    (``partial.py``).
    """

    regions: tuple[Region, ...] = ()
    read: Read | None = None
    marks: tuple[str, ...] = ()
    layout: Layout | None = None
    loose: bool = True
    short_ids: bool = False
    single: bool = False
    first_only: bool = False
    thoughts: str = "reasoning_content"
    head: re.Pattern[str] | None = None


def called(name: Any, arguments: Any) -> Call:
    """A call. Raises ValueError if the name is not text or the arguments are not an object."""
    if isinstance(arguments, str):
        arguments = DECODER.decode(arguments)
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise ValueError("no call")
    said = json.dumps(arguments, ensure_ascii=False)
    # A model may write half of a surrogate pair, which cannot be encoded as UTF-8.
    return Call(*(text.encode("utf-8", "replace").decode("utf-8") for text in (name, said)))


def _of_object(value: Any) -> Call:
    """The call in a JSON object, in any of the forms that models use."""
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    if not isinstance(value, dict):
        raise ValueError("no object")
    return called(value.get("name"), value.get("arguments", value.get("parameters", {})))


def _objects(text: str) -> list[Any]:
    """The JSON values in ``text``, separated by white space or semicolons; a list gives its entries."""
    found, place = [], 0
    while (place := place + len(text[place:]) - len(text[place:].lstrip(" \n\t;"))) < len(text):
        value, place = DECODER.raw_decode(text, place)
        found += value if isinstance(value, list) else [value]
    return found


def _read_objects(before: str, body: str, types: Types, closed: bool) -> list[Call | str]:
    calls: list[Call | str] = [_of_object(value) for value in _objects(body)]
    if not calls:
        raise ValueError("empty")
    return calls


def _read_bare(before: str, body: str, types: Types, closed: bool) -> list[Call | str]:
    """Read JSON that no mark tells from an answer in JSON: calls only if every name is that of an offered tool."""
    calls = [_of_object(value) for value in _objects(body)]
    if not calls or any(call.name not in types for call in calls):
        raise ValueError("no call of an offered tool")
    return [*calls]


# Qwen 3 Coder, Qwen 3.5 and later; GLM 4.5 and later. A value may contain such tags itself.
_TAGGED = re.compile(r"<function=([^>\n]+)>(.*?)(?:</function>\s*)?\Z", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>(?=\s*(?:<parameter=|\Z))", re.DOTALL)
_BARE, _BETWEEN = "<function=", re.compile(r"(?<=</function>)\s*(?=<function=)")
_NAME = re.compile(r"([^\s<{]+)\s*(<arg_key>.*)?\Z", re.DOTALL)
_ARGUMENT = re.compile(
    r"<arg_key>\s*(.*?)\s*</arg_key>\s*<arg_value>\n?(.*?)\n?</arg_value>(?=\s*(?:<arg_key>|\Z))", re.DOTALL
)


def _read_tool_call(before: str, body: str, types: Types, closed: bool) -> list[Call | str]:
    """Read the text between ``<tool_call>`` marks: JSON, or one of two kinds of tags.

    Raises ValueError for tags that the end of the answer has cut: the parameters until there are no whole call.
    """
    body = body.strip()
    for outer, inner, whole in (
        (_TAGGED, _PARAMETER, closed or body.endswith("</function>")),
        (_NAME, _ARGUMENT, closed),
    ):
        if (found := outer.match(body)) is not None:
            name, within = found[1].strip(), (found[2] or "").strip()
            if not within and name not in types:
                raise ValueError("a word and no call")
            if not whole or inner.sub("", within).strip():
                raise ValueError("a call that is not whole")
            known, pairs = types.get(name, {}), inner.findall(within)
            return [called(name, {key: typed(value, known.get(key, frozenset())) for key, value in pairs})]
    return _read_objects(before, body, types, closed)


def _read_tagged(before: str, body: str, types: Types, closed: bool) -> list[Call | str]:
    """Read the text between ``<tool_call>`` marks, or the calls behind a mark that Qwen 3 Coder has left out."""
    calls = _BETWEEN.split(body) if body.startswith(_BARE) else [body]
    return [part for call in calls for part in _read_tool_call(before, call, types, closed)]


def _read_gemma(quote: str, before: str, body: str, types: Types, closed: bool) -> list[Call | str]:
    """Read ``call:name{key:value}``, with texts between two ``quote`` marks and keys without quotes."""
    found = re.fullmatch(r"\s*call:([^{\s]+)\s*(\{.*\})\s*", body, re.DOTALL)
    if found is None:
        raise ValueError("no call")
    pieces = found[2].split(quote)
    pieces[0::2] = [re.sub(r"([{,]\s*)([^\s{}\[\],:\"]+)\s*:", r'\1"\2":', piece) for piece in pieces[0::2]]
    pieces[1::2] = [json.dumps(piece) for piece in pieces[1::2]]
    return [called(found[1], DECODER.decode("".join(pieces)))]


def _read_mistral(before: str, body: str, types: Types, closed: bool) -> list[Call | str]:
    """Read a JSON list of calls, or the name of one call followed by its arguments."""
    found = re.fullmatch(r"\s*([\w.-]+)(?:\[CALL_ID\]\s*(\w+))?\s*(?:\[ARGS\])?\s*(\{.*)", body, re.DOTALL)
    if found is None:
        return _read_objects(before, body, types, closed)
    call = called(found[1], DECODER.decode(found[3]))
    return [replace(call, id=found[2]) if found[2] else call]


def _read_harmony(before: str, body: str, types: Types, closed: bool) -> list[Call | str]:
    """Read a message of gpt-oss: a call if its header names a tool as the recipient, else visible text."""
    header, mark, said = body.partition("<|message|>")
    if not mark:
        raise ValueError("no message")
    recipient = re.search(r"to=(?:functions\.)?([\w.-]+)", f"{before} {header}")
    return [said] if recipient is None else [called(recipient[1], DECODER.decode(said))]


# Beginnings of calls with JSON arguments: an object with the name before the arguments, or the name and then the
# arguments.
_HEAD = re.compile(
    r"\s*\[?\s*\{\s*(?:\"type\"\s*:\s*\"function\"\s*,\s*)?"
    r"\"name\"\s*:\s*\"([^\"\\]+)\"\s*,\s*\"(?:arguments|parameters)\"\s*:\s*(?=\{)"
)
_MISTRAL_HEAD = re.compile(rf"{_HEAD.pattern}|\s*([\w.-]+)(?:\[CALL_ID\]\s*(?P<id>\w+))?\s*\[ARGS\]\s*(?=\{{)")
_HARMONY_HEAD = re.compile(r"[^{]*?to=(?:functions\.)?([\w.-]+)[^{]*?<\|message\|>\s*(?=\{)")
_HARMONY_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")
_TOOL_CALL = Format(
    (Region("call", "<tool_call>", ("</tool_call>",)),), _read_tool_call, ("<tool_call>", "</tool_call>"), head=_HEAD
)
_TAGS = "<function={name}>\n"
_MISTRAL = Format(
    (Region("call", "[TOOL_CALLS]", ("[TOOL_CALLS]",)),),
    _read_mistral,
    ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    short_ids=True,
    head=_MISTRAL_HEAD,
)

# The families, each with texts that its chat template contains. The first row whose texts all occur applies.
FAMILIES: tuple[tuple[tuple[str, ...], Format], ...] = (
    (
        ("<|channel|>", "<|message|>"),  # gpt-oss
        Format(
            (
                Region("thought", "<|channel|>analysis<|message|>", _HARMONY_ENDS, then="<|start|>assistant"),
                Region("text", "<|channel|>final<|message|>", _HARMONY_ENDS),
                Region("call", "<|channel|>", _HARMONY_ENDS),
            ),
            _read_harmony,
            (*_HARMONY_ENDS, "<|message|>", "<|constrain|>"),
            Layout(
                "<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>",
                between=None,
                text="<|channel|>final<|message|>",
            ),
            loose=False,
            first_only=True,
            thoughts="thinking",
            head=_HARMONY_HEAD,
        ),
    ),
    (
        ("<|tool_call>",),  # Gemma 4
        Format(
            (Region("call", "<|tool_call>", ("<tool_call|>",)),),
            partial(_read_gemma, '<|"|>'),
            ("<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>"),
            Layout(
                "<|tool_call>call:{name}{", "}<tool_call|>", parameter="{key}:{value}", separator=",", quote='<|"|>'
            ),
        ),
    ),
    (
        ("<start_function_call>",),  # FunctionGemma
        Format(
            (Region("call", "<start_function_call>", ("<end_function_call>",)),),
            partial(_read_gemma, "<escape>"),
            ("<start_function_call>", "<end_function_call>", "<escape>"),
            Layout(
                "<start_function_call>call:{name}{",
                "}<end_function_call>",
                parameter="{key}:{value}",
                separator=",",
                quote="<escape>",
            ),
        ),
    ),
    (
        ("<tool_call>", "<arg_key>"),  # GLM
        replace(
            _TOOL_CALL,
            marks=(*_TOOL_CALL.marks, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
            layout=Layout(
                "<tool_call>{name}\n",
                "</tool_call>",
                parameter="<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n",
                between="\n",
            ),
        ),
    ),
    (
        ("<tool_call>", "<function="),  # Qwen 3 Coder, Qwen 3.5 and later
        replace(
            _TOOL_CALL,
            regions=(*_TOOL_CALL.regions, Region("call", _BARE, ("</tool_call>",), bare=True)),
            read=_read_tagged,
            layout=Layout(
                f"<tool_call>\n{_TAGS}",
                "</function>\n</tool_call>",
                parameter="<parameter={key}>\n{value}\n</parameter>\n",
                between="\n",
            ),
        ),
    ),
    (
        ("<tool_call>",),  # Hermes, Qwen 2.5 and 3
        replace(_TOOL_CALL, layout=Layout("<tool_call>\n", "\n</tool_call>", key="arguments", between="\n")),
    ),
    (("[TOOL_CALLS]", "[ARGS]"), replace(_MISTRAL, layout=Layout("[TOOL_CALLS]{name}[ARGS]"))),
    (
        ("[TOOL_CALLS]",),  # Mistral before 2025
        replace(_MISTRAL, layout=Layout("", key="arguments", begins="[TOOL_CALLS][", between=", ", ends="]")),
    ),
    (
        ("<|start_header_id|>", "tool"),  # Llama 3.1 and later
        Format(
            (Region("call", "<|python_tag|>", first=True), Region("call", "{", first=True, bare=True)),
            _read_bare,
            ("<|python_tag|>",),
            Layout("", key="parameters", between=None),
            head=_HEAD,
        ),
    ),
)
# The regions of thinking, each with a text that the chat template contains. The first match applies. A mark later in
# an answer is text, such as code that contains it.
THOUGHTS: tuple[tuple[str, Region], ...] = (
    ("</think>", Region("thought", "<think>", ("</think>",), first=True)),
    ("<think>", Region("thought", "<think>", ("</think>",), first=True)),
    ("[THINK]", Region("thought", "[THINK]", ("[/THINK]",), first=True)),
    ("<|channel>", Region("thought", "<|channel>thought", ("<channel|>",), first=True)),
)
# A text in chat templates that refuse several calls in one message. Those of Llama 3 raise it as an error.
SINGLE = "single tool-call"


@functools.lru_cache(maxsize=8)
def format_of(template: str) -> Format:
    """The format of a model with this chat template; an empty format if it has neither calls nor thinking."""
    found = next((known for shown, known in FAMILIES if all(text in template for text in shown)), Format())
    if not found.loose:
        return found
    thoughts = next(((region,) for shown, region in THOUGHTS if shown in template), ())
    marks = {mark: None for region in thoughts for mark in (region.opens, *region.closes)}
    all_marks = tuple({**dict.fromkeys(found.marks), **marks})
    return replace(found, regions=thoughts + found.regions, marks=all_marks, single=SINGLE in template)


def types_of(tools: Sequence[dict[str, Any]]) -> Types:
    """The types of the tools' parameters, from their schemas."""
    known: dict[str, dict[str, frozenset[str]]] = {}
    for tool in tools:
        function = function_of(tool)
        if isinstance(name := function.get("name"), str):
            around = function.get("parameters")
            known[name] = {key: kinds_of(value, around) for key, value in members(around).properties.items()}
    return known


def function_of(tool: dict[str, Any]) -> dict[str, Any]:
    """The function of a tool; empty if it has none."""
    function = tool.get("function")
    return function if isinstance(function, dict) else {}
