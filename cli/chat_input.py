"""The input of ``adaptive chat``: messages typed at a terminal, with a history file, or text from a pipe."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from adaptive.errors import AdaptiveError

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession

PROMPT, MORE = "› ", "… "
QUOTES = '"""'


def is_command(text: str) -> bool:
    """Whether a message is a command: a slash and a word of letters, unlike a path."""
    return any(re.fullmatch(r"/[a-z]+", word) for word in text.split(maxsplit=1)[:1])


def piped() -> str:
    """All of standard input, empty if it is closed. Raises AdaptiveError if it is not UTF-8 text."""
    if sys.stdin is None:
        return ""
    try:
        return sys.stdin.read().strip()
    except UnicodeDecodeError as error:
        raise AdaptiveError("standard input is not UTF-8 text") from error


@contextlib.contextmanager
def echo() -> Iterator[None]:
    """Show typed text on the terminal even if answers are redirected. A dumb terminal gets plain text."""
    from prompt_toolkit.application import create_app_session
    from prompt_toolkit.output import create_output
    from prompt_toolkit.output.plain_text import PlainTextOutput
    from prompt_toolkit.utils import is_dumb_terminal

    shown = sys.stdout if sys.stdout.isatty() else sys.stderr
    with create_app_session(output=PlainTextOutput(shown) if is_dumb_terminal() else create_output(stdout=shown)):
        yield


@contextlib.contextmanager
def unseen() -> Iterator[None]:
    """In the block the terminal does not show what is typed, except at a prompt. Else it would appear within an answer
    or a progress bar, as would the ``^C`` of ctrl-C; it is not lost, and the next prompt shows it."""
    try:
        import termios
    except ModuleNotFoundError:  # Windows shows what is typed only while a program reads it
        yield
        return
    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    quiet = [*before]
    quiet[3] &= ~termios.ECHO  # the local modes
    termios.tcsetattr(terminal, termios.TCSANOW, quiet)
    try:
        yield
    finally:
        termios.tcsetattr(terminal, termios.TCSANOW, before)


class Keyboard:
    """Messages typed at a terminal."""

    def __init__(self, commands: Sequence[str], kept: Path | None, before: Callable[[], None] = lambda: None) -> None:
        """``commands`` are completed; typed lines are kept in the file ``kept``, or (None) for this run only. Before
        the prompt of each message ``before`` is called."""
        from prompt_toolkit import PromptSession
        from prompt_toolkit.completion import WordCompleter
        from prompt_toolkit.history import InMemoryHistory

        from cli.chat_typed import Typed

        self._before = before
        self._session: PromptSession[str] = PromptSession(
            completer=WordCompleter(list(commands), sentence=True),
            history=InMemoryHistory() if kept is None else Typed(kept),
        )

    def messages(self) -> Iterator[str]:
        """Yield one message after the other, until ctrl-D. ctrl-C discards the line being typed."""
        while True:
            try:
                text = self._message()
            except KeyboardInterrupt:
                continue
            except EOFError:
                return
            if text:
                yield text

    def _message(self) -> str:
        self._before()
        text = self._line(PROMPT)
        if text.lstrip().startswith(QUOTES):
            text = text.lstrip().removeprefix(QUOTES)
            while not text.rstrip().endswith(QUOTES):
                text += "\n" + self._line(MORE)
            return text.rstrip().removesuffix(QUOTES).strip()
        while text.endswith("\\"):
            text = text[:-1] + "\n" + self._line(MORE)
        return text.strip()

    def _line(self, prompt: str) -> str:
        from prompt_toolkit.formatted_text import FormattedText

        return self._session.prompt(FormattedText([("bold", prompt)]))

    def agrees(self, question: str) -> bool:
        """Ask a yes-no question; an empty answer means yes."""
        from prompt_toolkit import prompt

        try:
            return prompt(f"{question} [Y/n] ").strip().lower() in ("", "y", "yes")
        except (KeyboardInterrupt, EOFError):
            return False
