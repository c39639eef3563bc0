"""Caches for layers with a recurrent state: short convolutions, gated delta nets, state space models.

A state cannot be cropped like keys. So an earlier state (a mark) is kept, with the inputs of its updates since then
(keys, values, gates, time steps: small beside the state). A rollback repeats the update for the remaining tokens, with
the model's own function: it reads no weights, and the result is the state after exactly these tokens. A state that a
mark holds is replaced and never overwritten, so marks, checkpoints and copies can share it.

``calls.py`` intercepts the model's calls of such functions and passes them on to the ``State`` that the layer read
last.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from adaptive.engines.hf.calls import Call, current_pass
from adaptive.engines.state_checkpoints import Checkpoints

# The longest pass, in tokens, whose inputs are kept. A longer pass belongs to a prompt and is not rolled back. Too
# high: the inputs of all layers need more memory than the states. Too low (below the draft length): a rejection
# computes the whole text again.
KEPT_INPUTS = 80
# Single steps after which another mark is set. Too low (below the draft length): a draft loses the mark at the
# beginning of its proposal. Too high: more inputs are kept.
MARK_EVERY = 64


@dataclass(frozen=True)
class Mark:
    """The recurrent state after ``length`` tokens; None before the first token."""

    length: int
    recurrent: torch.Tensor | None


@dataclass(frozen=True)
class Kept:
    """All that a ``State`` needs to continue after ``length`` tokens. ``inputs`` (batch, width, kernel) are the last
    inputs of the convolution."""

    length: int
    kernel: int
    inputs: torch.Tensor | None
    recurrent: torch.Tensor | None

    def tensors(self) -> Iterator[torch.Tensor]:
        """The tensors that are kept, for counting memory."""
        yield from (tensor for tensor in (self.inputs, self.recurrent) if tensor is not None)


class State:
    """The last inputs of one convolution and one recurrent state. A layer may have several such pairs.

    ``length``: tokens that the convolution has processed; ``done``: tokens that the recurrent state has processed,
    which is less only after an interrupted pass.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Drop everything."""
        self.length = self._done = 0
        self.kernel = 0
        self.recurrent: torch.Tensor | None = None
        self._inputs: torch.Tensor | None = None  # (batch, width, kernel + tokens since the first mark)
        self._marks = [Mark(0, None)]  # at most two; ``_inputs`` and ``_calls`` reach back to the first
        self._calls: list[Call] = []  # since the first mark
        self._pending: Call | None = None
        self._keeps = True  # whether the inputs of the present pass are kept
        self._shared = False  # whether a mark, a checkpoint or a copy holds the same recurrent state
        self._recurs = False  # whether there is a recurrent state, not a convolution alone

    @property
    def done(self) -> int:
        """Tokens that the recurrent state has processed."""
        return self._done if self._recurs else self.length

    def window(self) -> torch.Tensor | None:
        """The convolution's last inputs (batch, width, kernel); None before the first token."""
        return None if self._inputs is None or not self.length else self._inputs[..., -self.kernel :]

    def convolve(self, inputs: torch.Tensor, kernel: int | None) -> torch.Tensor:
        """Append the inputs (batch, width, n) of a pass. Returns them after the ``kernel`` inputs before them, which
        are zeros at the beginning of a text."""
        if kernel is None:
            raise NotImplementedError("a convolution that does not say how many inputs it looks back")
        count = min(current_pass().count or inputs.shape[-1], inputs.shape[-1])
        self._begin(count)
        if self._inputs is None:
            self.kernel = kernel
            self._inputs = inputs.new_zeros(*inputs.shape[:-1], kernel)
        self._inputs = torch.cat([self._inputs, inputs[..., inputs.shape[-1] - count :]], dim=-1)
        self.length += count
        if inputs.shape[-1] > count:  # at the beginning of a text, some models pad the inputs themselves
            filling = inputs[..., :1].expand(*inputs.shape[:-1], count)
            self._inputs = torch.cat([filling, inputs], dim=-1)[..., -(kernel + count) :]
        return self._inputs[..., -(kernel + count) :]

    def _begin(self, count: int) -> None:
        """Set marks so that the pass of ``count`` tokens that begins now can be rolled back."""
        if not self._marks or count > 1:
            self._marks, self._calls = [self._mark()], []
        elif self.length - self._marks[-1].length >= MARK_EVERY:
            self._marks = [self._marks[-1], self._mark()]
        self._trim()
        self._pending, self._keeps = None, count <= KEPT_INPUTS

    def _trim(self) -> None:
        """Drop the calls and inputs before the first mark."""
        first = self._marks[0].length
        self._calls = [call for call in self._calls if call.start >= first]
        if self._inputs is not None:
            self._inputs = self._inputs[..., -(self.kernel + self.length - first) :]

    def _mark(self) -> Mark:
        self._shared = True
        return Mark(self.length, self.recurrent)

    def call(self, call: Call) -> None:
        """Announce ``call``, which computes the next state from the present one. ``recur`` then confirms it."""
        if self._pending is not None:
            raise NotImplementedError("a recurrent state that is updated in parts")
        self._pending = call

    def own(self) -> torch.Tensor:
        """The recurrent state for a function that writes into it; a copy if the state is shared."""
        assert self.recurrent is not None
        if self._shared:
            self.recurrent, self._shared = self.recurrent.clone(), False
        return self.recurrent

    def recur(self, state: torch.Tensor | None) -> None:
        """Set the state after the pass; None if it was written into ``own()``. Raises NotImplementedError without a
        ``call`` before."""
        self._recurs = True
        if self._pending is None:
            raise NotImplementedError("a recurrent state whose update is not known here")
        if state is not None:
            # A view would keep the whole of a larger tensor in memory.
            whole = state.untyped_storage().nbytes() == state.nbytes
            self.recurrent, self._shared = state if whole else state.clone(), False
        if self._keeps:
            self._calls.append(self._pending)
        else:
            self._marks, self._calls = [], []
        self._pending, self._done = None, self.length

    def reaches(self, length: int) -> bool:
        """Whether a rollback to the first ``length`` tokens is possible."""
        return length == self.length == self.done or any(mark.length <= length for mark in self._marks)

    def rollback(self, length: int) -> None:
        """Drop all tokens after the first ``length``, which the state must reach (``reaches``)."""
        if length == self.length == self.done:
            return
        self.recurrent, self._shared = self._at(length), True
        self._calls = [call.first(length - call.start) for call in self._calls if call.start < length]
        if self._inputs is not None:
            self._inputs = self._inputs[..., : self.kernel + length - self._marks[0].length]
        self.length = self._done = length
        # A draft continues token by token from here, and its next rollback starts from this mark.
        self._marks = [mark for mark in self._marks if mark.length <= length]
        if self._marks[-1].length < length:
            self._marks = [self._marks[-1], self._mark()]
            self._trim()
        self._pending = None

    def _at(self, length: int) -> torch.Tensor | None:
        """The recurrent state after the first ``length`` tokens, which the state must reach."""
        if length == self._done:
            return self.recurrent
        mark = next(mark for mark in reversed(self._marks) if mark.length <= length)
        state = mark.recurrent
        for call in self._calls:
            if mark.length <= call.start < length:
                state = call.first(length - call.start).after(state)
        return state

    def kept(self, length: int) -> Kept:
        """All that is needed to continue after the first ``length`` tokens, which the state must reach. Changes
        nothing."""
        if self._inputs is None:
            return Kept(length, self.kernel, None, None)
        end = self._inputs.shape[-1] - (self.length - length)
        recurrent = self._at(length)
        if recurrent is self.recurrent:
            self._shared = True
        return Kept(length, self.kernel, self._inputs[..., end - self.kernel : end].clone(), recurrent)

    def restore(self, kept: Kept) -> None:
        """Return to what ``kept`` has returned."""
        self.clear()
        if not kept.length:
            return
        self.kernel, self._inputs, self.recurrent = kept.kernel, kept.inputs, kept.recurrent
        self.length = self._done = kept.length
        self._recurs = kept.recurrent is not None
        self._marks = [self._mark()]

    def tensors(self) -> Iterator[torch.Tensor]:
        """The tensors that are kept, for counting memory."""
        for mark in self._marks:
            if mark.recurrent is not None:
                yield mark.recurrent
        for call in self._calls:
            yield from call.tensors()
        yield from (tensor for tensor in (self._inputs, self.recurrent) if tensor is not None)


class RecurrentLayer(LinearAttentionCacheLayerMixin):
    """The states of one layer, with the interface of transformers' cache layers."""

    is_compileable = False

    def __init__(self, count: int = 1) -> None:
        super().__init__(number_of_states=count)
        self.states = {number: State() for number in range(count)}
        # Makes models pass the convolution's inputs to the cache in single steps too, instead of shifting a window.
        self.record_past = True

    def lazy_initialization(self, *args: object, **kwargs: object) -> None:
        """Nothing to allocate."""

    def update_conv_state(
        self, conv_states: torch.Tensor, state_idx: int = 0, conv_kernel_size: int | None = None, **kwargs: object
    ) -> torch.Tensor:
        """Append a pass's inputs of the convolution. Returns them after those before them."""
        return self.states[state_idx].convolve(conv_states, conv_kernel_size)

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, state_idx: int = 0, **kwargs: object
    ) -> torch.Tensor:
        """Set the state after a pass, and return it."""
        self.states[state_idx].recur(recurrent_states)
        return recurrent_states


class States:
    """All states of a cache, and a few checkpoints of them for rollbacks beyond the marks, for example to the end of a
    prompt for another answer."""

    def __init__(self, states: list[State]) -> None:
        self._all = states
        self._checkpoints = Checkpoints[list[Kept]]()

    @property
    def length(self) -> int:
        """Tokens that the first layer has processed."""
        return self._all[0].length

    @property
    def done(self) -> int:
        """Tokens that every layer has processed."""
        return min(state.done for state in self._all)

    @torch.inference_mode()
    def checkpoint(self) -> None:
        """Keep the present states; if there are too many checkpoints, one is dropped."""
        if self.length and self.length not in self._checkpoints:
            self._checkpoints.add(self.length, [state.kept(self.length) for state in self._all])

    @torch.inference_mode()
    def rollback(self, length: int) -> int:
        """Drop all tokens after the first ``length``. If the states do not reach back so far, go back to the last
        checkpoint before, or to the beginning. Returns the number of tokens held then."""
        if all(state.reaches(length) for state in self._all):
            for state in self._all:
                state.rollback(length)
        else:
            length = self._restore(length)
        self._checkpoints.cut(length)
        return length

    def _restore(self, most: int) -> int:
        length, kept = self._checkpoints.last(most) or (0, None)
        for number, state in enumerate(self._all):
            state.clear() if kept is None else state.restore(kept[number])
        return length

    @torch.inference_mode()
    def copy(self, other: States, length: int) -> int:
        """Replace the contents by at most the first ``length`` tokens of ``other``. Returns how many are held then."""
        self._checkpoints.copy(other._checkpoints, length)
        if not all(state.reaches(length) for state in other._all):
            return self._restore(length)
        for state, source in zip(self._all, other._all, strict=True):
            state.restore(source.kept(length))
        return length

    @property
    def nbytes(self) -> tuple[int, int]:
        """Bytes of the states with the inputs kept for rollbacks, and of what only checkpoints hold."""
        states = _storages(tensor for state in self._all for tensor in state.tensors())
        kept = (kept for checkpoint in self._checkpoints for kept in checkpoint)
        checkpoints = _storages(tensor for one in kept for tensor in one.tensors())
        return sum(states.values()), sum(size for place, size in checkpoints.items() if place not in states)


def _storages(tensors: Iterator[torch.Tensor]) -> dict[int, int]:
    """The address and the bytes of each storage of these tensors, which may share storages."""
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
