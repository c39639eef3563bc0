"""The items and events of one answer of ``/v1/responses``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from adaptive.service.calls import AnswerReader, Part, Thought
from adaptive.service.dialects.response_request import ResponsesRequest
from adaptive.service.dialects.response_tools import Offered, as_input, offered
from adaptive.service.figures import figures, tokens_of
from adaptive.service.formats import Call
from adaptive.service.items import KeptItems
from adaptive.service.jobs import Answer, Failed, Piece
from adaptive.service.partial import Arguments, CallBegins, CallBroken
from adaptive.service.streams import Served, data_line

# The items of calls, and the beginning of their ids.
CALLS = {"function_call": "fc", "custom_tool_call": "ctc"}


@dataclass(frozen=True)
class _Place:
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
            "reasoning": {"effort": None, "summary": None} if body.reasoning is None else body.reasoning.model_dump(),
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
        if item["type"] in CALLS:
            yield from self._close_call(item, status)
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
        number, tool = len(self._items), self._tools.get(call.name)
        kind = "custom_tool_call" if tool is not None and tool.custom else "function_call"
        item = {"type": kind, "id": f"{CALLS[kind]}_{self._served.name}_{number}", "call_id": call.id}
        item["name"] = call.name if tool is None else tool.name
        if tool is not None and tool.namespace is not None:
            item["namespace"] = tool.namespace
        item["input" if kind == "custom_tool_call" else "arguments"] = ""
        self._written = ""
        yield self._added({**item, "status": "in_progress"})

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
