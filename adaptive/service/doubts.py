"""What live acceptance has put in doubt, kept beside the adapter store so that it is judged again after a restart, too.

In: the adapter that was rolled back. Out: ``doubts.json``, replaced in one step; a damaged file is as none.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import BaseModel

from checkpoints import files


class _File(BaseModel):
    """All of it is there, or the file is damaged."""

    adapter: str | None
    first: int
    settled: int


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
            return cls(**_File.model_validate_json(file.read_bytes()).model_dump())
        except (OSError, ValueError):  # pydantic's error is a ValueError
            return cls()

    def save(self, file: Path) -> None:
        """Replace ``file``. Raises OSError where that cannot be; it is then as it was."""
        files.replace_text(file.parent, file, _File(**asdict(self)).model_dump_json())
