"""The KV cache of our forward: one buffer for all layers whose heads have the same shape, and a length.

Keys are stored as the rotary embedding writes them, each pair of numbers as one complex number, or in panels of several
keys where attention is native (``native/attention.h``). A pass writes its tokens in place, a rollback assigns the
length, and one call takes the views that all layers need. Layers with a recurrent state use ``States`` instead
(``delta.py``).
"""

from __future__ import annotations

import math
import mmap
from array import array
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from adaptive.engines.cpu.delta import States
from adaptive.engines.protocol import Memory
from adaptive.tokens import on_one_thread

# Tokens of which the capacity is a multiple; itself a multiple of any panel of keys. Too low: the cache grows (and
# copies) more often. Too high: short chats waste memory.
GROWTH = 512

# Flags for memory that no other process shares, on systems where ``mmap`` takes flags.
PRIVATE = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_ANONYMOUS") else {}


def blank(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros of this shape. On the CPU the system provides each page when it is first written: most answers are shorter
    than their reservation, and filling all of it would take as long as some ten tokens. Raises MemoryError."""
    nbytes = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or not nbytes:
        return torch.zeros(shape, dtype=dtype, device=device)
    try:
        memory = mmap.mmap(-1, nbytes, **PRIVATE)
    except OSError as error:
        raise MemoryError from error
    return torch.frombuffer(memory, dtype=dtype).view(shape)


class CpuCache:
    """Keys and values of one text: caches numbered as in ``Layer.cache``, each (2, heads, capacity, head size) by
    ``shapes`` (heads, head size). With a ``width`` also the hidden states (capacity, kept * width) of its tokens,
    float32: those before each of the layers ``kept``, side by side. ``panel``: keys in a panel, 1 for keys stored one
    by one. ``states``: the recurrent states of the other layers, if there are any."""

    def __init__(
        self,
        shapes: Sequence[tuple[int, int]],
        dtype: torch.dtype,
        device: torch.device,
        width: int,
        panel: int,
        states: States | None = None,
        kept: tuple[int, ...] = (0,),
    ) -> None:
        self.panel, self.states, self._kept = panel, states, kept
        self.length = 0
        self.capacity = 0
        # The address of each cache, by number, and the address of this array.
        self.addresses = array("Q")
        self.table = 0
        # By shape: the numbers of the caches that have it, and their buffer (caches, 2, heads, capacity, size).
        self._groups = {
            shape: [i for i, other in enumerate(shapes) if other == shape] for shape in dict.fromkeys(shapes)
        }
        self._buffers = [
            torch.empty(len(group), 2, heads, 0, size, dtype=dtype, device=device)
            for (heads, size), group in self._groups.items()
        ]
        self._device = device
        self.hidden: torch.Tensor | None = None
        if width:
            self.hidden = torch.empty(0, len(kept) * width, device=device)
        self.hidden_address = 0  # 0 for none

    def reserve(self, length: int) -> None:
        """Reserve capacity for ``length`` tokens. Raises MemoryError; the held tokens stay in any case."""
        if length > self.capacity:
            self._grow(-(-length // GROWTH) * GROWTH)

    def ensure_capacity(self, length: int) -> None:
        """``reserve`` for a pass without a reservation: grows by half at least, so that few passes copy."""
        if length > self.capacity:
            self.reserve(max(length, self.capacity * 3 // 2))

    @torch.inference_mode()
    def _grow(self, capacity: int) -> None:
        # Zeros, not garbage: attention may multiply masked values by zero, and garbage may be nan.
        hidden = self.hidden
        buffers = [blank((*b.shape[:3], capacity, b.shape[4]), b.dtype, b.device) for b in self._buffers]
        if hidden is not None:
            hidden = blank((capacity, hidden.shape[1]), hidden.dtype, hidden.device)
        if self.capacity:  # copy the whole capacity: a tree may lie behind the held tokens
            with on_one_thread():
                for buffer, before in zip(buffers, self._buffers, strict=True):
                    buffer[:, :, :, : self.capacity] = before
                if self.hidden is not None and hidden is not None:
                    hidden[: self.capacity] = self.hidden
        addresses = array("Q", [each.data_ptr() for each in self._each(buffers)])
        if self.panel == 1:
            self._pairs = [torch.view_as_complex(buffer.unflatten(4, (-1, 2))) for buffer in buffers]
        if hidden is not None:
            self.hidden, self.hidden_address = hidden, hidden.data_ptr()
        self.addresses, self.table, self.capacity = addresses, addresses.buffer_info()[0], capacity
        self._buffers = buffers  # last: the addresses above are not those of the buffers that this frees

    def _each(self, groups: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """The parts of tensors that have one part for each cache of a group, in the order of cache numbers."""
        numbers = [number for group in self._groups.values() for number in group]
        parts = [part for group in groups for part in group.unbind(0)]
        if len(self._groups) < 2:
            return parts
        return [part for _, part in sorted(zip(numbers, parts, strict=True), key=lambda pair: pair[0])]

    def views(self, begin: int, end: int) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
        """For each cache: the keys and the values (1, heads, end, size) of the first ``end`` tokens, and the complex
        view (2, heads, end - begin, size / 2) into which the tokens from ``begin`` on are written."""
        self.ensure_capacity(end)
        held = [buffer.narrow(3, 0, end) for buffer in self._buffers]
        return (
            self._each(buffer[:, :1] for buffer in held),
            self._each(buffer[:, 1:] for buffer in held),
            self._each(pairs.narrow(3, begin, end - begin) for pairs in self._pairs),
        )

    def hold(self, layer: int, begin: int, x: torch.Tensor) -> None:
        """Store the residual stream x (n, width) before a layer, of tokens ``begin`` on, if that layer is ``kept``."""
        if self.hidden is not None and layer in self._kept:
            rows = self.hidden[begin : begin + len(x)].unflatten(1, (len(self._kept), -1))
            for place, kept in enumerate(self._kept):
                if kept == layer:
                    rows[:, place] = x

    def features(self, begin: int, end: int) -> torch.Tensor:
        """The hidden states (end - begin, kept * width) of these tokens; the cache must keep them."""
        assert self.hidden is not None
        return self.hidden[begin:end]

    def begin(self, count: int, steps: int = 0) -> Any:
        """The kernels' ``Recall`` for a pass, see ``States.begin``; None without recurrent layers."""
        return None if self.states is None else self.states.begin(count, steps)

    def end(self, count: int) -> None:
        """Finish the pass that has begun: it appended ``count`` tokens."""
        self.length += count
        if self.states is not None:
            self.states.end(count)

    def undo(self, whole: bool) -> None:
        """Handle the interruption of a pass that has begun, see ``States.undo``: fewer tokens may be held after it."""
        if self.states is not None:
            self.states.undo(whole)
            self.length = self.states.length

    def rollback(self, length: int) -> None:
        """Forget all tokens after the first ``length``, or more where recurrent states cannot go back to exactly
        there; the attribute ``length`` is the number of held tokens."""
        self.length = min(length, self.length)
        if self.states is not None:
            self.length = self.states.rollback(self.length)

    @torch.inference_mode()
    def keep_path(self, path: list[int]) -> None:
        """Append the nodes ``path`` of the tree that lies behind the held tokens; drop its other nodes."""
        moved = next((i for i, node in enumerate(path) if node != i), len(path))
        if moved < len(path):
            to = torch.arange(self.length + moved, self.length + len(path), device=self._device)
            at = torch.tensor(path[moved:], device=self._device) + self.length
            for buffer in self._buffers:
                count, _, heads, _, size = buffer.shape
                keys = buffer[:, 0].view(count, heads, self.capacity // self.panel, size, self.panel)
                keys[:, :, to // self.panel, :, to % self.panel] = keys[:, :, at // self.panel, :, at % self.panel]
                values = buffer[:, 1]
                values[:, :, to] = values[:, :, at]
            if self.hidden is not None:
                self.hidden[to] = self.hidden[at]
        self.length += len(path)

    @torch.inference_mode()
    def copy_prefix(self, other: CpuCache, length: int) -> None:
        """Hold the first ``length`` tokens of ``other``, or fewer as after a rollback. The capacity must suffice."""
        if self.states is not None and other.states is not None:
            length = self.states.copy(other.states, length)
        whole = min(-(-length // GROWTH) * GROWTH, other.capacity)  # whole panels
        for buffer, others in zip(self._buffers, other._buffers, strict=True):
            buffer[:, :, :, :whole] = others[:, :, :, :whole]
        if self.hidden is not None:
            self.hidden[:length] = other.features(0, length)
        self.length = length

    @torch.inference_mode()
    def stored(self) -> dict[str, torch.Tensor] | None:
        """Views of the held keys, values and hidden states by name, in whole panels; None with recurrent states or no
        tokens. The rest of the last panels becomes zeros: it may be of another text, which ``copy_prefix`` copied or a
        rollback left there, and must not be written to disk with this one."""
        if self.states is not None or not self.length:
            return None
        whole = min(-(-self.length // GROWTH) * GROWTH, self.capacity)
        rest = torch.arange(self.length, whole, device=self._device)
        found = {}
        for name, buffer in zip(self._names, self._buffers, strict=True):
            count, _, heads, _, size = buffer.shape
            keys = buffer[:, 0].view(count, heads, self.capacity // self.panel, size, self.panel)
            keys[:, :, rest // self.panel, :, rest % self.panel] = 0
            buffer[:, 1, :, self.length : whole] = 0
            found[name] = buffer[:, :, :, :whole]
        return found if self.hidden is None else {**found, "hidden": self.hidden[: self.length]}

    @property
    def _names(self) -> list[str]:
        """The names under which the buffers are stored."""
        return [f"keys_values_{number}" for number in range(len(self._buffers))]

    @torch.inference_mode()
    def restore(self, stored: dict[str, torch.Tensor], length: int) -> None:
        """Hold the first ``length`` tokens of a ``stored`` cache. Raises ValueError if it does not fit this one."""
        hidden = stored.get("hidden")
        given = [stored[name] for name in self._names]
        capacity = given[0].shape[3] if given and given[0].ndim > 3 else 0
        fits = capacity >= length and all(
            one.shape == (*buffer.shape[:3], capacity, buffer.shape[4]) and one.dtype == buffer.dtype
            for one, buffer in zip(given, self._buffers, strict=True)
        )
        if self.states is not None or not fits or (hidden is None) != (self.hidden is None):
            raise ValueError("it is of another kind of cache")
        self.reserve(max(length, capacity))
        for one, buffer in zip(given, self._buffers, strict=True):
            buffer[:, :, :, :capacity] = one
        if self.hidden is not None and hidden is not None:
            if len(hidden) < length or hidden.shape[1] != self.hidden.shape[1]:
                raise ValueError("it is of another kind of cache")
            self.hidden[:length] = hidden[:length]
        self.length = length

    @property
    def memory(self) -> Memory:
        """Bytes of the buffers, and of recurrent states and their checkpoints."""
        states, checkpoints = (0, 0) if self.states is None else (self.states.nbytes, self.states.checkpoint_nbytes)
        held = sum(buffer.nbytes for buffer in self._buffers)
        return Memory(held, states, checkpoints, 0 if self.hidden is None else self.hidden.nbytes)
