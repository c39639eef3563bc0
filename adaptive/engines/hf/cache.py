"""A KV cache for transformers' forward that rolls back by assigning its length: two buffers per layer.

transformers' dynamic cache grows by concatenation (a copy of everything at every token) and its static cache attends
over its whole capacity. This one writes in place into reserved buffers and gives attention a view of the used part. So
a step costs only its own tokens, and a rollback is an assignment. Layers with a sliding window keep all keys, and only
the mask applies the window: a rollback moves the window back over older keys. Layers with a recurrent state are in
``recurrent.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin, DummyLayer, get_layer_types_and_kwargs

from adaptive.engines.cpu.cache import CpuCache
from adaptive.engines.hf.calls import current_pass
from adaptive.engines.hf.recurrent import RecurrentLayer, State, States
from adaptive.engines.protocol import Memory
from adaptive.errors import NoMemoryError
from adaptive.tokens import uploaded

# Tokens of which the capacity is a multiple. Too low: the cache grows (and copies) more often. Too high: short chats
# waste memory.
GROWTH = 512


class Recording:
    """The places in a cache that a recorded pass uses. It writes ``size`` tokens from the place in ``start``, a tensor
    without dimensions, and reads the first ``keys`` places."""

    def __init__(self, start: torch.Tensor, size: int, keys: int) -> None:
        self.start, self.keys = start, keys
        self._steps = torch.arange(size, device=start.device)

    def places(self) -> torch.Tensor:
        """The places (size,) of the tokens."""
        return self.start + self._steps


@dataclass(frozen=True)
class Buffers:
    """The buffers of a cache: keys and values of each layer, (batch, heads, capacity, head size) each, and the hidden
    states (capacity, width) if they are kept."""

    layers: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    hidden: torch.Tensor | None

    @property
    def capacity(self) -> int:
        """Tokens for which every buffer has room."""
        return min(keys.shape[2] for keys, _ in self.layers)

    def suits(self, cache: RollbackCache) -> bool:
        """Whether they include hidden states exactly if the cache keeps these."""
        return (self.hidden is not None) == cache.keeps

    def copied(self, capacity: int) -> Buffers:
        """A copy of the first ``capacity`` places in new buffers."""
        layers = tuple((keys[:, :, :capacity].clone(), values[:, :, :capacity].clone()) for keys, values in self.layers)
        return Buffers(layers, None if self.hidden is None else self.hidden[:capacity].clone())


class RollbackLayer(CacheLayerMixin):
    """Keys and values of one layer, each (batch, heads, capacity, head size), used up to ``length``.

    ``kind`` is the layer type in the model's config. With a ``recording``, the length is a tensor of the recording, as
    in transformers' static cache.
    """

    is_croppable = True

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.recording: Recording | None = None
        self.kind = kind
        self.is_sliding = kind != "full_attention"
        self.length = 0
        self.capacity = 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate the reserved capacity, in the dtype and on the device of the first states."""
        self.dtype, self.device = key_states.dtype, key_states.device
        try:
            self.keys, self.values = (_buffer(states, self.capacity) for states in (key_states, value_states))
        except RuntimeError:  # no memory: nothing is reserved
            self.capacity = 0
            raise
        self.is_initialized = True

    def grown(self, capacity: int) -> list[torch.Tensor]:
        """Larger buffers for ``use``; an empty list before the first states."""
        return [_buffer(old, capacity) for old in (self.keys, self.values) if old is not None]

    def use(self, buffers: list[torch.Tensor], capacity: int) -> None:
        """Copy the contents into the ``grown`` buffers and use these from now on."""
        if buffers:
            assert self.keys is not None
            assert self.values is not None
            for new, old in zip(buffers, (self.keys, self.values), strict=True):
                new[:, :, : old.shape[2]] = old  # the whole buffer, because a tree may follow the held tokens
            self.keys, self.values = buffers
        self.capacity = capacity

    def lie_in(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Copy the contents into these buffers, as far as they fit, and use them from now on."""
        for new, old in ((keys, self.keys), (values, self.values)):
            if old is not None:
                held = min(new.shape[2], old.shape[2])
                new[:, :, :held] = old[:, :, :held]  # not only ``length``, because a tree may follow the held tokens
        self.keys, self.values, self.capacity = keys, values, keys.shape[2]
        self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True

    def copy_prefix(self, other: RollbackLayer, length: int) -> None:
        """Replace the contents by the first ``length`` tokens of ``other``; the capacity must suffice."""
        if other.keys is None or other.values is None:
            return
        if not self.is_initialized:
            self.lazy_initialization(other.keys, other.values)
        assert self.keys is not None
        assert self.values is not None
        self.keys[:, :, :length] = other.keys[:, :, :length]
        self.values[:, :, :length] = other.values[:, :, :length]
        self.length = length

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the new states after the held ones and return views of all of them."""
        if self.recording is not None:
            places, keys = self.recording.places(), self.recording.keys
            for buffer, states in ((self.keys, key_states), (self.values, value_states)):
                assert buffer is not None
                buffer.index_copy_(2, places, states)
            return self.keys[:, :, :keys], self.values[:, :, :keys]  # type: ignore[index]
        end = self.length + key_states.shape[-2]
        if end > self.capacity:  # a pass without a reservation
            capacity = -(-end // GROWTH) * GROWTH
            self.use(self.grown(capacity), capacity)
        views = self.write(self.length, key_states, value_states)
        self.length = end
        return views

    def write(
        self, begin: int, key_states: torch.Tensor, value_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the states of tokens from ``begin`` on, and return views of all tokens up to the last of them. The
        capacity must suffice."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        end = begin + key_states.shape[-2]
        self.keys[:, :, begin:end] = key_states
        self.values[:, :, begin:end] = value_states
        return self.keys[:, :, :end], self.values[:, :, :end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the keys that the mask of the next pass covers."""
        return self.length + query_length if self.recording is None else self.recording.keys, 0

    def get_seq_length(self) -> Any:
        """Tokens held; a tensor with a recording."""
        return self.length if self.recording is None else self.recording.start

    @property
    def is_compileable(self) -> bool:  # type: ignore[override]
        """Whether shapes and addresses are the same in every pass."""
        return self.recording is not None

    def get_max_length(self) -> int:
        """-1: no limit."""
        return -1


def _buffer(states: torch.Tensor, capacity: int) -> torch.Tensor:
    batch, heads, _, size = states.shape
    # Zeros, not uninitialised memory: a recorded pass multiplies masked values too, and NaN times 0 is NaN.
    return states.new_zeros((batch, heads, capacity, size))


class HybridLayer(RecurrentLayer, RollbackLayer):  # type: ignore[misc]
    """A layer with both attention and a recurrent state."""

    is_croppable = False  # type: ignore[misc]

    def __init__(self, kind: str, count: int) -> None:
        RollbackLayer.__init__(self, kind)
        RecurrentLayer.__init__(self, count)

    def lazy_initialization(self, *args: Any, **kwargs: object) -> None:
        """Allocate the keys and values; see ``RollbackLayer``."""
        RollbackLayer.lazy_initialization(self, *args)


ATTENTION = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
RECURRENT = frozenset({"linear_attention", "conv", "hybrid", "hybrid_sliding"})


def layer_kinds(config: Any) -> list[str]:
    """transformers' type of each layer of a model with this text config. ``dummy`` is a layer without its own cache,
    for example one that reuses another layer's keys."""
    return get_layer_types_and_kwargs(config)[0]


def _layer(kind: str, states: int) -> RollbackLayer | RecurrentLayer | DummyLayer:
    if kind in ATTENTION:
        return RollbackLayer(kind)
    if kind == "dummy":
        return DummyLayer()
    if kind not in RECURRENT:
        raise ValueError(f"layers of {kind} have no cache here")
    seen = "sliding_attention" if kind == "hybrid_sliding" else "full_attention"
    return HybridLayer(seen, states) if "hybrid" in kind else RecurrentLayer(states)


class RollbackCache(Cache):
    """The cache of one text: a cache layer for each model layer, which may be of ``ATTENTION`` or ``RECURRENT`` kinds
    or ``dummy``. With ``keeps`` also the hidden states of its tokens, in the model's dtype."""

    layers: list[Any]

    def __init__(self, config: Any, keeps: bool = False) -> None:
        kinds, options = get_layer_types_and_kwargs(config)
        layers = [_layer(kind, given.get("number_of_states", 1)) for kind, given in zip(kinds, options, strict=True)]
        super().__init__(layers=list[Any](layers))
        self._attention = [layer for layer in layers if isinstance(layer, RollbackLayer)]
        states = [state for layer in layers if isinstance(layer, RecurrentLayer) for state in layer.states.values()]
        self.states = States(states) if states else None
        self.keeps = keeps
        self._hidden: torch.Tensor | None = None  # (capacity, width); None before the first pass
        self._room = 0  # reserved tokens
        self._lies: tuple[int, ...] = ()  # the ``addresses``; empty until they are asked for

    @property
    def length(self) -> int:
        """Tokens held."""
        if self._attention:
            return self._attention[0].length
        assert self.states is not None
        return self.states.length

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """The last inputs of a layer's convolution; None at the beginning of a text."""
        state: State = self.layers[layer_idx].states[state_idx]
        current_pass().state = state
        return state.window()

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """A layer's recurrent state; None at the beginning of a text. Do not write into it: see ``State.own``."""
        state: State = self.layers[layer_idx].states[state_idx]
        current_pass().state = state
        return state.recurrent

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Whether any tokens are held."""
        return self.length > 0

    def reserve(self, length: int) -> None:
        """Reserve capacity for ``length`` tokens in every layer. If there is not enough memory, raises torch's error,
        with every layer unchanged."""
        capacity = -(-length // GROWTH) * GROWTH
        small = [layer for layer in self._attention if layer.capacity < capacity]
        grown = [layer.grown(capacity) for layer in small]
        hidden = self._grown(capacity)
        for layer, buffers in zip(small, grown, strict=True):
            layer.use(buffers, capacity)
        self._hidden = hidden
        self._room = max(self._room, capacity)
        if small:
            self._lies = ()

    def _grown(self, capacity: int) -> torch.Tensor | None:
        """A buffer for the hidden states of ``capacity`` tokens, with the present contents; None before the first
        pass."""
        old = self._hidden
        if old is None or len(old) >= capacity:
            return old
        new = old.new_zeros(capacity, old.shape[1])
        new[: len(old)] = old
        return new

    def keep(self, hidden: torch.Tensor) -> None:
        """Store the hidden states (1, n, width) of the n tokens of the present pass, whose keys are stored already."""
        recording = self._attention[0].recording if self._attention else None
        if recording is None:
            self.hold(self.length - hidden.shape[1], hidden[0])
        else:
            self._hidden_room(hidden).index_copy_(0, recording.places(), hidden[0])

    def hold(self, begin: int, hidden: torch.Tensor) -> None:
        """Store the hidden states (n, width) of n tokens from ``begin`` on."""
        self._hidden_room(hidden)[begin : begin + len(hidden)] = hidden

    def _hidden_room(self, hidden: torch.Tensor) -> torch.Tensor:
        """The buffer (capacity, width) for hidden states; allocated like ``hidden`` (..., width) at the first call."""
        if self._hidden is None:
            self._hidden = hidden.new_zeros(self.capacity, hidden.shape[-1])
        return self._hidden

    def features(self, begin: int, end: int) -> torch.Tensor:
        """A view of the hidden states (end - begin, width) of these tokens, which must be kept."""
        assert self._hidden is not None
        return self._hidden[begin:end]

    def ensure_capacity(self, length: int) -> None:
        """``reserve`` for a pass without a reservation: at least half as much again, so that few passes copy."""
        if length > self.capacity:
            self.reserve(max(length, self.capacity * 3 // 2))

    @property
    def capacity(self) -> int:
        """Tokens for which every layer has room."""
        return min((layer.capacity for layer in self._attention), default=self._room)

    def buffers(self) -> Buffers:
        """The cache's present buffers. Call it after the first pass."""
        layers = ((layer.keys, layer.values) for layer in self._attention)
        return Buffers(tuple((k, v) for k, v in layers if k is not None and v is not None), self._hidden)

    def addresses(self) -> tuple[int, ...]:
        """For each layer the addresses of its keys and of its values, and its capacity. Call it after the first pass of
        a model without recurrent layers. The same object until a buffer is replaced."""
        if not self._lies:
            pairs = self.buffers().layers
            self._lies = tuple(n for k, v in pairs for n in (k.data_ptr(), v.data_ptr(), k.shape[2]))
        return self._lies

    def lies_in(self, buffers: Buffers) -> bool:
        """Whether the cache uses these buffers, and has not replaced any of them by a larger one."""
        pairs = zip(self._attention, buffers.layers, strict=True)
        return self._hidden is buffers.hidden and all(layer.keys is keys for layer, (keys, _) in pairs)

    def lie_in(self, buffers: Buffers) -> None:
        """Copy the contents into these buffers and use them from now on. They must be large enough, and no other cache
        may use them."""
        for layer, (keys, values) in zip(self._attention, buffers.layers, strict=True):
            layer.lie_in(keys, values)
        if buffers.hidden is not None and self._hidden is not None:
            held = min(len(buffers.hidden), len(self._hidden))
            buffers.hidden[:held] = self._hidden[:held]
        self._hidden = buffers.hidden
        self._lies = ()

    def advance(self, count: int) -> None:
        """Count ``count`` more tokens as held, which a recorded, joint or tree pass has written."""
        for layer in self._attention:
            layer.length += count

    @contextmanager
    def written_as(self, recording: Recording) -> Iterator[None]:
        """Inside the context, passes read and write the cache as ``recording`` defines."""
        for layer in self._attention:
            layer.recording = recording
        try:
            yield
        finally:
            for layer in self._attention:
                layer.recording = None

    def rollback(self, length: int) -> None:
        """Drop all tokens after the first ``length``, and those that an interrupted forward has written in some layers
        only. Recurrent states may have to go back further; ``self.length`` is then the number of held tokens."""
        length = min([length, *(layer.length for layer in self._attention)])
        if self.states is not None:
            length = self.states.rollback(min(length, self.states.done))
        for layer in self._attention:
            layer.length = length

    @torch.inference_mode()
    def keep_path(self, path: list[int]) -> None:
        """Append the nodes ``path`` of the tree that was written after the held tokens, and drop the others."""
        begin, moved = self.length, next((i for i, node in enumerate(path) if node != i), len(path))
        buffers = [(t, 2) for layer in self._attention for t in (layer.keys, layer.values)]
        if self.keeps:
            buffers.append((self._hidden, 0))
        for buffer, axis in buffers if moved < len(path) else ():
            assert buffer is not None
            at = uploaded(path[moved:], torch.long, buffer.device) + begin
            buffer.narrow(axis, begin + moved, len(at)).copy_(buffer.index_select(axis, at))
        self.advance(len(path))

    @torch.inference_mode()
    def copy_prefix(self, other: RollbackCache, length: int) -> None:
        """Replace the contents by the first ``length`` tokens of ``other``, or by fewer, as after a rollback. The
        capacity must suffice."""
        if self.states is not None and other.states is not None:
            length = self.states.copy(other.states, length)
        for layer, source in zip(self._attention, other._attention, strict=True):
            layer.copy_prefix(source, length)
        if self.keeps and other._hidden is not None:
            if self._hidden is None:
                self._hidden = other._hidden.new_zeros(self.capacity, other._hidden.shape[1])
            self._hidden[:length] = other._hidden[:length]

    @property
    def memory(self) -> Memory:
        """The memory of all buffers, and of recurrent states with the inputs that are kept for rollbacks."""
        keys = sum(t.nbytes for layer in self._attention for t in (layer.keys, layer.values) if t is not None)
        states, checkpoints = (0, 0) if self.states is None else self.states.nbytes
        return Memory(keys, states, checkpoints, 0 if self._hidden is None else self._hidden.nbytes)


def reserve(cache: CpuCache | RollbackCache, length: int) -> None:
    """Reserve capacity for ``length`` tokens. Raises NoMemoryError if there is not enough memory."""
    try:
        cache.reserve(length)
    except (RuntimeError, MemoryError) as error:
        raise no_room(length) from error


def copy_prefix(cache: CpuCache | RollbackCache, other: CpuCache | RollbackCache, length: int) -> None:
    """``cache.copy_prefix``, which on a device allocates the buffers. Raises NoMemoryError if there is not enough
    memory; the cache is then empty."""
    try:
        cache.copy_prefix(other, length)  # type: ignore[arg-type]  # both caches are of the same kind
    except (RuntimeError, MemoryError) as error:
        cache.rollback(0)
        raise no_room(length) from error


def no_room(length: int) -> NoMemoryError:
    """The error if there is no memory for a text of ``length`` tokens."""
    return NoMemoryError(
        f"there is no memory for the keys and values of {length} tokens; shorten the text or free memory"
    )
