"""The findings of ``adaptive doctor``, one per line of the report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Finding:
    """One line of the report. ``note``: something is slower or missing; ``broken``: something that is needed fails."""

    group: Literal["machine", "packages", "used"]
    name: str
    status: Literal["ok", "note", "broken"]
    value: str
    advice: str = ""
