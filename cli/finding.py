"""What ``adaptive doctor`` finds, a line each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Finding:
    """One line of the report. ``note`` costs something, ``broken`` stops something that is needed."""

    group: Literal["machine", "packages", "used"]
    name: str
    status: Literal["ok", "note", "broken"]
    value: str
    advice: str = ""


def size(count: int) -> str:
    """Bytes, for people."""
    return f"{count / 2**30:.1f} GiB"
