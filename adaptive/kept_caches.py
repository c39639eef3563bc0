"""Caches of conversations on disk, so that a restarted server does not compute a long history again.

In: the target's sequences and their tokens. Out: private files in the pair's folder, within a limit of bytes (the least
recently used is removed first), and the file with the longest beginning of a prompt. A file is valid only for one way
to compute (dtype, kernels, layout). Damaged files are removed and ignored; one that cannot be opened now stays.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import shutil
import time
import zlib
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors import SafetensorError, safe_open

from adaptive.engines.protocol import KeepsCaches
from adaptive.engines.protocol import Sequence as EngineSequence
from adaptive.errors import AdaptiveError, out_of_memory, true_error
from checkpoints import files

logger = logging.getLogger("adaptive")

# Tokens from which a text's cache is written, and that a file must hold beyond the cache in memory to be read. Fewer
# tokens are computed as quickly as they are read.
LEAST = 256
# Bytes that are written at a time, in some milliseconds. Too low: a file takes many calls. Too high: a request that
# arrives meanwhile waits for the rest of a piece.
PIECE = 4 << 20
# The names of the numbers' types in a file.
TYPES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int32: "I32"}
# Exceptions from reading a file that is truncated, was written by another program, or is not readable.
UNREADABLE = (OSError, SafetensorError, ValueError, KeyError, TypeError, RuntimeError, MemoryError, AdaptiveError)
DAY_S = 86400.0
Tensors: TypeAlias = dict[str, torch.Tensor]


@dataclass(frozen=True)
class KeptCache:
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
        self._kept: list[KeptCache] = []
        self._fetched: tuple[KeptCache, Future[Tensors]] | None = None
        folder.mkdir(mode=0o700, exist_ok=True)
        files.sweep(folder)
        self._shrink()
        for path in self._files():
            try:
                with _opened(path) as file:
                    if json.loads(file.metadata()["layout"]) == engine.cache_layout:
                        self._kept.append(KeptCache(path, file.get_tensor("tokens").tolist()))
            except OSError as error:  # it may be whole, and readable at the next start
                logger.warning("a kept cache is not used: %s", error)
            except UNREADABLE:
                path.unlink(missing_ok=True)

    def best(self, prompt: Sequence[int], held: int) -> KeptCache | None:
        """The file worth reading for a prompt of which ``held`` tokens are in memory; None if there is none."""
        found = max(self._kept, key=lambda one: one.common(prompt), default=None)
        return found if found is not None and found.common(prompt) >= held + LEAST else None

    def fetch(self, kept: KeptCache) -> Future[Tensors] | None:
        """Begin to read a file on a thread of its own, for a later ``read`` of this one. None if there can be no more
        threads: ``read`` then reads it."""
        thread = ThreadPoolExecutor(1, "cache")
        try:
            self._fetched = kept, thread.submit(_whole, kept.path)
        except RuntimeError:
            return None
        thread.shutdown(wait=False)  # ends when the file is read
        return self._fetched[1]

    def release(self) -> None:
        """Free what was fetched and has not been read."""
        self._fetched = None

    def read(self, kept: KeptCache, sequence: EngineSequence, length: int) -> bool:
        """Restore the first ``length`` tokens of a file into a sequence. Returns False if that fails; the sequence is
        then empty, and the file is removed, unless it only cannot be opened now."""
        fetched, self._fetched = self._fetched, None
        try:
            found = fetched[1].result() if fetched is not None and fetched[0] is kept else _whole(kept.path)
            self._engine.restore(sequence, found, length)
            os.utime(kept.path)
            return True
        except UNREADABLE as error:
            logger.warning("a kept cache is not used: %s", str(error).splitlines()[0] if str(error) else error)
            sequence.rollback(0)
            passes = isinstance(error, OSError) or out_of_memory(error)
            if not passes or not kept.path.exists():
                self._drop(kept)
            return False

    def keep(
        self, sequence: EngineSequence, tokens: list[int], instead: Path | None
    ) -> Generator[None, None, Path | None]:
        """Write the cache of ``tokens`` in a sequence, replacing the earlier file ``instead``, if there is one. Returns
        the path, or ``instead`` if nothing is written: too short, too large, or the disk refuses it.

        It yields after each piece. A caller that wants to use the sequence must close it there, which drops what was
        written so far."""
        held = tokens[: sequence.length]
        if len(held) < LEAST:
            return instead
        found = self._engine.stored(sequence)
        if found is None or sum(tensor.nbytes for tensor in found.values()) > self.limit:
            return instead
        path = instead or self.folder / f"{secrets.token_hex(8)}.safetensors"
        try:
            new = files.unfinished(self.folder)
            try:
                tensors = {**found, "tokens": torch.tensor(held, dtype=torch.int32)}
                yield from _write(new, tensors, json.dumps(self._engine.cache_layout))
                os.replace(new, path)
            finally:
                files.finished(new)
        except OSError as error:
            logger.warning("a cache is not kept: %s", str(error).splitlines()[0])
            return instead
        self._kept = [*(one for one in self._kept if one.path != path), KeptCache(path, held)]
        with suppress(OSError):  # out of file descriptors, say; the next one does it
            self._shrink()
        return path

    @property
    def erased(self) -> bool:
        """Whether the folder was erased from outside since this object was made."""
        return not self.folder.is_dir()

    def forget(self) -> None:
        """Remove all files."""
        self._kept, self._fetched = [], None
        shutil.rmtree(self.folder, ignore_errors=True)
        with suppress(OSError):  # the pair's folder is gone, or its disk full: then no cache is kept
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
                self._drop(KeptCache(path, []))

    def _drop(self, kept: KeptCache) -> None:
        self._kept = [one for one in self._kept if one.path != kept.path]
        kept.path.unlink(missing_ok=True)


def _whole(path: Path) -> Tensors:
    """The tensors of a file, compared with their checksums: all of it is read. Raises one of UNREADABLE."""
    with _opened(path) as file:
        sums = json.loads(file.metadata()["sums"])
        found = {name: file.get_tensor(name) for name in sums}
    if any(_sum(found[name]) != value for name, value in sums.items()):
        raise ValueError("it is damaged")
    return found


def _opened(path: Path) -> Any:
    """``safe_open``, which raises OSError if the file cannot be opened now, as without file descriptors or memory."""
    try:
        return safe_open(path, "pt")
    except FileNotFoundError as error:
        raise true_error(error) from None
    except RuntimeError as error:  # torch's, which maps the file
        raise OSError(str(error)) from error


def _write(path: Path, tensors: Mapping[str, torch.Tensor], layout: str) -> Iterator[None]:
    """Write a file in safetensors' format piece by piece, with a checksum of each tensor; yields after each piece."""
    sums = dict.fromkeys(tensors, 0xFFFFFFFF)
    room = len(_header(tensors, layout, sums))  # the longest that it can get
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o600), "wb") as file:
        file.seek(8 + room)
        for name, tensor in tensors.items():
            sums[name] = 0
            for piece in _pieces(tensor):
                data = piece.view(torch.uint8).numpy().data
                sums[name] = zlib.crc32(data, sums[name])
                file.write(data)
                yield
        file.seek(0)
        file.write(room.to_bytes(8, "little") + _header(tensors, layout, sums).ljust(room))


def _header(tensors: Mapping[str, torch.Tensor], layout: str, sums: Mapping[str, int]) -> bytes:
    """The description of the tensors, which stand in the file in this order."""
    about: dict[str, object] = {"__metadata__": {"layout": layout, "sums": json.dumps(sums)}}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        about[name] = {"dtype": TYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    header = json.dumps(about).encode()
    return header.ljust(-(-len(header) // 8) * 8)  # the numbers after it are aligned


def _pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The numbers of a tensor in order, in contiguous pieces of at most PIECE bytes."""
    if tensor.is_contiguous():
        yield from tensor.view(-1).split(PIECE // tensor.element_size())
    else:
        for part in tensor:
            yield from _pieces(part)


def _sum(tensor: torch.Tensor) -> int:
    """A checksum of a contiguous tensor."""
    return zlib.crc32(tensor.contiguous().view(torch.uint8).numpy().data)
