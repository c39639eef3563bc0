"""``server.json`` in the folder of a pair that is served: where the server is, for others to find."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel

from adaptive.state import existing_states
from checkpoints import files


class Notice(BaseModel):
    """What it says; ``since`` in seconds of Unix time."""

    pid: int
    url: str
    since: float


@dataclass(frozen=True)
class Server:
    """A server that runs, by the name of its pair's folder."""

    pair: str
    pid: int
    url: str


def place(root: Path) -> Path:
    """The notice of the pair whose folder is ``root``."""
    return root / "server.json"


def write(root: Path, url: str) -> None:
    """Say that this process serves the pair at ``url``. Raises OSError."""
    text = Notice(pid=os.getpid(), url=url, since=time.time()).model_dump_json()
    files.replace_text(root, place(root), text)


def read(root: Path) -> Notice | None:
    """What is noted there; None for nothing that can be read."""
    try:
        return Notice.model_validate_json(place(root).read_bytes())
    except (OSError, ValueError):  # pydantic's error is a ValueError
        return None


def servers(state_dir: Path) -> list[Server]:
    """Every server that runs on a pair of this state folder. Raises AdaptiveError where the folder cannot be read."""
    from filelock import FileLock, Timeout

    found = []
    for state in existing_states(state_dir):
        notice = read(state.root)
        if notice is None:
            continue
        try:
            with FileLock(state.root / "server.lock", timeout=0, mode=0o600):
                continue  # nobody holds it: what is noted is of a server that was killed
        except Timeout:
            found.append(Server(state.root.name, notice.pid, notice.url))
        except OSError:  # somebody else's folder
            continue
    return found
