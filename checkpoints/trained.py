"""What sums and counts over all adapters of a pair need of each one, also after it has been pruned.

In: manifests. Out: ``Trained``, and two files of the store. ``PRUNED`` has one line of JSON for each pruned adapter; a
line that cannot be read is passed over. ``UNKEPT`` is a JSON object with the seconds of the runs that kept no adapter,
by the number of the newest adapter before them; one that cannot be parsed is empty.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from checkpoints import files
from checkpoints.contents import small_file
from checkpoints.manifest import Manifest

PRUNED, UNKEPT = "PRUNED", "UNKEPT"


@dataclass(frozen=True)
class Trained:
    """An adapter's id, the seconds of its training, the newest log record that it was trained on (0: none), whether it
    was judged, and whether it was ever in use."""

    id: str
    seconds: float
    last_record: int
    judged: bool
    promoted: bool = False

    @classmethod
    def of(cls, manifest: Manifest) -> Trained:
        """The figures of an adapter that is still there."""
        return cls(
            manifest.id,
            manifest.train_seconds,
            manifest.trained_on.last_id or 0,
            judged=manifest.judged,
            promoted=manifest.status in ("promoted", "rolled_back"),
        )


def read_pruned(root: Path) -> list[Trained]:
    """The pruned adapters of the store in ``root``. Raises UnreadableStore."""
    lines = (small_file(root / PRUNED) or "").splitlines()
    return [one for one in map(_parsed, lines) if one is not None]


def write_pruned(root: Path, pruned: Iterable[Trained]) -> None:
    """Replace the file atomically. Raises OSError."""
    files.replace_text(root, root / PRUNED, "".join(f"{json.dumps(asdict(one))}\n" for one in pruned))


def read_unkept(root: Path) -> dict[int, float]:
    """The seconds of the runs that kept no adapter, by the newest adapter before them. Raises UnreadableStore."""
    try:
        said = json.loads(small_file(root / UNKEPT) or "{}")
        return {int(newest): float(seconds) for newest, seconds in said.items()}
    except (ValueError, TypeError, AttributeError):
        return {}


def write_unkept(root: Path, seconds: dict[int, float]) -> None:
    """Replace the file atomically. Raises OSError."""
    files.replace_text(root, root / UNKEPT, json.dumps(seconds))


def _parsed(line: str) -> Trained | None:
    try:
        said = json.loads(line)
        judged, promoted = bool(said["judged"]), bool(said.get("promoted", False))  # earlier versions did not write it
        return Trained(f"{int(said['id']):04d}", float(said["seconds"]), int(said["last_record"]), judged, promoted)
    except (ValueError, KeyError, TypeError):
        return None
