"""The feature spool: hidden states of the target at logged positions, for the training of heads.

One file a record, ``<id>.safetensors``, beside the log: 8 bits a number, with one scale for each BLOCK of numbers. A
file is written atomically (under another name, then renamed) within the transaction of its record. A purge waits for
that transaction, so it finds every file of the records that it deletes. If the transaction fails, a file without a
record remains. It holds a hash of its tokens, so it is never used for another record, and ``sweep`` removes it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sqlite3
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from adaptive.records.overwrite import mark_deleted, remove_deleted
from adaptive.records.schema import transaction
from adaptive.state import PairState
from checkpoints import files

# Numbers of a hidden state that share a scale (float16). In some models a few numbers are a thousand times as large as
# the others. Too high: the others in such a block are rounded to 0. Too low: the scales take more disk.
BLOCK = 64
# The number of a text's tokens whose features are kept: as many as a training pass holds (trainers/batches.py).
LONGEST = 2048
# Of an answer, training reads at most this many tokens from its beginning (trainers/batches.py).
LONGEST_ANSWER = LONGEST // 2
# FULL: the share of the limit that the spool takes after it has deleted its oldest files. Too high: it deletes again
# after a few records; too low: it deletes files earlier than needed. LOOK: files written here between two scans of the
# folder. Too high: files of other processes exceed the limit for longer; too low: every few records need a scan.
FULL, LOOK = 0.98, 64
ENDING = ".safetensors"
LARGEST = 65504.0  # of float16


def kept(prompt: int, known: int) -> tuple[int, int]:
    """The first token and the end of those whose features are kept: LONGEST of the first ``known`` tokens of a text, up
    to the last one of its answer that training reads. The first ``prompt`` tokens are the prompt."""
    end = min(known, prompt + LONGEST_ANSWER)
    return max(0, end - LONGEST), end


@dataclass(frozen=True, eq=False)
class Features:
    """Hidden states of n consecutive tokens; ``first`` is the position of the first one in prompt and output together.

    ``values`` (n, width) int8; ``scales`` (n, blocks) float16, the factor of the numbers of each block.
    """

    first: int
    values: npt.NDArray[np.int8]
    scales: npt.NDArray[np.float16]

    @classmethod
    def of(cls, states: npt.NDArray[np.float32], first: int = 0) -> Features:
        """Features from hidden ``states`` (n, width), rounded to 8 bits; only the last LONGEST tokens are kept."""
        dropped = max(0, len(states) - LONGEST)
        states = np.nan_to_num(states[dropped:], posinf=LARGEST, neginf=-LARGEST)
        count, width = states.shape
        blocks = -(-width // BLOCK)
        padded = np.pad(states, ((0, 0), (0, blocks * BLOCK - width))).reshape(count, blocks, BLOCK)
        scales = np.minimum(np.abs(padded).max(-1) / 127, LARGEST).astype(np.float16)
        by = scales.astype(np.float32)[..., None]  # as stored; a scale that float16 rounds to 0 makes its block zeros
        rounded = np.divide(padded, by, out=np.zeros_like(padded), where=by > 0).round().clip(-127, 127)
        values = np.ascontiguousarray(rounded.reshape(count, -1)[:, :width].astype(np.int8))
        return cls(first + dropped, values, scales)

    def states(self) -> npt.NDArray[np.float32]:
        """The hidden states (n, width)."""
        width = self.values.shape[1]
        by = np.repeat(self.scales.astype(np.float32), BLOCK, axis=1)[:, :width]
        return self.values * by

    @property
    def nbytes(self) -> int:
        """Bytes of both arrays."""
        return self.values.nbytes + self.scales.nbytes


class FeatureSpool:
    """The feature files of one pair in ``folder``, at most ``limit`` bytes; the oldest are deleted first.

    Several processes may write. The limit can then be exceeded by the files that others wrote since the last scan.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder = folder
        self.limit = limit
        self.unswept = False  # whether ``sweep`` has left files to overwrite
        self._held = 0  # bytes found in the folder by the last scan, plus the bytes written here since
        self._until_look = 0

    def write(self, number: int, tokens: str, features: Features) -> None:
        """Store the features of record ``number``; ``tokens`` is the ``tokens_hash`` of its text. Features larger than
        the limit are not stored.

        Raises OSError if the file cannot be written.
        """
        if features.nbytes > self.limit:
            return
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary = files.unfinished(self.folder)
        try:
            meta = {"tokens": tokens, "first": str(features.first)}
            try:
                save_file({"values": features.values, "scales": features.scales}, temporary, metadata=meta)
            except SafetensorError as error:  # safetensors' error for a full disk
                raise OSError(str(error)) from error
            os.chmod(temporary, 0o600)
            self._held += temporary.stat().st_size
            os.replace(temporary, self._path(number))
        finally:
            files.finished(temporary)
        self._until_look -= 1
        if self._held > self.limit or self._until_look < 0:
            self._enforce()

    def has(self, number: int, tokens: str) -> bool:
        """Whether the spool has features of record ``number`` whose text has the hash ``tokens``."""
        try:
            with safe_open(self._path(number), "numpy") as file:
                return (file.metadata() or {}).get("tokens") == tokens
        except (OSError, SafetensorError):
            return False

    def read(self, number: int, tokens: str) -> Features | None:
        """The features of record ``number``; None if ``has`` is False or the file cannot be read."""
        try:
            with safe_open(self._path(number), "numpy") as file:
                said = file.metadata() or {}
                if said.get("tokens") != tokens:
                    return None
                values, scales = file.get_tensor("values"), file.get_tensor("scales")
                first = int(said["first"])
        except (OSError, SafetensorError, KeyError, ValueError):
            return None
        whole = values.ndim == 2 and scales.shape == (len(values), -(-values.shape[1] // BLOCK))
        return Features(first, values, scales) if whole else None

    def ids(self) -> list[int]:
        """The ids of the records that have features, in order."""
        return sorted(number for number, _ in self._files())

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(size for _, size in self._files())

    def sweep(self, connection: sqlite3.Connection, stop: Callable[[], bool] = lambda: False) -> int:
        """Overwrite and remove the features of records that are not in the log (``connection`` is open to it), and
        the files that killed processes left. Returns the number of such records. Raises sqlite3.Error, OSError.

        The files are only renamed while the log is locked, since overwriting thousands of them takes minutes. If
        ``stop`` returns True, some are left (``unswept``) for the next call.
        """
        self.unswept = False
        if not self.folder.is_dir():
            return 0
        files.sweep(self.folder)
        if gone := _not_logged(connection, self.ids()):
            with transaction(connection):  # so no writer has written a file whose transaction has not ended
                gone = _not_logged(connection, gone)
                self._mark_deleted(gone)
        self.unswept = not remove_deleted(self.folder, stop)
        return len(gone)

    def erase(self) -> None:
        """Overwrite and remove the features of all records. Raises OSError."""
        self._mark_deleted(self.ids())
        remove_deleted(self.folder)
        if self.folder.is_dir():
            files.sweep(self.folder)

    def _mark_deleted(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            with contextlib.suppress(FileNotFoundError):  # another process removed it, to keep the limit
                mark_deleted(self._path(number))

    def _enforce(self) -> None:
        found = sorted(self._files())
        self._held, self._until_look = sum(size for _, size in found), LOOK
        if self._held <= self.limit:
            return
        for number, size in found:
            if self._held <= FULL * self.limit:
                return
            with contextlib.suppress(FileNotFoundError):
                self._path(number).unlink()
            self._held -= size

    def _files(self) -> Iterable[tuple[int, int]]:
        """(record id, bytes) of each file."""
        try:
            entries = list(os.scandir(self.folder))
        except OSError:
            return
        for entry in entries:
            stem = entry.name.removesuffix(ENDING)
            if stem != entry.name and stem.isdecimal():
                with contextlib.suppress(OSError):
                    yield int(stem), entry.stat().st_size

    def _path(self, number: int) -> Path:
        return self.folder / f"{number}{ENDING}"


def _not_logged(connection: sqlite3.Connection, numbers: list[int]) -> list[int]:
    """Those of ``numbers`` that are no id of a record."""
    query = "SELECT value FROM json_each(?) WHERE value NOT IN (SELECT id FROM generations)"
    return [row[0] for row in connection.execute(query, (json.dumps(numbers),))]


def spool_of(state: PairState, gigabytes: float) -> FeatureSpool:
    """The feature spool of a pair, with a limit of ``gigabytes``."""
    return FeatureSpool(state.features, int(1e9 * gigabytes))


def tokens_hash(prompt: npt.NDArray[np.int32], output: npt.NDArray[np.int32]) -> str:
    """A hash that identifies the text of a record by its tokens."""
    return hashlib.sha256(prompt.tobytes() + b"|" + output.tobytes()).hexdigest()[:32]
