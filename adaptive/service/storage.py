"""Measures the disk space of a pair and, in a server, its memory."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from adaptive.machine import memory
from adaptive.printable import counted
from adaptive.state import PairState, existing_states

if TYPE_CHECKING:
    from adaptive.opened import OpenedPair


@dataclass(frozen=True)
class Size:
    """A name for display, and bytes."""

    name: str
    bytes: int


@dataclass(frozen=True)
class Storage:
    """Sizes by kind. ``folder`` begins with ~ if it is in the home folder. ``disk_free`` and ``memory_free`` are the
    machine's free bytes. Without a server ``memory`` is empty and ``memory_free`` None."""

    folder: str
    disk: tuple[Size, ...]
    disk_free: int
    memory: tuple[Size, ...] = ()
    memory_free: int | None = None


def on_disk(state: PairState) -> Storage:
    """The parts of the pair's folder, and the total of the other pairs."""
    parts = (
        ("answers", state.root.glob("records.db*")),
        ("adapters", [state.adapters]),
        ("hidden features of answers, for heads", [state.features]),
        ("an interrupted training run", [state.training, state.replays]),
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
    """The path with ~ for the home folder, so that a shared report does not show the user's name."""
    home = Path.home()
    return f"~/{folder.relative_to(home)}" if folder.is_relative_to(home) else str(folder)


def with_memory(storage: Storage, session: OpenedPair | None) -> Storage:
    """``storage`` with the memory of this process and its training process, and the caches and indexes in it."""
    process = psutil.Process()
    training = sum(_resident(child) for child in process.children(recursive=True))
    sizes = [Size("the server, models included", _resident(process)), Size("the training process", training)]
    if session is not None:
        sizes.append(Size("caches of conversations, within it", session.assistant.conversations.nbytes))
        history = session.assistant.history
        if history is not None and history.archive is not None:
            sizes.append(Size("the index for history drafting, within it", history.archive.nbytes))
    found = tuple(size for size in sizes if size.bytes > 0)
    return Storage(storage.folder, storage.disk, storage.disk_free, found, memory().available)


def _resident(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.Error:  # the process has just ended
        return 0


def _bytes(place: Path) -> int:
    """The size of a file, or of all files below a folder; 0 if it does not exist any more."""
    try:
        if place.is_dir() and not place.is_symlink():
            return sum(map(_bytes, _inside(place)))
        return place.lstat().st_size
    except OSError:
        return 0


def _inside(folder: Path) -> Iterable[Path]:
    return list(folder.iterdir())
