"""Models on the hub. Each name is resolved once, to one commit, which stays its meaning until the process ends.

A revision such as ``main`` may move at any time. A process passes its resolved names to the processes that it starts
(``resolved``, ``adopt``), so that both use the same weights.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from pathlib import Path

from adaptive.errors import AdaptiveError, first_line

# (name, requested revision) -> the folder or file of one commit.
_found: dict[tuple[str, str | None], Path] = {}
_lock = threading.Lock()

# Files of a hub checkpoint to download: config, tokenizer, chat template, code, and weights in the format of
# transformers. Not the same weights in formats for other programs (Mistral's own file, ONNX), which may double a
# download.
FETCHED = ["*.json", "*.safetensors", "*.model", "*.txt", "*.tiktoken", "*.jinja", "*.py"]
NOT_FETCHED = ["consolidated*", "onnx/*", "original/*", "openvino/*", "coreml/*"]


def hub_folder(name: str, revision: str | None) -> Path:
    """The local folder of the repository ``name``, downloaded if it is missing. Raises AdaptiveError."""

    def fetch() -> str:
        from huggingface_hub import snapshot_download

        return snapshot_download(name, revision=revision, allow_patterns=FETCHED, ignore_patterns=NOT_FETCHED)

    return _once(name, revision, f"no folder {name} here", fetch)


def hub_file(repository: str, file: str, revision: str | None) -> Path:
    """One file of a repository, downloaded if it is missing. Raises AdaptiveError."""

    def fetch() -> str:
        from huggingface_hub import hf_hub_download

        return hf_hub_download(repository, file, revision=revision)

    name = f"{repository}/{file}"
    return _once(name, revision, f"no file {name} here", fetch)


def resolved() -> list[tuple[str, str | None, str]]:
    """All names resolved so far: (name, requested revision, path), as plain JSON values."""
    with _lock:
        return [(name, revision, str(path)) for (name, revision), path in _found.items()]


def adopt(known: Iterable[tuple[str, str | None, str]]) -> None:
    """Resolve names as the process did whose ``resolved`` is given."""
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
