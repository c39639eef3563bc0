"""Reads what the folder of an adapter store holds: its small files, the names of its adapters, and their manifests.

What is missing is empty. What cannot be read now raises UnreadableStore: were it taken for empty, one failed read would
change which adapter is in use.
"""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

from checkpoints.folder import DamagedAdapter, UnreadableStore, read_manifest
from checkpoints.manifest import Manifest

_ID = re.compile(r"\d{4,}$", re.ASCII)
_NUMBERED = re.compile(r"(\d{4,})(\.damaged.*)?$", re.ASCII)


def is_id(name: str) -> bool:
    """Whether ``name`` can be the id of an adapter."""
    return _ID.match(name) is not None


def number(name: str) -> int:
    """The number of an adapter, also of one that was set aside."""
    return int(name.split(".")[0])


def small_file(path: Path) -> str | None:
    """The text of a file of the store; None if there is no such file. Raises UnreadableStore."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise _unreadable(str(path), error) from error


def numbered(root: Path) -> list[str]:
    """Names of all adapters in ``root``, also of those that were set aside, in order. Raises UnreadableStore."""
    try:
        names = [path.name for path in root.iterdir() if _NUMBERED.match(path.name)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise _unreadable(f"adapter store {root}", error) from error
    return sorted(names, key=lambda name: (number(name), name))


def ids(root: Path) -> tuple[str, ...]:
    """Ids of the adapters in ``root``, oldest first. Raises UnreadableStore."""
    try:
        return tuple(name for name in numbered(root) if is_id(name) and (root / name).is_dir())
    except OSError as error:
        raise _unreadable(f"adapter store {root}", error) from error


def manifests(root: Path) -> tuple[Manifest, ...]:
    """The manifests of the adapters in ``root`` that have a readable one, oldest first. Raises UnreadableStore."""
    found = []
    for name in ids(root):
        with suppress(DamagedAdapter):
            found.append(read_manifest(root / name))
    return tuple(found)


def _unreadable(what: str, error: OSError) -> UnreadableStore:
    return UnreadableStore(f"{what} cannot be read ({error.strerror})")
