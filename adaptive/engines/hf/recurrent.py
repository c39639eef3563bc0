"""Layers whose past is a state and not a list of keys: short convolutions, gated delta nets, state space models.

A state cannot be cropped, so it is kept as it was some tokens ago (a mark) with the inputs that its update took since
(keys, values, gates, time steps: small beside the state). Going back computes the update anew for the tokens that
stand, by the model's own function: no weight is read, and the state is the one that these tokens alone leave. States
are replaced and never written over while a mark holds them, so that marks, checkpoints and copies share them.

``calls.py`` sees the model's calls of such functions and tells the state that the layer has just asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from adaptive.engines.checkpoints import crowded
from adaptive.engines.hf.calls import Call, current_pass

# Tokens of a pass whose inputs are kept. A longer pass is a prompt's, of which no part is taken back: its keys and
# values in every layer would be larger than the states. Smaller than a proposal, and a rejection computes the text
# anew.
KEPT_INPUTS = 80
# Tokens fed one by one after which another mark is set. Fewer than a proposal has, and a draft loses the place where it
# began; more keep more inputs.
MARK_EVERY = 64


@dataclass(frozen=True)
class Mark:
    """A state as it was after ``length`` tokens; None before the first."""

    length: int
    recurrent: torch.Tensor | None


@dataclass(frozen=True)
class Kept:
    """All that a ``State`` needs to go on after ``length`` tokens. ``inputs`` (batch, width, kernel) are the last ones
    of the convolution."""

    length: int
    kernel: int
    inputs: torch.Tensor | None
    recurrent: torch.Tensor | None

    def tensors(self) -> Iterator[torch.Tensor]:
        """What takes memory."""
        yield from (tensor for tensor in (self.inputs, self.recurrent) if tensor is not None)


class State:
    """One convolution's last inputs and one recurrent state, of a layer (which may have several).

    ``length``: tokens whose inputs the convolution has taken; ``done``: those that the recurrent state has, which is
    less only where a pass was interrupted.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Hold nothing."""
        self.length = self._done = 0
        self.kernel = 0
        self.recurrent: torch.Tensor | None = None
        self._inputs: torch.Tensor | None = None  # (batch, width, kernel + tokens since the first mark)
        self._marks = [Mark(0, None)]  # the first one needs no more than what is here; at most two
        self._calls: list[Call] = []  # since the first mark
        self._pending: Call | None = None
        self._keeps = True  # the inputs of the pass under way
        self._shared = False  # whether others hold the recurrent state too
        self._recurs = False

    @property
    def done(self) -> int:
        """See above."""
        return self._done if self._recurs else self.length

    def window(self) -> torch.Tensor | None:
        """The convolution's last inputs (batch, width, kernel); None before the first token."""
        return None if self._inputs is None or not self.length else self._inputs[..., -self.kernel :]

    def convolve(self, inputs: torch.Tensor, kernel: int | None) -> torch.Tensor:
        """Take the inputs (batch, width, n) of a pass; the same with the ``kernel`` ones before them, zeros before the
        text begins."""
        if kernel is None:
            raise NotImplementedError("a convolution that does not say how many inputs it looks back")
        count = min(current_pass().count or inputs.shape[-1], inputs.shape[-1])
        self._begin(count)
        if self._inputs is None:
            self.kernel = kernel
            self._inputs = inputs.new_zeros(*inputs.shape[:-1], kernel)
        self._inputs = torch.cat([self._inputs, inputs[..., inputs.shape[-1] - count :]], dim=-1)
        self.length += count
        if inputs.shape[-1] > count:  # filled up by the model, in its own way, where the text begins
            filling = inputs[..., :1].expand(*inputs.shape[:-1], count)
            self._inputs = torch.cat([filling, inputs], dim=-1)[..., -(kernel + count) :]
        return self._inputs[..., -(kernel + count) :]

    def _begin(self, count: int) -> None:
        """A pass of so many tokens begins: see to it that it can be undone."""
        if not self._marks or count > 1:
            self._marks, self._calls = [self._mark()], []
        elif self.length - self._marks[-1].length >= MARK_EVERY:
            self._marks = [self._marks[-1], self._mark()]
        self._trim()
        self._pending, self._keeps = None, count <= KEPT_INPUTS

    def _trim(self) -> None:
        """Forget what was before the first mark."""
        first = self._marks[0].length
        self._calls = [call for call in self._calls if call.start >= first]
        if self._inputs is not None:
            self._inputs = self._inputs[..., -(self.kernel + self.length - first) :]

    def _mark(self) -> Mark:
        self._shared = True
        return Mark(self.length, self.recurrent)

    def call(self, call: Call) -> None:
        """``call`` computes the next state from this one."""
        if self._pending is not None:
            raise NotImplementedError("a recurrent state that is updated in parts")
        self._pending = call

    def own(self) -> torch.Tensor:
        """The recurrent state, for a function that writes into it."""
        assert self.recurrent is not None
        if self._shared:
            self.recurrent, self._shared = self.recurrent.clone(), False
        return self.recurrent

    def recur(self, state: torch.Tensor | None) -> None:
        """The pass's last state; None where it was written into ``own()``."""
        self._recurs = True
        if self._pending is None:
            raise NotImplementedError("a recurrent state whose update is not known here")
        if state is not None:
            # A part of a larger tensor would keep all of it in memory.
            whole = state.untyped_storage().nbytes() == state.nbytes
            self.recurrent, self._shared = state if whole else state.clone(), False
        if self._keeps:
            self._calls.append(self._pending)
        else:
            self._marks, self._calls = [], []
        self._pending, self._done = None, self.length

    def reaches(self, length: int) -> bool:
        """Whether it can go back to so many tokens."""
        return length == self.length == self.done or any(mark.length <= length for mark in self._marks)

    def rollback(self, length: int) -> None:
        """Be as after the first ``length`` tokens, which it ``reaches``."""
        if length == self.length == self.done:
            return
        self.recurrent, self._shared = self._at(length), True
        self._calls = [call.first(length - call.start) for call in self._calls if call.start < length]
        if self._inputs is not None:
            self._inputs = self._inputs[..., : self.kernel + length - self._marks[0].length]
        self.length = self._done = length
        # A draft goes on token by token from here: the next rollback begins from this place.
        self._marks = [mark for mark in self._marks if mark.length <= length]
        if self._marks[-1].length < length:
            self._marks = [self._marks[-1], self._mark()]
            self._trim()
        self._pending = None

    def _at(self, length: int) -> torch.Tensor | None:
        """The recurrent state after the first ``length`` tokens, which it ``reaches``."""
        if length == self._done:
            return self.recurrent
        mark = next(mark for mark in reversed(self._marks) if mark.length <= length)
        state = mark.recurrent
        for call in self._calls:
            if mark.length <= call.start < length:
                state = call.first(length - call.start).after(state)
        return state

    def kept(self, length: int) -> Kept:
        """What goes on after the first ``length`` tokens, which it ``reaches``; it stays as it is."""
        if self._inputs is None:
            return Kept(length, self.kernel, None, None)
        end = self._inputs.shape[-1] - (self.length - length)
        recurrent = self._at(length)
        if recurrent is self.recurrent:
            self._shared = True
        return Kept(length, self.kernel, self._inputs[..., end - self.kernel : end].clone(), recurrent)

    def restore(self, kept: Kept) -> None:
        """Be as when that was kept."""
        self.clear()
        if not kept.length:
            return
        self.kernel, self._inputs, self.recurrent = kept.kernel, kept.inputs, kept.recurrent
        self.length = self._done = kept.length
        self._recurs = kept.recurrent is not None
        self._marks = [self._mark()]

    def tensors(self) -> Iterator[torch.Tensor]:
        """What takes memory."""
        for mark in self._marks:
            if mark.recurrent is not None:
                yield mark.recurrent
        for call in self._calls:
            yield from call.tensors()
        yield from (tensor for tensor in (self._inputs, self.recurrent) if tensor is not None)


class RecurrentLayer(LinearAttentionCacheLayerMixin):
    """The states of one layer, as a cache of transformers shows them to a model."""

    is_compileable = False

    def __init__(self, count: int = 1) -> None:
        super().__init__(number_of_states=count)
        self.states = {number: State() for number in range(count)}
        # With this, models hand over the convolution's inputs at single tokens too, instead of shifting what they hold.
        self.record_past = True

    def lazy_initialization(self, *args: object, **kwargs: object) -> None:
        """Nothing is reserved."""

    def update_conv_state(
        self, conv_states: torch.Tensor, state_idx: int = 0, conv_kernel_size: int | None = None, **kwargs: object
    ) -> torch.Tensor:
        """Take a pass's inputs of the convolution; with those before them."""
        return self.states[state_idx].convolve(conv_states, conv_kernel_size)

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, state_idx: int = 0, **kwargs: object
    ) -> torch.Tensor:
        """Take a pass's last state."""
        self.states[state_idx].recur(recurrent_states)
        return recurrent_states


class States:
    """All states of a cache, and a few checkpoints of them for going back further than their marks: to where a prompt
    ended, say, for another answer."""

    def __init__(self, states: list[State]) -> None:
        self._all = states
        self._checkpoints: list[list[Kept]] = []  # ordered by length

    @property
    def length(self) -> int:
        """Tokens that the first layer has."""
        return self._all[0].length

    @property
    def done(self) -> int:
        """Tokens that every layer has."""
        return min(state.done for state in self._all)

    @torch.inference_mode()
    def checkpoint(self) -> None:
        """Remember how it is now; of too many the one between the nearest two is forgotten."""
        held = [kept[0].length for kept in self._checkpoints]
        if not self.length or self.length in held:
            return
        self._checkpoints.append([state.kept(self.length) for state in self._all])
        forgotten = crowded([*held, self.length])
        if forgotten is not None:
            del self._checkpoints[forgotten]

    @torch.inference_mode()
    def rollback(self, length: int) -> int:
        """Forget what was after ``length`` tokens. Where that is reached no more the last checkpoint before it is
        taken, or the beginning: so many tokens are held then."""
        if all(state.reaches(length) for state in self._all):
            for state in self._all:
                state.rollback(length)
        else:
            length = self._restore(length)
        self._checkpoints = [kept for kept in self._checkpoints if kept[0].length <= length]
        return length

    def _restore(self, most: int) -> int:
        kept = next((kept for kept in reversed(self._checkpoints) if kept[0].length <= most), None)
        for number, state in enumerate(self._all):
            state.clear() if kept is None else state.restore(kept[number])
        return 0 if kept is None else kept[0].length

    @torch.inference_mode()
    def copy(self, other: States, length: int) -> int:
        """Hold at most the first ``length`` tokens of ``other``; how many they are."""
        self._checkpoints = [kept for kept in other._checkpoints if kept[0].length <= length]
        if not all(state.reaches(length) for state in other._all):
            return self._restore(length)
        for state, source in zip(self._all, other._all, strict=True):
            state.restore(source.kept(length))
        return length

    @property
    def nbytes(self) -> tuple[int, int]:
        """Bytes of the states with what they need to be taken back, and of what checkpoints hold beside."""
        states = _storages(tensor for state in self._all for tensor in state.tensors())
        kept = (kept for checkpoint in self._checkpoints for kept in checkpoint)
        checkpoints = _storages(tensor for one in kept for tensor in one.tensors())
        return sum(states.values()), sum(size for place, size in checkpoints.items() if place not in states)


def _storages(tensors: Iterator[torch.Tensor]) -> dict[int, int]:
    """Where tensors lie, which may share memory, and how many bytes lie there."""
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
