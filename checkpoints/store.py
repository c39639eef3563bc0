"""The adapter store: ``adapters/0007/`` folders, and which of them is in use (``in_use.py``).

In: a folder that PEFT wrote and its description (``NewAdapter``). Out: manifests, and the folder
to load at a start (``usable``). Any number of processes may read without waiting; changes are made
one at a time under a file lock, in steps such that a kill between any two leaves a valid store. A folder gets its id by
one rename, when all its files and its manifest are on the disk.

No id is used twice, because the newest folder is never pruned: the log refers to adapters by id. Of a pruned adapter a
line stays in ``PRUNED`` (``trained.py``). Whatever reads raises UnreadableStore if the store cannot be read now.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from checkpoints import files
from checkpoints.contents import ids, manifests, number, numbered
from checkpoints.errors import AdaptiveError
from checkpoints.folder import (
    EXHAUSTED,
    MANIFEST,
    DamagedAdapter,
    UnreadableAdapter,
    UnreadableStore,
    check_destination,
    check_written,
    filling,
    read_manifest,
    verify_folder,
)
from checkpoints.in_use import CURRENT, InUse
from checkpoints.manifest import NOT_JUDGED, BaseDraft, HeldOut, Kind, Manifest, TrainedOn
from checkpoints.trained import Trained, read_pruned, read_unkept, write_pruned, write_unkept

__all__ = ["AdapterStore", "DamagedAdapter", "InUseChanged", "NewAdapter", "training_seconds"]

LOCK = ".lock"

# Seconds to wait for another process's change, which is a few small writes. Too low: failures on a slow
# disk. Too high: a stuck process is noticed late.
CHANGE_TIMEOUT = 60.0
# Seconds an opening waits before it reads without settling: the holder of the lock has just settled.
OPEN_TIMEOUT = 1.0

Lines = list[str]  # ``AdapterStore.list`` hides the builtin inside the class


class InUseChanged(AdaptiveError):  # noqa: N818 - an event that callers expect
    """Another adapter is in use than the one that a change was meant for. Nothing was changed."""


@dataclass(frozen=True)
class NewAdapter:
    """The data of a ``Manifest`` before the store adds an id, a time and the hashes of its files."""

    base: BaseDraft
    trained_on: TrainedOn
    parent: str | None = None
    hyperparameters: dict[str, Any] = field(default_factory=dict)
    train_seconds: float = 0.0
    device: str = "cpu"
    recent: HeldOut | None = None
    older: HeldOut | None = None
    reason: str = NOT_JUDGED
    kind: Kind = "lora"


class AdapterStore:
    """The adapters of one pair, in ``root`` (``PairState.adapters``), which need not exist yet.

    Opening removes the leftovers of killed processes and settles a change they had begun. If the folder
    cannot be written, the store still opens for reading.
    """

    def __init__(self, root: Path, around_changes: AbstractContextManager[Any] | None = None) -> None:
        """``around_changes`` is entered before the lock of each change is taken, and left after its release."""
        self.root = root
        self._in_use = InUse(root)
        self._around = around_changes or nullcontext()
        if root.is_dir():
            with suppress(AdaptiveError), self._changing(OPEN_TIMEOUT):
                pass

    def current_id(self) -> str | None:
        """Id of the adapter in use, None for the plain draft. One small read, cheap enough to poll."""
        return self._in_use.current()

    def current(self) -> Manifest | None:
        """The adapter in use, None for the plain draft. Raises AdaptiveError if its folder is missing."""
        current = self.current_id()
        return None if current is None else self.show(current)

    def fallback(self) -> str | None:
        """Id of the adapter that a rollback returns to: the last whole one in use before. None: the plain draft."""
        return self._in_use.whole(self._in_use.fallbacks(self.current_id()))

    def list(self) -> tuple[Manifest, ...]:
        """Every adapter whose manifest can be read, oldest first."""
        return manifests(self.root)

    def trained(self) -> tuple[Trained, ...]:
        """Every adapter of ``list`` and every pruned one, oldest first."""
        found = {one.id: one for one in (*read_pruned(self.root), *map(Trained.of, self.list()))}
        return tuple(sorted(found.values(), key=lambda one: int(one.id)))

    def last_record(self) -> int:
        """The newest log record that any adapter was trained on, 0 for none; its id must not be used again."""
        return max((one.last_record for one in self.trained()), default=0)

    def damaged(self) -> tuple[str, ...]:
        """Folders that ``list`` leaves out: set aside, or with an unreadable manifest."""
        readable = {manifest.id for manifest in self.list()}
        return tuple(name for name in numbered(self.root) if name not in readable)

    def show(self, name: str) -> Manifest:
        """One adapter's manifest; ``7`` means ``0007``.

        Raises AdaptiveError for an unknown id, DamagedAdapter if the manifest cannot be read.
        """
        return read_manifest(self.path(name))

    def path(self, name: str) -> Path:
        """Folder of an adapter, for PEFT or ``MergedAdapter``. Raises AdaptiveError for an unknown id."""
        known = ids(self.root)
        full = name.zfill(4) if name.isdecimal() else name
        if full not in known:
            there = f"there are {', '.join(known)}" if known else "there are none yet"
            raise AdaptiveError(f"no adapter {name!r} in {self.root}; {there}")
        return self.root / full

    def verify(self, name: str) -> Manifest:
        """Hash every file of an adapter and return its manifest.

        Raises DamagedAdapter, which names the missing, changed or pickled file, or AdaptiveError for
        an unknown id.
        """
        return verify_folder(self.path(name))

    def publish(self, write: Callable[[Path], None], new: NewAdapter) -> Manifest:
        """Add a candidate. ``write`` fills the folder that it gets, as ``PeftModel.save_pretrained`` does.

        An exception in ``write`` or a kill leaves no adapter.

        Raises AdaptiveError if ``write`` left no complete adapter in safetensors, or the store
        cannot be written.
        """
        from safetensors import SafetensorError

        self._create()
        folder = None
        try:
            folder = files.unfinished(self.root)
            folder.mkdir(mode=0o700)
            write(folder)
            check_written(folder, new.kind)
            hashes = {}
            for name in files.files_below(folder):
                os.chmod(folder / name, 0o600)
                files.flush(folder / name)
                hashes[name] = files.sha256(folder / name)
            with self._changing():
                manifest = self._manifest(new, hashes)
                files.write_text(folder / MANIFEST, manifest.to_json())
                files.flush(folder)
                os.rename(folder, self.root / manifest.id)
                files.flush(self.root)
            return manifest
        except (OSError, SafetensorError) as error:  # safetensors has an error of its own for a full disk
            raise self._unwritable(error) from error
        finally:
            if folder is not None:
                files.finished(folder)

    def promote(self, name: str, reason: str, over: Collection[str | None] | None = None) -> Manifest:
        """Put an adapter in use. The previous one is kept, and a rollback returns to it. ``over``: the ids (None: the
        plain draft) of which one must be in use.

        Raises DamagedAdapter if it is not whole, AdaptiveError for an unknown id, InUseChanged if another is in use.
        """
        name = self.verify(name).id
        with self._changing():
            before = self.current_id()
            if over is not None and before not in over:
                raise InUseChanged(f"adapter {before or 'none'} has come into use; {name} does not replace it")
            return self._in_use.promote(name, reason)

    def kept_nothing(self, seconds: float) -> None:
        """Note a training run of so many seconds that has published no adapter, for ``training_seconds``."""
        with self._changing():
            known, newest = read_unkept(self.root), max(map(number, numbered(self.root)), default=0)
            write_unkept(self.root, known | {newest: known.get(newest, 0.0) + seconds})

    def reject(self, name: str, reason: str) -> Manifest:
        """Mark an adapter as rejected. Raises AdaptiveError for the one in use, or an unknown id."""
        name = self.path(name).name
        with self._changing():
            if name == self.current_id():
                raise AdaptiveError(f"adapter {name} is in use; `adaptive adapters rollback` takes it out of use")
            return self._in_use.write_status(name, "rejected", reason)

    def rollback(self, reason: str, of: str | None = None) -> Manifest | None:
        """Take the adapter in use out of use and return to the last whole one before it. ``of``: the id that must be in
        use.

        Returns the manifest of that one, None for the plain draft. Raises AdaptiveError
        if no adapter is in use, InUseChanged if another is.
        """
        with self._changing():
            before = self.current_id()
            if of is not None and before != of:
                raise InUseChanged(f"adapter {before or 'none'} has come into use; {of} is in use no more")
            if before is None:
                raise AdaptiveError(f"no adapter is in use in {self.root}; there is nothing to roll back")
            after = self._in_use.roll_back(before, reason)
        return None if after is None else self.show(after)

    def usable(self, base: BaseDraft | None) -> tuple[Manifest | None, Lines]:
        """The adapter to load at a start, and one line for each problem found. Never raises for damage.

        A damaged adapter is set aside as ``0007.damaged`` and the last good one comes into use, or the
        plain draft. In place of one that cannot be read now they are returned, and nothing is changed. An adapter of
        other weights than ``base`` is not used; None skips this check.

        Raises UnreadableStore; whatever adapter is in memory should then stay in use, and the next try may succeed.
        """
        problems: Lines = []
        refused: set[str] = set()
        current = self.current_id()
        if current is None and self._in_use.garbled():
            current = self._mend_current()
            problems.append(f"{self.root / CURRENT} named no adapter; {_instead(current)}")
        while current is not None:
            try:
                manifest = self.verify(current)
            except UnreadableStore:
                raise
            except UnreadableAdapter as problem:  # it may be whole, and readable a moment later
                refused.add(current)
                current = next((one for one in self._in_use.fallbacks(current) if one not in refused), None)
                problems.append(f"{problem}; {_instead(current)}")
                continue
            except AdaptiveError as damage:
                refused.add(current)
                current, aside = self._set_aside(current, refused)
                problems.append(f"{damage}; {aside}{_instead(current)}")
                continue
            if base is not None and manifest.base.weights != base.weights:
                problems.append(
                    f"adapter {current} was trained for other weights (of {manifest.base.id}) than the draft's "
                    f"({base.id}); {_instead(None)}"
                )
                return None, problems
            return manifest, problems
        return None, problems

    def unreadable(self, usable: Manifest | None) -> UnreadableAdapter | None:
        """The reason why the adapter in use is not the ``usable`` one, if it is that it cannot be read now; else None.
        It may be whole, so its successor must not be chosen yet, and the next look may find it. Raises
        UnreadableStore."""
        current = self.current_id()
        if current is None or (usable is not None and usable.id == current):
            return None
        try:
            self.verify(current)
        except UnreadableAdapter as problem:
            return problem
        except UnreadableStore:
            raise
        except AdaptiveError:  # ``usable`` has said so
            pass
        return None

    def prune(self, keep: int, spare: Callable[[Manifest], bool] | None = None) -> tuple[str, ...]:
        """Delete all but the newest ``keep`` adapters, the one in use and the one a rollback would return to. With
        ``spare``, only adapters with a readable manifest for which it returns False.

        Returns the names that were deleted (set-aside ones with their ending). Raises AdaptiveError
        for ``keep`` below 1: the newest is kept, so that no id is used twice.
        """
        if keep < 1:
            raise AdaptiveError(f"keep is {keep}; it must be at least 1, the newest adapter always stays")
        if not self.root.is_dir():
            return ()
        back = self._back(keep)  # hashes whole adapters, so before the lock
        with self._changing():
            known = {manifest.id: manifest for manifest in self.list()}
            doomed = tuple(
                name
                for name in self._needless(keep, back)
                if spare is None or (name in known and not spare(known[name]))
            )
            self._delete(doomed, [Trained.of(known[name]) for name in doomed if name in known])
        return doomed

    def prunable(self, keep: int) -> tuple[str, ...]:
        """The names that ``prune`` would delete."""
        return self._needless(keep, self._back(keep))

    def _back(self, keep: int) -> str | None:
        """The adapter that a rollback would return to, unless it stays anyway as one of the newest."""
        return self.fallback() if len(ids(self.root)) > keep else None

    def _needless(self, keep: int, back: str | None) -> tuple[str, ...]:
        names, current = numbered(self.root), self.current_id()
        if current is None and self._in_use.garbled():
            current = self._in_use.lost()  # which ``usable`` brings into use again
        needed = {*ids(self.root)[-keep:], *names[-1:], current, back, *self._in_use.fallbacks(current)[:1]}
        return tuple(name for name in names if name not in needed)

    def export(self, name: str, destination: Path, force: bool = False) -> Path:
        """Copy an adapter as a plain PEFT folder (with its manifest) to ``destination``.

        Raises AdaptiveError if ``destination`` is not empty and ``force`` is not set (with it,
        files of the same name are replaced and others stay), or cannot be written; DamagedAdapter.
        """
        manifest = self.verify(name)
        check_destination(destination, force)
        try:
            with filling(destination):
                for file in [*manifest.files, MANIFEST]:
                    (destination / file).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(self.root / manifest.id / file, destination / file)
        except OSError as error:
            raise AdaptiveError(f"{destination} cannot be written ({error.strerror}); choose another folder") from error
        return destination

    def _create(self) -> None:
        try:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise self._unwritable(error) from error

    def _unwritable(self, error: Exception) -> AdaptiveError:
        exhausted = isinstance(error, OSError) and error.errno in EXHAUSTED
        remedy = "free some room there, or choose another folder with --state-dir"
        return AdaptiveError(
            f"adapter store {self.root} cannot be written ({getattr(error, 'strerror', None) or error}); "
            f"{'try again in a moment' if exhausted else remedy}"
        )

    @contextmanager
    def _changing(self, timeout: float = CHANGE_TIMEOUT) -> Iterator[None]:
        """Hold the lock, with the store settled. Raises AdaptiveError if the lock or the change fails."""
        from filelock import FileLock, Timeout

        self._create()
        try:
            with self._around, FileLock(self.root / LOCK, timeout=timeout, poll_interval=0.01, mode=0o600):
                files.sweep(self.root)
                self._in_use.settle()
                yield
        except Timeout as error:
            raise AdaptiveError(
                f"another process has held {self.root / LOCK} for {timeout:.0f} s; end it, then try again"
            ) from error
        except OSError as error:
            raise self._unwritable(error) from error

    def _manifest(self, new: NewAdapter, hashes: dict[str, str]) -> Manifest:
        """The manifest of ``new`` with the next free id. Set-aside and damaged folders keep their ids."""
        taken = map(number, numbered(self.root))
        return Manifest(
            id=f"{max(taken, default=0) + 1:04d}",
            parent=new.parent,
            created=time.time(),
            status="candidate",
            reason=new.reason,
            base=new.base,
            trained_on=new.trained_on,
            hyperparameters=new.hyperparameters,
            train_seconds=new.train_seconds,
            device=new.device,
            recent=new.recent,
            older=new.older,
            files=hashes,
            kind=new.kind,
        )

    def _mend_current(self) -> str | None:
        """Write the id that CURRENT must have named (not yet verified), as far as the store can be written."""
        lost = self._in_use.lost()
        with suppress(AdaptiveError), self._changing():
            if not self._in_use.garbled():  # another process has changed it since
                return self.current_id()
            self._in_use.write_current(lost)
        return lost

    def _set_aside(self, name: str, refused: set[str]) -> tuple[str | None, str]:
        """Rename a damaged folder and put the next one (not yet verified) in use. Returns that one and a message."""
        after = next((one for one in self._in_use.fallbacks(name) if one not in refused), None)
        try:
            with self._changing():
                if self.current_id() == name:  # else another process has changed it since
                    self._in_use.write_current(after)
                else:
                    after = self.current_id()
                if not (self.root / name).is_dir():
                    return after, ""
                aside = self.root / f"{name}.damaged"
                while aside.exists():
                    aside = aside.with_name(f"{aside.name}-again")
                os.rename(self.root / name, aside)
                files.flush(self.root)
                return after, f"set aside as {aside.name}; "
        except AdaptiveError:
            return after, "it could not be set aside; "

    def _delete(self, names: Collection[str], figures: Collection[Trained]) -> None:
        """Delete folders. The ``figures`` of their adapters are written before, so that a kill loses none, and after,
        where the disk was too full before."""
        if not names:
            return
        gone = {one.id for one in figures}
        pruned = [*(one for one in read_pruned(self.root) if one.id not in gone), *figures]
        with suppress(OSError):
            write_pruned(self.root, pruned)
        for name in names:
            temporary = files.unfinished(self.root)
            os.rename(self.root / name, temporary)  # first, so that no half-deleted adapter has an id
            files.finished(temporary)
        write_pruned(self.root, pruned)
        self._in_use.write_previous(self._in_use.previous())


def training_seconds(store: AdapterStore) -> float:
    """Seconds of all training runs of the store, those of rejected and pruned adapters and of none included.

    An adapter that was not judged comes from a run that was stopped. Its seconds include those of the runs that it
    continued, and are part of those of the run that continues it.
    """
    runs = [(int(one.id), one.judged, one.seconds) for one in store.trained()]
    runs += [(newest, True, seconds) for newest, seconds in read_unkept(store.root).items()]
    total = since = 0.0
    for _, over, seconds in sorted(runs, key=lambda run: run[0]):  # those of none stay behind the adapter before them
        if over:
            total, since = total + seconds, 0.0
        else:
            since = max(since, seconds)
    return total + since


def _instead(current: str | None) -> str:
    return f"adapter {current} is used" if current else "the draft without an adapter is used"
