"""What commands write to standard output: on a terminal without control characters that came with their data."""

from __future__ import annotations

import json
import sys
from typing import Any

from adaptive.printable import printable


def shown(text: str) -> str:
    """``text`` as standard output gets it: as it is, or, on a terminal, without controls."""
    return printable(text) if sys.stdout.isatty() else text


def print_json(value: Any, indent: int | None = None) -> None:
    """Print a JSON value in any script's own letters."""
    print(shown(json.dumps(value, indent=indent, ensure_ascii=False)), flush=True)
