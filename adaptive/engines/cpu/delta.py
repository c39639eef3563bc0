"""Gated delta nets of our forward, and their recurrent states of a text.

A pass that may be rolled back does not overwrite a text's state (``native/delta.h``). Each layer has a base, the state
some tokens ago, and a log of the inputs since. The pass after a rollback applies the logged tokens that remain while it
reads the state, which it does anyway. So a rollback is an assignment, as for keys and values, and reads no weights.
Passes over single tokens, as a draft makes them, also store the current state beside the base.

For going back further there are a few checkpoints, as in ``engines/hf/recurrent.py``.
"""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from adaptive.engines.checkpoints import crowded
from adaptive.engines.cpu.kernels import library

# The longest pass that is logged, and the most tokens that a log holds. A longer pass is a prompt's, and no part of it
# is rolled back. Too low (fewer than a round's tokens): a rejection computes the text again.
LOGGED = 80
# Logged tokens, none of which will be rolled back, from which a pass over one token moves the base. Too low: more
# passes write the base as well as the current state. Too high: more tokens are applied again after the next rollback.
SETTLED = 16
# Rows of a new log; it at least doubles when it has to grow.
ROOM = 16


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
            and 1 < self.kernel < LOGGED
        )

    @property
    def state(self) -> int:
        """How many numbers a layer's state has."""
        return self.value_heads * self.key_size * self.value_size

    @property
    def row(self) -> int:
        """How many numbers are logged for a token: the convolution's inputs, and two for each value head."""
        return 2 * self.key_heads * self.key_size + self.value_heads * (self.value_size + 2)

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
    """The ``states`` (layers, numbers) after ``length`` tokens, and the log rows ``inputs`` (layers, kernel - 1, row)
    of the last of these tokens."""

    length: int
    states: torch.Tensor
    inputs: torch.Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of the checkpoint."""
        return self.states.nbytes + self.inputs.nbytes


class Pass(NamedTuple):
    """How a pass uses the states, as in ``Recall`` of ``native/delta.h``."""

    commit: bool
    store: bool
    log: bool


class States:
    """The recurrent states of a model's delta nets for one text of ``length`` tokens.

    The base is the state after ``_base`` tokens (None: the base is unusable), and the log has the tokens since.
    ``_current``: whether the current state is stored too. One of the two is always valid.
    """

    def __init__(self, sizes: DeltaSizes, nets: list[DeltaNet]) -> None:
        self.sizes = sizes
        self._nets = nets
        self._checkpoints: list[Checkpoint] = []  # ordered by length
        none = torch.empty(0)
        self._bases, self._now, self._log = none, none, none  # (layers, state), the same, (layers, rows, row)
        self._table = array("Q")
        self._pass: Pass | None = None  # the pass that has begun
        self.clear()

    @torch.inference_mode()
    def clear(self) -> None:
        """Forget the text, except for its checkpoints."""
        self.length = 0
        self._base: int | None = 0
        self._current = False
        self._stands = True  # no held token will be rolled back
        if self._log.numel():
            self._bases.zero_()
            self._log[:, : self.sizes.kernel - 1] = 0

    @torch.inference_mode()
    def _reserve(self, rows: int) -> None:
        """Make room in the log for ``rows`` tokens."""
        layers, before = len(self._nets), self.sizes.kernel - 1
        room = self._log.shape[1] - before if self._log.numel() else 0
        if rows <= room:
            return
        if not room:
            self._bases = torch.zeros(layers, self.sizes.state)
            self._now = torch.empty(layers, self.sizes.state)
        log = torch.zeros(layers, before + max(rows, 2 * room, ROOM), self.sizes.row)
        if room:
            log[:, : self._log.shape[1]] = self._log
        self._log = log
        parts = (self._bases, self._now, log)
        self._table = array("Q", [part[layer].data_ptr() for layer in range(layers) for part in parts])

    def begin(self, count: int, steps: int = 0) -> Any:
        """The kernels' ``Recall`` for a pass over ``count`` tokens, followed in the same call by at most ``steps``
        passes over one token. Call ``end`` or ``undo`` before any other method."""
        held = 0 if self._base is None else self.length - self._base
        logged = count <= LOGGED
        lost = self._base is None or held + count + steps > LOGGED
        settled = self._stands and (not self._current or held >= SETTLED)
        commit = logged and (self._base is None or (held > 0 and (lost or count > 1 or settled)))
        store = not logged or count == 1 or steps > 0
        self._reserve((0 if commit else held) + count + steps if logged else 1)
        self._pass = Pass(commit, store, logged)
        return self._recall(held, self._pass)

    def end(self, count: int) -> None:
        """Finish the pass and the single steps behind it: together they appended ``count`` tokens."""
        done = self._pass
        assert done is not None
        if done.commit or not done.log:
            self._base = self.length if done.commit else None
        self._current, self._stands, self._pass = done.store, False, None
        self.length += count

    def undo(self, whole: bool) -> None:
        """Handle an interrupted pass. All tokens from before it stay held if the layers cannot differ in how far they
        came (``whole``) and the pass was logged; otherwise only those of the last checkpoint."""
        broken, self._pass = self._pass, None
        if broken is None:  # no pass has begun
            return
        self._current = False
        if not whole or not broken.log:
            self._restore(self.length)
        elif broken.commit:
            self._base = self.length

    def _recall(self, held: int, what: Pass) -> Any:
        found = library()
        assert found is not None
        return found.module.Recall(self._table.buffer_info()[0], held, self._current, *what)

    def reaches(self, length: int) -> bool:
        """Whether a rollback to ``length`` tokens needs no checkpoint."""
        return (length == self.length and self._current) or (self._base is not None and self._base <= length)

    def rollback(self, length: int) -> int:
        """Forget all tokens after the first ``length``; returns how many are held then. Where the base is too recent,
        that is the length of the last checkpoint up to there, or 0."""
        if length >= self.length:
            self._stands = True
            return self.length
        if self.reaches(length):
            self.length, self._current, self._stands = length, False, True
        else:
            self._restore(length)
        self._checkpoints = [kept for kept in self._checkpoints if kept.length <= self.length]
        return self.length

    @torch.inference_mode()
    def _restore(self, most: int) -> None:
        kept = next((kept for kept in reversed(self._checkpoints) if kept.length <= most), None)
        self.clear()
        if kept is None:
            return
        self._reserve(1)
        self._bases.copy_(kept.states)
        self._log[:, : self.sizes.kernel - 1] = kept.inputs
        self.length = self._base = kept.length

    @torch.inference_mode()
    def checkpoint(self) -> None:
        """Store a checkpoint of the current state. If there are too many, drop the one between the nearest two."""
        lengths = [kept.length for kept in self._checkpoints]
        if not self.length or self.length in lengths:
            return
        self._settle()
        inputs = self._log[:, : self.sizes.kernel - 1].clone()
        self._checkpoints.append(Checkpoint(self.length, self._bases.clone(), inputs))
        forgotten = crowded([*lengths, self.length])
        if forgotten is not None:
            del self._checkpoints[forgotten]

    def _settle(self) -> None:
        """Move the base to the end of the text."""
        if self._base == self.length:
            return
        held = 0 if self._base is None else self.length - self._base
        recall = self._recall(held, Pass(commit=True, store=False, log=True))
        for number, net in enumerate(self._nets):
            net(self._log, self._log, number, 0, recall)  # no tokens: neither tensor is used
        self._base = self.length

    @torch.inference_mode()
    def copy(self, other: States, length: int) -> int:
        """Hold at most the first ``length`` tokens of ``other``; returns how many."""
        self._checkpoints = [kept for kept in other._checkpoints if kept.length <= length]
        if not other.reaches(length):
            self._restore(length)
            return self.length
        before, base = self.sizes.kernel - 1, other._base
        self._reserve(1 if base is None else max(1, length - base))
        if base is None:
            self._now.copy_(other._now)
            base = other.length
        else:
            self._bases.copy_(other._bases)
        rows = before + length - base
        self._log[:, :rows] = other._log[:, :rows]
        self.length, self._base, self._current, self._stands = length, other._base, other._base is None, True
        return length

    @property
    def nbytes(self) -> int:
        """Bytes of the states and the log."""
        return self._bases.nbytes + self._now.nbytes + self._log.nbytes

    @property
    def checkpoint_nbytes(self) -> int:
        """Bytes of the checkpoints."""
        return sum(kept.nbytes for kept in self._checkpoints)
