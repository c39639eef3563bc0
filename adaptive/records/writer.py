"""Writes generations to the log on its own thread, so that decoding does not wait for the disk.

``write`` takes a generation, which becomes one transaction: it is wholly in the log or not at all. A generation
that ``flush`` has acknowledged survives ``kill -9``; before that it may still be in memory. So
a front end calls ``flush`` before it reports that a generation is done.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import math
import sqlite3
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from adaptive.errors import AdaptiveError, first_line
from adaptive.printable import counted
from adaptive.records.features import Features, FeatureSpool, tokens_hash
from adaptive.records.overwrite import forget_set_aside
from adaptive.records.place import Place, abandon
from adaptive.records.recover import open_for_writing, remove_beside, replacing
from adaptive.records.retention import LOOK_S, Keep
from adaptive.records.rows import continue_ids, insert, last_given_id
from adaptive.records.schema import DiskFullError, connect, is_damage, transaction, unusable
from adaptive.records.waiting import Pending, Waiting
from adaptive.types import Generation

logger = logging.getLogger("adaptive.records")

# Bytes of generations held in memory while the disk does not accept them: some 600 of 500 tokens with supervision (100
# kB each), or several thousand without. Too low: a short outage loses records. Too high: it takes the models' memory.
MEMORY_BYTES = 64 << 20

# Seconds between two tries after a failure. Too low: useless tries on a full disk. Too high: records stay
# in memory, where a crash loses them, for longer than needed.
RETRY_S = 5.0

# Longest wait of ``write`` for room, in seconds, when the disk is slow but has not failed. A user
# notices a longer one; a healthy disk makes room within milliseconds.
ROOM_S = 5.0

# Longest time, in seconds, that the deletion of old records delays the end of the program; the next start continues it.
CLOSING_S = 2.0
# Seconds after the beginning of the end in which waiting generations are still tried, if some fail. A program that
# locks the log makes each try take ten seconds.
LAST_TRIES_S = 5.0

# Instructions of SQLite between two looks for waiting generations: less than a millisecond.
STEPS = 1000

# Errors of SQLite that mean that the generation itself is wrong, so that another try cannot succeed.
PERMANENT = (sqlite3.IntegrityError, sqlite3.DataError, sqlite3.InterfaceError, sqlite3.ProgrammingError)

# Errors of the deletion of what has expired. They may not end the writer's thread: the next deletion tries again, and
# generations are to be written meanwhile.
TIDYING = (AdaptiveError, sqlite3.Error, OSError, MemoryError)


@dataclass(frozen=True)
class WriterState:
    """Whether the log can be written, how many generations wait in memory, and how many lost their supervision
    (``stripped``) or were lost since the start."""

    writable: bool
    waiting: int
    stripped: int
    lost: int


class LogWriter:
    """The only writer of this process. Safe to call from several threads; also a context manager.

    When the memory for waiting generations is full, ``write`` waits up to ROOM_S, unless the disk is failing. Then the
    oldest waiting generations lose their features and their supervision (counted in ``stripped``), and when none has
    any left, the oldest generation is dropped (``lost``). Features go to ``spool``, if given; a failure to write them
    is not a failure of the log.
    """

    def __init__(
        self,
        path: Path,
        *,
        memory_bytes: int = MEMORY_BYTES,
        retry_s: float = RETRY_S,
        after: int = 0,
        keep: Keep | None = None,
        spool: FeatureSpool | None = None,
    ) -> None:
        """Open (or create) the log at ``path``; new ids are above ``after``. A damaged log is replaced (``recover``).
        Records beyond the limits of ``keep`` are deleted now, while records are written, and every LOOK_S without any.

        With a full disk, or while another program holds the write lock, the writer still starts, and generations wait
        in memory. Raises AdaptiveError if the log cannot be opened for another reason.
        """
        self.path = path
        self.on_stored: Callable[[], None] = _nobody  # called on the writer's thread, after a record is in the log
        self.lost = self.stripped = 0
        self._retry_s = retry_s
        self._newest = after
        self._keep = keep
        self._spool = spool
        self._looked = -math.inf  # when ``keep`` was last enforced
        self._unfinished = False  # whether that was interrupted
        self._pending = Pending(memory_bytes)
        self._changed = threading.Condition()
        self._handed = self._settled = 0  # generations given to write(), and those committed or dropped
        self._attempt = self._failed_attempt = 0
        self._urged = self._closing = False
        self._closing_since = 0.0
        self._failure: str | None = None
        self._loss: str | None = None
        self._connection: sqlite3.Connection | None = None
        self._place: Place | None = None
        try:
            self._open()
        except AdaptiveError as error:
            if not _may_pass(error):
                raise
            self._failure = str(error)
        self._thread = threading.Thread(target=self._run, name="log-writer", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # a daemon thread ends with the program, but its queue must be written

    @property
    def problem(self) -> str | None:
        """The problem with logging, as one line for a front end to show, or None.

        It is cleared when a later try succeeds; a loss stays, since it cannot be repaired.
        """
        with self._changed:
            if self._failure is not None:
                waiting = self._handed - self._settled
                return (
                    f"the log {self.path} cannot be written ({self._failure}); {waiting} waiting in memory"
                    + (f", {self.stripped} of them or before without supervision" if self.stripped else "")
                    + (f", {self.lost} lost" if self.lost else "")
                )
            if self.lost:
                return f"{counted(self.lost, 'answer')} could not be logged ({self._loss})"
            return f"{counted(self.stripped, 'answer')} logged without supervision" if self.stripped else None

    @property
    def state(self) -> WriterState:
        """The content of ``problem`` as figures."""
        with self._changed:
            return WriterState(self._failure is None, self._handed - self._settled, self.stripped, self.lost)

    def write(self, generation: Generation, features: Features | None = None) -> None:
        """Queue ``generation``; returns at once while there is room (see the class)."""
        waiting = Waiting(generation, features if self._spool is not None else None)
        with self._changed:
            if self._closing:
                raise RuntimeError("the log writer is closed")
            self._changed.wait_for(lambda: self._pending.fits(waiting) or self._failure is not None, ROOM_S)
            self._pending.add(waiting)
            self._handed += 1
            stripped, dropped = self._pending.shrink()
            self.stripped += stripped
            for _ in range(dropped):
                self._give_up(self._failure or "the disk is too slow")
            self._changed.notify_all()

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until everything written so far is committed; failed generations are tried again now.

        Returns True if it is in the log, False if a try failed, something was lost, or
        ``timeout_s`` seconds passed; ``problem`` then has the reason.
        """
        with self._changed:
            ticket, attempt, lost = self._handed, self._attempt, self.lost
            self._urged = True
            self._changed.notify_all()

            def answered() -> bool:
                # A try that began before the call does not show the state of the disk now.
                return self._settled >= ticket or self._failed_attempt > attempt or not self._thread.is_alive()

            self._changed.wait_for(answered, timeout_s)
            return self._settled >= ticket and self.lost == lost

    @property
    def handed(self) -> int:
        """The number of generations given to ``write`` so far, for ``settled``."""
        with self._changed:
            return self._handed

    def settled(self, handed: int) -> bool:
        """Whether the first ``handed`` generations are committed or dropped, or the disk fails: no reason to wait."""
        with self._changed:
            return self._settled >= handed or self._failure is not None

    def close(self) -> bool:
        """Write the waiting generations, with one last try each, and close. True if everything is in the log."""
        with self._changed:
            self._closing, self._closing_since = True, time.monotonic()
            self._changed.notify_all()
        self._thread.join()
        atexit.unregister(self.close)
        return self._handed == self._settled and self.lost == 0

    def __enter__(self) -> LogWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _run(self) -> None:
        self._enforce()
        self._sweep()
        while (waiting := self._next()) is not None:
            failure = permanent = None
            try:
                self._store(waiting)
            except PERMANENT as error:
                permanent = str(error)
            except (AdaptiveError, sqlite3.Error, OSError, MemoryError) as error:
                failure = str(error) or type(error).__name__
            except Exception as error:  # nothing may end this thread, since other generations wait
                permanent = f"{type(error).__name__}: {error}"
            if failure is not None or permanent is not None:
                self._drop_connection()
            if not self._conclude(waiting, failure, permanent):
                break
            self._enforce()
            if self._spool is not None and self._spool.unswept:
                self._sweep()
        self._drop_connection()

    def _next(self) -> Waiting | None:
        while True:
            with self._changed:
                if self._changed.wait_for(lambda: self._pending or self._closing, LOOK_S if self._keep else None):
                    if not self._pending:
                        return None
                    self._attempt += 1
                    self._urged = False
                    return self._pending.take()
            if self._place is not None and self._place.holds():  # a log that was moved away is its owner's
                self._enforce()

    def _store(self, waiting: Waiting) -> None:
        try:
            number = self._insert(waiting)
        except PERMANENT:
            raise
        except sqlite3.DatabaseError as error:
            if not is_damage(error):
                raise
            self._replace_damaged()
            number = self._insert(waiting)
        self._newest = max(self._newest, number)
        self.on_stored()

    def _insert(self, waiting: Waiting) -> int:
        """Commit the generation to the file that is at ``path``. Returns its id."""
        while True:
            if self._place is not None and not self._place.holds():
                self._begin_anew()
                self._open()
                self._sweep()
            elif self._connection is None:
                self._open()
            connection, place = self._connection, self._place
            assert connection is not None
            assert place is not None
            with transaction(connection):
                if not place.holds():  # another process has replaced the file while this one waited for its lock
                    continue
                number = insert(connection, waiting.generation)
                if self._spool is not None and waiting.features is not None:
                    try:
                        tokens = tokens_hash(waiting.generation.prompt, waiting.generation.output)
                        self._spool.write(number, tokens, waiting.features)
                    except OSError as error:  # features serve training only
                        logger.warning("the features of record %d cannot be kept: %s", number, error)
            return number

    def _enforce(self) -> None:
        """Apply ``keep``, at most every LOOK_S seconds. After a failure (full disk, reader) it is tried again then.

        On a large log this can take minutes. So it stops when a generation is to be written, and continues after that.
        """
        keep, connection = self._keep, self._connection
        if keep is None or connection is None or self._pending:
            return
        if not self._unfinished and time.monotonic() - self._looked < LOOK_S:
            return
        self._looked, continued = time.monotonic(), self._unfinished
        connection.set_progress_handler(self._must_stop, STEPS)
        try:
            deleted = keep.enforce(connection)
            self._unfinished = False
            if keep.days is not None and forget_set_aside(self.path, time.time() - 86400 * keep.days):
                logger.info("damaged logs that were set aside more than %g days ago are deleted", keep.days)
        except TIDYING as error:
            self._unfinished = "interrupted" in str(error)  # by ``_must_stop``
            if not self._unfinished:
                logger.warning("old records cannot be deleted now: %s", first_line(error))
            if isinstance(error, sqlite3.Error) and is_damage(error):
                with contextlib.suppress(*TIDYING):  # the next generation tries again
                    self._replace_damaged()
            return
        finally:
            connection.set_progress_handler(None, STEPS)
        if deleted or continued:
            logger.info("records that were older or more than are kept are deleted")
            self._sweep()

    def _must_stop(self) -> bool:
        """Whether the deletion of old records must give way to a generation, or to the end of the program."""
        return bool(self._pending) or (self._closing and time.monotonic() - self._looked > CLOSING_S)

    def _sweep(self) -> None:
        """Remove the features of records that are no longer in the log."""
        if self._spool is None or self._connection is None:
            return
        try:
            self._spool.sweep(self._connection, self._must_stop)
        except TIDYING as error:
            logger.warning("the features of deleted records cannot be removed now: %s", first_line(error))

    def _conclude(self, waiting: Waiting, failure: str | None, permanent: str | None) -> bool:
        """Record the outcome of one try. False if a closing writer must stop although generations wait."""
        with self._changed:
            self._failure = failure
            if failure is None:
                if permanent is not None:
                    self._give_up(permanent)
                else:
                    self._settled += 1
                self._changed.notify_all()
                return True
            self._failed_attempt = self._attempt
            self._changed.notify_all()
            if self._closing:  # the others may fit, or come after what was in the way of this one
                return time.monotonic() - self._closing_since < LAST_TRIES_S
            self._pending.put_back(waiting)
            self._changed.wait_for(lambda: self._urged or self._closing, self._retry_s)
            return True

    def _give_up(self, reason: str) -> None:
        self.lost += 1
        self._settled += 1
        self._loss = reason

    def _open(self, suspect: bool = False) -> None:
        """Open the file that is at ``path``, and make new ids continue. ``suspect``: see ``open_for_writing``."""
        while True:
            before = Place.of(self.path) if self.path.exists() else None
            self._connection, said = open_for_writing(self.path, suspect)
            self._place = Place.of(self.path)
            if said is not None:
                logger.warning("%s", said)
            if said is not None or before in (None, self._place):
                break
            # Another process has replaced the file, so this may be a connection to the old one.
            abandon(self._connection)
            self._connection = None
        try:
            if self._newest > last_given_id(self._connection):
                with transaction(self._connection):
                    continue_ids(self._connection, self._newest)
        except sqlite3.Error as error:
            if is_damage(error) and not suspect:
                self._replace_damaged()
                return
            self._drop_connection()
            raise unusable(self.path, error) from error

    def _replace_damaged(self) -> None:
        """Open the log again after an error that means damage: its pages are checked whatever its size, and a damaged
        file is replaced. Raises AdaptiveError if that is not possible now."""
        if self._connection is not None:
            abandon(self._connection)  # closing it could remove the write-ahead log, which is copied too
            self._connection = None
        self._open(suspect=True)

    def _begin_anew(self) -> None:
        """Replace the open file, which is no longer at ``path``: SQLite would continue to write to the moved file."""
        self._drop_connection()
        self._place = None
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with replacing(self.path):
            if not self.path.exists():
                remove_beside(self.path)
                connect(self.path).close()
                logger.warning("the log %s was moved or deleted; a new one is begun", self.path)

    def _drop_connection(self) -> None:
        if self._connection is None:
            return
        connection, self._connection = self._connection, None
        if self._place is not None and not self._place.holds():
            abandon(connection)
            return
        with contextlib.suppress(sqlite3.Error):  # closing checkpoints, which a full disk refuses
            connection.close()


def _nobody() -> None:
    pass


def _may_pass(error: AdaptiveError) -> bool:
    """Whether a later try can succeed: the disk is full, or another program holds the log's lock."""
    return isinstance(error, DiskFullError) or "locked" in str(error.__cause__)
