"""Writes generations to the log on a thread of its own, off the path of the tokens.

A generation goes in by ``write`` and is one transaction: wholly in the log or not at all. What
``flush`` has acknowledged survives ``kill -9``; what was only handed over may still be in memory, so
a front end calls ``flush`` before it tells anybody that a generation is done.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sqlite3
import threading
from collections import deque
from pathlib import Path
from types import TracebackType

from adaptive.errors import AdaptiveError
from adaptive.records.rows import insert
from adaptive.records.schema import connect, transaction
from adaptive.types import Generation

# Generations held in memory while the disk does not take them: at about 100 kB each (500 tokens with
# supervision) this is 25 MB. Lower loses records in a short outage, higher takes memory from the models.
CAPACITY = 256

# Seconds between two tries after a failure. Lower wakes a full disk for nothing, higher leaves
# records in memory (where a crash loses them) for longer than needed.
RETRY_S = 5.0

# Longest wait of ``write`` for room, in seconds, when the disk is slow but has not failed. A person
# notices more; a healthy disk makes room within milliseconds.
ROOM_S = 5.0

# Errors of SQLite that say the generation itself is wrong: another try cannot help.
PERMANENT = (sqlite3.IntegrityError, sqlite3.DataError, sqlite3.InterfaceError, sqlite3.ProgrammingError)


class LogWriter:
    """The one writer of this process. Safe to call from several threads; also a context manager.

    When the queue is full, ``write`` waits for room up to ROOM_S, unless the disk is failing; then
    the oldest waiting generation is given up and counted in ``lost``.
    """

    def __init__(self, path: Path, *, capacity: int = CAPACITY, retry_s: float = RETRY_S) -> None:
        """Open (or create) the log at ``path``. Raises AdaptiveError where that cannot be done."""
        self.path = path
        self.lost = 0
        self._capacity = capacity
        self._retry_s = retry_s
        self._pending: deque[Generation] = deque()
        self._changed = threading.Condition()
        self._handed = self._settled = 0  # generations given to write(), and committed or given up
        self._attempt = self._failed_attempt = 0
        self._urged = self._closing = False
        self._failure: str | None = None
        self._loss: str | None = None
        self._connection: sqlite3.Connection | None = None
        self._inode = 0
        self._open()
        self._thread = threading.Thread(target=self._run, name="log-writer", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # a daemon thread dies with the program, its queue must not

    @property
    def problem(self) -> str | None:
        """What is wrong with logging, on one line for a front end to show, or None.

        It goes away when a later try succeeds; a loss stays, since it cannot be mended.
        """
        with self._changed:
            if self._failure is not None:
                waiting = self._handed - self._settled
                return f"the log {self.path} cannot be written ({self._failure}); {waiting} waiting in memory" + (
                    f", {self.lost} lost" if self.lost else ""
                )
            return None if not self.lost else f"{self.lost} generations could not be logged ({self._loss})"

    def write(self, generation: Generation) -> None:
        """Hand over ``generation``; returns at once while there is room (see the class)."""
        with self._changed:
            if self._closing:
                raise RuntimeError("the log writer is closed")
            self._changed.wait_for(self._has_room_or_fails, ROOM_S)
            while len(self._pending) >= self._capacity:
                self._pending.popleft()
                self._give_up(self._failure or "the disk is too slow")
            self._pending.append(generation)
            self._handed += 1
            self._changed.notify_all()

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until everything handed over so far is committed; what had failed is tried again now.

        Returns True when it is in the log, False when a try failed, something was lost, or after
        ``timeout_s`` seconds; ``problem`` then says why.
        """
        with self._changed:
            ticket, attempt, lost = self._handed, self._attempt, self.lost
            self._urged = True
            self._changed.notify_all()

            def answered() -> bool:
                # A try that was under way before the call says nothing about the disk of now.
                return self._settled >= ticket or self._failed_attempt > attempt or not self._thread.is_alive()

            self._changed.wait_for(answered, timeout_s)
            return self._settled >= ticket and self.lost == lost

    def close(self) -> bool:
        """Write what waits, one last try each, and close. True when everything is in the log."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()
        atexit.unregister(self.close)
        return self._handed == self._settled and self.lost == 0

    def __enter__(self) -> LogWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _has_room_or_fails(self) -> bool:
        return len(self._pending) < self._capacity or self._failure is not None

    def _run(self) -> None:
        while (generation := self._next()) is not None:
            failure = permanent = None
            try:
                self._store(generation)
            except PERMANENT as error:
                permanent = str(error)
            except (AdaptiveError, sqlite3.Error, OSError, MemoryError) as error:
                failure = str(error) or type(error).__name__
            except Exception as error:  # nothing may kill this thread: the generations behind this one count
                permanent = f"{type(error).__name__}: {error}"
            if failure is not None or permanent is not None:
                self._drop_connection()
            if not self._conclude(generation, failure, permanent):
                break
        self._drop_connection()

    def _next(self) -> Generation | None:
        with self._changed:
            self._changed.wait_for(lambda: self._pending or self._closing)
            if not self._pending:
                return None
            self._attempt += 1
            self._urged = False
            return self._pending.popleft()

    def _store(self, generation: Generation) -> None:
        if self._connection is None or not self._still_there():
            self._drop_connection()
            self._open()
        connection = self._connection
        assert connection is not None
        with transaction(connection):
            insert(connection, generation)

    def _conclude(self, generation: Generation, failure: str | None, permanent: str | None) -> bool:
        """Book the outcome of one try. False when a closing writer must stop although something waits."""
        with self._changed:
            self._failure = failure
            if failure is None:
                if permanent is not None:
                    self._give_up(permanent)
                else:
                    self._settled += 1
                self._changed.notify_all()
                return True
            self._pending.appendleft(generation)  # keep the order, so that ids follow time
            self._failed_attempt = self._attempt
            self._changed.notify_all()
            if self._closing:
                return False
            self._changed.wait_for(lambda: self._urged or self._closing, self._retry_s)
            return True

    def _give_up(self, reason: str) -> None:
        self.lost += 1
        self._settled += 1
        self._loss = reason

    def _open(self) -> None:
        self._connection = connect(self.path)
        self._inode = os.stat(self.path).st_ino

    def _still_there(self) -> bool:
        """Whether the file we hold is still the one at ``path``: SQLite writes on into a deleted one."""
        try:
            return os.stat(self.path).st_ino == self._inode
        except OSError:
            return False

    def _drop_connection(self) -> None:
        if self._connection is not None:
            connection, self._connection = self._connection, None
            with contextlib.suppress(sqlite3.Error):  # closing checkpoints, which a full disk refuses
                connection.close()
