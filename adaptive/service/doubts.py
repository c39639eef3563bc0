"""The adapter in doubt: it was taken out of use, and is compared with the draft in use again, also after a restart.

In: what live acceptance (``watch``) and the comparison of drafts on the newest answers (``trainers.review``) have
found, and how far training has read. Out: changes of the adapter store, and ``doubts.json``, replaced atomically; a
damaged file counts as missing.
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


@dataclass(frozen=True)
class Doubt:
    """``adapter`` is in doubt; None: no adapter. Live acceptance ignores answers up to id ``settled``: a rollback or a
    review has already used them. ``reviewed`` is the newest answer on which drafts were compared, ``trained`` the
    newest one of a training run that is over, whether it made an adapter or not."""

    adapter: str | None = None
    settled: int = 0
    reviewed: int = 0
    trained: int = 0

    @classmethod
    def load(cls, file: Path) -> Doubt:
        """Read ``file``; no doubt if it is missing or cannot be read."""
        try:
            return cls(**_File.model_validate_json(file.read_bytes()).model_dump())
        except (OSError, ValueError):  # pydantic's error is a ValueError
            return cls()

    def save(self, file: Path) -> None:
        """Replace ``file``. Raises OSError if that fails; the file is then unchanged."""
        files.replace_text(file.parent, file, _File(**asdict(self)).model_dump_json())


class Doubts:
    """What is in doubt in one store, kept in ``file``. Used by the trainer's thread."""

    def __init__(self, store: AdapterStore, file: Path, warn: Callable[[str], None]) -> None:
        """``warn`` receives a line if the file cannot be written."""
        self.now = Doubt()
        self._store, self._file, self._warn = store, file, warn

    def remember(self, newest: int) -> None:
        """Read the file; ``newest`` is the newest answer in the log."""
        self.now = Doubt.load(self._file)
        if self.now.adapter is not None and self.now.adapter == self._store.current_id():
            # It came back into use before the last process noted it.
            self._keep(replace(self.now, adapter=None, settled=newest))

    def due(self, newest: int) -> bool:
        """Whether drafts are to be compared: enough answers on which none was trained, and none compared."""
        if newest - self.now.reviewed < REVIEWED:
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
        """Take ``current`` out of use, to return to the one before it. Returns whether it was still in use."""
        before = self.now
        self._keep(replace(before, adapter=current))  # first, so that a killed process compares it again, too
        try:
            self._store.rollback(reason, of=current)
        except InUseChanged:
            self._keep(before)
            return False
        self._keep(replace(self.now, settled=newest()))
        logger.warning("adapter %s is rolled back: %s", current, reason)
        return True

    def reviewed(self, until: int) -> None:
        """Drafts were compared on answers up to ``until``."""
        self._keep(replace(self.now, reviewed=until))

    def exchange(self, best: str | None, reason: str) -> bool:
        """Put ``best`` in use (None: the plain draft) after a review; the adapter that was in use is in doubt. Returns
        whether that could be done."""
        before, current = self.now, self._store.current_id()
        self._keep(replace(before, adapter=current, settled=before.reviewed))
        try:
            if best is not None:
                self._store.promote(best, f"back in use: {reason}", over=(current,))
            while best is None and (leaving := self._store.current_id()) is not None:
                self._store.rollback(reason, of=leaving)
        except AdaptiveError as problem:  # another has come into use, or the best one is damaged
            self._warn(str(problem))
            self._keep(before)
            return False
        named = "the draft without an adapter" if best is None else f"adapter {best}"
        logger.warning("%s is in use now: %s", named, reason)
        return True

    def trained(self, until: int) -> None:
        """A training run on answers up to ``until`` is over."""
        self._keep(replace(self.now, trained=until))

    def trained_until(self, newest: int) -> int:
        """The newest answer of a training run that is over, of this process or another; 0 for none. ``newest`` is the
        newest answer in the log: a later one was in a log that has been deleted."""
        until = max(self.now.trained, Doubt.load(self._file).trained)
        return until if until <= newest else 0

    def promoted(self) -> None:
        """A newly trained adapter came into use: it has learned from newer answers than the one in doubt."""
        if self.now.adapter is not None:
            self._keep(replace(self.now, adapter=None))

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

    def _keep(self, doubt: Doubt) -> None:
        self.now = doubt
        try:
            doubt.save(self._file)
        except OSError as error:
            self._warn(f"{self._file} cannot be written ({error.strerror}); a restart forgets what is in it")
