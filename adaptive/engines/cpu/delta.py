"""Gated delta nets of our forward, and what a text's layers remember of them.

A text's state is not written by the pass that may be taken back: ``native/delta.h``. Each layer has a ``base``, the
state of some tokens ago, and a log of what its convolution was given since; what follows a rollback applies the logged
tokens that stand, in the one pass over the state that it makes anyway. So a rollback is an assignment, as of keys and
values, and no weight is read for it. Passes of single tokens, a draft's, keep the state of now beside the base.

Further back there are a few checkpoints, as in ``engines/hf/recurrent.py``.
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

# Tokens of a pass that are logged, and the most that the log holds. A longer pass is a prompt's, of which no part is
# taken back. Smaller than a proposal, and a rejection computes the text anew.
LOGGED = 80
# Logged tokens, none of which will be taken back, from which a single step moves the base. Fewer write the state twice
# more often; more are computed again after the next rollback.
SETTLED = 16
# Rows of a log at first; it grows to twice as many where they are needed.
ROOM = 16


@dataclass(frozen=True)
class DeltaSizes:
    """Of every gated delta net of a model. ``kernel``: tokens that its convolution sees."""

    key_heads: int
    value_heads: int
    key_size: int
    value_size: int
    kernel: int

    @classmethod
    def of(cls, config: Any) -> DeltaSizes:
        """Those of a model's config."""
        names = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
        return cls(*(getattr(config, f"linear_{name}") for name in names))

    @property
    def computed(self) -> bool:
        """Whether there are kernels for them."""
        found = library()
        return (
            found is not None
            and bool(found.module.recurs(self.key_size, self.value_size))
            and self.value_heads % self.key_heads == 0
            and 1 < self.kernel < LOGGED
        )

    @property
    def state(self) -> int:
        """Numbers of a layer's state."""
        return self.value_heads * self.key_size * self.value_size

    @property
    def row(self) -> int:
        """Numbers that are logged of a token: what the convolution is given, and two of each value head."""
        return 2 * self.key_heads * self.key_size + self.value_heads * (self.value_size + 2)

    def by_key_head(self) -> torch.Tensor:
        """Where projections that go by key head (Qwen 3-Next) have the outputs as ``native/delta.h`` takes them."""
        group, heads = self.value_heads // self.key_heads, self.key_heads
        parts = [self.key_size, self.key_size, group * self.value_size, group * self.value_size]
        mixed = torch.arange(heads * sum(parts)).view(heads, -1)
        gates = mixed.numel() + torch.arange(2 * self.value_heads).view(heads, -1)
        return torch.cat([part.reshape(-1) for part in (*mixed.split(parts, 1), *gates.split(group, 1))])


class DeltaNet:
    """What a gated delta net computes between its projections; ``native`` is the same for the kernels, and stands as
    long as this does."""

    def __init__(self, module: Any, sizes: DeltaSizes) -> None:
        """``module`` is transformers': its convolution, decays and norm are read, and not followed."""
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
        """The first ``count`` rows of ``projected`` (n, outputs) to those of ``out`` (n, value heads * value size), of
        the model's delta net number ``layer``; ``recall`` as from ``States.begin``."""
        self.native(projected.data_ptr(), out.data_ptr(), layer, count, recall, torch.get_num_threads())


@dataclass(frozen=True)
class Checkpoint:
    """The ``states`` (layers, numbers) after ``length`` tokens, and the ``inputs`` (layers, kernel - 1, row) before."""

    length: int
    states: torch.Tensor
    inputs: torch.Tensor

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        return self.states.nbytes + self.inputs.nbytes


class Pass(NamedTuple):
    """What a pass does with the states, as in ``Recall`` of ``native/delta.h``."""

    commit: bool
    store: bool
    log: bool


class States:
    """What the delta nets of a model remember of one text of ``length`` tokens.

    The base is the state after ``_base`` tokens (None where it is none that is of use), the log has what came since;
    ``_current`` says whether the state of now is held, too. One of the two always is.
    """

    def __init__(self, sizes: DeltaSizes, nets: list[DeltaNet]) -> None:
        self.sizes = sizes
        self._nets = nets
        self._checkpoints: list[Checkpoint] = []  # ordered by length
        none = torch.empty(0)
        self._bases, self._now, self._log = none, none, none  # (layers, state), the same, (layers, rows, row)
        self._table = array("Q")
        self._pass: Pass | None = None  # that has begun
        self.clear()

    @torch.inference_mode()
    def clear(self) -> None:
        """Hold nothing of the text but its checkpoints."""
        self.length = 0
        self._base: int | None = 0
        self._current = False
        self._stands = True  # nothing that is held will be taken back
        if self._log.numel():
            self._bases.zero_()
            self._log[:, : self.sizes.kernel - 1] = 0

    @torch.inference_mode()
    def _reserve(self, rows: int) -> None:
        """Have a log for so many tokens."""
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
        """What the kernels are told of a pass over ``count`` tokens, behind which come at most so many single ``steps``
        in the same call. Before anything else is asked, ``end`` or ``undo``."""
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
        """The pass, and what came behind it, appended so many tokens."""
        done = self._pass
        assert done is not None
        if done.commit or not done.log:
            self._base = self.length if done.commit else None
        self._current, self._stands, self._pass = done.store, False, None
        self.length += count

    def undo(self, whole: bool) -> None:
        """The pass was interrupted. What was held before is held, or less; all of it where each layer came as far as
        the others (``whole``), and where the pass was logged."""
        broken, self._pass = self._pass, None
        if broken is None:  # nothing has begun
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
        """Whether it can go back to so many tokens without a checkpoint."""
        return (length == self.length and self._current) or (self._base is not None and self._base <= length)

    def rollback(self, length: int) -> int:
        """Forget what was after ``length`` tokens. Where that is not reached the last checkpoint before it is taken, or
        the beginning: so many tokens are held then."""
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
        """Remember how it is now; of too many the one between the nearest two is forgotten."""
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
        """Put the base where the text ends."""
        if self._base == self.length:
            return
        held = 0 if self._base is None else self.length - self._base
        recall = self._recall(held, Pass(commit=True, store=False, log=True))
        for number, net in enumerate(self._nets):
            net(self._log, self._log, number, 0, recall)  # no tokens: neither is looked at
        self._base = self.length

    @torch.inference_mode()
    def copy(self, other: States, length: int) -> int:
        """Hold at most the first ``length`` tokens of ``other``; how many they are."""
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
