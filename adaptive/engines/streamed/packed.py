"""A file with the packed weights of a checkpoint: written once, then read layer by layer.

``weights.bin`` has a section for each layer and one for the vocabulary projection, in the order in which a pass reads
them. A section has its linear layers in the kernels' format (``NativeLinear.parts``). ``manifest.json`` beside it has
the places of all parts, the sha256 of every section, and its own. Both are in a subfolder of the state folder, named
after the checkpoint and a hash of everything that decides the contents: the checkpoint's weights, the packed number
format, the processor's kernels, and their layout of weights.
"""

from __future__ import annotations

import errno
import hashlib
import json
import mmap
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import nn
from transformers import PreTrainedModel

from adaptive.engines.cpu.families import FAMILIES
from adaptive.engines.cpu.kernels import library
from adaptive.engines.cpu.packing import Packing
from adaptive.engines.cpu.weights import PackedLinear
from adaptive.engines.identity import weights_hash
from adaptive.engines.streamed.checkpoint import Checkpoint, linear_names
from adaptive.errors import AdaptiveError, first_line
from adaptive.machine import give_memory_back
from adaptive.state import packed_root
from checkpoints import files

# The version of the format, to be increased when the contents or their layout change.
FORMAT = 2
# The alignment in bytes of sections, as reads past the system's cache need it, and of parts within a section, a
# processor's cache line.
SECTION, PART = 4096, 64
# The number of the vocabulary projection's section, which comes after all layers.
PROJECTION = -1
# The name of the file that holds all sections.
WEIGHTS = "weights.bin"


@dataclass(frozen=True)
class Stored:
    """A linear layer of ``shape`` (out, in) in a section: the offsets of its ``parts`` there, -1 for a missing part."""

    shape: tuple[int, int]
    parts: tuple[int, ...]


@dataclass
class Section:
    """``bytes`` of the file from ``offset``, and its linear layers by the name of their first module's weight."""

    offset: int
    bytes: int = 0
    sha256: str = ""
    linears: dict[str, Stored] = field(default_factory=dict)


def packed_folder(state_dir: Path, checkpoint: Path, weights: str) -> Path:
    """The folder of a checkpoint's packed weights, which may not exist yet; ``weights`` is their number format."""
    found = library()
    kernels = "none"
    if found is not None:
        filled = found.module.filled_to(getattr(torch, weights).itemsize)
        kernels = f"{found.name} {found.panel} {filled}"
    digest = hashlib.sha256(f"{weights_hash(checkpoint)} {weights} {kernels} {FORMAT}".encode()).hexdigest()[:12]
    name = re.sub(r"[^\w.-]+", "-", checkpoint.resolve().name)
    return packed_root(state_dir) / f"{name}-{weights}-{digest}"


class _Writing(Packing):
    """Packs linear layers with the weights of a checkpoint, and writes them to a file instead of keeping them in
    memory."""

    def __init__(
        self, checkpoint: Checkpoint, model: PreTrainedModel, int8: bool, file: BinaryIO, tell: Callable[[int], None]
    ) -> None:
        """``tell`` is called after each layer with the number of bytes written."""
        super().__init__(int8)
        self.checkpoint, self.dtype, self.file, self.tell = checkpoint, model.dtype, file, tell
        self.names = linear_names(model)
        self.sections: dict[int, Section] = {}
        self.written = 0
        self._digest = hashlib.sha256()

    def __call__(self, *modules: nn.Linear, order: torch.Tensor | None = None, factor: float = 1.0) -> PackedLinear:
        """Pack and write the linear layer of these modules. The result has no weight."""
        missing = [module for module in modules if module.weight.is_meta]
        for module in missing:
            module.weight = self.checkpoint.read(self.names[module], self.dtype)
        linear = super().__call__(*modules, order=order, factor=factor)
        for module in missing:
            module.weight = nn.Parameter(module.weight.to("meta"), requires_grad=False)
        assert linear.kernel is not None
        name = self.names[modules[0]]
        self._write(name, (linear.outputs, linear.inputs), linear.kernel.parts)
        linear.kernel = None
        give_memory_back()  # otherwise the freed memory of all linear layers adds up to the size of the model
        self.tell(self.written)
        return linear

    def _write(self, name: str, shape: tuple[int, int], parts: list[torch.Tensor | None]) -> None:
        section = self._section(section_of(name))
        places = []
        for part in parts:
            places.append(-1 if part is None else self.written - section.offset)
            if part is not None:
                self._bytes(part.reshape(-1).view(torch.uint8).numpy())
                self._fill(PART)
        section.linears[name] = Stored(shape, tuple(places))

    def _section(self, number: int) -> Section:
        if number not in self.sections:
            self.end()
            self.sections[number] = Section(self.written)
        assert number == next(reversed(self.sections)), "an earlier section is complete"
        return self.sections[number]

    def end(self) -> None:
        """Complete the section that was written last."""
        if not self.sections:
            return
        self._fill(SECTION)
        section = list(self.sections.values())[-1]
        section.bytes, section.sha256 = self.written - section.offset, self._digest.hexdigest()
        self._digest = hashlib.sha256()

    def _bytes(self, data: Any) -> None:
        self.file.write(data)
        self._digest.update(data)
        self.written += len(data)

    def _fill(self, step: int) -> None:
        self._bytes(bytes(-self.written % step))


def section_of(name: str) -> int:
    """The section of the weight ``name``: the number of its layer, or ``PROJECTION``."""
    layer = re.search(r"\.layers\.(\d+)\.", name)
    return PROJECTION if layer is None else int(layer[1])


def write(
    folder: Path, checkpoint: Checkpoint, model: PreTrainedModel, int8: bool, tell: Callable[[float], None]
) -> None:
    """Write the packed weights of a checkpoint, whose ``skeleton`` is ``model``. At most one linear layer of it is in
    memory at a time. ``tell`` is called with the share written. Raises AdaptiveError if the weights cannot be
    written, or if there is no room for them: a full disk would stop the log too."""
    size = sum(module.weight.nbytes for module in linear_names(model)) // (model.dtype.itemsize if int8 else 1)
    folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    files.sweep(folder.parent)
    part = files.unfinished(folder.parent)
    try:
        free = shutil.disk_usage(folder.parent).free
        if free < size:
            raise OSError(errno.ENOSPC, f"{free / 1e9:.2f} GB are free")
        part.mkdir(mode=0o700)
        with os.fdopen(os.open(part / WEIGHTS, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as file:
            writing = _Writing(checkpoint, model, int8, file, lambda written: tell(min(1.0, written / size)))
            FAMILIES[type(model).__name__](model, writing)
            writing.end()
            file.flush()
            os.fsync(file.fileno())
        files.write_text(part / "manifest.json", manifest(writing.sections))
        if not folder.exists():  # another process may have been faster
            os.rename(part, folder)
            files.flush(folder.parent)
    except OSError as error:
        raise AdaptiveError(
            f"the packed weights cannot be written to {folder.parent} ({error.strerror}): they take about "
            f"{size / 1e9:.2f} GB; make room there, or choose another folder with --state-dir"
        ) from error
    finally:
        files.finished(part)


def manifest(sections: dict[int, Section]) -> str:
    """The contents of ``manifest.json``."""
    said = {str(number): asdict(section) for number, section in sections.items()}
    return json.dumps({"format": FORMAT, "sha256": _hash(said), "sections": said})


def _hash(sections: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(sections).encode()).hexdigest()


def unreadable(error: BaseException) -> bool:
    """Whether a pass ended with ``error`` because the packed weights could not be read."""
    found = library()
    return found is not None and isinstance(error, found.module.ReadError)


class PackedFile:
    """The packed weights in a folder. ``file`` is a descriptor for reading, past the system's cache if the file system
    supports that."""

    def __init__(self, folder: Path) -> None:
        """Raises AdaptiveError if the manifest or the file's size is wrong, or if they cannot be read."""
        self.folder = folder
        try:
            said = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
            if _hash(said["sections"]) != said["sha256"]:
                raise ValueError("manifest.json has changed")
            self.sections = {int(number): _section(given) for number, given in said["sections"].items()}
            size = max(section.offset + section.bytes for section in self.sections.values())
            there = (folder / WEIGHTS).stat().st_size
            if there != size:
                raise ValueError(f"weights.bin has {there} bytes instead of {size}")
            self.file = _open(folder / WEIGHTS)
        except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise self._damaged(first_line(error)) from error
        except OSError as error:
            raise self._unreadable(error) from error

    def _damaged(self, why: str) -> AdaptiveError:
        return AdaptiveError(
            f"the packed weights in {self.folder} are damaged ({why}); they are written again after "
            f"`adaptive packed delete {self.folder.name}`"
        )

    def _unreadable(self, error: OSError) -> AdaptiveError:
        return AdaptiveError(
            f"the packed weights in {self.folder} cannot be read ({first_line(error)}); check the disk and the "
            "permissions, then start again"
        )

    @property
    def layers(self) -> list[Section]:
        """The sections of the layers."""
        return [self.sections[number] for number in range(len(self.sections) - 1)]

    def read(self, section: Section, memory: mmap.mmap) -> None:
        """Read a section into ``memory``, which is at least as large, and check its hash. Raises AdaptiveError if it
        cannot be read or has changed."""
        with memoryview(memory)[: section.bytes] as whole:
            done = 0
            while done < section.bytes:
                with whole[done:] as rest:
                    got = self._read(rest, section.offset + done)
                if not got:
                    raise self._damaged("weights.bin is too short")
                done += got
            if hashlib.sha256(whole).hexdigest() != section.sha256:
                raise self._damaged("its hash is another than when it was written")

    def _read(self, to: memoryview, offset: int) -> int:
        """Read bytes from an offset on, through the system's cache if the file system opens files for direct reads but
        does not make them. Returns their number. Raises AdaptiveError."""
        try:
            try:
                return os.preadv(self.file, [to], offset)
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                    raise
                self._read_through_cache()
                return os.preadv(self.file, [to], offset)
        except OSError as error:
            raise self._unreadable(error) from error

    def _read_through_cache(self) -> None:
        """Let ``file`` be open without direct reads. Other threads may be reading from it."""
        opened = os.open(self.folder / WEIGHTS, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.dup2(opened, self.file, inheritable=False)
        finally:
            os.close(opened)

    def close(self) -> None:
        """Close ``file``. A native stream has its own descriptor and stays usable."""
        os.close(self.file)


def _section(given: dict[str, Any]) -> Section:
    linears = {
        name: Stored((linear["shape"][0], linear["shape"][1]), tuple(linear["parts"]))
        for name, linear in given["linears"].items()
    }
    return Section(int(given["offset"]), int(given["bytes"]), given["sha256"], linears)


def _open(path: Path) -> int:
    direct = getattr(os, "O_DIRECT", 0)  # macOS has none
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | direct)
    except OSError:  # a file system without direct reads, or a missing file, for which the next line raises again
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
