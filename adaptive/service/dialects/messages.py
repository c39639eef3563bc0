"""Anthropic's ``/v1/messages`` and ``/v1/messages/count_tokens``: requests, and responses as one object or events."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal

from fastapi import FastAPI, Request, Response
from pydantic import Field

from adaptive.errors import AdaptiveError
from adaptive.service.api import UNLIMITED, Api
from adaptive.service.calls import AnswerReader, Part, Thought, arguments_of
from adaptive.service.chats import encoded
from adaptive.service.errors import ANTHROPIC_REFUSALS, DetailedError, error_object
from adaptive.service.figures import figures
from adaptive.service.formats import Call
from adaptive.service.jobs import Answer, Failed, Piece
from adaptive.service.loose import LooseModel, Text
from adaptive.service.partial import Arguments, CallBegins, CallBroken
from adaptive.service.schemas import (
    MOST_TOKENS,
    PASSED_OVER,
    ChatRequest,
    Effort,
    RequestBody,
    chat_request,
    result_of,
)
from adaptive.service.streams import COMPLETION, Served, data_line

MESSAGES = "/v1/messages"
# Lines that Claude Code writes before its system prompt. They are for Anthropic's servers, and differ in each request.
HEADER_LINES = re.compile(r"\A(?:x-anthropic-[^\n]*(?:\n|\Z))+")
# The session in Claude Code's ``user_id``, after the user and the account.
SESSION = re.compile(r"\A(user_.+)_session_[0-9A-Za-z-]+\Z")


class TextBlock(LooseModel):
    """A block of text, in a system prompt or in the result of a tool."""

    type: str
    text: Text | None = None

    def said(self) -> str:
        """The text of the block. Raises AdaptiveError if it is not a text block."""
        if self.type != "text" or self.text is None:
            raise AdaptiveError(f"messages: a block of type {self.type[:64]!r} is not understood here; send text")
        return self.text


class Block(TextBlock):
    """One block of a message's content. Its ``type`` determines which fields it has."""

    thinking: Text | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: Text | list[TextBlock] | None = None


class AnthropicMessage(LooseModel):
    """One message."""

    role: Literal["user", "assistant", "system"]
    content: Text | list[Block]

    def translated(self) -> Iterator[dict[str, Any]]:
        """The message in OpenAI's form, where each tool result is a message of its own."""
        if isinstance(self.content, str):
            yield {"role": self.role, "content": self.content}
            return
        text, thoughts, calls = "", "", []
        for block in self.content:
            if block.type == "tool_result":
                if text:
                    yield {"role": self.role, "content": text}
                    text = ""
                result = result_of(block.content) if isinstance(block.content, list) else block.content or ""
                yield {"role": "tool", "content": result, "tool_call_id": block.tool_use_id or ""}
            elif block.type == "tool_use":
                function = {"name": block.name or "", "arguments": json.dumps(block.input or {}, ensure_ascii=False)}
                calls.append({"id": block.id or "", "type": "function", "function": function})
            elif block.type == "thinking":
                thoughts += block.thinking or ""
            elif block.type != "redacted_thinking":
                text += block.said()
        if text or thoughts or calls:
            extra = {"reasoning_content": thoughts or None, "tool_calls": calls or None}
            yield {"role": self.role, "content": text, **{name: value for name, value in extra.items() if value}}


class Tool(LooseModel):
    """A tool that the client runs. Tools that Anthropic runs have another ``type`` and are refused."""

    type: str | None = None
    name: str
    description: Text | None = None
    input_schema: dict[str, Any] | None = None

    def translated(self) -> dict[str, Any]:
        """The tool in OpenAI's form. Raises AdaptiveError for a tool that the server would have to run."""
        if self.type not in (None, "custom"):
            raise AdaptiveError(f"tools: {self.type[:64]!r} is run by Anthropic, and not here; offer your own")
        function: dict[str, Any] = {"name": self.name, "parameters": self.input_schema or {"type": "object"}}
        if self.description is not None:
            function["description"] = self.description
        return {"type": "function", "function": function}


class ToolChoice(LooseModel):
    """Whether the model must call a tool, and which one."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False

    def translated(self) -> str | dict[str, Any]:
        """The choice in OpenAI's form."""
        if self.type == "tool":
            return {"type": "function", "function": {"name": self.name}}
        return {"any": "required"}.get(self.type, self.type)


class Thinking(LooseModel):
    """Whether the model thinks. A token budget is accepted but has no effect."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]


class OutputFormat(LooseModel):
    """The JSON schema that the text of the answer must match."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(LooseModel):
    """How much the model thinks, and the required format of the text."""

    effort: Effort | None = None
    format: OutputFormat | None = None


class Metadata(LooseModel):
    """The user of the client."""

    user_id: str | None = None

    def user(self) -> str | None:
        """The user without the session, which Claude Code writes into the same field: as the end of a text, or in a
        JSON object."""
        said = self.user_id
        if said is None or not said.startswith("{"):
            return said if said is None else SESSION.sub(r"\1", said)
        try:
            parts = json.loads(said)
        except (ValueError, RecursionError):
            return said
        parts.pop("session_id", None)
        return json.dumps(parts, sort_keys=True) if parts else None


class MessagesRequest(RequestBody):
    """``POST /v1/messages`` and ``/v1/messages/count_tokens``."""

    passed_over: ClassVar[frozenset[str]] = PASSED_OVER | {
        "cache_control", "context_management", "inference_geo", "speed", "diagnostics", "user_profile_id", "betas",
    }  # fmt: skip

    model: str | None = None
    messages: Annotated[list[AnthropicMessage], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1, le=MOST_TOKENS)] | None = None
    system: Text | list[TextBlock] | None = None
    stop_sequences: list[Text] | None = None
    stream: bool | None = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    metadata: Metadata | None = None
    thread: dict[str, Any] | None = None
    store: bool | None = None  # not Anthropic's; as in OpenAI's requests

    def translated(self) -> ChatRequest:
        """The request as OpenAI's chat. Raises AdaptiveError for unsupported fields."""
        self.refuse_unknown()
        if self.thread is not None:  # with these details, tool runners send the whole conversation instead
            raise DetailedError(
                "thread is not served: no message is kept to be gone on from; send the whole conversation",
                {"error_code": "thread_unsupported_request", "unsupported": ["thread"]},
            )
        system = [{"role": "system", "content": said}] if (said := self._system()) else []
        config = self.output_config or OutputConfig()
        wanted = config.format or self.output_format
        choice = self.tool_choice
        return chat_request(
            {
                "messages": [*system, *(said for message in self.messages for said in message.translated())],
                "max_tokens": self.max_tokens,
                "stop": self.stop_sequences,
                "stream": self.stream,
                "temperature": self.temperature,
                "top_p": self.top_p,
                "top_k": self.top_k,
                "tools": None if self.tools is None else [tool.translated() for tool in self.tools],
                "tool_choice": None if choice is None else choice.translated(),
                "parallel_tool_calls": None if choice is None else not choice.disable_parallel_tool_use,
                "reasoning_effort": self._effort(config),
                "user": None if self.metadata is None else self.metadata.user(),
                "store": self.store,
                "response_format": None
                if wanted is None
                else {"type": "json_schema", "json_schema": {"name": "answer", "schema": wanted.schema_}},
            }
        )

    def refuse_continuation(self) -> None:
        """Raise AdaptiveError if the last message is the beginning of the answer, which is only counted."""
        if self.messages[-1].role == "assistant":
            raise AdaptiveError("messages: the last one is the assistant's, and to go on with it is not served")

    def _system(self) -> str:
        """The system prompt, without header lines at the beginning of its blocks."""
        blocks = [self.system] if isinstance(self.system, str) else [block.said() for block in self.system or ()]
        return "".join(HEADER_LINES.sub("", text) for text in blocks)

    def _effort(self, config: OutputConfig) -> Effort:
        """How much to think. As in Anthropic's API, nothing if the client asks for neither thinking nor an effort."""
        if self.thinking is None:
            return config.effort or "none"
        return "none" if self.thinking.type == "disabled" else config.effort or "medium"


def add_messages(app: FastAPI, api: Api) -> None:
    """Add the two paths to ``app``."""

    @app.post(MESSAGES, responses={**COMPLETION, **ANTHROPIC_REFUSALS}, response_class=Response)
    async def messages(body: MessagesRequest, request: Request) -> Response:
        body.refuse_continuation()
        return await api.chat(body.translated(), request, MessageWriter)

    @app.post(f"{MESSAGES}/count_tokens", responses=ANTHROPIC_REFUSALS)
    async def count(body: MessagesRequest) -> dict[str, Any]:
        ids = await api.long.run(encoded, body.translated(), api.tokenizer, UNLIMITED)
        return {"input_tokens": len(ids)}


class MessageWriter:
    """Writes one message as a sequence of blocks: text, thinking, tool calls."""

    def __init__(self, served: Served) -> None:
        self._served = served
        self._reader: AnswerReader = served.reading.reader()
        self._blocks = 0  # index of the open block, or of the next one
        self._open: str | None = None  # the type of the open block
        self._calls = 0  # without those that turned out to be none

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """See ``Writer.whole``."""
        (answer,) = answers
        blocks: list[dict[str, Any]] = []
        for part in self._reader.feed(answer.text) + self._reader.finish():
            if isinstance(part, CallBroken):  # only in a stream
                continue
            kind, _, delta = _block(part)
            if blocks and not isinstance(part, Call) and blocks[-1]["type"] == kind:
                blocks[-1][kind] += delta[kind]
            else:
                blocks.append(_whole_block(part))
        called = any(block["type"] == "tool_use" for block in blocks)
        ends = _ending(answer, called)
        return {**self._message(blocks), **ends, "usage": _usage(answer), **figures(answers)}

    def begin(self) -> Iterator[str]:
        """The event that begins the message, without content."""
        self._reader = self._served.reading.reader(partial=True)
        usage = {"input_tokens": self._served.prompt_tokens, "output_tokens": 0}
        ends = {"stop_reason": None, "stop_sequence": None}
        yield _event({"type": "message_start", "message": {**self._message([]), **ends, "usage": usage}})

    def piece(self, piece: Piece) -> Iterator[str]:
        """Events for new text."""
        yield from self._parts(self._reader.feed(piece.text))

    def answer(self, answer: Answer) -> Iterator[str]:
        """Events for the text that was held back, and the stop reason."""
        yield from self._parts(self._reader.finish())
        yield from self._close()
        ends = _ending(answer, self._calls > 0)
        yield _event({"type": "message_delta", "delta": ends, "usage": _usage(answer), **figures([answer])})

    def end(self, answers: Sequence[Answer]) -> Iterator[str]:
        """The event that ends the message."""
        yield _event({"type": "message_stop"})

    def failed(self, failed: Failed) -> Iterator[str]:
        """The error, as an event."""
        yield _event(error_object(failed.status, failed.message, path=MESSAGES))

    def _message(self, blocks: list[dict[str, Any]]) -> dict[str, Any]:
        head = {"id": f"msg_{self._served.name}", "type": "message", "role": "assistant"}
        return {**head, "model": self._served.model, "content": blocks}

    def _parts(self, parts: Iterable[Part]) -> Iterator[str]:
        for part in parts:
            if isinstance(part, CallBroken):
                self._calls -= 1
                continue
            kind, empty, delta = _block(part)
            if kind != self._open or isinstance(part, Call | CallBegins):
                yield from self._close()
                yield _event({"type": "content_block_start", "index": self._blocks, "content_block": empty})
                self._open = kind
            if not isinstance(part, CallBegins):
                yield _event({"type": "content_block_delta", "index": self._blocks, "delta": delta})
            self._calls += isinstance(part, Call | CallBegins)

    def _close(self) -> Iterator[str]:
        if self._open is not None:
            yield _event({"type": "content_block_stop", "index": self._blocks})
            self._open, self._blocks = None, self._blocks + 1


def _event(body: dict[str, Any]) -> str:
    return data_line(body, body["type"])


def _block(part: str | Thought | Call | CallBegins | Arguments) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """For a part: the type of its block, that block when it begins (empty), and the part's delta."""
    if isinstance(part, Call | CallBegins | Arguments):
        call = part.call if isinstance(part, CallBegins) else part
        empty = {} if isinstance(call, Arguments) else _empty_call(call)
        said = call.text if isinstance(call, Arguments) else call.arguments
        return "tool_use", empty, {"type": "input_json_delta", "partial_json": said}
    if isinstance(part, Thought):
        empty = {"type": "thinking", "thinking": "", "signature": ""}
        return "thinking", empty, {"type": "thinking_delta", "thinking": part.text}
    return "text", {"type": "text", "text": ""}, {"type": "text_delta", "text": part}


def _whole_block(part: str | Thought | Call | CallBegins | Arguments) -> dict[str, Any]:
    kind, empty, delta = _block(part)
    return {**empty, **({"input": arguments_of(part)} if isinstance(part, Call) else {kind: delta[kind]})}


def _empty_call(call: Call) -> dict[str, Any]:
    return {"type": "tool_use", "id": _call_id(call), "name": call.name, "input": {}}


def _call_id(call: Call) -> str:
    return f"toolu_{call.id.removeprefix('call_')}"


def _ending(answer: Answer, called: bool) -> dict[str, Any]:
    """Anthropic's fields for why the answer ended."""
    if answer.finish_reason == "length":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if called:
        return {"stop_reason": "tool_use", "stop_sequence": None}
    if answer.stopped_by:
        return {"stop_reason": "stop_sequence", "stop_sequence": answer.stopped_by}
    return {"stop_reason": "end_turn", "stop_sequence": None}


def _usage(answer: Answer) -> dict[str, Any]:
    """Token counts; prompt tokens that were in a cache are counted separately."""
    cached = answer.timings.cached_n
    return {
        "input_tokens": answer.prompt_tokens - cached,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": len(answer.tokens),
    }
