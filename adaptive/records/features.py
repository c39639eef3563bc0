"""The feature spool: hidden states of the target at logged positions, for the training of heads.

One file a record, ``<id>.safetensors``, beside the log: 8 bits a number, with a scale for each BLOCK of them. A file
is written whole (another name, then a rename) in the transaction of its record, so that a purge, which waits for that,
finds every file of what it deletes. A file without a record (its transaction did not end) says which tokens it is of,
so that it is never taken for another's, and ``sweep`` removes it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sqlite3
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from adaptive.records.recover import overwrite_and_remove
from adaptive.records.schema import transaction
from adaptive.state import PairState
from checkpoints import files

# Numbers of a hidden state that share a scale (float16). Some models have a few numbers a thousand times as large as
# the others: with one scale a token, all others of theirs would be rounded to nothing. Smaller takes more disk.
BLOCK = 64
# Tokens of a text whose features are kept, its last ones: what a training pass holds (trainers/batches.py).
LONGEST = 2048
# How full the spool is after the oldest were deleted because of the limit, and how many records another process may
# have written before the folder is looked through again. More of either and the limit is passed, or files go early.
FULL, LOOK = 0.98, 64
ENDING = ".safetensors"
LARGEST = 65504.0  # of float16


@dataclass(frozen=True, eq=False)
class Features:
    """Hidden states of n tokens, the first of which stands at place ``first`` of prompt and output.

    ``values`` (n, width) int8; ``scales`` (n, blocks) float16, by which the numbers of each block are multiplied.
    """

    first: int
    values: npt.NDArray[np.int8]
    scales: npt.NDArray[np.float16]

    @classmethod
    def of(cls, states: npt.NDArray[np.float32], first: int = 0) -> Features:
        """Rounded to 8 bits, from hidden ``states`` (n, width); of more than LONGEST, the last."""
        dropped = max(0, len(states) - LONGEST)
        states = np.nan_to_num(states[dropped:], posinf=LARGEST, neginf=-LARGEST)
        count, width = states.shape
        blocks = -(-width // BLOCK)
        padded = np.pad(states, ((0, 0), (0, blocks * BLOCK - width))).reshape(count, blocks, BLOCK)
        scales = np.minimum(np.abs(padded).max(-1) / 127, LARGEST).astype(np.float16)
        by = scales.astype(np.float32)[..., None]  # as it is kept; one that is too small for float16 stands for zeros
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
    """The files of one pair, in ``folder``, at most ``limit`` bytes of them; the oldest go first.

    Several processes may write; then the limit is passed by what the others wrote since one looked.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder = folder
        self.limit = limit
        self._held = 0  # bytes, when the folder was last looked through and by what was written since
        self._until_look = 0

    def write(self, number: int, tokens: str, features: Features) -> None:
        """Keep the features of record ``number``, of the text that ``tokens_hash`` names ``tokens``.

        Raises OSError where the disk does not take them.
        """
        if features.nbytes > self.limit:
            return
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary = files.unfinished(self.folder)
        try:
            meta = {"tokens": tokens, "first": str(features.first)}
            try:
                save_file({"values": features.values, "scales": features.scales}, temporary, metadata=meta)
            except SafetensorError as error:  # which says that a disk is full in its own way
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
        """Whether there are features of record ``number``, of the text that ``tokens_hash`` names so."""
        try:
            with safe_open(self._path(number), "numpy") as file:
                return (file.metadata() or {}).get("tokens") == tokens
        except (OSError, SafetensorError):
            return False

    def read(self, number: int, tokens: str) -> Features | None:
        """Those of record ``number``; None where ``has`` says no, or what is there cannot be read."""
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
        """The records of which there are features, in order."""
        return sorted(number for number, _ in self._files())

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(size for _, size in self._files())

    def sweep(self, connection: sqlite3.Connection) -> int:
        """Remove the features of what is not in the log (``connection`` is open to it), overwritten where they lie, and
        what killed processes left unfinished; how many records' that were. Raises sqlite3.Error, OSError."""
        if not self.folder.is_dir():
            return 0
        files.sweep(self.folder)
        with transaction(connection):  # no writer is between its file and the end of its transaction
            here = set(self.ids())
            logged = {row[0] for row in connection.execute("SELECT id FROM generations")} if here else set()
            for number in here - logged:
                overwrite_and_remove(self._path(number))
        return len(here - logged)

    def erase(self) -> None:
        """Remove the features of all records, overwritten where they lie. Raises OSError."""
        for number in self.ids():
            overwrite_and_remove(self._path(number))
        if self.folder.is_dir():
            files.sweep(self.folder)

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
        """(record, bytes) of each file."""
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


def spool_of(state: PairState, gigabytes: float) -> FeatureSpool:
    """The spool of a pair, of at most so many gigabytes."""
    return FeatureSpool(state.features, int(1e9 * gigabytes))


def tokens_hash(prompt: npt.NDArray[np.int32], output: npt.NDArray[np.int32]) -> str:
    """Names the tokens of a text."""
    return hashlib.sha256(prompt.tobytes() + b"|" + output.tobytes()).hexdigest()[:32]
