"""Gated delta nets of our forward, and their recurrent states of a text.

A pass does not overwrite a text's state (``native/delta.h``). Each layer has a base, which is the state before a chunk
of tokens, and of each token since then what it adds to the state. So a rollback is an assignment, as for keys and
values, and reads no weights, and the pass after it computes nothing more than another. The base moves behind a chunk
once none of its tokens will be rolled back.

For going back further there are a few checkpoints, as in ``engines/hf/recurrent.py``.
"""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from adaptive.engines.cpu.kernels import library
from adaptive.engines.state_checkpoints import Checkpoints

# The longest pass whose tokens can all be rolled back, and the most tokens that are held behind the base. A longer pass
# is a prompt's. Too low (fewer than a round's tokens): a rejection computes the text again. Too high: memory.
HELD = 80
# Tokens for which a text has room behind its base at first.
ROOM = 32


@dataclass(frozen=True)
class DeltaSizes:
    """The sizes of every gated delta net of a model. ``kernel``: tokens that its convolution sees."""

    key_heads: int
    value_heads: int
    key_size: int
    value_size: int
    kernel: int

    @classmethod
    def of(cls, config: Any) -> DeltaSizes:
        """The sizes in a model's config."""
        names = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
        return cls(*(getattr(config, f"linear_{name}") for name in names))

    @property
    def computed(self) -> bool:
        """Whether there are kernels for these sizes."""
        found = library()
        return (
            found is not None
            and bool(found.module.recurs(self.key_size, self.value_size))
            and self.value_heads % self.key_heads == 0
            and 1 < self.kernel < HELD
        )

    @property
    def state(self) -> int:
        """How many numbers a layer's state has."""
        return self.value_heads * self.key_size * self.value_size

    @property
    def channels(self) -> int:
        """How many inputs of the convolution a token has."""
        return 2 * self.key_heads * self.key_size + self.value_heads * self.value_size

    @property
    def held(self) -> int:
        """How many numbers are stored of a token beside its inputs: keys, and each value head's change and decay."""
        return self.key_heads * self.key_size + self.value_heads * (self.value_size + 1)

    def by_key_head(self) -> torch.Tensor:
        """The order (see ``stacked``) that brings the outputs of projections grouped by key head (Qwen 3-Next) into
        the order of ``native/delta.h``."""
        group, heads = self.value_heads // self.key_heads, self.key_heads
        parts = [self.key_size, self.key_size, group * self.value_size, group * self.value_size]
        mixed = torch.arange(heads * sum(parts)).view(heads, -1)
        gates = mixed.numel() + torch.arange(2 * self.value_heads).view(heads, -1)
        return torch.cat([part.reshape(-1) for part in (*mixed.split(parts, 1), *gates.split(group, 1))])


class DeltaNet:
    """The computation of a gated delta net between its projections. ``native`` is the same object for the kernels,
    valid as long as this one lives."""

    def __init__(self, module: Any, sizes: DeltaSizes) -> None:
        """Read the convolution, decays and norm of transformers' ``module`` once; later changes are not followed."""
        found = library()
        assert found is not None
        norm: nn.Module = module.norm
        size = sizes.value_size
        eps = float(norm.variance_epsilon) * size  # type: ignore[arg-type]
        self._parts = [
            module.conv1d.weight.squeeze(1).T.float().contiguous(),
            -module.A_log.float().exp(),
            module.dt_bias.float().contiguous(),
            norm.weight.float() * math.sqrt(size),  # type: ignore[operator]
        ]
        self.native = found.module.DeltaNet(
            sizes.key_heads,
            sizes.value_heads,
            sizes.key_size,
            size,
            sizes.kernel,
            *(part.data_ptr() for part in self._parts),
            eps,
        )

    def __call__(self, projected: torch.Tensor, out: torch.Tensor, layer: int, count: int, recall: Any) -> None:
        """Compute the first ``count`` rows of ``out`` (n, value heads * value size) from those of ``projected``
        (n, outputs). ``layer`` is this net's number among the model's delta nets; ``recall`` as from ``States.begin``.
        """
        self.native(projected.data_ptr(), out.data_ptr(), layer, count, recall, torch.get_num_threads())


@dataclass(frozen=True)
class Checkpoint:
    """The ``states`` (layers, numbers) after some tokens, which are whole chunks, and the convolution's ``inputs``
    (layers, kernel - 1, channels) of the last of these tokens."""

    states: torch.Tensor
    inputs: torch.Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of the checkpoint."""
        return self.states.nbytes + self.inputs.nbytes


class States:
    """The recurrent states of a model's delta nets for one text of ``length`` tokens.

    The base is the state after ``_base`` tokens, whole chunks, none of which will be rolled back. ``_ahead`` is None or
    the number of tokens, whole chunks too, that a second state has: some may be rolled back yet. What is stored of the
    tokens behind the base, and of the few before it that the convolution sees, lies in a ring, see ``Recall`` in
    ``native/delta.h``.
    """

    def __init__(self, sizes: DeltaSizes, nets: list[DeltaNet]) -> None:
        found = library()
        assert found is not None
        self.sizes = sizes
        self._nets, self._chunk, self._recall = nets, found.chunk, found.module.Recall
        self._checkpoints = Checkpoints[Checkpoint]()
        # (layers, state) of the base and of the state ahead; (layers, rows, channels); (layers, rows / chunk, numbers).
        self._states = [torch.empty(0), torch.empty(0)]
        self._inputs = self._chunks = torch.empty(0)
        self._rows = 0
        # Where everything is, for the kernels: now, and with the two states exchanged.
        self._tables = [array("Q"), array("Q")]
        self._settled: int | None = None  # of the pass that has begun: tokens that it lets nobody roll back
        self.clear()

    @torch.inference_mode()
    def clear(self) -> None:
        """Forget the text, except for its checkpoints."""
        self.length = self._base = 0
        self._ahead: int | None = None
        self._stands = True  # no held token will be rolled back
        if self._rows:
            self._states[0].zero_()
            self._inputs[:, 1 - self.sizes.kernel :] = 0

    def _whole(self, length: int) -> int:
        """How many of ``length`` tokens are in whole chunks."""
        return length // self._chunk * self._chunk

    @torch.inference_mode()
    def _reserve(self, rows: int) -> None:
        """Make room for ``rows`` tokens, including those just before the base."""
        if rows <= self._rows:
            return
        layers, room = len(self._nets), -(-max(rows, ROOM) // self._chunk) * self._chunk
        states = self._states if self._rows else [torch.zeros(layers, self.sizes.state) for _ in self._states]
        inputs = torch.zeros(layers, room, self.sizes.channels)
        chunks = torch.zeros(layers, room // self._chunk, self._chunk * self.sizes.held)
        if self._rows:
            self._copy(self._inputs, self._chunks, inputs, chunks)
        tables = [
            array("Q", [part[i].data_ptr() for i in range(layers) for part in (*pair, inputs, chunks)])
            for pair in (states, states[::-1])
        ]
        # Only now, so that an error above, such as no memory, leaves what is there in use.
        self._states, self._tables, self._rows = states, tables, room
        self._inputs, self._chunks = inputs, chunks

    def _copy(
        self, inputs: torch.Tensor, chunks: torch.Tensor, to_inputs: torch.Tensor, to_chunks: torch.Tensor
    ) -> None:
        """Copy what one ring has of this text's tokens to another."""
        rows = torch.arange(self._base - self.sizes.kernel + 1, self.length)
        to_inputs[:, rows % to_inputs.shape[1]] = inputs[:, rows % inputs.shape[1]]
        places = torch.arange(self._base // self._chunk, -(-self.length // self._chunk))
        to_chunks[:, places % to_chunks.shape[1]] = chunks[:, places % chunks.shape[1]]

    def begin(self, count: int, steps: int = 0) -> Any:
        """The kernels' ``Recall`` for a pass over ``count`` tokens, followed in the same call by at most ``steps``
        passes over one token. Call ``end`` or ``undo`` before any other method."""
        end = self.length + count + steps
        settled = self._base
        if count > HELD:
            settled = self.length + count
        elif self._stands or end - self._base > HELD:
            settled = self.length
        self._settled = settled
        self._settle(settled)
        self._reserve(end - self._whole(settled) + self.sizes.kernel - 1)
        return self._recalled(settled)

    def _settle(self, settled: int) -> None:
        """Let the state ahead become the base if all tokens before it are ``settled``."""
        if self._ahead is not None and self._ahead <= settled:
            self._base, self._ahead = self._ahead, None
            self._states.reverse()
            self._tables.reverse()

    def _recalled(self, settled: int) -> Any:
        start = self._base if self._ahead is None else self._ahead
        where = self._tables[0].buffer_info()[0]
        return self._recall(where, start, self._ahead is not None, self.length, self._rows, settled)

    def end(self, count: int) -> None:
        """Finish the pass and the single steps behind it: together they appended ``count`` tokens."""
        assert self._settled is not None
        self._base = max(self._base, self._whole(self._settled))
        self.length += count
        reached = self._whole(max(0, self.length - 1))  # where the last token's chunk begins
        if reached > self._base:
            self._ahead = reached
        self._settled, self._stands = None, False

    def undo(self, whole: bool) -> None:
        """Handle an interrupted pass. All tokens from before it stay held, unless it moved the base behind them, or
        moved it and the layers can differ in how far they came (not ``whole``): then only those of the last
        checkpoint."""
        settled, self._settled = self._settled, None
        if settled is None:  # no pass has begun
            return
        self._ahead = None
        moved = max(self._base, self._whole(settled))
        if moved == self._base or (whole and moved <= self.length):
            self._base = moved
        else:
            self._restore(self.length)

    def reaches(self, length: int) -> bool:
        """Whether a rollback to ``length`` tokens needs no checkpoint."""
        return self._base <= length

    def rollback(self, length: int) -> int:
        """Forget all tokens after the first ``length``; returns how many are held then. Where the base is too recent,
        that is the length of the last checkpoint up to there, or 0."""
        self.undo(whole=False)  # of a pass that was interrupted before its ``end``
        if length < self.length and not self.reaches(length):
            self._restore(length)
        self.length, self._stands = min(length, self.length), True
        if self._ahead is not None and self._ahead > self.length:
            self._ahead = None
        self._checkpoints.cut(self.length)
        return self.length

    @torch.inference_mode()
    def _restore(self, most: int) -> None:
        found = self._checkpoints.last(most)
        self.clear()
        if found is None:
            return
        length, kept = found
        self._reserve(self.sizes.kernel - 1)
        self._states[0].copy_(kept.states)
        self.length = self._base = length
        self._inputs[:, self._before()] = kept.inputs

    def _before(self) -> torch.Tensor:
        """The rows of the tokens just before the base, which the convolution sees."""
        return torch.arange(self._base - self.sizes.kernel + 1, self._base) % self._rows

    @torch.inference_mode()
    def checkpoint(self) -> None:
        """Store a checkpoint of the text's whole chunks; if there are too many, one is dropped."""
        whole = self._whole(self.length)
        if not whole or whole in self._checkpoints:
            return
        self._settle(whole)
        if self._base < whole:
            self._settled = whole  # if ctrl-C comes between two layers, the next rollback undoes this as a pass
            for number, net in enumerate(self._nets):
                net(self._inputs, self._inputs, number, 0, self._recalled(whole))  # no tokens: neither tensor is used
            self._base, self._ahead, self._settled = whole, None, None
        self._checkpoints.add(whole, Checkpoint(self._states[0].clone(), self._inputs[:, self._before()]))

    @torch.inference_mode()
    def copy(self, other: States, length: int) -> int:
        """Hold at most the first ``length`` tokens of ``other``; returns how many."""
        self._checkpoints.copy(other._checkpoints, length)
        if not other._rows or not other.reaches(length):
            self._restore(length)
            return self.length
        self._reserve(length - other._base + self.sizes.kernel - 1)
        self.length, self._base, self._ahead, self._stands = length, other._base, None, True
        self._states[0].copy_(other._states[0])
        self._copy(other._inputs, other._chunks, self._inputs, self._chunks)
        return length

    @property
    def nbytes(self) -> int:
        """Bytes of the states and of what is stored of the tokens since."""
        return sum(part.nbytes for part in (*self._states, self._inputs, self._chunks))

    @property
    def checkpoint_nbytes(self) -> int:
        """Bytes of the checkpoints."""
        return sum(kept.nbytes for kept in self._checkpoints)
