"""Brings the promoted adapter into use: at once, or beside an answer.

In: the adapter store, which any process may change. Out: calls of the assistant, and a line for each problem. An
adapter is verified and read on a thread of its own, while the draft drafts with its old weights, and then merged in
slices between rounds, without the draft. A damaged or incompatible adapter is skipped and reported once; decoding
continues. While the store or the adapter cannot be read, the one in use stays, or the one before it is used, and it is
looked at again. So is one for whose merging memory is short; meanwhile there is none.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace

from adaptive.assistant import Assistant
from adaptive.control.acceptance import by_position
from adaptive.engines.protocol import Engine
from adaptive.errors import AdaptiveError, first_line
from checkpoints.manifest import BaseDraft, Manifest
from checkpoints.store import AdapterStore

logger = logging.getLogger("adaptive.service")

# Seconds between two checks of the store during an answer; a check reads one small file.
LOOK_S = 0.25
# Seconds of a swap between two bursts of rounds. Too high: the text pauses noticeably. Too low: the answer is without a
# draft for longer. A single step of a large draft may take longer than this.
SLICE_S = 0.015
# Seconds for which the rounds wait when an adapter begins to be read: a small one is then merged at once. Too high: the
# text pauses noticeably for a large one.
WAIT_S = 0.015
# Seconds until the next look after one in which the store or an adapter could not be read. Too high: an adapter that is
# promoted during a short shortage of file descriptors comes into use late. Too low: a large one, for which there is no
# memory, is read again and again.
AGAIN_S = 30.0
# What reading may raise, beside AdaptiveError, and what causes that of merging, if memory, threads or file descriptors
# run out.
EXHAUSTED = (OSError, RuntimeError, MemoryError)


@dataclass(frozen=True)
class _Read:
    """A promoted adapter that was read: its ``manifest``, None for the plain draft, and ``problems`` for the user.

    ``before`` is CURRENT's value at the beginning, and ``after`` the one to expect at the end: another one if a damaged
    adapter was replaced. ``unreadable``: this is another adapter than CURRENT's, which cannot be read now. ``steps`` is
    the swap, whose first step is done; None if this adapter is in use, or does not fit (``error``).
    """

    manifest: Manifest | None
    problems: list[str]
    before: str | None
    after: str | None
    unreadable: bool = False
    steps: Iterator[None] | None = None
    error: AdaptiveError | None = None

    @property
    def name(self) -> str | None:
        """The adapter's id."""
        return None if self.manifest is None else self.manifest.id


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
        self._unread: set[str] = set()  # reported reasons why something could not be read
        self._merging: str | None = None  # the value of CURRENT that began the swap
        self._looked = 0.0
        self._put_off = False  # the last look and swap could not be completed, and come again
        self._first = True
        self._reading: Future[_Read] | None = None
        self._began, self._seconds, self._slices = 0.0, 0.0, 0

    def use_promoted(self) -> bool:
        """Bring the promoted adapter into use completely, which may take seconds. Returns whether the adapter has
        changed."""
        before = self.assistant.adapter
        self._go_on(float("inf"))
        while self._look(None):
            self._go_on(float("inf"))
            if self._put_off:
                break
        self._go_on(float("inf"))
        return self.assistant.adapter != before

    def between_rounds(self) -> bool:
        """For ``Assistant.between_rounds``, and for idle moments: check the store at intervals, continue a swap for
        about a slice. Returns whether the draft may be used."""
        if self.assistant.swapping:
            return self._go_on(SLICE_S)
        if self._reading is not None:
            self._look(0.0)
        elif time.perf_counter() - self._looked >= LOOK_S:
            self._looked = time.perf_counter()
            self._look(WAIT_S)
        return not self.assistant.swapping  # the rest comes in the next gaps

    def _look(self, patience: float | None) -> bool:
        """Begin to read the adapter if another one is promoted, and to swap once it is read. Waits for that for at most
        ``patience`` seconds (None: without limit). Returns whether the promoted one was read."""
        try:
            if self._reading is None:
                self._reading = self._begin()
            if self._reading is None:
                return False
            began = time.perf_counter()
            done, _ = wait([self._reading], patience)
            read = None
            if done:
                reading, self._reading = self._reading, None
                read = reading.result()
                self._take(read)
            self._seconds += time.perf_counter() - began
            return read is not None and not read.unreadable
        except (AdaptiveError, *EXHAUSTED) as error:
            self._keep(error)
            return False

    def _keep(self, error: Exception) -> None:
        """Nothing is known of what is promoted: leave the adapter in use, and look again later."""
        problem = str(error)
        if not isinstance(error, AdaptiveError):
            problem = f"the promoted adapter cannot be read now ({first_line(error)})"
        self._again_later(f"{problem}; adapter {self.assistant.adapter or 'none'} stays in use")

    def _again_later(self, *problems: str) -> None:
        """Look again in AGAIN_S. Each problem is said once."""
        self._looked = time.perf_counter() + AGAIN_S - LOOK_S
        self._put_off = True
        for problem in problems:
            if problem not in self._unread:
                self._unread.add(problem)
                self._say(problem)

    def _begin(self) -> Future[_Read] | None:
        """Begin to read the adapter, if another one is promoted."""
        known = self.store.current_id() in (self.assistant.adapter, self._refused)
        # The first read is done even if no adapter is in use: CURRENT may be damaged, and ``usable`` repairs it.
        if self.assistant.pair.draft is None or (known and not self._first):
            return None
        self._began, self._seconds, self._slices = time.perf_counter(), 0.0, 1
        self._put_off = False
        thread = ThreadPoolExecutor(1, "adapter")
        reading = thread.submit(self._read, self.assistant.pair.draft)
        thread.shutdown(wait=False)  # ends when the adapter is read
        return reading

    def _read(self, draft: Engine) -> _Read:
        """Verify the promoted adapter and do the first step of its swap, which only reads. Runs on its own thread."""
        before = self.store.current_id()
        manifest, problems = self.store.usable(self.base)
        unreadable = bool(problems) and self.store.unreadable(manifest) is not None
        read = _Read(manifest, problems, before, self.store.current_id() if problems else before, unreadable)
        if read.name == self.assistant.adapter:
            return read
        folder = None if read.name is None else self.store.path(read.name)
        try:
            steps = draft.swap_adapter(folder)
            next(steps, None)
        except AdaptiveError as error:
            if isinstance(error.__cause__, OSError):  # the store has just read it all, so this passes
                raise
            return replace(read, error=error)
        return replace(read, steps=steps)

    def _take(self, read: _Read) -> None:
        """Begin the swap to an adapter that was read, unless another one has been promoted since."""
        self._first = False
        if read.unreadable:
            self._again_later(*read.problems)
        else:
            for problem in read.problems:
                self._say(problem)
            if read.problems:
                self._refused = read.before  # report it once, not before every burst
        current = self.store.current_id()
        if current != read.after:
            return
        if read.error is not None:
            self._refuse(read.after, read.error)
        elif read.steps is not None:
            self.expected, self._merging = promised(read.manifest), read.after
            self.assistant.begin_swap(read.name, None, self.expected, read.steps)

    def _go_on(self, seconds: float) -> bool:
        if not self.assistant.swapping:
            return True
        began, before = time.perf_counter(), self.assistant.adapter
        try:
            finished = self.assistant.finish_swap(seconds)
        except AdaptiveError as error:
            self._failed(error, before)
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

    def _failed(self, error: AdaptiveError, before: str | None) -> None:
        """An adapter could not be merged, so that none is in use now, after ``before``."""
        self.expected = None
        if isinstance(error.__cause__, EXHAUSTED):
            self._again_later(f"{error}; adapter none is used")
        else:
            self._refuse(self._merging, error)
        if before is not None:
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
