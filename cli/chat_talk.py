"""The messages of a chat, and the operations on them: save, load, undo, forget the oldest."""

from __future__ import annotations

import json
from pathlib import Path

from adaptive.errors import AdaptiveError
from adaptive.types import Message
from cli.prompts import read_prompts


class Talk:
    """An optional system message, and turns of a question and its answer."""

    def __init__(self, system: str | None, messages: tuple[Message, ...] = ()) -> None:
        self.messages = list(messages)
        if system is not None:
            self.system = system

    @property
    def system(self) -> str:
        """The system message, empty if there is none."""
        return self.messages[0].content if self.messages and self.messages[0].role == "system" else ""

    @system.setter
    def system(self, text: str) -> None:
        turns = self.turns
        self.messages = [Message("system", text), *turns] if text else turns

    @property
    def turns(self) -> list[Message]:
        """The messages without the system message."""
        there = bool(self.messages) and self.messages[0].role == "system"  # it may be empty, in a loaded chat
        return self.messages[1:] if there else list(self.messages)

    def take_back(self) -> str | None:
        """Remove the last question and its answer. Returns the question, None if there was none."""
        asked = next((i for i in reversed(range(len(self.messages))) if self.messages[i].role == "user"), None)
        if asked is None:
            return None
        question = self.messages[asked].content
        del self.messages[asked:]
        return question

    def forget_oldest(self) -> bool:
        """Remove the oldest question and its answer; False if only the last question is left."""
        turns = self.turns
        second = next((i for i, message in enumerate(turns) if message.role == "user" and i), None)
        if second is None:
            return False
        self.messages = [*self.messages[: len(self.messages) - len(turns)], *turns[second:]]
        return True

    def save(self, file: Path) -> None:
        """Write the chat as one line of a prompt file. Raises AdaptiveError if the file exists or cannot be written."""
        from adaptive.settings import expanded

        place = expanded(file)
        messages = [{"role": m.role, "content": m.content} for m in self.messages]
        said = json.dumps({"messages": messages}, ensure_ascii=False)
        try:
            with place.open("xb") as out:
                try:
                    out.write(said.encode("utf-8", "replace") + b"\n")  # half of a surrogate pair: a question mark
                    out.flush()
                except OSError:
                    place.unlink()  # no part of it stays, which would be "there already"
                    raise
        except FileExistsError as error:
            raise AdaptiveError(f"{file} is there already; choose another name") from error
        except OSError as error:
            raise AdaptiveError(f"{file} cannot be written ({error.strerror})") from error

    def load(self, file: Path) -> int:
        """Continue the first chat of a file such as ``save`` writes. Returns the number of chats in it. Raises
        AdaptiveError if it cannot be read."""
        from adaptive.settings import expanded

        found = read_prompts(expanded(file), "conversation file")
        self.messages = list(found[0].messages)
        return len(found)
