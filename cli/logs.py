"""Shows log lines while a command runs."""

from __future__ import annotations

import logging
import sys


class _Stderr(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to the current ``sys.stderr``, which rich replaces while it draws a bar; lines then go above the bar."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def show_log() -> None:
    """Show what ``adaptive`` logs, with the time, on standard error."""
    handlers = [_Stderr()]
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", datefmt="%Y-%m-%d %H:%M:%S", handlers=handlers)
    logging.getLogger("adaptive").setLevel(logging.INFO)
