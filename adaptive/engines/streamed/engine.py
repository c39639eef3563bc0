"""A target whose layers do not all fit into memory: some stay in memory, the others are read from disk in every pass.

It is our CPU forward with linear layers whose packed weights lie in a buffer that threads fill (``native/stream.h``).
So all kinds of passes work as usual: over chains and trees, of one text or several. The ``--memory`` limit covers the
embedding, norms, the vocabulary projection, two buffers of a layer each, and as many other layers as fit. The layers
in memory are spread evenly among those that are read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import mmap
import os
import queue
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from adaptive.engines.cpu.families import FAMILIES
from adaptive.engines.cpu.forward import CpuForward
from adaptive.engines.cpu.kernels import NativeLinear, library
from adaptive.engines.cpu.memory import asked_for
from adaptive.engines.cpu.packing import Packing
from adaptive.engines.cpu.weights import PackedLinear
from adaptive.engines.hf.engine import TransformersEngine
from adaptive.engines.streamed.checkpoint import Checkpoint, linear_names, skeleton
from adaptive.engines.streamed.packed import (
    PROJECTION,
    WEIGHTS,
    PackedFile,
    Section,
    Stored,
    packed_folder,
    section_of,
    write,
)
from adaptive.errors import AdaptiveError

# Buffers of one layer each: for the layer that computes, and the next one, which is read. A third buffer would save one
# layer's reading time while the draft proposes, but so does one more layer in memory, in every pass.
BUFFERS = 2
# Bytes of a request to the disk, and the number of requests in progress. Too low: a fast disk idles between two
# requests. Too large requests: a layer waits for its last request while nothing else is read.
PIECE, READERS = 1 << 20, 4


class StreamedLinear(PackedLinear):
    """A linear layer that was packed into a file. Its weight is in ``memory``, into which a section is read."""

    def __init__(
        self, modules: tuple[nn.Module, ...], kernel: NativeLinear, stored: Stored, int8: bool, memory: mmap.mmap
    ) -> None:
        self.modules, self.kernel, self.int8 = modules, kernel, int8
        self.outputs, self.inputs = stored.shape
        self.memory = memory  # a reference, because the kernel reads from it

    def refresh(self) -> None:
        """Raises AdaptiveError, because the packed weights cannot be changed."""
        raise AdaptiveError("the weights of a model that is streamed cannot be changed")


class _Loading(Packing):
    """Makes linear layers that use weights in ``memory``, into which their sections are read."""

    def __init__(self, packed: PackedFile, model: PreTrainedModel, memory: dict[int, mmap.mmap], int8: bool) -> None:
        super().__init__(int8)
        self.packed, self.memory = packed, memory
        self.names, self.dtype = linear_names(model), torch.int8 if int8 else model.dtype

    def __call__(self, *modules: nn.Linear, order: torch.Tensor | None = None, factor: float = 1.0) -> PackedLinear:
        """The linear layer of these modules."""
        name = self.names[modules[0]]
        number = section_of(name)
        stored, memory = self.packed.sections[number].linears[name], self.memory[number]
        places = [0 if part < 0 else _address(memory) + part for part in stored.parts]
        kernel = NativeLinear.at(places, stored.shape, self.dtype, factor)
        return StreamedLinear(modules, kernel, stored, self.int8, memory)


def _address(memory: mmap.mmap) -> int:
    return torch.frombuffer(memory, dtype=torch.uint8).data_ptr()


def load_streamed(
    folder: Path,
    config: Any,
    dtype: torch.dtype,
    int8: bool,
    memory: int,
    state_dir: Path,
    tell: Callable[[float], None],
) -> TransformersEngine:
    """The engine of a checkpoint, with at most ``memory`` bytes of weights in memory. Writes the packed weights first
    if there are none. ``tell`` is called with the share of the work that is done. Raises AdaptiveError if ``memory`` is
    too little, or if packed weights are damaged or cannot be written."""
    checkpoint = Checkpoint(folder, config)
    model = skeleton(checkpoint, config, dtype)
    resident = sum(weight.nbytes for weight in model.parameters() if not weight.is_meta)
    _check(memory, *_least(model, resident, int8))
    where = packed_folder(state_dir, folder, "int8" if int8 else str(dtype).removeprefix("torch."))
    new = not where.exists()
    if new:
        write(where, checkpoint, model, int8, lambda share: tell(0.7 * share))
    begin = 0.7 if new else 0.0
    with contextlib.closing(PackedFile(where)) as packed:
        room = memory - resident - packed.sections[PROJECTION].bytes
        kept = kept_layers([section.bytes for section in packed.layers], room)
        largest = max(section.bytes for section in packed.layers)
        if kept is None:
            _check(memory, memory - room, largest, always=True)
        forward = _forward(packed, model, kept or frozenset(), int8, lambda share: tell(begin + (1 - begin) * share))
    return TransformersEngine(model, forward=forward)


def _least(model: PreTrainedModel, resident: int, int8: bool) -> tuple[int, int]:
    """Bytes of the weights that always stay in memory, and bytes of the largest layer, both without padding."""
    sizes: dict[int, int] = {}
    for module, name in linear_names(model).items():
        size = module.weight.numel() * (1 if int8 else module.weight.itemsize)
        sizes[section_of(name)] = sizes.get(section_of(name), 0) + size
    return resident + sizes.pop(PROJECTION), max(sizes.values())


def _check(memory: int, resident: int, layer: int, always: bool = False) -> None:
    """Raises AdaptiveError if ``memory`` bytes do not hold the ``resident`` bytes and buffers of ``layer`` bytes each;
    with ``always`` in any case."""
    least = resident + BUFFERS * layer
    if always or memory < least:
        raise AdaptiveError(
            f"--memory {_size(memory)} is too little for this target: embedding and vocabulary projection take "
            f"{_size(resident)}, and {BUFFERS} buffers of a layer {_size(layer)} each; give it at least {_size(least)}"
        )


def _size(count: int) -> str:
    return f"{math.ceil(count / 1e5) / 10}MB"


def kept_layers(sizes: list[int], room: int) -> frozenset[int] | None:
    """The layers to keep in memory, spread evenly, given the ``sizes`` (bytes) of all layers and ``room`` (bytes) for
    them and the buffers of the others; None if not even the buffers fit."""
    if sum(sizes) <= room:
        return frozenset(range(len(sizes)))
    count, largest = len(sizes), max(sizes)
    stay = room // largest - BUFFERS
    if stay < 0:
        return None
    return frozenset(i for i in range(count) if (i + 1) * stay // count > i * stay // count)


def _forward(
    packed: PackedFile, model: PreTrainedModel, kept: frozenset[int], int8: bool, tell: Callable[[float], None]
) -> CpuForward:
    """Our forward with the ``kept`` layers in memory. Reads and checks every section once."""
    read = [number for number in range(len(packed.layers)) if number not in kept]
    largest = max((packed.sections[number].bytes for number in read), default=0)
    buffers = [asked_for(largest) for _ in range(BUFFERS if read else 0)]
    own = {number: asked_for(packed.sections[number].bytes) for number in (*kept, PROJECTION)}
    memory = own | {number: buffers[turn % BUFFERS] for turn, number in enumerate(read)}
    _read_all(packed, own, buffers, tell)
    with torch.inference_mode():
        plan = FAMILIES[type(model).__name__](model, _Loading(packed, model, memory, int8))
    stream = _stream(packed, memory, kept) if read else None
    return CpuForward(dataclasses.replace(plan, stream=stream))


def _stream(packed: PackedFile, memory: dict[int, mmap.mmap], kept: frozenset[int]) -> Any:
    """The native stream that reads the layers that are not ``kept`` into their buffers."""
    found = library()
    assert found is not None
    native, sections = found.module, []
    for number, section in enumerate(packed.layers):
        place = () if number in kept else (section.offset, section.bytes, _address(memory[number]))
        sections.append(native.Section(*place))
    path = os.fsencode(packed.folder.absolute() / WEIGHTS)
    return native.Stream(packed.file, path, sections, PIECE, READERS, memory)


def _read_all(
    packed: PackedFile, own: dict[int, mmap.mmap], buffers: list[mmap.mmap], tell: Callable[[float], None]
) -> None:
    """Read and check every section: into its ``own`` memory if it stays, else into any buffer."""
    free: queue.SimpleQueue[mmap.mmap] = queue.SimpleQueue()
    for buffer in buffers:
        free.put(buffer)

    def read(item: tuple[int, Section]) -> None:
        number, section = item
        if number in own:
            packed.read(section, own[number])
            return
        buffer = free.get()
        try:
            packed.read(section, buffer)
        finally:
            free.put(buffer)

    with ThreadPoolExecutor(BUFFERS) as pool:
        for done, _ in enumerate(pool.map(read, packed.sections.items()), 1):
            tell(done / len(packed.sections))
