"""The adapter in doubt: it was taken out of use, and is compared with the draft in use again, also after a restart.

In: what live acceptance (``watch``) and the comparison of drafts on the newest answers (``trainers.review``) have
found, and how far training has read. Out: changes of the adapter store, and ``doubts.json``, replaced atomically; a
damaged file counts as missing. Several processes may use one file, such as a server and a chat: each change is made to
what the file says at that moment, under a lock.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from pydantic import BaseModel

from adaptive.errors import AdaptiveError
from checkpoints import files
from checkpoints.manifest import Manifest
from checkpoints.store import AdapterStore, InUseChanged

logger = logging.getLogger("adaptive.trainer")

# New answers after which drafts are compared. Too low: the machine works for nothing, since the answers do not suffice.
# Too high: a draft that suits other text stays in use for longer.
REVIEWED = 24


class _File(BaseModel):
    """The contents of the file; it is damaged if a field without a default is missing."""

    adapter: str | None
    settled: int
    reviewed: int = 0
    trained: int = 0
    more: int = 0


@dataclass(frozen=True)
class Doubt:
    """``adapter`` is in doubt; None: no adapter. Live acceptance ignores answers up to id ``settled``: a rollback or a
    review has already used them. ``reviewed`` is the newest answer on which drafts were compared, ``trained`` the
    newest one of a training run that is over, whether it made an adapter or not, and ``more`` the number of answers
    that this run lacked, if it was refused; else 0."""

    adapter: str | None = None
    settled: int = 0
    reviewed: int = 0
    trained: int = 0
    more: int = 0

    @classmethod
    def load(cls, file: Path) -> Doubt:
        """Read ``file``; no doubt if it is missing or damaged. Raises OSError if it cannot be read now."""
        try:
            return cls(**_File.model_validate_json(file.read_bytes()).model_dump())
        except (FileNotFoundError, ValueError):  # pydantic's error is a ValueError
            return cls()

    def save(self, file: Path) -> None:
        """Replace ``file``. Raises OSError if that fails; the file is then unchanged."""
        files.replace_text(file.parent, file, _File(**asdict(self)).model_dump_json())


Change = Callable[[Doubt], Doubt]


class Doubts:
    """What is in doubt in one store, kept in ``file``. Used by the trainer's thread.

    ``now`` is what the file said when it was read last (``refresh``), with the changes that could not be written yet.
    """

    def __init__(self, store: AdapterStore, file: Path, warn: Callable[[str], None]) -> None:
        """``warn`` receives a line if the file cannot be read or written."""
        self.now = Doubt()
        self._store, self._file, self._warn = store, file, warn
        self._unwritten: list[Change] = []

    def refresh(self) -> None:
        """Read the file, which another process may have changed. If it cannot be read, ``now`` stays as it is."""
        try:
            self.now = self._changed(Doubt.load(self._file))
        except OSError as error:
            self._warn(f"{self._file} cannot be read now ({error.strerror})")

    def remember(self, newest: int) -> None:
        """At a start: read the file; ``newest`` is the newest answer in the log."""
        self.refresh()
        current = self._store.current_id()

        def came_back(said: Doubt) -> Doubt:
            return replace(said, adapter=None, settled=newest) if said.adapter == current else said

        if self.now.adapter is not None and self.now.adapter == current:
            self._change(came_back)  # into use before the last process noted it

    def due(self, newest: int) -> bool:
        """Whether drafts are to be compared: enough answers on which none was trained, and none compared."""
        if newest - _in_this_log(self.now.reviewed, newest) < REVIEWED:
            return False
        try:
            current = self._store.current()
        except AdaptiveError:  # unreadable or damaged: reported elsewhere
            return False
        doubted = self._doubted()
        known = [manifest for manifest in (current, doubted) if manifest is not None]
        if not known or (doubted is None and known[0].kind == "head"):
            return False  # a head that is grown here has no plain draft
        return newest - max(manifest.trained_on.last_id or 0 for manifest in known) >= REVIEWED

    def roll_back(self, current: str, reason: str, newest: Callable[[], int]) -> bool:
        """Take ``current`` out of use, to return to the one before it. Returns whether it was still in use. Raises
        AdaptiveError if the store cannot be changed now."""

        def noted(said: Doubt) -> Doubt:
            return replace(said, adapter=current)

        before = self._change(noted)  # first, so that a killed process compares it again, too
        try:
            self._store.rollback(reason, of=current)
        except InUseChanged:
            self._take_back(noted, before)
            return False
        except AdaptiveError:
            self._take_back(noted, before)
            raise
        settled = newest()
        self._change(lambda said: replace(said, adapter=current, settled=settled))
        logger.warning("adapter %s is rolled back: %s", current, reason)
        return True

    def reviewed(self, until: int, newest: int) -> None:
        """Drafts were compared on answers up to ``until``. ``newest`` is the newest answer in the log."""
        self._change(lambda said: replace(said, reviewed=max(_in_this_log(said.reviewed, newest), until)))

    def exchange(self, best: str | None, compared: str | None, reason: str) -> bool:
        """Put ``best`` in use (None: the plain draft) after a review, which began when the adapter ``compared`` was in
        use; that one is in doubt then. Returns whether that could be done: not if another is in use by now, of which
        the review says nothing."""
        if self._store.current_id() != compared:
            return False

        def noted(said: Doubt) -> Doubt:
            kept = None if said.adapter == best else said.adapter
            return replace(said, adapter=compared or kept, settled=max(said.settled, said.reviewed))

        before = self._change(noted)
        try:
            if best is not None:
                self._store.promote(best, f"back in use: {reason}", over=(compared,))
            leaving = compared if best is None else None
            while leaving is not None:
                self._store.rollback(reason, of=leaving)
                leaving = self._store.current_id()
        except AdaptiveError as problem:  # another has come into use, or the best one is damaged
            self._warn(str(problem))
            if self._store.current_id() == compared:
                self._take_back(noted, before)
            return False
        named = "the draft without an adapter" if best is None else f"adapter {best}"
        logger.warning("%s is in use now: %s", named, reason)
        return True

    def trained(self, until: int, newest: int, more: int = 0) -> None:
        """A training run on answers up to ``until`` is over; if it was refused, it lacked about ``more``. ``newest`` is
        the newest answer in the log."""
        self._change(lambda said: replace(said, trained=max(_in_this_log(said.trained, newest), until), more=more))

    def trained_until(self, newest: int) -> int:
        """The newest answer of a training run that is over, of this process or another; 0 for none. ``newest`` is the
        newest answer in the log."""
        self.refresh()
        return _in_this_log(self.now.trained, newest)

    def needed(self, seen: int, usual: int) -> int:
        """The number of answers after ``seen`` with which a training run begins: ``usual``, or fewer after one that was
        refused."""
        since = self.now.trained - seen
        return min(usual, since + self.now.more) if self.now.more and since >= 0 else usual

    def promoted(self) -> None:
        """A newly trained adapter came into use: it has learned from newer answers than the one in doubt."""
        doubted = self.now.adapter
        if doubted is not None:
            self._change(lambda said: replace(said, adapter=None) if said.adapter == doubted else said)

    @property
    def text(self) -> str:
        """Why no adapter is in use, in words."""
        manifest = self._doubted()
        return "no adapter in use" if manifest is None else f"adapter {manifest.id} is out of use: {manifest.reason}"

    def _doubted(self) -> Manifest | None:
        """The adapter in doubt; None without one, or if it was deleted or damaged meanwhile."""
        with suppress(AdaptiveError):
            return None if self.now.adapter is None else self._store.show(self.now.adapter)
        return None

    def _take_back(self, noted: Change, before: Doubt) -> None:
        """Restore the doubt ``before`` the change ``noted``, unless another process has noted one since."""
        if noted in self._unwritten:  # on a full disk, say, where this is tried again and again
            self._unwritten.remove(noted)
            self.now = before
            return
        doubted = noted(before).adapter

        def taken_back(said: Doubt) -> Doubt:
            return replace(said, adapter=before.adapter, settled=before.settled) if said.adapter == doubted else said

        self._change(taken_back)

    def _changed(self, said: Doubt) -> Doubt:
        """What the file ``said``, with the changes that could not be written yet."""
        for change in self._unwritten:
            said = change(said)
        return said

    def _change(self, change: Change) -> Doubt:
        """Change what the file says now, which another process may have written, and return what it said before. A
        change that cannot be written is kept until the next one."""
        before = self.now
        try:
            with files.changing(self._file):
                before = self._changed(Doubt.load(self._file))
                change(before).save(self._file)
                self._unwritten.clear()
        except OSError as error:
            self._unwritten.append(change)
            self._warn(f"{self._file} cannot be written ({error.strerror}); a restart forgets what is in it")
        self.now = change(before)
        return before


def end_doubt(store: AdapterStore, file: Path, warn: Callable[[str], None]) -> None:
    """Note that a training run outside a server has promoted its adapter (``Doubts.promoted``)."""
    doubts = Doubts(store, file, warn)
    doubts.refresh()
    doubts.promoted()


def _in_this_log(answer: int, newest: int) -> int:
    """``answer``, or 0 if it is later than the ``newest`` one: it was in a log that has been deleted."""
    return answer if answer <= newest else 0
