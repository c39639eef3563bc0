"""A key-value cache that rolls back by forgetting: one buffer a layer, and a length.

transformers' dynamic cache grows by concatenation (a copy of everything at every token) and its
static cache attends over its whole capacity. This one writes in place into a reserved buffer and
hands attention a view of the part in use, so a step costs its own tokens and a rollback costs an
assignment. Layers with a sliding window keep their past too: the mask, not the cache, is the window,
because a rolled-back token may bring an older one back into sight. Layers with a recurrent state are in
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
from adaptive.errors import AdaptiveError
from adaptive.tokens import uploaded

# Tokens. Smaller grows (and copies) more often, larger wastes memory on short chats.
GROWTH = 512


class Recording:
    """How a pass that is recorded sees a cache: ``size`` tokens from the place that ``start`` () holds, and the
    first ``keys`` places."""

    def __init__(self, start: torch.Tensor, size: int, keys: int) -> None:
        self.start, self.keys = start, keys
        self._steps = torch.arange(size, device=start.device)

    def places(self) -> torch.Tensor:
        """The places (size,) of the tokens."""
        return self.start + self._steps


@dataclass(frozen=True)
class Buffers:
    """Where a cache's keys and values lie: those of each layer, (batch, heads, capacity, head size) each, and the
    hidden states (capacity, width) where they are kept."""

    layers: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    hidden: torch.Tensor | None

    @property
    def capacity(self) -> int:
        """Tokens that each of them holds."""
        return min(keys.shape[2] for keys, _ in self.layers)

    def suits(self, cache: RollbackCache) -> bool:
        """Whether they hold what the cache holds."""
        return (self.hidden is not None) == cache.keeps

    def copied(self, capacity: int) -> Buffers:
        """The same for fewer tokens, elsewhere."""
        layers = tuple((keys[:, :, :capacity].clone(), values[:, :, :capacity].clone()) for keys, values in self.layers)
        return Buffers(layers, None if self.hidden is None else self.hidden[:capacity].clone())


class RollbackLayer(CacheLayerMixin):
    """Keys and values of one layer, each (batch, heads, capacity, head size), used up to ``length``.

    ``kind`` is what the model calls such a layer. Under a ``recording`` the length is the recording's, a tensor, as in
    transformers' static cache.
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
        except RuntimeError:  # no memory: what was reserved is not there
            self.capacity = 0
            raise
        self.is_initialized = True

    def grown(self, capacity: int) -> list[torch.Tensor]:
        """Larger buffers for ``use``; none where the first states are still to come."""
        return [_buffer(old, capacity) for old in (self.keys, self.values) if old is not None]

    def use(self, buffers: list[torch.Tensor], capacity: int) -> None:
        """Go over to ``grown`` buffers; what is held stays."""
        if buffers:
            assert self.keys is not None
            assert self.values is not None
            for new, old in zip(buffers, (self.keys, self.values), strict=True):
                new[:, :, : old.shape[2]] = old  # all of it: a tree may lie behind what is held
            self.keys, self.values = buffers
        self.capacity = capacity

    def lie_in(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Hold what is held in these buffers."""
        for new, old in ((keys, self.keys), (values, self.values)):
            if old is not None:
                held = min(new.shape[2], old.shape[2])
                new[:, :, :held] = old[:, :, :held]  # all of it: a tree may lie behind what is held
        self.keys, self.values, self.capacity = keys, values, keys.shape[2]
        self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True

    def copy_prefix(self, other: RollbackLayer, length: int) -> None:
        """Hold the first ``length`` tokens of ``other``; the capacity suffices."""
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
        """Write the new states after the ones held and return views of all of them."""
        if self.recording is not None:
            places, keys = self.recording.places(), self.recording.keys
            for buffer, states in ((self.keys, key_states), (self.values, value_states)):
                assert buffer is not None
                buffer.index_copy_(2, places, states)
            return self.keys[:, :, :keys], self.values[:, :, :keys]  # type: ignore[index]
        end = self.length + key_states.shape[-2]
        if end > self.capacity:  # a pass that nobody reserved for
            capacity = -(-end // GROWTH) * GROWTH
            self.use(self.grown(capacity), capacity)
        views = self.write(self.length, key_states, value_states)
        self.length = end
        return views

    def write(
        self, begin: int, key_states: torch.Tensor, value_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the states of tokens ``begin`` on, for which there is capacity, and return views of all up to them."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        end = begin + key_states.shape[-2]
        self.keys[:, :, begin:end] = key_states
        self.values[:, :, begin:end] = value_states
        return self.keys[:, :, :end], self.values[:, :, :end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the keys that the mask of the next step covers."""
        return self.length + query_length if self.recording is None else self.recording.keys, 0

    def get_seq_length(self) -> Any:
        """Tokens held."""
        return self.length if self.recording is None else self.recording.start

    @property
    def is_compileable(self) -> bool:  # type: ignore[override]
        """Whether shapes and addresses are the same at every step."""
        return self.recording is not None

    def get_max_length(self) -> int:
        """No limit of its own."""
        return -1


def _buffer(states: torch.Tensor, capacity: int) -> torch.Tensor:
    batch, heads, _, size = states.shape
    # Zeros, not garbage: a recorded pass multiplies what a mask hides, and garbage may be nan.
    return states.new_zeros((batch, heads, capacity, size))


class HybridLayer(RecurrentLayer, RollbackLayer):  # type: ignore[misc]
    """A layer that has both attention and a recurrent state."""

    is_croppable = False  # type: ignore[misc]

    def __init__(self, kind: str, count: int) -> None:
        RollbackLayer.__init__(self, kind)
        RecurrentLayer.__init__(self, count)

    def lazy_initialization(self, *args: Any, **kwargs: object) -> None:
        """Of the keys and values."""
        RollbackLayer.lazy_initialization(self, *args)


ATTENTION = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
RECURRENT = frozenset({"linear_attention", "conv", "hybrid", "hybrid_sliding"})


def layer_kinds(config: Any) -> list[str]:
    """What each layer of a model of this (text) config holds, in transformers' words; ``dummy`` for nothing of its own,
    as where it reuses another layer's keys."""
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
    """A layer of ours for each of the model's, of ``ATTENTION`` or ``RECURRENT`` kinds or none, all of one length; with
    ``keeps`` the hidden states of its tokens too, in the model's dtype."""

    layers: list[Any]

    def __init__(self, config: Any, keeps: bool = False) -> None:
        kinds, options = get_layer_types_and_kwargs(config)
        layers = [_layer(kind, given.get("number_of_states", 1)) for kind, given in zip(kinds, options, strict=True)]
        super().__init__(layers=list[Any](layers))
        self._attention = [layer for layer in layers if isinstance(layer, RollbackLayer)]
        states = [state for layer in layers if isinstance(layer, RecurrentLayer) for state in layer.states.values()]
        self.states = States(states) if states else None
        self.keeps = keeps
        self._hidden: torch.Tensor | None = None  # (capacity, width), from the first pass on
        self._room = 0  # tokens that were reserved for

    @property
    def length(self) -> int:
        """Tokens held."""
        if self._attention:
            return self._attention[0].length
        assert self.states is not None
        return self.states.length

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """The last inputs of a layer's convolution; None where the text begins."""
        state: State = self.layers[layer_idx].states[state_idx]
        current_pass().state = state
        return state.window()

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """A layer's state; None where the text begins. It belongs to the cache: see ``State.own``."""
        state: State = self.layers[layer_idx].states[state_idx]
        current_pass().state = state
        return state.recurrent

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Whether a text has begun."""
        return self.length > 0

    def reserve(self, length: int) -> None:
        """Have capacity for ``length`` tokens in every layer. Memory may be short: then every layer stays as it was."""
        capacity = -(-length // GROWTH) * GROWTH
        small = [layer for layer in self._attention if layer.capacity < capacity]
        grown = [layer.grown(capacity) for layer in small]
        hidden = self._grown(capacity)
        for layer, buffers in zip(small, grown, strict=True):
            layer.use(buffers, capacity)
        self._hidden = hidden
        self._room = max(self._room, capacity)

    def _grown(self, capacity: int) -> torch.Tensor | None:
        """Room for the hidden states of so many tokens, with those that are held."""
        old = self._hidden
        if old is None or len(old) >= capacity:
            return old
        new = old.new_zeros(capacity, old.shape[1])
        new[: len(old)] = old
        return new

    def keep(self, hidden: torch.Tensor) -> None:
        """Hold the hidden states (1, n, width) of the n tokens of the pass under way, whose keys are held already."""
        recording = self._attention[0].recording if self._attention else None
        if recording is None:
            self.hold(self.length - hidden.shape[1], hidden[0])
        else:
            self._hidden_room(hidden).index_copy_(0, recording.places(), hidden[0])

    def hold(self, begin: int, hidden: torch.Tensor) -> None:
        """Hold the hidden states (n, width) of tokens ``begin`` on."""
        self._hidden_room(hidden)[begin : begin + len(hidden)] = hidden

    def _hidden_room(self, hidden: torch.Tensor) -> torch.Tensor:
        """Where hidden states (..., width) like these are held, (capacity, width)."""
        if self._hidden is None:
            self._hidden = hidden.new_zeros(self.capacity, hidden.shape[-1])
        return self._hidden

    def features(self, begin: int, end: int) -> torch.Tensor:
        """The hidden states (end - begin, width) of these tokens, where they are kept."""
        assert self._hidden is not None
        return self._hidden[begin:end]

    def ensure_capacity(self, length: int) -> None:
        """``reserve`` for a pass that nobody reserved for: half as much again, so that few passes copy."""
        if length > self.capacity:
            self.reserve(max(length, self.capacity * 3 // 2))

    @property
    def capacity(self) -> int:
        """Tokens that the buffers of every layer hold."""
        return min((layer.capacity for layer in self._attention), default=self._room)

    def buffers(self) -> Buffers:
        """Where it lies; behind its first pass."""
        layers = ((layer.keys, layer.values) for layer in self._attention)
        return Buffers(tuple((k, v) for k, v in layers if k is not None and v is not None), self._hidden)

    def lies_in(self, buffers: Buffers) -> bool:
        """Whether it lies there: it has not grown out of any of them."""
        pairs = zip(self._attention, buffers.layers, strict=True)
        return self._hidden is buffers.hidden and all(layer.keys is keys for layer, (keys, _) in pairs)

    def lie_in(self, buffers: Buffers) -> None:
        """Hold what is held there from now on; they are large enough, and nobody else's."""
        for layer, (keys, values) in zip(self._attention, buffers.layers, strict=True):
            layer.lie_in(keys, values)
        if buffers.hidden is not None and self._hidden is not None:
            held = min(len(buffers.hidden), len(self._hidden))
            buffers.hidden[:held] = self._hidden[:held]
        self._hidden = buffers.hidden

    def advance(self, count: int) -> None:
        """``count`` tokens have been written by a recorded or a joint pass."""
        for layer in self._attention:
            layer.length += count

    @contextmanager
    def written_as(self, recording: Recording) -> Iterator[None]:
        """Passes inside write and see the cache in this way."""
        for layer in self._attention:
            layer.recording = recording
        try:
            yield
        finally:
            for layer in self._attention:
                layer.recording = None

    def rollback(self, length: int) -> None:
        """Forget all tokens after the first ``length``, and those that an interrupted forward left in
        some layers only. Recurrent states may not reach back so far: ``length`` then says how many are held."""
        length = min([length, *(layer.length for layer in self._attention)])
        if self.states is not None:
            length = self.states.rollback(min(length, self.states.done))
        for layer in self._attention:
            layer.length = length

    @torch.inference_mode()
    def keep_path(self, path: list[int]) -> None:
        """Hold the nodes ``path`` of a tree, which lies behind what is held, and nothing else of it."""
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
        """Hold the first ``length`` tokens of ``other``, or fewer as after a rollback; the capacity suffices."""
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
        """Of all buffers, and of states with the inputs that are kept for going back."""
        keys = sum(t.nbytes for layer in self._attention for t in (layer.keys, layer.values) if t is not None)
        states, checkpoints = (0, 0) if self.states is None else self.states.nbytes
        return Memory(keys, states, checkpoints, 0 if self._hidden is None else self._hidden.nbytes)


def reserve(cache: CpuCache | RollbackCache, length: int) -> None:
    """Have capacity for ``length`` tokens. Raises AdaptiveError where there is no memory for them."""
    try:
        cache.reserve(length)
    except (RuntimeError, MemoryError) as error:
        raise AdaptiveError(
            f"there is no memory for the keys and values of {length} tokens; shorten the text or free memory"
        ) from error
