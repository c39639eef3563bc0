"""OpenAI's ``/v1/responses``, without the features that need responses to be stored on the server."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal

from fastapi import FastAPI, Request, Response
from pydantic import Field

from adaptive.errors import AdaptiveError
from adaptive.service.api import Api
from adaptive.service.calls import AnswerReader, Part, Thought
from adaptive.service.dialects.response_tools import Offered, ResponseTool, as_arguments, as_input, model_name, offered
from adaptive.service.figures import figures
from adaptive.service.formats import Call
from adaptive.service.jobs import Answer, Failed, Piece
from adaptive.service.partial import Arguments, CallBegins, CallBroken
from adaptive.service.schemas import (
    MOST_TOKENS,
    PASSED_OVER,
    ChatRequest,
    Effort,
    LooseModel,
    RequestBody,
    Text,
    chat_request,
)
from adaptive.service.streams import COMPLETION, Served, data_line

# Types of content parts that are text.
TEXTS = frozenset({"input_text", "output_text", "text", "reasoning_text", "summary_text"})
# Accepted values of ``include``. They have no effect: thinking is sent as text, not encrypted.
NOTHING_MORE = frozenset({"reasoning.encrypted_content"})
# The items of calls, and the beginning of their ids.
CALLS = {"function_call": "fc", "custom_tool_call": "ctc"}


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
    """A message, a tool call, the result of one, or the model's thinking, according to ``type``."""

    type: str = "message"
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
    """How much the model thinks. A response has the thinking in full, and no summary of it."""

    effort: Effort | None = None


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

    def translated(self) -> ChatRequest:
        """The request as a chat. Raises AdaptiveError for unsupported fields."""
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
                "messages": self._messages(),
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

    def _messages(self) -> list[dict[str, Any]]:
        """The input as messages. Calls and thinking become part of the adjacent message of the assistant."""
        said: list[dict[str, Any]] = []
        if self.instructions:
            said.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*said, {"role": "user", "content": self.input}]
        thoughts = ""
        for item in self.input:
            if item.type == "reasoning":
                thoughts += text_of(item.content) or text_of(item.summary)
                continue
            if item.type in ("function_call_output", "custom_tool_call_output"):
                said.append({"role": "tool", "content": text_of(item.output), "tool_call_id": item.call_id or ""})
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


def add_responses(app: FastAPI, api: Api) -> None:
    """Add ``/v1/responses`` to ``app``, and the paths of single responses, which are refused with a reason."""

    @app.post("/v1/responses", responses=COMPLETION, response_class=Response)
    async def respond(body: ResponsesRequest, request: Request) -> Response:
        def write(served: Served) -> ResponseWriter:
            return ResponseWriter(served, body)

        return await api.chat(body.translated(), request, write)

    async def kept(name: str) -> Response:
        raise AdaptiveError("no response is kept by this server, so that none can be fetched, deleted or cancelled")

    app.get("/v1/responses/{name}", include_in_schema=False)(kept)
    app.delete("/v1/responses/{name}", include_in_schema=False)(kept)


class ResponseWriter:
    """Writes one response as a sequence of items: thinking, messages, tool calls."""

    def __init__(self, served: Served, body: ResponsesRequest) -> None:
        self._served, self._body = served, body
        self._reader: AnswerReader = served.reading.reader()
        self._tools: dict[str, Offered] = {
            tool.function["function"]["name"]: tool for tool in offered(body.tools or ())
        }
        self._items: list[dict[str, Any]] = []  # all items so far; the last one may still be open
        self._open = False
        self._written = ""  # the arguments of the open call
        self._events = 0

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """See ``Writer.whole``."""
        (answer,) = answers
        for _ in self._parts(self._reader.feed(answer.text) + self._reader.finish()):
            pass
        return self._ended(answer)

    def begin(self) -> Iterator[str]:
        """The events that begin the response, without output."""
        self._reader = self._served.reading.reader(partial=True)
        for kind in ("response.created", "response.in_progress"):
            yield self._event(kind, response=self._response("in_progress", None))

    def piece(self, piece: Piece) -> Iterator[str]:
        """Events for new text."""
        yield from self._parts(self._reader.feed(piece.text))

    def answer(self, answer: Answer) -> Iterator[str]:
        """Events for the text that was held back, and the complete response."""
        yield from self._parts(self._reader.finish())
        yield from self._close("incomplete" if answer.finish_reason == "length" else "completed")
        ended = self._ended(answer)
        yield self._event(f"response.{ended['status']}", response=ended)

    def end(self, answers: Sequence[Answer]) -> Iterable[str]:
        """Nothing: ``answer`` has sent the complete response."""
        return ()

    def failed(self, failed: Failed) -> Iterator[str]:
        """The event of a failed response, with the reason."""
        error = {"code": "server_error", "message": failed.message}
        yield self._event("response.failed", response={**self._response("failed", None), "error": error})

    def _ended(self, answer: Answer) -> dict[str, Any]:
        cut = answer.finish_reason == "length"
        for _ in self._close("incomplete" if cut else "completed"):
            pass
        whole = self._response("incomplete" if cut else "completed", _usage(answer, self._thought_tokens()))
        return {**whole, "incomplete_details": {"reason": "max_output_tokens"} if cut else None, **figures([answer])}

    def _response(self, status: str, usage: dict[str, Any] | None) -> dict[str, Any]:
        body = self._body
        return {
            "id": f"resp_{self._served.name}",
            "object": "response",
            "created_at": self._served.created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": self._served.model,
            "output": list(self._items),
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": None if body.reasoning is None else body.reasoning.effort, "summary": None},
            "store": False,  # responses cannot be fetched again; the log is not meant
            "temperature": body.temperature,
            "text": {"format": {"type": "text"}}
            if body.text is None or body.text.format is None
            else {"format": body.text.format.model_dump(by_alias=True, exclude_none=True)},
            "tool_choice": body.tool_choice or "auto",
            "tools": [tool.model_dump(exclude_none=True) for tool in body.tools or ()],
            "top_p": body.top_p,
            "truncation": "disabled",
            "usage": usage,
            "user": body.user,
            "metadata": {},
        }

    def _parts(self, parts: Iterable[Part]) -> Iterator[str]:
        for part in parts:
            if isinstance(part, Call | CallBegins):
                yield from self._call(part.call if isinstance(part, CallBegins) else part)
                if isinstance(part, Call):
                    yield from self._arguments(part.arguments)
                    yield from self._close("completed")
                continue
            if isinstance(part, Arguments):
                yield from self._arguments(part.text)
                continue
            if isinstance(part, CallBroken):
                yield from self._close("incomplete")
                continue
            thought = isinstance(part, Thought)
            kind, text = ("reasoning", part.text) if isinstance(part, Thought) else ("message", part)
            if not self._open or self._items[-1]["type"] != kind:
                yield from self._close("completed")
                yield from self._opened(kind)
            self._items[-1]["content"][0]["text"] += text
            name = "response.reasoning_text.delta" if thought else "response.output_text.delta"
            yield self._event(name, **self._place(), delta=text, **({} if thought else {"logprobs": []}))

    def _opened(self, kind: str) -> Iterator[str]:
        number, name = len(self._items), self._served.name
        if kind == "reasoning":
            item: dict[str, Any] = {"id": f"rs_{name}_{number}", "type": kind, "summary": [], "status": "in_progress"}
            part: dict[str, Any] = {"type": "reasoning_text", "text": ""}
        else:
            item = {"id": f"msg_{name}_{number}", "type": kind, "role": "assistant", "status": "in_progress"}
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        self._items.append({**item, "content": []})
        self._open = True
        yield self._event("response.output_item.added", output_index=number, item=self._items[-1])
        self._items[-1]["content"] = [part]
        yield self._event("response.content_part.added", **self._place(), part=part)

    def _close(self, status: str) -> Iterator[str]:
        """End the open item, if there is one."""
        if not self._open:
            return
        self._open = False
        item = self._items[-1]
        if item["type"] in CALLS:
            yield from self._close_call(item, status)
            return
        (part,) = item["content"]
        name = "reasoning_text" if item["type"] == "reasoning" else "output_text"
        more: dict[str, Any] = {} if item["type"] == "reasoning" else {"logprobs": []}
        yield self._event(f"response.{name}.done", **self._place(), text=part["text"], **more)
        yield self._event("response.content_part.done", **self._place(), part=part)
        item["status"] = status
        yield self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)

    def _call(self, call: Call) -> Iterator[str]:
        """Begin a call, without its arguments; its item stays open."""
        yield from self._close("completed")
        number, tool = len(self._items), self._tools.get(call.name)
        kind = "custom_tool_call" if tool is not None and tool.custom else "function_call"
        item = {"type": kind, "id": f"{CALLS[kind]}_{self._served.name}_{number}", "call_id": call.id}
        item["name"] = call.name if tool is None else tool.name
        if tool is not None and tool.namespace is not None:
            item["namespace"] = tool.namespace
        item["input" if kind == "custom_tool_call" else "arguments"] = ""
        self._written = ""
        self._items.append({**item, "status": "in_progress"})
        self._open = True
        yield self._event("response.output_item.added", output_index=number, item=self._items[-1])

    def _arguments(self, text: str) -> Iterator[str]:
        self._written += text
        if self._items[-1]["type"] == "function_call":
            self._items[-1]["arguments"] += text
            yield self._event("response.function_call_arguments.delta", **self._call_place(), delta=text)

    def _close_call(self, item: dict[str, Any], status: str) -> Iterator[str]:
        """End a call. The input of a custom tool is sent here, since it is a part of JSON until then."""
        item["status"] = status
        if item["type"] == "function_call":
            done = {"name": item["name"], "arguments": item["arguments"]}
            yield self._event("response.function_call_arguments.done", **self._call_place(), **done)
        else:
            item["input"] = as_input(self._written)
            for kind, field in (("delta", "delta"), ("done", "input")):
                yield self._event(
                    f"response.custom_tool_call_input.{kind}", **self._call_place(), **{field: item["input"]}
                )
        yield self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)

    def _call_place(self) -> dict[str, Any]:
        return {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1, "content_index": 0}

    def _event(self, kind: str, **fields: Any) -> str:
        number, self._events = self._events, self._events + 1
        return data_line({"type": kind, "sequence_number": number, **fields}, kind)

    def _thought_tokens(self) -> int:
        """The number of tokens of the thinking, by tokenizing its text again."""
        texts = [item["content"][0]["text"] for item in self._items if item["type"] == "reasoning"]
        return sum(len(self._served.tokenizer.encode(text, add_special_tokens=False)) for text in texts)


def _usage(answer: Answer, thought: int) -> dict[str, Any]:
    count = len(answer.tokens)
    return {
        "input_tokens": answer.prompt_tokens,
        "input_tokens_details": {"cached_tokens": answer.timings.cached_n, "cache_write_tokens": 0},
        "output_tokens": count,
        "output_tokens_details": {"reasoning_tokens": min(thought, count)},
        "total_tokens": answer.prompt_tokens + count,
    }
