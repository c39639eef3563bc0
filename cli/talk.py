"""The messages of a chat, and what a person may do to them: save, load, take back, forget the oldest."""

from __future__ import annotations

import json
from pathlib import Path

from adaptive.errors import AdaptiveError
from adaptive.types import Message
from cli.prompts import read_prompts


class Talk:
    """A system message, if there is one, and turns of a question and its answer."""

    def __init__(self, system: str | None, messages: tuple[Message, ...] = ()) -> None:
        self.messages = list(messages)
        if system is not None:
            self.system = system

    @property
    def system(self) -> str:
        """The system message, empty where there is none."""
        return self.messages[0].content if self.messages and self.messages[0].role == "system" else ""

    @system.setter
    def system(self, text: str) -> None:
        turns = self.turns
        self.messages = [Message("system", text), *turns] if text else turns

    @property
    def turns(self) -> list[Message]:
        """The messages but for the system's."""
        return self.messages[1:] if self.system else list(self.messages)

    def take_back(self) -> str | None:
        """Forget the last question and its answer; the question, None where there was none."""
        asked = next((i for i in reversed(range(len(self.messages))) if self.messages[i].role == "user"), None)
        if asked is None:
            return None
        question = self.messages[asked].content
        del self.messages[asked:]
        return question

    def forget_oldest(self) -> bool:
        """Forget the oldest question and its answer; False where there is nothing but the last."""
        turns = self.turns
        second = next((i for i, message in enumerate(turns) if message.role == "user" and i), None)
        if second is None:
            return False
        self.messages = [*self.messages[: len(self.messages) - len(turns)], *turns[second:]]
        return True

    def save(self, file: Path) -> None:
        """Write it as one line of a prompt file. Raises AdaptiveError where the file is there or cannot be written."""
        said = {"messages": [{"role": m.role, "content": m.content} for m in self.messages]}
        try:
            with file.expanduser().open("x", encoding="utf-8") as out:
                out.write(json.dumps(said, ensure_ascii=False) + "\n")
        except FileExistsError as error:
            raise AdaptiveError(f"{file} is there already; choose another name") from error
        except OSError as error:
            raise AdaptiveError(f"{file} cannot be written ({error.strerror})") from error

    def load(self, file: Path) -> None:
        """Go on with what ``save`` wrote. Raises AdaptiveError where it cannot be read."""
        self.messages = list(read_prompts(file.expanduser())[0].messages)
