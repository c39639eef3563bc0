"""Finds the requests that repeat logged answers: the next turn of a chat, or the continuation of a raw text.

In: answers of the log, and other requests. Out: which of these hold such an answer. Clients change an answer before
they send it back: they trim white space, leave out the thinking, and write tool calls in OpenAI's form. So texts are
compared without white space and in part. In doubt the answer is held: a deleted text must not stay anywhere.
"""

from __future__ import annotations

import json
import re
import sqlite3
from collections import defaultdict
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from adaptive.records.rows import DamagedRecordError, beginning, messages_of
from adaptive.types import Message

# Characters of a raw text, white space left out, by which answers are indexed. Too low: texts are compared in full with
# many answers. Too high: short answers, which are not indexed, are compared with every text.
INDEXED = 16
# Bytes of a chat's opening that are compared before its messages are parsed. Too low: more of them are parsed.
COMPARED = 200
# The beginning of a message in the ``messages`` column. It is nowhere within one: quotation marks are escaped there.
MESSAGE = b'{"role": "'
ESCAPES = re.compile(r'(?:\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))+')


@dataclass(frozen=True)
class Asked:
    """The prompt of an answer: chat ``messages``, or a raw ``text``. ``session`` is empty if it is not known."""

    session: str
    messages: tuple[Message, ...]
    text: str

    @cached_property
    def spoken(self) -> tuple[Message, ...]:
        """The messages other than the system's, which change where a client writes the current time into them."""
        return tuple(message for message in self.messages if message.role not in ("system", "developer"))

    @property
    def opening(self) -> Message | None:
        """The first of these messages; None if there is none or an answer is the first."""
        return self.spoken[0] if self.spoken and self.spoken[0].role != "assistant" else None


@dataclass(frozen=True)
class Given:
    """The ``answer`` to the messages ``chat``, without the system's. ``begun`` is the beginning of it that was part of
    the request, usually empty."""

    session: str
    chat: tuple[Message, ...]
    begun: str
    answer: str

    @cached_property
    def last(self) -> bytes:
        """The last message of the chat, as in the ``messages`` column."""
        return beginning(self.chat[-1:])[1:].encode()

    def place(self, request: Asked) -> int | None:
        """The index, among the request's messages other than the system's, of the message that holds the answer; None
        if there is none. It follows the whole chat before it, or within one session the last message of that chat,
        since the client may have left out older messages."""
        messages, count = request.spoken, len(self.chat)
        for place, message in enumerate(messages):
            if message.role != "assistant" or (count and (not place or messages[place - 1] != self.chat[-1])):
                continue
            same = place == count and messages[:count] == self.chat
            if (same or (count and request.session == self.session)) and self._is(message.content):
                return place
        return None

    def _is(self, said: str) -> bool:
        """Whether an assistant's message is this answer, perhaps changed by a client."""
        text, calls = split_calls(said)
        if calls and all(squeezed(part) in self._unescaped for call in calls for part in parts(call)):
            return True
        said = squeezed(text)
        return said in self._squeezed and said not in squeezed(self.begun)

    @cached_property
    def _squeezed(self) -> str:
        return squeezed(self.answer)

    @cached_property
    def _unescaped(self) -> str:
        """The answer, and the answer with the escapes of JSON resolved: arguments may be JSON within JSON."""
        once = unescaped(self.answer)
        return "\0".join(map(squeezed, (self.answer, once, unescaped(once))))


class Held:
    """Answers of the log, to be found in other requests."""

    def __init__(self) -> None:
        self._chats: dict[Message | None, list[Given]] = defaultdict(list)  # by the chat's opening
        self._openings: set[bytes] = set()
        self._sessions: dict[str, list[Given]] = defaultdict(list)
        # Each message once: every answer of a chat repeats those before it, and a server keeps this until its end.
        self._once: dict[Message, Message] = {}
        # Raw prompts with their answers, squeezed, by their first INDEXED characters; shorter ones by "".
        self._texts: dict[str, list[str]] = defaultdict(list)

    def add(self, request: Asked, answer: str) -> None:
        """Look for the ``answer`` to this request, too."""
        if request.messages:
            chat, begun = request.spoken, ""
            if chat and chat[-1].role == "assistant":
                chat, begun = chat[:-1], chat[-1].content
            self._look_for(request, Given(request.session, chat, begun, begun + answer))
        elif squeezed(answer):
            whole = squeezed(request.text + answer)
            self._texts[whole[:INDEXED] if len(whole) >= INDEXED else ""].append(whole)

    def may_hold(self, session: str, messages: bytes) -> bool:
        """Whether a record with this ``messages`` column may hold one of the answers; quicker than ``holds``."""
        if messages == b"[]":
            return bool(self._texts)
        return _opening(messages) in self._openings or any(
            one.last in messages for one in self._sessions.get(session, ())
        )

    def holds(self, request: Asked) -> bool:
        """Whether the request holds one of the answers."""
        if request.messages:
            return self._found(request) is not None
        begins = squeezed(request.text[: 20 * INDEXED])[:INDEXED]
        if len(begins) == INDEXED and begins not in self._texts and "" not in self._texts:
            return False
        text = squeezed(request.text)
        return any(text.startswith(whole) for key in (text[:INDEXED], "") for whole in self._texts.get(key, ()))

    def follow(self, request: Asked, answer: str) -> bool:
        """As ``holds``. If the ``answer`` to the request continues one of the answers, later chats hold both as one
        message, so look for that too."""
        if not request.messages:
            return self.holds(request)
        found = self._found(request)
        if found is None:
            return False
        one, place = found
        if place == len(request.spoken) - 1:
            whole = request.spoken[place].content + answer
            self._look_for(request, Given(request.session, request.spoken[:place], one.begun, whole))
        return True

    def _look_for(self, request: Asked, one: Given) -> None:
        one = replace(one, chat=tuple(self._once.setdefault(message, message) for message in one.chat))
        self._chats[request.opening].append(one)
        self._openings.add(_opening(beginning(request.messages).encode()))
        if one.chat:
            self._sessions[one.session].append(one)

    def _found(self, request: Asked) -> tuple[Given, int] | None:
        """An answer that the request holds, and the place of the message that holds it."""
        for some in (self._chats.get(request.opening, ()), self._sessions.get(request.session, ())):
            for one in some:
                if (place := one.place(request)) is not None:
                    return one, place
        return None


def search(connection: sqlite3.Connection, ids: Collection[int]) -> tuple[set[int], Held]:
    """Ids of the later records whose requests hold one of the answers ``ids``, these left out; and the answers, to be
    found in further requests. Raises sqlite3.Error."""
    answers, found, wanted = Held(), set[int](), frozenset(ids)
    texts = ", ".join(f"CAST({column} AS TEXT)" for column in ("session", "messages", "prompt_text", "text"))
    query = f"SELECT {texts} FROM generations WHERE id"  # damage can make a number of a text
    for *asked, answer in connection.execute(
        f"{query} IN (SELECT value FROM json_each(?))", (json.dumps(sorted(wanted)),)
    ):
        with suppress(DamagedRecordError):  # nobody can have read it
            answers.add(_asked(*asked), answer)
    later = "SELECT id, CAST(session AS TEXT), CAST(messages AS BLOB) FROM generations WHERE id > ? ORDER BY id"
    for number, session, messages in connection.execute(later, (min(wanted, default=2**63 - 1),)):
        if number in wanted or not answers.may_hold(session, messages):
            continue
        *asked, answer = connection.execute(f"{query} = ?", (number,)).fetchone()
        try:
            if answers.follow(_asked(*asked), answer):
                found.add(number)
        except DamagedRecordError:  # no reader can use it, and it may hold an answer
            found.add(number)
    return found, answers


def _asked(session: str, messages: str, text: str) -> Asked:
    return Asked(session, messages_of(messages), text)


def _opening(messages: bytes) -> bytes:
    """The beginning of a chat's opening in the ``messages`` column; empty if it has none."""
    place = messages.find(MESSAGE)
    while place >= 0 and messages.startswith((MESSAGE + b"system", MESSAGE + b"developer"), place):
        place = messages.find(MESSAGE, place + 1)
    if place < 0 or messages.startswith(MESSAGE + b"assistant", place):
        return b""
    end = messages.find(MESSAGE, place + 1, place + COMPARED + len(MESSAGE))
    return messages[place : place + COMPARED if end < 0 else end].rstrip(b", ]")


def squeezed(text: str) -> str:
    """``text`` without white space."""
    return "".join(text.split())


def unescaped(text: str) -> str:
    """``text`` with the escapes of JSON resolved, wherever they are."""
    return ESCAPES.sub(lambda found: str(json.loads(f'"{found[0]}"')), text)


def split_calls(said: str) -> tuple[str, list[dict[str, Any]]]:
    """The text of an assistant's logged message, and its tool calls, which stand after it as JSON in OpenAI's form."""
    place = said.find("[{") if said.endswith("}]") else -1
    while place >= 0:
        with suppress(ValueError, RecursionError):
            calls = json.loads(said[place:])
            if all(isinstance(call, dict) and isinstance(call.get("function"), dict) for call in calls):
                return said[:place], [call["function"] for call in calls]
        place = said.find("[{", place + 1)
    return said, []


def parts(function: dict[str, Any]) -> Iterator[str]:
    """The name of a call, and the texts and whole numbers in its arguments: the parts that every model's format of
    calls writes alike."""
    yield str(function.get("name"))
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):
            arguments = json.loads(arguments)
    yield from _leaves(arguments)


def _leaves(value: Any) -> Iterator[str]:
    if isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _leaves(one)
    elif isinstance(value, str) or type(value) is int:
        yield str(value)
