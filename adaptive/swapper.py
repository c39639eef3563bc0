"""Brings the promoted adapter into use: at once between two answers, or in slices between the rounds of one.

In: the adapter store, which any process may change. Out: calls of the assistant, and a line for each
thing that is wrong. A damaged or foreign adapter is passed over and said once; answers go on.
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

# Seconds between two looks at the store while an answer is under way: a look reads one small file.
LOOK_S = 0.25
# Seconds of a swap that may come between two rounds. More is felt as a pause in the text, less leaves the
# answer without a draft for longer; one step of a large draft may take longer than this by itself.
SLICE_S = 0.015


class Swapper:
    """Follows ``store`` for one assistant, on the thread that runs it."""

    def __init__(self, assistant: Assistant, store: AdapterStore, base: BaseDraft, say: Callable[[str], None]) -> None:
        """``say`` is told what is wrong with an adapter, in one line each."""
        self.assistant = assistant
        self.store = store
        self.base = base
        self.swaps = 0
        self.expected: list[float] | None = None  # acceptance by position that the adapter in use promised
        self.on_swap: Callable[[], None] = lambda: None
        self._say = say
        self._refused: str | None = ""  # what cannot be used (None: what CURRENT says) and has been said to be
        self._looked = 0.0
        self._first = True
        self._began, self._seconds, self._slices = 0.0, 0.0, 0

    def use_promoted(self) -> bool:
        """Have the promoted adapter in use, wholly; True if another one was before."""
        before = self.assistant.adapter
        self._go_on(float("inf"))
        self._begin()
        self._go_on(float("inf"))
        return self.assistant.adapter != before

    def between_rounds(self) -> bool:
        """For ``Assistant.between_rounds``: look now and then, go on with a swap; whether the draft may be used."""
        if not self.assistant.swapping:
            now = time.perf_counter()
            if now - self._looked < LOOK_S:
                return True
            self._looked = now
            self._begin()  # its reading is this gap's share
            return not self.assistant.swapping
        return self._go_on(SLICE_S)

    def _begin(self) -> None:
        current, first, self._first = self.store.current_id(), self._first, False
        known = current in (self.assistant.adapter, self._refused)
        # The first time also where none is in use: what says so may be damaged, which the store mends.
        if self.assistant.pair.draft is None or (known and not first):
            return
        began = time.perf_counter()
        manifest, problems = self.store.usable(self.base)
        for problem in problems:
            self._say(problem)
        if problems:
            self._refused = current  # said once, not before every round
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
    """Acceptance by position that the gate found by replay on recent held-out answers; None where it did not judge."""
    held = None if manifest is None else manifest.recent
    if held is None:
        return None
    return by_position(held.acceptance_after.mean, held.mean_acceptance_length_after.mean, held.draft_length)
