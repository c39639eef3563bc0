"""Indexes all records of a pair for history drafting, with one index per owner. Records are read in the background at
the start and whenever new ones are written, and forgotten when this process or another one deletes them."""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from adaptive.control.matches import Matches
from adaptive.drafting.history import HistoryDrafter, RunningText
from adaptive.drafting.suffixes import LONGEST, Suffixes, compiled, suffixes
from adaptive.errors import AdaptiveError, first_line
from adaptive.records.log import Log
from adaptive.records.logged import LoggedText

logger = logging.getLogger("adaptive.history")

# Most tokens to keep, of the newest records of all owners together, and most bytes of memory for them: 38 per token
# plus the room of the last segment, and more if many owners have few tokens each.
MOST_TOKENS, MOST_BYTES = 10_000_000, 450_000_000
# Most tokens of the plain index, whose objects take 0.5 to 1 kB per token and which reads records more slowly.
MOST_PLAIN_TOKENS = 200_000
# Records read at a time: an answer that begins meanwhile waits for one page, some 20 ms.
PAGE = 32
# Seconds between two checks for records that other processes wrote or deleted. An answer checks for deletions before it
# begins.
LOOK_S = 1.0
# Sessions whose last text is remembered, so that a chat's next record adds only its new part.
SESSIONS = 256


def owner_name(user: str) -> str:
    """The name of a user in the log: a digest, so that the log contains no user names; empty for no user."""
    return hashlib.sha256(user.encode("utf-8", "replace")).hexdigest()[:16] if user else ""


class Archive:
    """The indexes, and the thread that updates them. Safe to call from several threads.

    ``index`` may be called at any time, also before everything is read.
    """

    def __init__(self, path: Path, vocab: int, most: int | None = None, most_bytes: int = MOST_BYTES) -> None:
        """``path`` is the log. Records with a token beyond ``vocab`` are damaged and left out. At most ``most`` tokens
        (None: the default of the index) and ``most_bytes`` of memory are held; reading a page may exceed that for a
        moment."""
        self.vocab = vocab
        self._most = most or (MOST_PLAIN_TOKENS if compiled() is None else MOST_TOKENS)
        self._most_bytes = most_bytes
        self._log = Log(path)
        self._turn = threading.Lock()  # held by an answer that waits for ``_lock``, so that it is next
        self._lock = threading.Lock()  # for the log and all below
        self._indexes: dict[str, Suffixes] = {}
        self._known: dict[int, str] = {}  # the owner of every record read, by record id
        self._sessions: dict[str, LoggedText] = {}  # the last record of each session, the latest session last
        self._seen: tuple[int, int] | None = None  # ``Log.changes`` at the last check for deletions
        self._last = -1  # id of the last record read, -1 before the first
        self._problem: str | None = None  # why the log could not be read when it was read last
        self._poked, self._closing = threading.Event(), False
        self.loaded = threading.Event()
        self._thread = threading.Thread(target=self._run, name="history", daemon=True)

    def start(self) -> None:
        """Start to read in the background."""
        self._thread.start()
        # A daemon thread that is in compiled code when the interpreter ends would abort the process.
        atexit.register(self.close)

    def poke(self) -> None:
        """Note that a record was written."""
        self._poked.set()

    def close(self) -> None:
        """End the thread."""
        atexit.unregister(self.close)
        self._closing = True
        self._poked.set()
        if self._thread.is_alive():
            self._thread.join()
        self._log.close()

    def index(self, owner: str) -> Suffixes:
        """The index of the records of ``owner``, '' for records without an owner; an empty one of its own if there are
        none."""
        with self._turn, self._lock:
            found = self._indexes.get(owner)
            return suffixes(self._most) if found is None else found

    def forget_deleted(self) -> None:
        """Remove records from the indexes that are no longer in the log."""
        if not self._known:
            return
        with self._turn, self._lock, self._logged():
            self._forget_deleted()

    def catch_up(self) -> None:
        """Read new records from the log, and forget the deleted ones."""
        more = True
        while more and not self._closing:
            with self._turn:  # a thread that frees a lock and takes it again is usually faster than one that waits
                pass
            with self._lock, self._logged():
                more = False  # also after an error: the next check tries again
                self._forget_deleted()
                more = self._read_page()

    @property
    def tokens(self) -> int:
        """Tokens held."""
        return sum(len(index) for index in list(self._indexes.values()))

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the indexes take."""
        return sum(index.nbytes for index in list(self._indexes.values()))

    def _run(self) -> None:
        while not self._closing:
            self.catch_up()
            self.loaded.set()
            self._poked.wait(LOOK_S)
            self._poked.clear()

    @contextlib.contextmanager
    def _logged(self) -> Iterator[None]:
        """Log an error of any kind, such as no memory, once until it is another one: it must end neither an answer nor
        the thread. History continues with what is indexed, and the next check tries again."""
        try:
            yield
            self._problem = None
        except Exception as error:
            problem, self._problem = self._problem, first_line(error)
            if self._problem != problem:
                unexpected = not isinstance(error, AdaptiveError)
                logger.warning("history: %s", self._problem, exc_info=unexpected)

    def _index(self, owner: str) -> Suffixes:
        found = self._indexes.get(owner)
        if found is None:
            found = self._indexes[owner] = suffixes(self._most)
        return found

    def _forget_deleted(self) -> None:
        seen = self._log.changes()
        if seen == self._seen:
            return
        if self._known:
            here = self._log.ids_since(next(iter(self._known)))  # the oldest
            gone = [number for number in self._known if number not in here]
            for owner in {self._known[number] for number in gone}:
                self._remove(owner, gone)
            for number in gone:
                del self._known[number]
            if gone:
                self._sessions = {s: text for s, text in self._sessions.items() if text.id in here}
        self._seen = seen  # at last, since all this may fail

    def _read_page(self) -> bool:
        """Read the next records. Returns whether there may be more."""
        if self._last < 0:
            self._last = self._log.first_within(self._most)
        before = self._last
        last, texts = self._log.texts(before, PAGE)
        for text in texts:
            if text.id <= self._last:  # damaged
                continue
            self._last = text.id  # first: a text that cannot be added is left out
            if len(text.tokens) and (int(text.tokens.min()) < 0 or int(text.tokens.max()) >= self.vocab):
                continue
            self._add(text)
        self._make_room()
        self._last = max(self._last, last)
        return last > before

    def _add(self, text: LoggedText) -> None:
        """Add the part of the record that its session's last record lacks, and enough tokens before it for a match."""
        before = self._sessions.pop(text.session, None)
        same = 0
        if before is not None and before.owner == text.owner:
            length = min(len(before.tokens), len(text.tokens))
            differ = np.flatnonzero(before.tokens[:length] != text.tokens[:length])
            same = int(differ[0]) if len(differ) else length
        self._known[text.id] = text.owner
        if same < len(text.tokens):
            self._index(text.owner).add(text.id, np.ascontiguousarray(text.tokens[max(0, same - LONGEST) :]))
        self._sessions[text.session] = text
        if len(self._sessions) > SESSIONS:
            del self._sessions[next(iter(self._sessions))]

    def _make_room(self) -> None:
        """Forget the oldest records, of any owner, until tokens and bytes are within the limits."""
        while len(self._known) > 1 and (self.tokens > self._most or self.nbytes > self._most_bytes):
            oldest = next(iter(self._known))
            self._remove(self._known.pop(oldest), [oldest])

    def _remove(self, owner: str, records: list[int]) -> None:
        """Remove these records of ``owner``, and the index with the last of them."""
        index = self._index(owner)
        index.remove(records)
        if not len(index):
            del self._indexes[owner]


class History:
    """The sources of history drafting in a program: the running text of each answer and, if there is an archive, the
    records."""

    def __init__(self, archive: Archive | None, matches: Matches | None = None) -> None:
        self.archive = archive
        self.matches = matches or Matches()
        self._texts: list[RunningText] = []  # not in use
        self._lent: list[RunningText] = []  # of the answers under way

    def forget(self) -> None:
        """Drop the running texts, and the records that were deleted."""
        self._texts, self._lent = [], []
        if self.archive is not None:
            self.archive.forget_deleted()

    def drafter(self, owner: str, temperature: float) -> HistoryDrafter:
        """The drafter of one answer, until ``release``. It uses only the records of ``owner``."""
        records = None
        if self.archive is not None:
            self.archive.forget_deleted()
            records = self.archive.index(owner)
        text = self._texts.pop() if self._texts else RunningText()
        self._lent.append(text)
        return HistoryDrafter(text, records, self.matches, temperature)

    def release(self, drafter: HistoryDrafter) -> None:
        """Take back the text of a finished answer; the next answer may continue in it."""
        if drafter.text in self._lent:  # else ``forget`` has dropped it
            self._lent.remove(drafter.text)
            self._texts.append(drafter.text)
