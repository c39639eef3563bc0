"""Atomic writes of files and folders: a killed process leaves either the old or the new one, never a part.

The name of every unfinished file starts with ``.tmp-``, and beside it is a lock file that its writer holds
while it lives. ``sweep`` removes those whose lock is free. Process ids would not do: other containers have their own.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from filelock import FileLock

# Bytes read at a time, the memory that hashing a large adapter takes. Too low only costs calls.
HASH_CHUNK = 1 << 20

UNFINISHED = ".tmp-"
# Names tried for an unfinished file. Its lock is only taken if ``sweep`` looks at it in that moment, or always, in a
# folder of the kernel's own.
TRIES = 100
# Seconds to wait for another process's change of a file, which is one small write. Too low: a change is kept back on a
# slow disk. Too high: a process that stands still while it holds the lock delays its caller.
CHANGE_S = 5.0
_mine: dict[Path, FileLock] = {}


def unfinished(root: Path) -> Path:
    """A fresh path in ``root`` for an unfinished file or folder; pass it to ``finished`` in the end.

    Raises OSError if ``root`` cannot be written, or if no file there can be locked.
    """
    from filelock import Timeout

    for _ in range(TRIES):
        path = root / f"{UNFINISHED}{secrets.token_hex(8)}"
        lock = _lock_of(path)
        with contextlib.suppress(Timeout):
            lock.acquire()
            if os.path.exists(lock.lock_file):
                _mine[path] = lock
                return path
            lock.release()  # removed by ``sweep`` between its creation and its locking
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


def finished(path: Path) -> None:
    """Forget an ``unfinished`` path, and remove the file or folder if it is still there (after a rename it is not)."""
    remove(path)
    lock = _mine.pop(path, None)
    if lock is not None:
        _release(lock)


@contextlib.contextmanager
def changing(file: Path) -> Iterator[None]:
    """Hold the lock under which the processes change ``file``. Raises OSError if it cannot be had."""
    from filelock import FileLock, Timeout

    lock = FileLock(file.with_suffix(".lock"), timeout=CHANGE_S, mode=0o600)
    try:
        lock.acquire()
    except Timeout as error:
        raise OSError(errno.EAGAIN, "another process holds its lock") from error
    try:
        yield
    finally:
        lock.release()


def _lock_of(path: Path) -> FileLock:
    from filelock import FileLock

    return FileLock(f"{path}.lock", timeout=0, mode=0o600, thread_local=False)


def _release(lock: FileLock) -> None:
    with contextlib.suppress(OSError):
        os.unlink(lock.lock_file)  # before the release, or another process could lock a file that is then removed
    lock.release()
    if os.name == "nt":  # Windows does not remove open files
        Path(lock.lock_file).unlink(missing_ok=True)


def remove(path: Path) -> None:
    """Remove a file or a folder with its contents, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def sweep(root: Path) -> None:
    """Remove the unfinished files and folders in ``root`` whose writers have ended."""
    paths = {Path(str(found).removesuffix(".lock")) for found in root.glob(f"{UNFINISHED}*")}
    if not paths:
        return
    from filelock import Timeout

    for path in paths:
        lock = _lock_of(path)
        with contextlib.suppress(Timeout, OSError):
            lock.acquire()
            remove(path)
            _release(lock)


def flush(path: Path) -> None:
    """Flush a file, or a folder's list of names, to the disk."""
    if path.is_dir() and os.name == "nt":  # Windows has no such call for folders
        return
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """Write a small private file (0600) and flush it."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8", newline="\n") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def replace_text(root: Path, path: Path, text: str) -> None:
    """Replace ``path`` with ``text`` atomically. ``root`` (same file system) holds the unfinished file."""
    temporary = unfinished(root)
    try:
        write_text(temporary, text)
        os.replace(temporary, path)
        flush(path.parent)
    finally:
        finished(temporary)


def sha256(path: Path) -> str:
    """Hex digest of a file. Raises OSError if it cannot be read."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(HASH_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def files_below(folder: Path) -> list[str]:
    """Names of all files below ``folder``, relative and with forward slashes, sorted. Raises OSError if a folder cannot
    be read, which ``Path.rglob`` takes for an empty one (Python 3.13)."""
    found = []
    for place, _, names in os.walk(folder, onerror=_fail):
        found += [(Path(place) / name).relative_to(folder).as_posix() for name in names]
    return sorted(found)


def _fail(error: OSError) -> None:
    raise error
