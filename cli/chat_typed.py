"""Keeps the lines typed in ``adaptive chat`` in a file that only the user may read."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path

from prompt_toolkit.history import FileHistory


class Typed(FileHistory):
    """Lines in a ``file``. While it cannot be read or written, as on a full disk, they are kept for this run only."""

    def __init__(self, file: Path) -> None:
        super().__init__(str(file))
        self._file = file

    def load_history_strings(self) -> Iterable[str]:
        """The lines of earlier runs, the newest first."""
        try:
            return super().load_history_strings()
        except OSError:
            return ()

    def store_string(self, string: str) -> None:
        """Add a line to the file, which may have been deleted meanwhile."""
        with contextlib.suppress(OSError):
            self._file.touch(mode=0o600)
            super().store_string(string)
