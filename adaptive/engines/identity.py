"""Identifies the weights in a checkpoint's folder without reading all of them."""

from __future__ import annotations

import hashlib
from pathlib import Path

from adaptive.errors import AdaptiveError

# Bytes read at either end of a weights file to identify it: more than the whole safetensors header of the supported
# models. Training does not produce two checkpoints that differ only between the ends.
IDENTITY_BYTES = 1 << 20


def weights_hash(folder: Path, needed: bool = True, counted: bool = True) -> str:
    """A short hash of config, tokenizer and, if they are ``counted``, the weights' identity (names, sizes, first and
    last megabyte).

    Raises AdaptiveError if there are no weights and they are ``needed``.
    """
    digest = hashlib.sha256()
    weights = sorted(folder.glob("*.safetensors")) if counted else []
    if not weights and needed:
        raise AdaptiveError(f"{folder} holds no weights: there is no *.safetensors file in it")
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        if (folder / name).is_file():
            digest.update((folder / name).read_bytes())
    for file in weights:
        digest.update(f"{file.name} ".encode() + ends(file))
    return digest.hexdigest()[:16]


def ends(file: Path) -> bytes:
    """What identifies a file of weights: its size, first and last megabyte."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        first = stream.read(IDENTITY_BYTES)
        stream.seek(max(0, size - IDENTITY_BYTES))
        return f"{size}".encode() + first + stream.read(IDENTITY_BYTES)
