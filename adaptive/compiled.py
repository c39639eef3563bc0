"""A fingerprint of native sources, to tell whether a compiled library was built from the sources beside it."""

from __future__ import annotations

import hashlib
from pathlib import Path


def fingerprint(folder: Path) -> str | None:
    """The fingerprint of the sources in ``folder``, as ``setup.py`` computes it. None if there are no sources, as in an
    installed copy, which cannot differ from them. An editable installation has both, and ``git pull`` changes only the
    sources."""
    sources = sorted(file for file in folder.glob("*") if file.suffix in (".h", ".cpp", ".map"))
    if not sources:
        return None
    digest = hashlib.sha256()
    for file in sources:
        digest.update(file.name.encode() + b"\0" + file.read_bytes().replace(b"\r\n", b"\n"))
    return digest.hexdigest()[:16]
