"""Reads and writes ``server.json`` in the folder of a pair: the address of the server that serves the pair."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel

from adaptive.state import existing_states
from checkpoints import files


class Notice(BaseModel):
    """The contents of ``server.json``; ``since`` in seconds since the epoch."""

    pid: int
    url: str
    since: float


@dataclass(frozen=True)
class Server:
    """A running server; ``pair`` is the name of the pair's folder."""

    pair: str
    pid: int
    url: str


def place(root: Path) -> Path:
    """The path of ``server.json`` in the pair's folder ``root``."""
    return root / "server.json"


def write(root: Path, url: str) -> None:
    """Record that this process serves the pair at ``url``. Raises OSError."""
    text = Notice(pid=os.getpid(), url=url, since=time.time()).model_dump_json()
    files.replace_text(root, place(root), text)


def read(root: Path) -> Notice | None:
    """The notice in the folder ``root``; None if it is missing or cannot be read."""
    try:
        return Notice.model_validate_json(place(root).read_bytes())
    except (OSError, ValueError):  # pydantic's error is a ValueError
        return None


def servers(state_dir: Path) -> list[Server]:
    """All running servers of pairs in this state folder. Raises AdaptiveError if the folder cannot be read."""
    from filelock import FileLock, Timeout

    found = []
    for state in existing_states(state_dir):
        notice = read(state.root)
        if notice is None:
            continue
        try:
            with FileLock(state.root / "server.lock", timeout=0, mode=0o600):
                continue  # the lock is free: the notice is left from a killed server
        except Timeout:
            found.append(Server(state.root.name, notice.pid, notice.url))
        except OSError:  # another user's folder
            continue
    return found
