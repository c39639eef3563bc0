"""Remembers the adapter that live acceptance rolled back, so that the gate judges it again, also after a restart.

In: the adapter that was rolled back. Out: ``doubts.json``, replaced atomically; a damaged file counts as missing.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import BaseModel

from checkpoints import files


class _File(BaseModel):
    """The contents of the file; it is damaged if a field is missing."""

    adapter: str | None
    first: int
    settled: int


@dataclass(frozen=True)
class Doubts:
    """``adapter`` will be judged again on the log's answers from id ``first`` on, its first answer; None: no adapter.
    Live acceptance ignores answers up to id ``settled``: a rollback or its review has already used them."""

    adapter: str | None = None
    first: int = 0
    settled: int = 0

    @classmethod
    def load(cls, file: Path) -> Doubts:
        """Read ``file``; no doubts if it is missing or cannot be read."""
        try:
            return cls(**_File.model_validate_json(file.read_bytes()).model_dump())
        except (OSError, ValueError):  # pydantic's error is a ValueError
            return cls()

    def save(self, file: Path) -> None:
        """Replace ``file``. Raises OSError if that fails; the file is then unchanged."""
        files.replace_text(file.parent, file, _File(**asdict(self)).model_dump_json())
