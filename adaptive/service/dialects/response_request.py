"""The requests of ``/v1/responses``, and their translation to OpenAI's chats."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from adaptive.errors import AdaptiveError
from adaptive.service.dialects.response_tools import ResponseTool, as_arguments, model_name, offered
from adaptive.service.items import KeptItems
from adaptive.service.loose import LooseModel, Text
from adaptive.service.schemas import (
    MOST_TOKENS,
    PASSED_OVER,
    ChatRequest,
    Effort,
    RequestBody,
    chat_request,
    result_of,
)

# Types of content parts that are text.
TEXTS = frozenset({"input_text", "output_text", "text", "reasoning_text", "summary_text"})
# Accepted values of ``include``. They have no effect: thinking is sent as text, not encrypted.
NOTHING_MORE = frozenset({"reasoning.encrypted_content"})


class InputPart(LooseModel):
    """One part of an item's content. Only text and refusals are accepted."""

    type: str
    text: Text | None = None
    refusal: Text | None = None

    def said(self) -> str:
        """The text of the part. Raises AdaptiveError if the part is not text."""
        if self.type == "refusal" and self.refusal is not None:
            return self.refusal
        if self.type not in TEXTS or self.text is None:
            raise AdaptiveError(f"input: a part of type {self.type[:64]!r} is not understood here; send text")
        return self.text


def text_of(content: str | list[InputPart] | None) -> str:
    """The text of a content. Raises AdaptiveError for parts that are not text."""
    return "".join(part.said() for part in content) if isinstance(content, list) else content or ""


class InputItem(LooseModel):
    """A message, a tool call, the result of one, the model's thinking, or a reference to an item of a response before,
    according to ``type``."""

    type: str = "message"
    id: str | None = None
    role: str | None = None
    content: Text | list[InputPart] | None = None
    summary: list[InputPart] | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: Text | None = None
    input: Text | None = None
    output: Text | list[InputPart] | None = None

    def function(self) -> dict[str, str]:
        """The call in an item of a call: the name of the function that the model knows, and its arguments as JSON."""
        arguments = self.arguments or "{}" if self.type == "function_call" else as_arguments(self.input or "")
        return {"name": model_name(self.name or "", self.namespace), "arguments": arguments}


class TextFormat(LooseModel):
    """The required format of the answer's text."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")

    def translated(self) -> dict[str, Any]:
        """The format in the form of chats. Raises AdaptiveError if the schema is missing."""
        if self.type != "json_schema":
            return {"type": self.type}
        if self.schema_ is None:
            raise AdaptiveError("text.format: a schema is missing")
        return {"type": self.type, "json_schema": {"name": self.name, "schema": self.schema_}}


class TextConfig(LooseModel):
    """Options for the answer's text."""

    format: TextFormat | None = None


class Reasoning(LooseModel):
    """How much the model thinks. A client that asks for a ``summary`` gets all of the thinking as one."""

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed", "none"] | None = None

    @property
    def summarised(self) -> bool:
        """Whether thinking is given as a summary."""
        return self.summary not in (None, "none")


class ResponsesRequest(RequestBody):
    """``POST /v1/responses``."""

    passed_over: ClassVar[frozenset[str]] = PASSED_OVER | {
        "stream_options", "context_management", "max_tool_calls", "client_metadata",
    }  # fmt: skip

    model: str | None = None
    input: Text | list[InputItem]
    instructions: Text | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=MOST_TOKENS)] | None = None
    stream: bool | None = False
    temperature: float | None = None
    top_p: float | None = None
    tools: list[ResponseTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    store: bool | None = None
    user: str | None = None
    include: list[str] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    previous_response_id: str | None = None
    conversation: str | dict[str, Any] | None = None
    background: bool | None = None

    def translated(self, kept: KeptItems) -> ChatRequest:
        """The request as a chat. Raises AdaptiveError for unsupported fields, and for references to items that are not
        ``kept``."""
        self.refuse_unknown()
        self._refuse_memory()
        wanted = None if self.text is None or self.text.format is None else self.text.format.translated()
        choice: Any = self.tool_choice
        if isinstance(choice, dict):
            if choice.get("type") not in ("function", "custom"):
                raise AdaptiveError("tool_choice: only a function can be chosen by its name")
            name = model_name(str(choice.get("name")), choice.get("namespace"))
            choice = {"type": "function", "function": {"name": name}}
        return chat_request(
            {
                "messages": self._messages(kept),
                "max_tokens": self.max_output_tokens,
                "stream": self.stream,
                "temperature": self.temperature,
                "top_p": self.top_p,
                "tools": [tool.function for tool in offered(self.tools)] if self.tools else None,
                "tool_choice": choice,
                "parallel_tool_calls": self.parallel_tool_calls,
                "reasoning_effort": None if self.reasoning is None else self.reasoning.effort,
                "response_format": wanted,
                "store": self.store,
                "user": self.user,
            }
        )

    def _refuse_memory(self) -> None:
        if self.previous_response_id or self.conversation:
            raise AdaptiveError(
                "previous_response_id and conversation are not served: no response is kept to be gone on from; send "
                "the whole conversation as input (what of it is the same is not computed again)"
            )
        if self.background:
            raise AdaptiveError("background is not served: a response is made while somebody waits for it")
        if self.truncation == "auto":
            raise AdaptiveError("truncation: auto is not served; shorten the input yourself")
        for more in self.include or ():
            if more not in NOTHING_MORE:
                raise AdaptiveError(f"include: {more[:64]!r} is not served")

    def _messages(self, kept: KeptItems) -> list[dict[str, Any]]:
        """The input as messages. Calls and thinking become part of the adjacent message of the assistant."""
        said: list[dict[str, Any]] = []
        if self.instructions:
            said.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*said, {"role": "user", "content": self.input}]
        thoughts = ""
        for item in (_referred(item, kept) for item in self.input):
            if item.type == "reasoning":
                thoughts += text_of(item.content) or text_of(item.summary)
                continue
            if item.type in ("function_call_output", "custom_tool_call_output"):
                result = result_of(item.output) if isinstance(item.output, list) else item.output or ""
                said.append({"role": "tool", "content": result, "tool_call_id": item.call_id or ""})
            elif item.type in ("function_call", "custom_tool_call"):
                if not said or said[-1]["role"] != "assistant" or thoughts:
                    said.append({"role": "assistant", "content": ""})
                said[-1].setdefault("tool_calls", []).append(
                    {"id": item.call_id or "", "type": "function", "function": item.function()}
                )
            elif item.type == "message" and item.role is not None:
                said.append({"role": item.role, "content": text_of(item.content)})
            else:
                raise AdaptiveError(f"input: an item of type {item.type[:64]!r} is not understood here")
            if thoughts and said and said[-1]["role"] == "assistant":
                said[-1]["reasoning_content"], thoughts = thoughts, ""
        return said


def _referred(item: InputItem, kept: KeptItems) -> InputItem:
    """The item itself, if it is a reference to one. Raises AdaptiveError if that is not ``kept``."""
    if item.type != "item_reference":
        return item
    if (found := kept.find(item.id or "")) is None:
        raise AdaptiveError(
            f"input: no item {(item.id or '')[:64]!r} is kept; send items instead of references to them"
        )
    return InputItem.model_validate(found)
