"""Which file is at the log's path, and how a connection to another one is given up."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sqlite3
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Place:
    """Identifies the file that was at the log's path when it was opened."""

    path: Path
    device: int
    inode: int

    @classmethod
    def of(cls, path: Path) -> Place:
        """The file that is at ``path`` now. Raises OSError if there is none."""
        found = os.stat(path)
        return cls(path, found.st_dev, found.st_ino)

    def holds(self) -> bool:
        """Whether the same file is still at the path."""
        try:
            return Place.of(self.path) == self
        except OSError:
            return False


def abandon(connection: sqlite3.Connection) -> None:
    """Give up the connection to a log that was moved, replaced or damaged; commits are first copied into its file.

    The connection is never closed: at the last close SQLite removes the write-ahead log by its name, which may by then
    be the name of another log's.
    """
    with contextlib.suppress(sqlite3.Error, UnicodeDecodeError):
        connection.execute("PRAGMA wal_checkpoint(PASSIVE)")
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(connection))
