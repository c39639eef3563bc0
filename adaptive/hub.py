"""Models of the hub: each name is resolved once, to one commit, and that is what it means until the process ends.

A revision such as ``main`` may move at any time. Whoever starts another process hands over what the names meant here
(``resolved``, ``adopt``), so that both have the same weights.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from pathlib import Path

from adaptive.errors import AdaptiveError, first_line

# (name, revision asked for) -> the folder or file of one commit.
_found: dict[tuple[str, str | None], Path] = {}
_lock = threading.Lock()

# What is fetched of a checkpoint on the hub: config, tokenizer, chat template, code, and weights as transformers wants
# them. Not the same weights again for other programs (Mistral's own file, ONNX), which may double a download.
FETCHED = ["*.json", "*.safetensors", "*.model", "*.txt", "*.tiktoken", "*.jinja", "*.py"]
NOT_FETCHED = ["consolidated*", "onnx/*", "original/*", "openvino/*", "coreml/*"]


def hub_folder(name: str, revision: str | None) -> Path:
    """The local folder of the repository ``name``, fetched where it is not there. Raises AdaptiveError."""

    def fetch() -> str:
        from huggingface_hub import snapshot_download

        return snapshot_download(name, revision=revision, allow_patterns=FETCHED, ignore_patterns=NOT_FETCHED)

    return _once(name, revision, f"no folder {name} here", fetch)


def hub_file(repository: str, file: str, revision: str | None) -> Path:
    """One file of a repository, fetched where it is not there. Raises AdaptiveError."""

    def fetch() -> str:
        from huggingface_hub import hf_hub_download

        return hf_hub_download(repository, file, revision=revision)

    name = f"{repository}/{file}"
    return _once(name, revision, f"no file {name} here", fetch)


def resolved() -> list[tuple[str, str | None, str]]:
    """What names of the hub have meant so far: (name, revision asked for, path), as plain JSON values."""
    with _lock:
        return [(name, revision, str(path)) for (name, revision), path in _found.items()]


def adopt(known: Iterable[tuple[str, str | None, str]]) -> None:
    """Let names mean what they meant in the process whose ``resolved`` this is."""
    with _lock:
        _found.update({(name, revision): Path(path) for name, revision, path in known})


def _once(name: str, revision: str | None, missing: str, fetch: Callable[[], str]) -> Path:
    with _lock:
        if (name, revision) not in _found:
            try:
                _found[name, revision] = Path(fetch())
            except Exception as error:
                raise AdaptiveError(f"{missing}, and fetching it from the hub failed: {first_line(error)}") from error
        return _found[name, revision]
