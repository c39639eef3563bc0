"""What a pair takes of the disk and, in a server, of memory."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from adaptive.printable import counted
from adaptive.state import PairState, existing_states

if TYPE_CHECKING:
    from adaptive.service.engine import Opened


@dataclass(frozen=True)
class Size:
    """A name for people, and bytes."""

    name: str
    bytes: int


@dataclass(frozen=True)
class Storage:
    """``folder`` begins with ~ in a home folder. ``memory`` is empty, and ``memory_free`` None, where no server runs;
    the free bytes are the machine's."""

    folder: str
    disk: tuple[Size, ...]
    disk_free: int
    memory: tuple[Size, ...] = ()
    memory_free: int | None = None


def on_disk(state: PairState) -> Storage:
    """The parts of the pair's folder, and what other pairs have beside it."""
    parts = (
        ("answers", state.root.glob("records.db*")),
        ("adapters", [state.adapters]),
        ("hidden features of answers, for heads", [state.features]),
        ("an interrupted training run", [state.training]),
        ("what was typed in the chat", [state.typed]),
    )
    sizes = [Size(name, sum(map(_bytes, places))) for name, places in parts]
    sizes.append(Size("everything else of this pair", _bytes(state.root) - sum(one.bytes for one in sizes)))
    others = [other.root for other in existing_states(state.root.parent) if other.root != state.root]
    pairs = f"{counted(len(others), 'other pair')} of models"
    sizes.append(Size(pairs, sum(map(_bytes, others))))
    free = shutil.disk_usage(state.root).free
    return Storage(_short(state.root), tuple(size for size in sizes if size.bytes > 0), free)


def _short(folder: Path) -> str:
    """Without whose home folder it is in, which a report that is passed on need not tell."""
    home = Path.home()
    return f"~/{folder.relative_to(home)}" if folder.is_relative_to(home) else str(folder)


def with_memory(storage: Storage, session: Opened | None) -> Storage:
    """What this process and its training process take, too, and which part of it is caches and indexes."""
    process = psutil.Process()
    training = sum(_resident(child) for child in process.children(recursive=True))
    sizes = [Size("the server, models included", _resident(process)), Size("the training process", training)]
    if session is not None:
        sizes.append(Size("caches of conversations, within it", session.assistant.conversations.nbytes))
        history = session.assistant.history
        if history is not None and history.archive is not None:
            sizes.append(Size("the index of what was said, within it", history.archive.nbytes))
    found = tuple(size for size in sizes if size.bytes > 0)
    return Storage(storage.folder, storage.disk, storage.disk_free, found, int(psutil.virtual_memory().available))


def _resident(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.Error:  # it has just ended
        return 0


def _bytes(place: Path) -> int:
    """Of a file, or of all files below a folder; 0 for what is not there any more."""
    try:
        if place.is_dir() and not place.is_symlink():
            return sum(map(_bytes, _inside(place)))
        return place.lstat().st_size
    except OSError:
        return 0


def _inside(folder: Path) -> Iterable[Path]:
    return list(folder.iterdir())
