"""Other forms of a chat, for chat templates that refuse it as it is.

Templates raise errors for what clients send every day: system messages that are not the first (Qwen 3.5, Mistral),
users who speak twice in a row or behind the result of a tool (Mistral), any system message (Gemma 2, Mistral's first),
efforts of thinking that a model was not trained with (Mistral, Hunyuan). A message keeps its place in every form, so
that a conversation that grows keeps the prefix whose cache is held.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import takewhile
from typing import Any, TypeVar

from adaptive.encoding import RefusedChatError

Chat = list[dict[str, Any]]
Variables = dict[str, Any]
T = TypeVar("T")

# Values of ``reasoning_effort`` that turn thinking off.
NO_EFFORT = ("none", "minimal")
# Values that stand for one that a template refuses, the best first: for those that turn thinking off, and for others.
OFF, ON = ("none", "no_think"), ("high",)


def accepted(render: Callable[[Chat, Variables], T], chat: Chat, variables: Variables, own_effort: bool) -> T:
    """The result of ``render`` for the first form that the template takes. ``own_effort``: the client has set the
    template's variable itself, which then stays. Raises RefusedChatError, with what the template says of the chat as it
    is, if it takes none."""
    refusal: RefusedChatError | None = None
    for form in _forms(chat):
        for said in [variables] if own_effort else _efforts(variables):
            try:
                return render(form, said)
            except RefusedChatError as error:
                refusal = refusal or error
    assert refusal is not None
    raise refusal


def _efforts(variables: Variables) -> Iterator[Variables]:
    yield variables
    effort = variables.get("reasoning_effort")
    if effort is not None:
        for other in OFF if effort in NO_EFFORT else ON:
            if other != effort:
                yield {**variables, "reasoning_effort": other}
        yield {name: value for name, value in variables.items() if name != "reasoning_effort"}


def _forms(chat: Chat) -> Iterator[Chat]:
    yield chat
    one_system = _one_system(chat)
    if one_system != chat:
        yield one_system
    alternating = _alternating(one_system)
    if alternating != one_system:
        yield alternating
    if alternating and alternating[0]["role"] == "system":
        yield _alternating([{**alternating[0], "role": "user"}, *alternating[1:]])


def _one_system(chat: Chat) -> Chat:
    """The chat where only the first message is one of the system: others at the beginning become part of it, and later
    ones are said by the user."""
    leading = list(takewhile(lambda message: message["role"] == "system", chat))
    found = [{**leading[0], "content": _joined(*(one["content"] for one in leading))}] if leading else []
    for message in chat[len(leading) :]:
        said = {**message, "role": "user"} if message["role"] == "system" else message
        if said is not message and found and found[-1]["role"] == "user":
            found[-1] = {**found[-1], "content": _joined(found[-1]["content"], said["content"])}
        else:
            found.append(said)
    return found


def _alternating(chat: Chat) -> Chat:
    """The chat where users and the assistant speak in turns: what a user says in a row is one message, and what he says
    behind the result of a tool a part of that."""
    found: Chat = []
    for message in chat:
        if message["role"] == "user" and found and found[-1]["role"] in ("user", "tool"):
            found[-1] = {**found[-1], "content": _joined(found[-1]["content"], message["content"])}
        else:
            found.append(message)
    return found


def _joined(*texts: str) -> str:
    return "\n\n".join(text for text in texts if text)
