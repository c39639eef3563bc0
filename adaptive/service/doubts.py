"""What live acceptance has put in doubt, kept beside the adapter store so that it is judged again after a restart, too.

In: the adapter that was rolled back. Out: ``doubts.json``, replaced in one step; a damaged file is as none.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from checkpoints import files


@dataclass(frozen=True)
class Doubts:
    """``adapter`` is to be judged once more on the answers of the log since its ``first`` (ids); None: nothing is.
    Live acceptance of answers up to ``settled`` says nothing any more: a rollback or its review has decided on them."""

    adapter: str | None = None
    first: int = 0
    settled: int = 0

    @classmethod
    def load(cls, file: Path) -> Doubts:
        """Those in ``file``; none where it is not there or cannot be read."""
        try:
            stored = json.loads(file.read_text(encoding="utf-8"))
            adapter = stored["adapter"]
            return cls(None if adapter is None else str(adapter), int(stored["first"]), int(stored["settled"]))
        except (OSError, ValueError, KeyError, TypeError):
            return cls()

    def save(self, file: Path) -> None:
        """Replace ``file``. Raises OSError where that cannot be; it is then as it was."""
        files.replace_text(file.parent, file, json.dumps(asdict(self)))
