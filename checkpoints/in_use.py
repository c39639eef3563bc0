"""Which adapter of a store is in use, and which were before: ``CURRENT``, ``PREVIOUS``, and the statuses in manifests.

``CURRENT`` has the id of the adapter in use, and ``PREVIOUS`` those that were in use before it, in that order, the
newest last. Changes are made by the holder of the store's lock, in steps such that a kill between any two leaves a
valid store:

* a promotion writes the status into the manifest, then the id that it replaces into ``PREVIOUS``, then ``CURRENT``. If
  the process is killed before that, the promotion has not happened, and ``settle`` corrects the manifest. At last an
  adapter that was in use before, and is again, leaves ``PREVIOUS``; if killed before that, ``settle`` does it;
* a rollback writes the status first, then ``CURRENT``; if killed between, ``settle`` finishes it.

Everything here raises UnreadableStore for what cannot be read now, and what writes raises OSError.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from checkpoints import files
from checkpoints.contents import ids, is_id, manifests, small_file
from checkpoints.folder import MANIFEST, DamagedAdapter, read_manifest, verify_folder
from checkpoints.manifest import INTERRUPTED, Manifest, Status

CURRENT = "CURRENT"
PREVIOUS = "PREVIOUS"


class InUse:
    """The adapter in use and those before it, of the store in ``root``."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def current(self) -> str | None:
        """Id of the adapter in use, None for the plain draft."""
        named = self._named()
        return named if named is not None and is_id(named) else None

    def garbled(self) -> bool:
        """Whether ``CURRENT`` is there, but names no adapter."""
        named = self._named()
        return named is not None and not is_id(named)

    def previous(self) -> list[str]:
        """Ids in use before, newest last; only those that still exist."""
        text, known = small_file(self.root / PREVIOUS) or "", ids(self.root)
        return [one for one in text.split() if one in known]

    def fallbacks(self, current: str | None) -> list[str]:
        """The ids to return to from ``current``, best first: those in use before it, then its ancestors."""
        known = {manifest.id: manifest for manifest in manifests(self.root)}
        promoted = {name for name, manifest in known.items() if manifest.status == "promoted"}
        chain = [one for one in reversed(self.previous()) if one in promoted]
        parent = known[current].parent if current in known else None
        while parent is not None and parent in promoted and parent not in chain:
            chain.append(parent)
            parent = known[parent].parent
        return [one for one in chain if one != current]

    def whole(self, names: Iterable[str]) -> str | None:
        """The first of ``names`` whose files are all as they were published."""
        for name in names:
            with suppress(DamagedAdapter):
                return verify_folder(self.root / name).id
        return None

    def lost(self) -> str | None:
        """The adapter that a garbled ``CURRENT`` must have named: promoted, and not replaced yet."""
        previous = self.previous()
        promoted = [one.id for one in reversed(manifests(self.root)) if one.status == "promoted"]
        unreplaced = [one for one in promoted if one not in previous]
        return next(iter([*unreplaced, *self.fallbacks(None)]), None)

    def promote(self, name: str, reason: str) -> Manifest:
        """Put an adapter in use in place of the one that is."""
        before = self.current()
        previous = [one for one in self.previous() if one != before]  # read first: it may fail
        promoted = self.write_status(name, "promoted", reason)
        if before != name:
            # ``name`` keeps its place in PREVIOUS until CURRENT has changed; readers skip it.
            self.write_previous(previous if before is None else [*previous, before])
            self.write_current(name)
            self._forget_replaced(name)
        return promoted

    def roll_back(self, name: str, reason: str) -> str | None:
        """Take ``name``, the adapter in use, out of use. Returns the id of the one that is in use then."""
        with suppress(DamagedAdapter):  # the folder or its manifest is missing: there is no status to write
            self.write_status(name, "rolled_back", reason)
        return self._return_from(name)

    def settle(self) -> None:
        """Finish a rollback and undo or finish a promotion that a killed process had begun."""
        known = manifests(self.root)
        current = self.current()
        for manifest in known:
            if manifest.id == current and manifest.status == "rolled_back":
                self._return_from(manifest.id)
            elif manifest.id == current and manifest.status != "promoted":
                self.write_status(manifest.id, "promoted", f"{CURRENT} names it; it was a {manifest.status}")
        if self.garbled() or (current is not None and not (self.root / PREVIOUS).exists()):
            return  # the adapter that was in use is unknown, so no promotion can be called interrupted
        current = self.current()
        self._forget_replaced(current)
        in_use = {current, *self.previous()}
        for manifest in known:
            if manifest.status == "promoted" and manifest.id not in in_use:
                self.write_status(manifest.id, "candidate", INTERRUPTED)

    def write_status(self, name: str, status: Status, reason: str) -> Manifest:
        """Write the status of an adapter into its manifest, and return that."""
        manifest = read_manifest(self.root / name).with_status(status, reason)
        files.replace_text(self.root, self.root / name / MANIFEST, manifest.to_json())
        return manifest

    def write_current(self, name: str | None) -> None:
        """Put an adapter in use, or the plain draft."""
        if name is None:
            (self.root / CURRENT).unlink(missing_ok=True)
            files.flush(self.root)
        else:
            files.replace_text(self.root, self.root / CURRENT, f"{name}\n")

    def write_previous(self, names: Sequence[str]) -> None:
        """Write which adapters were in use before."""
        files.replace_text(self.root, self.root / PREVIOUS, "".join(f"{name}\n" for name in names))

    def _named(self) -> str | None:
        text = small_file(self.root / CURRENT)
        return None if text is None else text.strip()

    def _return_from(self, before: str) -> str | None:
        """Put the predecessor of ``before`` back in use. CURRENT is written first, so PREVIOUS may be stale briefly."""
        after = self.whole(self.fallbacks(before))
        self.write_current(after)
        self.write_previous([one for one in self.previous() if one not in (before, after)])
        return after

    def _forget_replaced(self, current: str | None) -> None:
        """Take the adapter in use out of PREVIOUS, by which ``lost`` tells it from those that were replaced."""
        previous = self.previous()
        if current in previous:
            self.write_previous([one for one in previous if one != current])
