"""Writing so that a killed process leaves either the old or the new, never half of one.

Everything unfinished carries a name that starts with ``.tmp-<pid>-``; ``sweep`` removes what dead
processes left.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import shutil
from pathlib import Path

# Read in pieces, so that hashing a large adapter holds this much memory (bytes). Smaller only costs calls.
HASH_CHUNK = 1 << 20

_UNFINISHED = re.compile(r"\.tmp-(\d+)-[0-9a-f]+$")
# What this process is writing now: its own pid is alive, so only this tells work from leftovers of an
# earlier process that had the same pid (in a container every run may).
_mine: set[Path] = set()


def unfinished(root: Path) -> Path:
    """A fresh path in ``root`` for something not yet whole; give it to ``finished`` when it is."""
    path = root / f".tmp-{os.getpid()}-{secrets.token_hex(4)}"
    _mine.add(path)
    return path


def finished(path: Path) -> None:
    """Forget an ``unfinished`` path, and remove what is still there (nothing, after a rename)."""
    remove(path)
    _mine.discard(path)


def remove(path: Path) -> None:
    """Remove a file or a folder with all in it, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def sweep(root: Path) -> None:
    """Remove the unfinished files and folders in ``root`` whose process is gone."""
    import psutil

    for path in list(root.glob(".tmp-*")):
        match = _UNFINISHED.match(path.name)
        if match is None or path in _mine:
            continue
        pid = int(match.group(1))
        if pid == os.getpid() or not psutil.pid_exists(pid):
            remove(path)


def flush(path: Path) -> None:
    """Bring a file, or a folder's list of names, to the disk itself."""
    if path.is_dir() and os.name == "nt":  # Windows has no such call for folders
        return
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """Write a small file of the user's own (0600) and flush it."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8", newline="\n") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def replace_text(root: Path, path: Path, text: str) -> None:
    """Replace ``path`` with ``text`` in one step. ``root`` (same file system) holds the unfinished file."""
    temporary = unfinished(root)
    try:
        write_text(temporary, text)
        os.replace(temporary, path)
        flush(path.parent)
    finally:
        finished(temporary)


def sha256(path: Path) -> str:
    """Hex digest of a file. Raises OSError where it cannot be read."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(HASH_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def files_below(folder: Path) -> list[str]:
    """Names of all files below ``folder``, relative and with forward slashes, sorted."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir())
