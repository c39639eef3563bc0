"""Shows log lines while a command runs, or holds them back while a user types."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from adaptive.printable import printable_line

if TYPE_CHECKING:
    from rich.console import Console

# Warnings that are held back, the newest ones. Too high: after a night at the prompt they fill the screen.
HELD = 20


class _Stderr(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to the current ``sys.stderr``, which rich replaces while it draws a bar; lines then go above the bar."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


class _Held(logging.Handler):
    """Keeps the text of warnings."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: deque[str] = deque(maxlen=HELD)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@contextlib.contextmanager
def hold_warnings(console: Console) -> Iterator[Callable[[], None]]:
    """Hold back what ``adaptive`` warns of, since any thread may do so while a line is being typed. Yields a function
    that prints the warnings so far; the others are printed at the end."""
    held, logger = _Held(), logging.getLogger("adaptive")

    def show() -> None:
        while held.lines:
            console.print(printable_line(held.lines.popleft()), style="yellow", markup=False)

    logger.addHandler(held)
    try:
        yield show
    finally:
        logger.removeHandler(held)
        show()


def show_log() -> None:
    """Show what ``adaptive`` logs, with the time, on standard error."""
    handlers = [_Stderr()]
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", datefmt="%Y-%m-%d %H:%M:%S", handlers=handlers)
    logging.getLogger("adaptive").setLevel(logging.INFO)
