"""What sums and counts over all adapters of a pair need of each one, also after it has been pruned.

In: manifests. Out: ``Trained``, and the file ``PRUNED`` of the store with one line of JSON for each pruned adapter.
A line that cannot be read is passed over.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from checkpoints import files
from checkpoints.contents import small_file
from checkpoints.manifest import Manifest

PRUNED = "PRUNED"


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


def _parsed(line: str) -> Trained | None:
    try:
        said = json.loads(line)
        judged, promoted = bool(said["judged"]), bool(said.get("promoted", False))  # earlier versions did not write it
        return Trained(f"{int(said['id']):04d}", float(said["seconds"]), int(said["last_record"]), judged, promoted)
    except (ValueError, KeyError, TypeError):
        return None
