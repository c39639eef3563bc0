"""OpenAI's ``/v1/responses``, without the features that need responses to be stored on the server."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from fastapi import FastAPI, Request, Response
from pydantic import Field

from adaptive.errors import AdaptiveError
from adaptive.service.api import Api
from adaptive.service.calls import AnswerReader, Part, Thought
from adaptive.service.figures import figures, tokens_of
from adaptive.service.formats import Call
from adaptive.service.items import KeptItems
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
    arguments: Text | None = None
    output: Text | list[InputPart] | None = None


class FunctionTool(LooseModel):
    """A function that the client runs. Tools that OpenAI runs have another ``type`` and are refused."""

    type: str
    name: str | None = None
    description: Text | None = None
    parameters: dict[str, Any] | None = None

    def translated(self) -> dict[str, Any]:
        """The tool in the form of chats. Raises AdaptiveError for a tool that the server would have to run."""
        if self.type != "function" or self.name is None:
            raise AdaptiveError(f"tools: {self.type[:64]!r} is run by OpenAI, and not here; offer your own")
        function: dict[str, Any] = {"name": self.name, "parameters": self.parameters or {"type": "object"}}
        if self.description is not None:
            function["description"] = self.description
        return {"type": "function", "function": function}


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
    tools: list[FunctionTool] | None = None
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
            if choice.get("type") != "function":
                raise AdaptiveError("tool_choice: only a function can be chosen by its name")
            choice = {"type": "function", "function": {"name": choice.get("name")}}
        return chat_request(
            {
                "messages": self._messages(kept),
                "max_tokens": self.max_output_tokens,
                "stream": self.stream,
                "temperature": self.temperature,
                "top_p": self.top_p,
                "tools": [tool.translated() for tool in self.tools] if self.tools else None,
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
            if item.type == "function_call_output":
                said.append({"role": "tool", "content": text_of(item.output), "tool_call_id": item.call_id or ""})
            elif item.type == "function_call":
                function = {"name": item.name or "", "arguments": item.arguments or "{}"}
                if not said or said[-1]["role"] != "assistant" or thoughts:
                    said.append({"role": "assistant", "content": ""})
                said[-1].setdefault("tool_calls", []).append(
                    {"id": item.call_id or "", "type": "function", "function": function}
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


def add_responses(app: FastAPI, api: Api) -> None:
    """Add ``/v1/responses`` to ``app``, and the paths of single responses, which are refused with a reason."""

    @app.post("/v1/responses", responses=COMPLETION, response_class=Response)
    async def respond(body: ResponsesRequest, request: Request) -> Response:
        def write(served: Served) -> ResponseWriter:
            return ResponseWriter(served, body, None if body.store is False else api.items)

        return await api.chat(body.translated(api.items), request, write)

    async def kept(name: str) -> Response:
        raise AdaptiveError("no response is kept by this server, so that none can be fetched, deleted or cancelled")

    app.get("/v1/responses/{name}", include_in_schema=False)(kept)
    app.delete("/v1/responses/{name}", include_in_schema=False)(kept)


class _Place(NamedTuple):
    """Where an item has its text: in the first part of its ``field``. ``event``, ``opened`` and ``index`` are parts of
    the names of events and of their fields."""

    field: str
    type: str
    event: str
    opened: str = "content_part"
    index: str = "content_index"


TEXT = _Place("content", "output_text", "output_text")
THOUGHT = _Place("content", "reasoning_text", "reasoning_text")
SUMMARY = _Place("summary", "summary_text", "reasoning_summary_text", "reasoning_summary_part", "summary_index")


class ResponseWriter:
    """Writes one response as a sequence of items: thinking, messages, tool calls. ``kept`` gets these items."""

    def __init__(self, served: Served, body: ResponsesRequest, kept: KeptItems | None = None) -> None:
        self._served, self._body, self._kept = served, body, kept
        self._thought = SUMMARY if body.reasoning is not None and body.reasoning.summarised else THOUGHT
        self._reader: AnswerReader = served.reading.reader()
        self._items: list[dict[str, Any]] = []  # all items so far; the last one may still be open
        self._open = False
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
            "reasoning": (body.reasoning or Reasoning()).model_dump(),
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
            kind, text = ("reasoning", part.text) if isinstance(part, Thought) else ("message", part)
            if not self._open or self._items[-1]["type"] != kind:
                yield from self._close("completed")
                yield from self._opened(kind)
            place = self._place_of(self._items[-1])
            self._items[-1][place.field][0]["text"] += text
            yield self._event(f"response.{place.event}.delta", **self._part_place(place), delta=text, **_more(place))

    def _opened(self, kind: str) -> Iterator[str]:
        number, name = len(self._items), self._served.name
        if kind == "reasoning":
            item: dict[str, Any] = {"id": f"rs_{name}_{number}", "type": kind, "summary": [], "status": "in_progress"}
        else:
            item = {"id": f"msg_{name}_{number}", "type": kind, "role": "assistant", "status": "in_progress"}
        place = self._place_of(item)
        part: dict[str, Any] = {"type": place.type, "text": ""}
        if place is TEXT:
            part.update(annotations=[], logprobs=[])
        item[place.field] = []
        yield self._added(item)
        item[place.field] = [part]
        yield self._event(f"response.{place.opened}.added", **self._part_place(place), part=part)

    def _added(self, item: dict[str, Any]) -> str:
        """Begin an item, which stays open."""
        self._items.append(item)
        self._open = True
        if self._kept is not None:
            self._kept.keep(item)
        return self._event("response.output_item.added", output_index=len(self._items) - 1, item=item)

    def _close(self, status: str) -> Iterator[str]:
        """End the open item, if there is one."""
        if not self._open:
            return
        self._open = False
        item = self._items[-1]
        if item["type"] == "function_call":
            item["status"] = status
            done = {"name": item["name"], "arguments": item["arguments"]}
            yield self._event("response.function_call_arguments.done", **self._call_place(), **done)
            yield self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)
            return
        place = self._place_of(item)
        (part,) = item[place.field]
        yield self._event(f"response.{place.event}.done", **self._part_place(place), text=part["text"], **_more(place))
        yield self._event(f"response.{place.opened}.done", **self._part_place(place), part=part)
        item["status"] = status
        yield self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)

    def _call(self, call: Call) -> Iterator[str]:
        """Begin a call, without its arguments; its item stays open."""
        yield from self._close("completed")
        number = len(self._items)
        item = {"type": "function_call", "id": f"fc_{self._served.name}_{number}", "call_id": call.id}
        yield self._added({**item, "name": call.name, "arguments": "", "status": "in_progress"})

    def _arguments(self, text: str) -> Iterator[str]:
        self._items[-1]["arguments"] += text
        yield self._event("response.function_call_arguments.delta", **self._call_place(), delta=text)

    def _place_of(self, item: dict[str, Any]) -> _Place:
        return self._thought if item["type"] == "reasoning" else TEXT

    def _call_place(self) -> dict[str, Any]:
        return {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}

    def _part_place(self, place: _Place) -> dict[str, Any]:
        return {**self._call_place(), place.index: 0}

    def _event(self, kind: str, **fields: Any) -> str:
        number, self._events = self._events, self._events + 1
        return data_line({"type": kind, "sequence_number": number, **fields}, kind)

    def _thought_tokens(self) -> int:
        """The number of tokens of the thinking, by tokenizing its text again."""
        texts = [item[self._thought.field][0]["text"] for item in self._items if item["type"] == "reasoning"]
        return tokens_of(texts, self._served.tokenizer)


def _more(place: _Place) -> dict[str, Any]:
    """Fields that only visible text has."""
    return {"logprobs": []} if place is TEXT else {}


def _usage(answer: Answer, thought: int) -> dict[str, Any]:
    count = len(answer.tokens)
    return {
        "input_tokens": answer.prompt_tokens,
        "input_tokens_details": {"cached_tokens": answer.timings.cached_n, "cache_write_tokens": 0},
        "output_tokens": count,
        "output_tokens_details": {"reasoning_tokens": min(thought, count)},
        "total_tokens": answer.prompt_tokens + count,
    }
