"""When a draft ends on its own confidence, as numbers that a proposal in one call reads as well as Python.

``GoodputLength`` says what the thresholds are. A proposal of our kernels applies them by itself
(``engines/cpu/native/draft.h``): asking Python at each position takes 12 us between two passes of a hundred.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from adaptive.control.confidence import CENTRES, EDGES, bin_of
from adaptive.control.policy import Advice

_POINTER, _INT, _DOUBLE = ctypes.c_void_p, ctypes.c_int, ctypes.c_double


class _Stopping(ctypes.Structure):
    """``Stopping`` of ``engines/cpu/native/draft.h``."""

    _fields_ = (
        *((name, _POINTER) for name in ("edges", "accepted", "follow", "drop_below", "last_below", "bins", "asked")),
        ("reach", _DOUBLE),
        *((name, _INT) for name in ("count", "longest", "room", "drafts")),
    )


class Stopping:
    """What becomes of a position (from 1) of a draft, by the confidence there. Positions are asked about in turn."""

    def __init__(self, longest: int, room: int = 1) -> None:
        """For drafts of at most ``longest`` tokens, which go on until then as long as nothing is decided. Of the last
        ``room`` drafts it is kept how sure they were."""
        self.longest, self.room = longest, room
        self._edges = (_DOUBLE * len(EDGES))(*EDGES)
        self._accepted: Any = (_DOUBLE * len(CENTRES))(*CENTRES)
        self._follow: Any = (_DOUBLE * len(CENTRES))(*CENTRES)
        self._drop_below: Any = (_DOUBLE * longest)()
        self._last_below: Any = (_DOUBLE * longest)(*[-1.0] * longest)
        self._bins: Any = (_INT * (room * longest))()
        self._asked: Any = (_INT * room)()
        arrays: tuple[Any, ...] = (
            self._edges,
            self._accepted,
            self._follow,
            self._drop_below,
            self._last_below,
            self._bins,
            self._asked,
        )
        self._given = _Stopping(*map(ctypes.addressof, arrays), count=len(EDGES), longest=longest, room=room)
        self.address = ctypes.addressof(self._given)

    def decide(
        self,
        accepted: Sequence[float],
        follow: Sequence[float],
        drop_below: Sequence[float],
        last_below: Sequence[float],
    ) -> None:
        """By bin of confidence the probability that a token is accepted, and that the one after it is; by position that
        of all up to it below which it is dropped, and that of the next one too at which it is the last."""
        self._accepted[:] = accepted
        self._follow[:] = follow
        self._drop_below[:] = drop_below
        self._last_below[: len(last_below)] = last_below

    def bins(self, number: int = 0) -> list[int]:
        """Of the confidences that were asked about in a draft, by its number since ``clear``; none where there was no
        such draft."""
        if number >= self._given.drafts:
            return []
        row = number % self.room
        bins: list[int] = self._bins[row * self.longest : row * self.longest + self._asked[row]]
        return bins

    def clear(self) -> None:
        """Nothing was asked yet."""
        self._given.drafts = 0

    def __call__(self, position: int, confidence: float) -> Advice:
        """As ``LengthPolicy.advise``."""
        given = self._given
        b = bin_of(confidence)
        if position == 1:
            given.drafts += 1
        row = (given.drafts - 1) % self.room
        self._bins[row * self.longest + position - 1] = b
        self._asked[row] = position
        # The probability that everything up to here is accepted.
        given.reach = reach = (given.reach if position > 1 else 1.0) * self._accepted[b]
        if reach < self._drop_below[position - 1]:
            return Advice.DROP
        if position >= self.longest or reach * self._follow[b] <= self._last_below[position - 1]:
            return Advice.LAST
        return Advice.MORE
