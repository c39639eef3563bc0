"""The tools of ``/v1/responses``: functions, alone or in a namespace, and custom tools, whose input is a text.

In: a request's tools and items. Out: the functions that the model sees, and how a call of one of them is an item again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from adaptive.errors import AdaptiveError
from adaptive.service.loose import LooseModel, Text

# The parameter of the function that stands for a custom tool.
INPUT = "input"


class CustomFormat(LooseModel):
    """The form of a custom tool's input: any text, or a text of a grammar."""

    type: str = "text"
    syntax: str | None = None
    definition: Text | None = None


class ResponseTool(LooseModel):
    """A tool that the client runs, or a namespace of such tools. Tools that OpenAI runs have another ``type``."""

    type: str
    name: str | None = None
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    format: CustomFormat | None = None
    tools: list[ResponseTool] | None = None

    def described(self) -> str | None:
        """The description, with the grammar of a custom tool's input, which the model has to keep to by itself."""
        if self.format is None or self.format.definition is None:
            return self.description
        grammar = f"The input follows this grammar ({self.format.syntax or self.format.type}):"
        return "\n".join(text for text in (self.description, grammar, self.format.definition) if text)


@dataclass(frozen=True)
class Offered:
    """A tool as the client knows it, and as the model does: a function with a name of its own."""

    name: str
    namespace: str | None
    custom: bool
    function: dict[str, Any]


def offered(tools: Iterable[ResponseTool], namespace: str | None = None) -> Iterator[Offered]:
    """The tools that the model may call. Raises AdaptiveError for one that the server would have to run."""
    for tool in tools:
        if tool.type == "namespace" and tool.name is not None and namespace is None:
            yield from offered(tool.tools or (), tool.name)
        elif tool.type in ("function", "custom") and tool.name is not None:
            custom = tool.type == "custom"
            text = {"type": "object", "properties": {INPUT: {"type": "string"}}, "required": [INPUT]}
            parameters = text if custom else tool.parameters or {"type": "object"}
            function: dict[str, Any] = {"name": model_name(tool.name, namespace), "parameters": parameters}
            if (description := tool.described()) is not None:
                function["description"] = description
            yield Offered(tool.name, namespace, custom, {"type": "function", "function": function})
        else:
            raise AdaptiveError(
                f"tools: {tool.type[:64]!r} is run by OpenAI, and not here; turn it off, or offer a tool of your own"
            )


def model_name(name: str, namespace: str | None) -> str:
    """The name by which the model calls a tool."""
    return name if not namespace else f"{namespace.removesuffix('__')}__{name}"


def as_arguments(text: str) -> str:
    """The input of a custom tool as the arguments of the function that stands for it."""
    return json.dumps({INPUT: text}, ensure_ascii=False)


def as_input(arguments: str) -> str:
    """The input of a custom tool in the arguments of a call: its text, or what the model wrote instead of it."""
    try:
        said = json.loads(arguments)[INPUT]
    except (ValueError, KeyError, TypeError, RecursionError):
        return arguments
    return said if isinstance(said, str) else arguments
