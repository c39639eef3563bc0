"""The recurrent states of one text in llama.cpp: how far it can go back, and copies from which it goes back further.

The library keeps, beside a state, those after each of the last tokens of a pass (snapshots), and takes tokens of that
pass back by choosing one: once, before the next pass. What was there before the pass cannot be chosen, and a pass over
one token leaves nothing to go back to. So states are copied before passes that may have to be taken back further
(marks), and at a few places for another answer or an edited message (checkpoints). Keys and values need none of it.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from adaptive.engines.checkpoints import REMEMBER_BEFORE, crowded
from adaptive.errors import AdaptiveError

if TYPE_CHECKING:
    from adaptive.engines.llamacpp.model import LlamaModel

# Tokens of a pass that can be taken back. Each takes the memory of all states once more; fewer than a proposal has
# tokens, and the states are copied before every pass that verifies one.
SNAPSHOTS = 8
# Tokens fed one by one after which another mark is set. Fewer than a draft has, and it loses the place where it began;
# more compute more of the text anew after one that was taken back.
MARK_EVERY = 64
# The library's flag for the states without keys and values.
STATES_ALONE = 1


@dataclass(frozen=True)
class Kept:
    """The states as they were after ``length`` tokens, as the library's own bytes."""

    length: int
    data: Any


class States:
    """See above. ``snapshots``: tokens of a pass that the library can take back.

    What the text should hold is the sequence's matter: it asks how far it can go back (``reach``), and has it done
    before the library is asked for anything else (``go_back``).
    """

    def __init__(self, model: LlamaModel, snapshots: int) -> None:
        self.model = model
        self.snapshots = snapshots
        self.bytes_of_one = 0  # of all layers; known from the first pass on
        self._last = 0  # tokens of the last pass that can be taken back now
        self._stepping = False  # the last pass was a single step
        self._begun = 0  # tokens held when the last pass began, or the single steps
        # Whether the beginning of single steps has been gone back to, as those of a draft are, or that of other passes.
        self._marks_steps = self._marks_passes = False
        self._marks: list[Kept] = []  # at most two
        self._checkpoints: list[Kept] = []

    @property
    def nbytes(self) -> tuple[int, int]:
        """Bytes of the states with snapshots and marks, and of the checkpoints."""
        marks, checkpoints = (sum(len(kept.data) for kept in held) for held in (self._marks, self._checkpoints))
        return (1 + self.snapshots) * self.bytes_of_one + marks, checkpoints

    def remembered(self, count: int, rows: int) -> int:
        """Of a pass over so many tokens, behind how many a checkpoint is to be; 0 for nowhere."""
        return max(0, count - max(rows, REMEMBER_BEFORE)) if rows else 0

    def before(self, context: Any, length: int, count: int, rows: int) -> None:
        """A pass over ``count`` tokens follows those that are held, with logits of the last ``rows``: mark the place
        where it may have to be taken back to."""
        single = count == 1
        if not (single and self._stepping):
            self._begun = length
        if single and self._stepping and self._marks and length - self._marks[-1].length < MARK_EVERY:
            pass
        elif length and (self._marks_steps if single else self._marks_passes or rows - 1 > self.snapshots):
            self._marks = [*(self._marks[-1:] if self._stepping else []), self._copy(context, length)]
        self._stepping = single

    def begins(self) -> None:
        """The library begins a pass: until it has ended, nothing of it can be taken back."""
        self._last = 0

    def ended(self, context: Any, count: int) -> None:
        """That pass, over so many tokens, has ended."""
        self._last = min(count - 1, self.snapshots)
        if not self.bytes_of_one:
            self.bytes_of_one = int(self.model.library.llama_state_seq_get_size_ext(context, 0, STATES_ALONE))

    def checkpoint(self, context: Any, length: int) -> None:
        """Remember the states of now; of too many the one between the nearest two is forgotten."""
        held = [kept.length for kept in self._checkpoints]
        if length in held:
            return
        self._checkpoints.append(self._copy(context, length))
        forgotten = crowded([*held, length])
        if forgotten is not None:
            del self._checkpoints[forgotten]

    def reach(self, length: int, written: int) -> int:
        """How many tokens can be held of the first ``length`` of those ``written``; copies of states behind them are
        forgotten."""
        if written - length > self._last:
            if length >= self._begun:
                self._marks_steps |= self._stepping
                self._marks_passes |= not self._stepping
            length = max((kept.length for kept in self._kept if kept.length <= length), default=0)
        self._marks = [kept for kept in self._marks if kept.length <= length]
        self._checkpoints = [kept for kept in self._checkpoints if kept.length <= length]
        return length

    def go_back(self, context: Any, memory: Any, length: int, written: int) -> None:
        """Have the library hold the first ``length`` tokens, which were within reach, of those ``written``."""
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
        """The library holds here what it holds of another text, which is held as it was."""
        self.bytes_of_one, self._last, self._stepping = other.bytes_of_one, 0, False
        self._marks, self._checkpoints = [], sorted(other._kept, key=lambda kept: kept.length)

    def moved(self) -> None:
        """The library holds the same in another context."""
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
