"""Caches of conversations on disk, so that a restarted server does not compute a long history again.

In: the target's sequences and their tokens. Out: private files in the pair's folder, within a limit of bytes (the least
recently used is removed first), and the file with the longest beginning of a prompt. A file is valid only for one way
to compute (dtype, kernels, layout). Damaged files are removed and ignored.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import shutil
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from adaptive.engines.protocol import KeepsCaches
from adaptive.engines.protocol import Sequence as EngineSequence
from adaptive.errors import AdaptiveError
from checkpoints import files

logger = logging.getLogger("adaptive")

# Tokens from which a text's cache is written, and that a file must hold beyond the cache in memory to be read. Fewer
# tokens are computed as quickly as they are read.
LEAST = 256
# Exceptions from reading a file that is truncated, was written by another program, or is not readable.
UNREADABLE = (OSError, SafetensorError, ValueError, KeyError, TypeError, RuntimeError, AdaptiveError)
DAY_S = 86400.0


@dataclass(frozen=True)
class Kept:
    """A cache file, and the tokens whose cache it holds."""

    path: Path
    tokens: list[int]

    def common(self, prompt: Sequence[int]) -> int:
        """The number of its tokens at the beginning of ``prompt``, whose last token does not count: it is always fed
        again."""
        pairs = enumerate(zip(self.tokens, prompt, strict=False))
        return next((i for i, (a, b) in pairs if a != b), min(len(self.tokens), len(prompt) - 1))


class KeptCaches:
    """The files of one pair, for one engine."""

    def __init__(self, folder: Path, limit: int, engine: KeepsCaches, days: float | None = None) -> None:
        """At most ``limit`` bytes in ``folder``, and no file that was unused for ``days``."""
        self.folder, self.limit = folder, limit
        self._engine, self._days = engine, days
        self._kept: list[Kept] = []
        folder.mkdir(mode=0o700, exist_ok=True)
        files.sweep(folder)
        self._shrink()
        for path in self._files():
            try:
                with safe_open(path, "pt") as file:
                    if json.loads(file.metadata()["layout"]) == engine.cache_layout:
                        self._kept.append(Kept(path, file.get_tensor("tokens").tolist()))
            except UNREADABLE:
                path.unlink(missing_ok=True)

    def best(self, prompt: Sequence[int], held: int) -> Kept | None:
        """The file worth reading for a prompt of which ``held`` tokens are in memory; None if there is none."""
        found = max(self._kept, key=lambda one: one.common(prompt), default=None)
        return found if found is not None and found.common(prompt) >= held + LEAST else None

    def read(self, kept: Kept, sequence: EngineSequence, length: int) -> bool:
        """Restore the first ``length`` tokens of a file into a sequence. Returns False if that fails; the sequence is
        then empty, and the file is removed."""
        try:
            with safe_open(kept.path, "pt") as file:
                sums = json.loads(file.metadata()["sums"])
                found = {name: file.get_tensor(name) for name in sums}
            if any(_sum(found[name]) != value for name, value in sums.items()):
                raise ValueError("it is damaged")
            self._engine.restore(sequence, found, length)
            os.utime(kept.path)
            return True
        except UNREADABLE as error:
            logger.warning("a kept cache is not used: %s", str(error).splitlines()[0] if str(error) else error)
            sequence.rollback(0)
            self._drop(kept)
            return False

    def keep(self, sequence: EngineSequence, tokens: list[int], instead: Path | None) -> Path | None:
        """Write the cache of ``tokens`` in a sequence, replacing the earlier file ``instead``, if there is one. Returns
        the path, or ``instead`` if nothing is written: too short, too large, or the disk refuses it."""
        held = tokens[: sequence.length]
        if len(held) < LEAST:
            return instead
        found = self._engine.stored(sequence)
        if found is None or sum(tensor.nbytes for tensor in found.values()) > self.limit:
            return instead
        sums = {name: _sum(tensor) for name, tensor in found.items()}
        about = {"layout": json.dumps(self._engine.cache_layout), "sums": json.dumps(sums)}
        path = instead or self.folder / f"{secrets.token_hex(8)}.safetensors"
        try:
            new = files.unfinished(self.folder)
            try:
                save_file({**found, "tokens": torch.tensor(held, dtype=torch.int32)}, new, about)
                os.chmod(new, 0o600)
                os.replace(new, path)
            finally:
                files.finished(new)
        except (OSError, SafetensorError) as error:
            logger.warning("a cache is not kept: %s", str(error).splitlines()[0])
            return instead
        self._kept = [*(one for one in self._kept if one.path != path), Kept(path, held)]
        self._shrink()
        return path

    @property
    def erased(self) -> bool:
        """Whether the folder was erased from outside since this object was made."""
        return not self.folder.is_dir()

    def forget(self) -> None:
        """Remove all files."""
        self._kept = []
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(mode=0o700, exist_ok=True)

    def _files(self) -> list[Path]:
        """The files, least recently used first."""
        return sorted(self.folder.glob("*.safetensors"), key=lambda path: path.stat().st_mtime)

    def _shrink(self) -> None:
        """Remove files that are too old, or exceed the limit."""
        known = self._files()
        total = sum(path.stat().st_size for path in known)
        for path in known:
            status = path.stat()
            old = self._days is not None and time.time() - status.st_mtime > self._days * DAY_S
            if old or total > self.limit:
                total -= status.st_size
                self._drop(Kept(path, []))

    def _drop(self, kept: Kept) -> None:
        self._kept = [one for one in self._kept if one.path != kept.path]
        kept.path.unlink(missing_ok=True)


def _sum(tensor: torch.Tensor) -> int:
    """A checksum of a contiguous tensor."""
    return zlib.crc32(tensor.contiguous().view(torch.uint8).numpy().data)
