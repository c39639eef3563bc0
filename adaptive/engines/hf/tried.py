"""Keeps in the state folder what the test of a model's passes at loading (``guard.py``) has found, for ``adaptive
doctor``, which reads no weights."""

from __future__ import annotations

import contextlib
import hashlib
import json
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from checkpoints.files import replace_text

# The file in the state folder. Its keys are made of the checkpoint, how it is run, and the versions of the libraries.
FILE = "passes.json"
# The most results that are kept; the oldest are dropped.
MOST = 64


@dataclass(frozen=True)
class Tried:
    """``problem``: the reason why the model decodes plainly, in words that follow its name; None if it can use a
    draft."""

    problem: str | None


def keep(state: Path, folder: Path, how: str, problem: str | None) -> None:
    """Keep the result for the checkpoint in ``folder``, run in the way ``how``. Does nothing if ``state`` is not a
    folder or cannot be written."""
    here = _checkpoint(folder, how)
    known = {name: found for name, found in _read(state).items() if name != here}
    newest = dict([*known.items(), (here, problem)][-MOST:])
    if state.is_dir():
        with contextlib.suppress(OSError):
            replace_text(state, state / FILE, json.dumps(newest, indent=1))


def kept(state: Path, folder: Path, how: str) -> Tried | None:
    """The result of the last loading; None if there is none, or if the checkpoint or a library has changed since."""
    here, known = _checkpoint(folder, how), _read(state)
    return Tried(known[here]) if here in known else None


def _checkpoint(folder: Path, how: str) -> str:
    """A key for the checkpoint's files, by size and modification time, and for what computes with them."""
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
