"""Removes files so that nothing of their contents stays on the disk, and the damaged logs that were set aside.

A file gets another name first, by which the next process finds it if this one is killed.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable
from pathlib import Path

# Bytes overwritten at a time.
ZEROS = 1 << 20

# How the name of a file begins that is to be overwritten and removed.
DELETED = ".deleted-"


def overwrite_and_remove(file: Path) -> None:
    """Rename a file, overwrite it and remove it. If the process is killed meanwhile, ``remove_deleted`` goes on."""
    if not file.exists():
        return
    doomed = mark_deleted(file)  # first, so that a process that opens the log now does not read zeros
    with doomed.open("r+b") as stream:
        size = stream.seek(0, os.SEEK_END)
        stream.seek(0)
        with contextlib.suppress(OSError):
            for start in range(0, size, ZEROS):
                stream.write(bytes(min(ZEROS, size - start)))
            stream.flush()
            os.fsync(stream.fileno())
        if not doomed.name.endswith("-shm"):  # other processes have -shm mapped, and would crash if it were truncated
            stream.truncate(0)  # frees its blocks even while another process has the file open
    doomed.unlink(missing_ok=True)


def mark_deleted(file: Path) -> Path:
    """Give a file a name by which ``remove_deleted`` finds it, and return that."""
    if file.name.startswith(DELETED):
        return file
    ending = "-shm" if file.name.endswith("-shm") else ""
    return file.replace(file.with_name(f"{DELETED}{secrets.token_hex(8)}{ending}"))


def remove_deleted(folder: Path, stop: Callable[[], bool] = lambda: False) -> bool:
    """Overwrite and remove the files in ``folder`` that were marked, here or by processes that were killed since, until
    ``stop`` returns True. Returns whether all are removed."""
    for file in folder.glob(f"{DELETED}*"):
        if stop():
            return False
        with contextlib.suppress(FileNotFoundError):  # another process removes it
            overwrite_and_remove(file)
    return True


def set_aside_logs(path: Path) -> list[Path]:
    """Damaged logs that were set aside beside ``path``, and their write-ahead logs."""
    return sorted(path.parent.glob(f"{path.name}.damaged*"))


def forget_set_aside(path: Path, before: float) -> int:
    """Remove the damaged logs beside ``path`` that were last written before ``before`` (epoch seconds). Returns the
    number of files. Raises OSError."""
    old = [file for file in set_aside_logs(path) if file.stat().st_mtime < before]
    for file in old:
        remove_set_aside(path, file)
    remove_deleted(path.parent)  # what a process left that was killed here
    return len(old)


def remove_set_aside(path: Path, file: Path) -> None:
    """Overwrite and remove one of ``set_aside_logs``. If it is the log in use under a second name, because a process
    was killed before it had replaced the log, only the name is removed."""
    live = path.with_name(path.name + ("-wal" if file.name.endswith("-wal") else ""))
    if live.exists() and live.samefile(file):
        file.unlink()
    else:
        overwrite_and_remove(file)
