"""Where log lines go while a command runs."""

from __future__ import annotations

import logging
import sys


class _Stderr(logging.StreamHandler):  # type: ignore[type-arg]
    """Standard error as it is at each line: while a bar is drawn, rich stands there and writes lines above the bar."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def show_log() -> None:
    """Show what ``adaptive`` logs, with the time, on standard error."""
    handlers = [_Stderr()]
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", datefmt="%Y-%m-%d %H:%M:%S", handlers=handlers)
    logging.getLogger("adaptive").setLevel(logging.INFO)
