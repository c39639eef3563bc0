"""Rolls back the recurrent states of one text in llama.cpp, by the library's snapshots and by copies of the states.

Beside the current states, the library keeps those after each of the last tokens of a pass (snapshots). It rolls back
tokens of that pass by selecting a snapshot, once, before the next pass. It cannot go back to before the pass, so a pass
over one token cannot be rolled back. Therefore the states are copied before passes that may have to be rolled back
further (marks), and at a few places for another answer or an edited message (checkpoints). Keys and values need no
copies.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from adaptive.engines.state_checkpoints import REMEMBER_BEFORE, Checkpoints
from adaptive.errors import AdaptiveError

if TYPE_CHECKING:
    from adaptive.engines.llamacpp.model import LlamaModel

# Tokens of a pass that snapshots can roll back. Too high: memory; each token needs the memory of all states once more.
# Too low (below the draft length): the states are copied before every verification.
SNAPSHOTS = 8
# Single steps after which another mark is set. Too low (below the draft length): the mark at the beginning of a
# proposal is dropped. Too high: a rollback recomputes more of the text.
MARK_EVERY = 64
# The library's flag for states without keys and values.
STATES_ALONE = 1


@dataclass(frozen=True)
class Kept:
    """A copy of the states after ``length`` tokens, in the library's own format."""

    length: int
    data: Any


class States:
    """The marks and checkpoints of one text. ``snapshots``: tokens of a pass that the library can roll back.

    The sequence decides what the text holds. It calls ``reach`` for the length to which it can go back, and ``go_back``
    before any other call of the library.
    """

    def __init__(self, model: LlamaModel, snapshots: int) -> None:
        self.model = model
        self.snapshots = snapshots
        self.bytes_of_one = 0  # bytes of the states of all layers; 0 before the first pass
        self._last = 0  # tokens of the last pass that can be rolled back now
        self._stepping = False  # whether the last pass was a single step
        self._begun = 0  # tokens held before the last pass, or before the last series of single steps
        # Whether the text was ever rolled back beyond the snapshots, within a series of single steps (as a draft's
        # sequence is) or within another pass. From then on, marks are set before such steps or passes.
        self._marks_steps = self._marks_passes = False
        self._marks: list[Kept] = []  # at most two
        self._checkpoints = Checkpoints[Kept]()

    @property
    def nbytes(self) -> tuple[int, int]:
        """Bytes of the states including snapshots and marks, and bytes of the checkpoints."""
        marks, checkpoints = (sum(len(kept.data) for kept in held) for held in (self._marks, self._checkpoints))
        return (1 + self.snapshots) * self.bytes_of_one + marks, checkpoints

    def remembered(self, count: int, rows: int) -> int:
        """After how many of the ``count`` tokens of a pass a checkpoint is to be made; 0 for no checkpoint."""
        return max(0, count - max(rows, REMEMBER_BEFORE)) if rows else 0

    def before(self, context: Any, length: int, count: int, rows: int) -> None:
        """Set a mark if one is needed, before a pass over ``count`` tokens after the ``length`` held ones, with logits
        of the last ``rows``."""
        single = count == 1
        if not (single and self._stepping):
            self._begun = length
        if single and self._stepping and self._marks and length - self._marks[-1].length < MARK_EVERY:
            pass
        elif length and (self._marks_steps if single else self._marks_passes or rows - 1 > self.snapshots):
            self._marks = [*(self._marks[-1:] if self._stepping else []), self._copy(context, length)]
        self._stepping = single

    def begins(self) -> None:
        """Record the beginning of a pass, which cannot be rolled back by snapshots until it has ended."""
        self._last = 0

    def ended(self, context: Any, count: int) -> None:
        """Record the end of that pass over ``count`` tokens."""
        self._last = min(count - 1, self.snapshots)
        if not self.bytes_of_one:
            self.bytes_of_one = int(self.model.library.llama_state_seq_get_size_ext(context, 0, STATES_ALONE))

    def checkpoint(self, context: Any, length: int) -> None:
        """Keep the present states; if there are too many checkpoints, one is dropped."""
        if length not in self._checkpoints:
            self._checkpoints.add(length, self._copy(context, length))

    def reach(self, length: int, written: int) -> int:
        """The longest prefix of at most ``length`` of the ``written`` tokens to which the states can go back. Drops the
        copies after that prefix."""
        if written - length > self._last:
            if length >= self._begun:
                self._marks_steps |= self._stepping
                self._marks_passes |= not self._stepping
            length = max((kept.length for kept in self._kept if kept.length <= length), default=0)
        self._marks = [kept for kept in self._marks if kept.length <= length]
        self._checkpoints.cut(length)
        return length

    def go_back(self, context: Any, memory: Any, length: int, written: int) -> None:
        """Roll the library back from the ``written`` tokens to the first ``length``, a result of ``reach``. Raises
        AdaptiveError, with the library's text empty, if that fails."""
        library, near = self.model.library, written - length <= self._last
        self._last, self._stepping = 0, False
        kept = next((kept for kept in self._kept if kept.length == length), None)
        if not length:
            library.llama_memory_seq_rm(memory, 0, -1, -1)
            return
        if not near:
            assert kept is not None
            size = len(kept.data)
            near = library.llama_state_seq_set_data_ext(context, kept.data, size, 0, STATES_ALONE) == size
        if not near or not library.llama_memory_seq_rm(memory, 0, length, -1):
            library.llama_memory_seq_rm(memory, 0, -1, -1)
            raise AdaptiveError(f"{self.model.path}: llama.cpp could not take tokens back; give the prompt again")

    def copy(self, other: States) -> None:
        """Take over the copies of ``other``, from whose context the library's contents were copied."""
        self.bytes_of_one, self._last, self._stepping = other.bytes_of_one, 0, False
        self._marks, self._checkpoints = [], Checkpoints()
        for kept in sorted(other._kept, key=lambda kept: kept.length):
            if kept.length not in self._checkpoints:
                self._checkpoints.add(kept.length, kept)

    def moved(self) -> None:
        """Record that the contents were copied to another context, which has no snapshots."""
        self._last, self._stepping = 0, False

    @property
    def _kept(self) -> list[Kept]:
        return [*self._checkpoints, *self._marks]

    def _copy(self, context: Any, length: int) -> Kept:
        library = self.model.library
        size = library.llama_state_seq_get_size_ext(context, 0, STATES_ALONE)
        data = (ctypes.c_uint8 * size)()
        if library.llama_state_seq_get_data_ext(context, data, size, 0, STATES_ALONE) != size:
            raise AdaptiveError(f"{self.model.path}: llama.cpp gives no copy of its states")
        return Kept(length, data)
