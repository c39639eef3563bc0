"""Caches of conversations on disk, so that a server which was restarted does not read a long history again.

In: what a sequence of the target holds of a text. Out: files in the pair's folder, private as all of it, at most so
many bytes, the least recently used of which goes first; and the one that holds the longest beginning of a prompt. A
file is of one way to compute (dtype, kernels, layout); a damaged one is as good as none.
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

# Tokens from which a text's cache is kept, and which a file has to hold beyond what is in memory to be read. Fewer are
# computed as quickly.
LEAST = 256
# Whatever reading a file raises that is cut, of another program or not readable.
UNREADABLE = (OSError, SafetensorError, ValueError, KeyError, TypeError, RuntimeError, AdaptiveError)
DAY_S = 86400.0


@dataclass(frozen=True)
class Kept:
    """A file, and the tokens whose cache it holds."""

    path: Path
    tokens: list[int]

    def common(self, prompt: Sequence[int]) -> int:
        """Tokens at the beginning of ``prompt`` that it holds, but for its last one, which is always fed anew."""
        pairs = enumerate(zip(self.tokens, prompt, strict=False))
        return next((i for i, (a, b) in pairs if a != b), min(len(self.tokens), len(prompt) - 1))


class KeptCaches:
    """The files of one pair, for one engine."""

    def __init__(self, folder: Path, limit: int, engine: KeepsCaches, days: float | None = None) -> None:
        """At most ``limit`` bytes in ``folder``, and none that was not used for so many ``days``."""
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
        """The file worth reading for a prompt of which ``held`` tokens are in memory."""
        found = max(self._kept, key=lambda one: one.common(prompt), default=None)
        return found if found is not None and found.common(prompt) >= held + LEAST else None

    def read(self, kept: Kept, sequence: EngineSequence, length: int) -> bool:
        """Have a sequence hold the first ``length`` tokens of a file. False where that cannot be; it holds nothing
        then, and the file is gone."""
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
        """Write what a sequence holds of ``tokens``, ``instead`` of an earlier file; where to, or None where it is not
        kept: too short, too large, or there is no disk for it."""
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
        """Whether somebody has erased what was kept since this was made."""
        return not self.folder.is_dir()

    def forget(self) -> None:
        """Keep nothing of what was kept."""
        self._kept = []
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(mode=0o700, exist_ok=True)

    def _files(self) -> list[Path]:
        """The least recently used first."""
        return sorted(self.folder.glob("*.safetensors"), key=lambda path: path.stat().st_mtime)

    def _shrink(self) -> None:
        """Remove what is too old or too much."""
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
