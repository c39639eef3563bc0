"""Brings the promoted adapter into use: at once between two answers, or in slices between the rounds of an answer.

In: the adapter store, which any process may change. Out: calls of the assistant, and a line for each problem. A damaged
or incompatible adapter is skipped and reported once; decoding continues.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

from adaptive.assistant import Assistant
from adaptive.control.acceptance import by_position
from adaptive.errors import AdaptiveError
from checkpoints.manifest import BaseDraft, Manifest
from checkpoints.store import AdapterStore

logger = logging.getLogger("adaptive.service")

# Seconds between two checks of the store during an answer; a check reads one small file.
LOOK_S = 0.25
# Seconds of a swap between two bursts of rounds. Too high: the text pauses noticeably. Too low: the answer is without a
# draft for longer. A single step of a large draft may take longer than this.
SLICE_S = 0.015


class Swapper:
    """Follows ``store`` for one assistant, on the thread that runs it."""

    def __init__(self, assistant: Assistant, store: AdapterStore, base: BaseDraft, say: Callable[[str], None]) -> None:
        """``say`` receives each problem with an adapter as one line."""
        self.assistant = assistant
        self.store = store
        self.base = base
        self.swaps = 0
        self.expected: list[float] | None = None  # acceptance by position expected of the adapter in use
        self.on_swap: Callable[[], None] = lambda: None
        self._say = say
        self._refused: str | None = ""  # an unusable and reported value of CURRENT (None: it names no adapter)
        self._looked = 0.0
        self._first = True
        self._began, self._seconds, self._slices = 0.0, 0.0, 0

    def use_promoted(self) -> bool:
        """Bring the promoted adapter into use completely. Returns whether the adapter has changed."""
        before = self.assistant.adapter
        self._go_on(float("inf"))
        self._begin()
        self._go_on(float("inf"))
        return self.assistant.adapter != before

    def between_rounds(self) -> bool:
        """For ``Assistant.between_rounds``: check the store at intervals, continue a swap. Returns whether the draft
        may be used."""
        if not self.assistant.swapping:
            now = time.perf_counter()
            if now - self._looked < LOOK_S:
                return True
            self._looked = now
            self._begin()  # reads the adapter, which uses up this gap's share of time
            return not self.assistant.swapping
        return self._go_on(SLICE_S)

    def _begin(self) -> None:
        current, first, self._first = self.store.current_id(), self._first, False
        known = current in (self.assistant.adapter, self._refused)
        # The first call checks even if no adapter is in use: CURRENT may be damaged, and ``usable`` repairs it.
        if self.assistant.pair.draft is None or (known and not first):
            return
        began = time.perf_counter()
        manifest, problems = self.store.usable(self.base)
        for problem in problems:
            self._say(problem)
        if problems:
            self._refused = current  # report it once, not before every burst
        name = manifest.id if manifest else None
        if name == self.assistant.adapter:
            return
        try:
            self.expected = promised(manifest)
            self.assistant.begin_swap(name, self._folder(name), self.expected)
        except AdaptiveError as error:
            self._refuse(name, error)
        self._began, self._seconds, self._slices = began, time.perf_counter() - began, 1

    def _folder(self, name: str | None) -> Path | None:
        return None if name is None else self.store.path(name)

    def _go_on(self, seconds: float) -> bool:
        if not self.assistant.swapping:
            return True
        began = time.perf_counter()
        try:
            finished = self.assistant.finish_swap(seconds)
        except AdaptiveError as error:
            self._refuse(self.store.current_id(), error)
            return True
        self._seconds += time.perf_counter() - began
        self._slices += 1
        if finished:
            self._tell()
        return finished

    def _tell(self) -> None:
        self.swaps += 1
        now = time.perf_counter()
        logger.info(
            "now drafting with adapter %s (swapped in %.0f ms, in %d parts over %.0f ms)",
            self.assistant.adapter or "none",
            1000 * self._seconds,
            self._slices,
            1000 * (now - self._began),
        )
        self.on_swap()

    def _refuse(self, name: str | None, error: AdaptiveError) -> None:
        self._refused = name
        self._say(f"{error}; adapter {self.assistant.adapter or 'none'} is used")


def promised(manifest: Manifest | None) -> list[float] | None:
    """Acceptance by position that the gate's replay found on recent held-out answers; None if it did not judge."""
    held = None if manifest is None else manifest.recent
    if held is None:
        return None
    return by_position(held.acceptance_after.mean, held.mean_acceptance_length_after.mean, held.draft_length)
