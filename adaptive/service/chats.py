"""Converts a chat request to a prompt, the grammar of its answers, and the way to read them."""

from __future__ import annotations

import hashlib
import inspect
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from transformers import PreTrainedTokenizerBase

from adaptive.encoding import chat_text, render_chat, template_text
from adaptive.errors import AdaptiveError
from adaptive.grammar import Grammar
from adaptive.service.calls import Reading, reading_of
from adaptive.service.forced import NESTED, call_or_text, forced_call, marked_text
from adaptive.service.formats import Format, format_of, function_of
from adaptive.service.forms import NO_EFFORT, accepted
from adaptive.service.jobs import Prompt
from adaptive.service.schemas import ChatRequest

# The values that gpt-oss knows, for those that it does not.
HARMONY_EFFORT = {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"}
# Template variables that the server sets and a client must not.
OURS = frozenset({"messages", "tools", "add_generation_prompt", "bos_token", "eos_token", "pad_token", "unk_token"})


@dataclass(frozen=True)
class Chat:
    """A chat ready to be answered."""

    prompt: Prompt
    grammar: Grammar | None
    reading: Reading
    marks: dict[int, str]


def prepare(body: ChatRequest, tokenizer: PreTrainedTokenizerBase, context: int) -> Chat:
    """Prepare a chat for a model whose context holds ``context`` tokens.

    Raises AdaptiveError for options that the model's chat template or call format does not support.
    """
    body.refuse_unbuilt()
    grammar = body.constrained()
    must_call, tools = body.must_call(), offered(body)
    ids = encoded(body, tokenizer, context)
    prompt = Prompt(ids, tuple(message.for_log() for message in body.messages), "")
    most = 1 if body.parallel_tool_calls is False else None
    reading = reading_of(tokenizer, tools, ids, most)
    marks = reading.marks(tokenizer)
    thinks = _may_think_first(body, grammar, reading.format) and _thinks(body, tokenizer, reading)
    if must_call:  # such an answer has no text that a format could apply to
        several = body.tool_choice == "required" and reading.most is None
        grammar = forced_call(reading, marks, must_call, several, thinks)
    elif grammar is None:
        return Chat(prompt, None, reading, marks)
    elif tools:
        grammar = call_or_text(reading, marks, tools, reading.most is None, grammar, thinks)
    elif (marked := marked_text(reading, marks, grammar, thinks)) is not None:
        grammar = marked
    else:
        return Chat(prompt, grammar, Reading(), {})  # all of the answer is visible text
    return Chat(prompt, grammar, reading if thinks else reading.without_thinking(), marks)


def _may_think_first(body: ChatRequest, grammar: Grammar | None, known: Format) -> bool:
    """Whether thinking can stand before an answer that must be calls or keep to ``grammar``. One in a notation of its
    own applies from the first token."""
    kept = bool(body.must_call()) or (grammar is not None and grammar.kind in NESTED)
    return kept and any(region.kind == "thought" for region in known.regions)


def _thinks(body: ChatRequest, tokenizer: PreTrainedTokenizerBase, reading: Reading) -> bool:
    """Whether the model may think before such an answer: the prompt has opened its thinking, the client asks for it, or
    it cannot be turned off."""
    if reading.begun is not None or not reading.format.loose:
        return True
    said = variables(body, template_text(tokenizer), reading.format)
    return bool(said.get("enable_thinking")) or said.get("reasoning_effort", "none") not in NO_EFFORT


def rendered(body: ChatRequest, tokenizer: PreTrainedTokenizerBase) -> str:
    """The chat as text, formatted by the template. Raises AdaptiveError as ``prepare``."""
    chat, tools, said = _given(body, tokenizer)
    own = _own_effort(body)
    return accepted(lambda form, variables: chat_text(tokenizer, form, tools, variables), chat, said, own)


def encoded(body: ChatRequest, tokenizer: PreTrainedTokenizerBase, context: int) -> list[int]:
    """Token ids of the chat, formatted by the template. Raises AdaptiveError as ``prepare``."""
    chat, tools, said = _given(body, tokenizer)
    own = _own_effort(body)
    return accepted(lambda form, variables: render_chat(tokenizer, form, context, tools, variables), chat, said, own)


def _own_effort(body: ChatRequest) -> bool:
    """Whether the client has set the template's variable, and not the field of the request."""
    return "reasoning_effort" in (body.chat_template_kwargs or {})


def _given(
    body: ChatRequest, tokenizer: PreTrainedTokenizerBase
) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None, dict[str, Any]]:
    """What the template gets: the messages in the form that it expects, the tools, and its variables."""
    template = template_text(tokenizer)
    known = format_of(template)
    tools = offered(body)
    if tools and not _mentions(template, "tools"):
        raise AdaptiveError(
            "tools: this model's chat template has no place for tools, so that it would never see them; leave them "
            "out, or serve a model that was made to call tools"
        )
    chat = list(_with_names(message.for_template() for message in body.messages))
    if known.single or known.first_only:
        chat = list(_with_single_calls(chat))
    chat = [_for_template(message, template, known) for message in chat]
    return chat, tools, variables(body, template, known)


def offered(body: ChatRequest) -> list[dict[str, Any]] | None:
    """The tools to put into the prompt; None if ``tool_choice`` is none."""
    return None if body.tool_choice == "none" else body.tools


def variables(body: ChatRequest, template: str, known: Format) -> dict[str, Any]:
    """The template's variables: those of the client, and those that control thinking.

    ``reasoning_effort`` becomes ``enable_thinking`` if the template only knows the latter, or turns thinking off, and
    has no effect if it knows neither. A format, or calls that are required, turn thinking off, unless the client asks
    for it and it can stand before them. Raises AdaptiveError for a client's variable that the template does not read.
    """
    said, switch = dict(body.chat_template_kwargs or {}), _mentions(template, "enable_thinking")
    if not switch and not said.get("enable_thinking", True):
        del said["enable_thinking"]
    reserved = OURS | set(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters)
    for name in said:
        if name in reserved or not _mentions(template, name):
            raise AdaptiveError(f"chat_template_kwargs: this model's chat template has no variable {name[:64]!r}")
    if body.enable_thinking is not None:
        if switch:
            said["enable_thinking"] = body.enable_thinking
        elif body.enable_thinking:
            raise AdaptiveError("enable_thinking: this model's chat template knows no thinking")
    effort, grammar = body.reasoning_effort, body.constrained()
    asks = effort is not None and effort not in NO_EFFORT and _may_think_first(body, grammar, known)
    if not asks and (grammar is not None or body.must_call()):
        if switch:
            said.setdefault("enable_thinking", False)
        elif known.loose:
            effort = "none"
    if effort is not None and _mentions(template, "reasoning_effort"):
        said.setdefault("reasoning_effort", effort if known.loose else HARMONY_EFFORT.get(effort, effort))
        switch = switch and effort in NO_EFFORT
    if effort is not None and switch:
        said.setdefault("enable_thinking", effort not in NO_EFFORT)
    return said


def _mentions(template: str, name: str) -> bool:
    return re.search(rf"\b{re.escape(name)}\b", template) is not None


def _with_names(chat: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The chat where the result of a call has the name of the called tool. Some templates refuse it without a name, and
    clients send only the id of the call."""
    names: dict[str, Any] = {}
    for message in chat:
        names |= {str(call.get("id")): function_of(call).get("name") for call in message.get("tool_calls", ())}
        name = names.get(message.get("tool_call_id", "")) if message["role"] == "tool" else None
        yield {"name": name, **message} if isinstance(name, str) else message


def _with_single_calls(chat: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The chat where a message has at most one call: each call of a message with several becomes a message, followed by
    its results."""
    place = 0
    while place < len(chat):
        message, place = chat[place], place + 1
        calls = message.get("tool_calls", ())
        if len(calls) < 2:
            yield message
            continue
        results = list(takewhile(lambda later: later["role"] == "tool", chat[place:]))
        place += len(results)
        for number, call in enumerate(calls):
            head = {"role": message["role"], "content": ""} if number else message
            yield {**head, "tool_calls": [call]}
            yield from (one for one in results if one.get("tool_call_id") == call.get("id"))
            results = [one for one in results if one.get("tool_call_id") != call.get("id")]
        yield from results


def _for_template(message: dict[str, Any], template: str, known: Format) -> dict[str, Any]:
    """A message in the form that this template expects."""
    if message["role"] == "developer" and "developer" not in template:
        message = {**message, "role": "system"}
    if (thoughts := message.pop("reasoning_content", None)) and not (
        known.thoughts == "thinking" and message["content"]  # that template refuses both in one message
    ):
        message[known.thoughts] = thoughts
    if known.short_ids:
        if "tool_call_id" in message:
            message["tool_call_id"] = _short(message["tool_call_id"])
        if "tool_calls" in message:
            message["tool_calls"] = [{**call, "id": _short(call.get("id"))} for call in message["tool_calls"]]
    return message


def _short(call_id: Any) -> str:
    """The id of a call as nine letters and digits; the same id always gives the same result."""
    text = str(call_id)
    if re.fullmatch(r"[a-zA-Z0-9]{9}", text):
        return text
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:9]
