"""Which settings file is read, and what one that merely lies in the current folder may set.

A file that was named (``--config``) or lies in the user's own config folder may set everything. One in the
current folder may have come with somebody else's checkout: there it names no model, runs no code and decides
nothing about data or doors, unless the user has said yes to that very file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from adaptive.errors import AdaptiveError
from checkpoints import files

# What a file of the current folder may set by itself: how text is sampled and how much of the machine is used. A new
# setting is not among them until somebody has thought about it.
HARMLESS = frozenset(
    {
        "device", "draft_device", "dtype", "quantize", "draft_quantize", "memory", "cuda_graphs", "draft_length",
        "seed", "history", "slots",
        "max_new_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty",
        "frequency_penalty", "record", "name", "port", "queue", "max_body_mb", "cache_mb", "threads", "distill",
        "distill_after", "distill_idle_seconds", "distill_seconds", "distill_nice",
    }
)  # fmt: skip

# What ``trusted.json`` holds: the SHA-256 of each file that the user has said yes to, by its absolute path.
_CONSENTS = TypeAdapter(dict[str, str])

# Shown of a value in the question: a name, not a page.
SHOWN = 80


def user_folder() -> Path:
    """The platform's folder for the user's own settings."""
    import platformdirs

    return Path(platformdirs.user_config_dir("adaptive"))


def config_file(explicit: Path | None) -> Path | None:
    """``--config``, else ``adaptive.toml`` here, else the one in the platform's config folder."""
    if explicit is not None:
        if not explicit.is_file():
            raise AdaptiveError(f"config file {explicit} does not exist")
        return explicit
    for candidate in (Path("adaptive.toml"), user_folder() / "adaptive.toml"):
        if candidate.is_file():
            return candidate
    return None


def doubtful(file: Path, written: dict[str, Any], overridden: Collection[str]) -> dict[str, Any]:
    """The settings of a ``file`` found in the current folder that need the user's word: those in use (not
    ``overridden`` by a flag or the environment) and not HARMLESS, unless the user has said yes to this file."""
    if file.resolve().parent == user_folder().resolve() or _known().get(str(file.resolve())) == _digest(file):
        return {}
    return {name: value for name, value in written.items() if name not in HARMLESS and name not in overridden}


def require_consent(file: Path, found: dict[str, Any], ask: Callable[[str], bool] | None) -> None:
    """Have ``ask`` put one question to the user, and remember a yes until the file changes.

    Raises AdaptiveError where the answer is no, or where nobody can be asked (``ask`` is None).
    """
    if not found:
        return
    said = ", ".join(f"{name} = {str(value)[:SHOWN]!r}" for name, value in found.items())
    about = f"{file.resolve()}, found in the current folder, sets {said}"
    if ask is None or not ask(
        f"{about}. That can choose other models, run code that comes with them, or decide where your data go. "
        "Use it, now and until the file changes?"
    ):
        raise AdaptiveError(
            f"{about}, which is taken only from your own settings; if you trust it, name it with --config {file}"
        )
    _remember(file)


def _consents() -> Path:
    return user_folder() / "trusted.json"


def _known() -> dict[str, str]:
    try:
        return _CONSENTS.validate_json(_consents().read_bytes())
    except (OSError, ValueError):  # pydantic's error is a ValueError
        return {}


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _remember(file: Path) -> None:
    target = _consents()
    known = {**_known(), str(file.resolve()): _digest(file)}
    try:
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        files.replace_text(target.parent, target, _CONSENTS.dump_json(known, indent=1).decode())
    except OSError:  # it will be asked again
        return
