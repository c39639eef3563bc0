"""Chooses the settings files, and limits the settings that a file in the current folder may set.

A file that is named (``--config``) or lies in the user's own settings folder may set everything. One in the current
folder may have come with somebody else's checkout: unless the user has accepted that very file, it cannot name models,
run code, or decide about data and access.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from adaptive.errors import AdaptiveError
from checkpoints import files

# Settings that a file in the current folder may set without consent: sampling, and use of the machine. A new setting
# needs a decision before it is added here. See ``doubtful`` for ``record``.
HARMLESS = frozenset(
    {
        "device", "draft_device", "dtype", "quantize", "draft_quantize", "memory", "cuda_graphs", "draft_length",
        "seed", "history", "slots",
        "max_new_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty",
        "frequency_penalty", "record", "name", "port", "queue", "max_body_mb", "cache_mb", "threads", "distill",
        "distill_after", "distill_idle_seconds", "distill_seconds", "distill_nice",
    }
)  # fmt: skip

# Contents of ``trusted.json``: the SHA-256 of each file that the user has accepted, by its absolute path.
_CONSENTS = TypeAdapter(dict[str, str])

# Characters of a value that the question shows.
SHOWN = 80


def user_folder() -> Path:
    """The platform's settings folder of this user."""
    import platformdirs

    return Path(platformdirs.user_config_dir("adaptive"))


def config_files(explicit: Path | None) -> tuple[Path, ...]:
    """The file of ``--config`` alone, else ``adaptive.toml`` in the user's settings folder and the one in the current
    folder, as far as they exist. A later file overrides an earlier one. Raises AdaptiveError."""
    if explicit is not None:
        if not explicit.is_file():
            what = "is not a file" if explicit.exists() else "does not exist"
            raise AdaptiveError(f"settings file {explicit} {what}")
        return (explicit,)
    candidates = {path.resolve(): path for path in (user_folder() / "adaptive.toml", Path("adaptive.toml"))}
    return tuple(path for path in candidates.values() if path.is_file())


def doubtful(file: Path, written: dict[str, Any], overridden: Collection[str]) -> dict[str, Any]:
    """The settings of a ``file`` in the current folder that need the user's consent: those in use (not ``overridden``
    by a flag or the environment) and not HARMLESS, unless the user has accepted this file. ``record`` is harmless only
    where it is switched off: the user's own file may have switched it off."""
    own = user_folder().resolve() in (file.parent.resolve(), file.resolve().parent)  # also a link to or from there
    if own or _known().get(str(file.resolve())) == _digest(file):
        return {}
    harmless = HARMLESS if written.get("record", False) is False else HARMLESS - {"record"}
    return {name: value for name, value in written.items() if name not in harmless and name not in overridden}


def require_consent(file: Path, found: dict[str, Any], ask: Callable[[str], bool] | None) -> None:
    """Put one question to the user through ``ask``, and remember a yes until the file changes.

    Raises AdaptiveError if the answer is no, or if ``ask`` is None.
    """
    if not found:
        return
    said = ", ".join(f"{name} = {_shown(name, value)}" for name, value in found.items())
    about = f"{file.resolve()}, found in the current folder, sets {said}"
    if ask is None or not ask(
        f"{about}. That can choose other models, run code that comes with them, or decide where your data go. "
        "Use it, now and until the file changes?"
    ):
        raise AdaptiveError(
            f"{about}, which is taken only from your own settings; if you trust it, name it with --config {file}"
        )
    _remember(file)


def _shown(name: str, value: Any) -> str:
    """A value as a message shows it: not that of a key, even where the setting's name is misspelt."""
    return "****" if "key" in name.lower() and not name.endswith("_file") else repr(str(value)[:SHOWN])


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
    except OSError:  # the question will be repeated
        return
