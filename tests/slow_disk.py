"""An adapter on a disk that does not answer until the test says so: a named pipe is in place of one of its files."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from test_service_learning import publish_random_adapter

from checkpoints.store import AdapterStore

PATIENCE_S = 60.0


class SlowFile:
    """A file whose readers wait for ``answer``, and a minute at most. ``opened``, ``reads``: how often it was opened,
    and read to its end; ``in_vain``: whether a reader waited for a minute, so that a test fails, but never hangs."""

    def __init__(self, file: Path) -> None:
        self.reads, self.opened, self.in_vain = 0, 0, False
        self._file, self._holds = file, file.read_bytes()
        self._answers = threading.Semaphore(0)
        self._stand_in()
        threading.Thread(target=self._serve, daemon=True).start()

    def answer(self, times: int) -> None:
        """Let the next readers have the file."""
        self._answers.release(times)

    def _stand_in(self) -> None:
        pipe = self._file.with_name("pipe")
        os.mkfifo(pipe)
        os.replace(pipe, self._file)

    def _serve(self) -> None:
        while True:
            with self._file.open("wb") as pipe:  # waits for a reader
                self.opened += 1
                self.in_vain |= not self._answers.acquire(timeout=PATIENCE_S)
                self._stand_in()  # for the next reader
                pipe.write(self._holds)
            self.reads += 1


def promoted_on_a_slow_disk(store: AdapterStore, folder: Path) -> tuple[str, SlowFile]:
    """Promote a random adapter of the bundled draft whose config, which is hashed and then read, cannot be read yet."""
    name = publish_random_adapter(store, folder)
    slow = SlowFile(store.path(name) / "adapter_config.json")
    slow.answer(1)  # to the promotion, which hashes it
    store.promote(name, "the test says so")
    return name, slow


def until(what: Callable[[], bool]) -> None:
    """Wait until something is true."""
    deadline = time.monotonic() + PATIENCE_S
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.01)
