"""Tells the trainers of all processes on one state folder that somebody is answered there.

A server and a chat may share a folder. Each one's trainer hears of its own requests only, and would train while the
other one answers. So both touch one file when a request arrives, while it is answered, and when it is over.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path


class Presence:
    """The time at which somebody was last answered, kept as that of ``file``."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._own = 0  # the file's time as this process set it

    def tell(self) -> None:
        """Note that somebody is answered now. A file that cannot be written is no reason to fail."""
        now = time.time_ns()
        with suppress(OSError):
            try:
                os.utime(self._file, ns=(now, now))
            except FileNotFoundError:
                self._file.touch(mode=0o600)
            self._own = self._file.stat().st_mtime_ns  # as the file system rounds it

    def others(self, within_s: float) -> bool:
        """Whether another process has answered somebody within the last ``within_s`` seconds."""
        try:
            told = self._file.stat().st_mtime_ns
        except OSError:
            return False
        # The clock may have been set back meanwhile: then the time is in the future.
        return told != self._own and abs(time.time_ns() - told) < within_s * 1e9
