"""Whether what was compiled is of the sources beside it."""

from __future__ import annotations

import hashlib
from pathlib import Path


def fingerprint(folder: Path) -> str | None:
    """Of the sources in ``folder``, as ``setup.py`` computes it; None where there are none, since an installed copy
    has only what was compiled with it. An editable installation has both, and ``git pull`` changes one of them."""
    sources = sorted(file for file in folder.glob("*") if file.suffix in (".h", ".cpp", ".map"))
    if not sources:
        return None
    digest = hashlib.sha256()
    for file in sources:
        digest.update(file.name.encode() + b"\0" + file.read_bytes().replace(b"\r\n", b"\n"))
    return digest.hexdigest()[:16]
