"""What was found when a model's passes were tried at loading (``guard.py``), kept in the state folder for ``adaptive
doctor``, which reads no weights."""

from __future__ import annotations

import contextlib
import hashlib
import json
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from checkpoints.files import replace_text

# What was found, in the state folder: by checkpoint, how it is run, and with what.
FILE = "passes.json"
# Checkpoints of which that is kept, the newest.
MOST = 64


@dataclass(frozen=True)
class Tried:
    """``problem``: why the model decodes plainly, in words that follow its name; None where it can be drafted for."""

    problem: str | None


def keep(state: Path, folder: Path, how: str, problem: str | None) -> None:
    """Keep what was found of the checkpoint in ``folder``, run in that way, where there is such a state folder."""
    here = _checkpoint(folder, how)
    known = {name: found for name, found in _read(state).items() if name != here}
    newest = dict([*known.items(), (here, problem)][-MOST:])
    if state.is_dir():
        with contextlib.suppress(OSError):
            replace_text(state, state / FILE, json.dumps(newest, indent=1))


def kept(state: Path, folder: Path, how: str) -> Tried | None:
    """What was found when it was last loaded; None where it was not yet, or is another one by now."""
    here, known = _checkpoint(folder, how), _read(state)
    return Tried(known[here]) if here in known else None


def _checkpoint(folder: Path, how: str) -> str:
    """A name for these files, by size and time, and for what computes with them."""
    files = sorted([*folder.glob("*.safetensors"), *folder.glob("*.py"), folder / "config.json"])
    digest = hashlib.sha256()
    for file in files:
        with contextlib.suppress(OSError):
            seen = file.stat()
            digest.update(f"{file.resolve()} {seen.st_size} {seen.st_mtime_ns}\n".encode())
    return f"{digest.hexdigest()[:16]} {how}; torch {version('torch')}, transformers {version('transformers')}"


def _read(state: Path) -> dict[str, str | None]:
    try:
        found = json.loads((state / FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(found, dict):
        return {}
    return {name: problem for name, problem in found.items() if problem is None or isinstance(problem, str)}
