"""Keeps the controller's costs up to date: loads and saves them, and measures them again while the program is idle.

In: the policy of a pair, the state that the last session saved, and idle moments. Out: costs in the policy, and
``controller.json``, at the end and now and then while idle, since a program may be killed. Costs are due for
measurement if they are older than a day, or come from another machine, another power supply or a busy machine, and
after a swap of the adapter; a program that runs for weeks looks at this again and again. The first use of a pair does
not wait for a quiet moment. A target without a local draft is not measured: the costs of verifying history's proposals,
or of a draft server, are learned during decoding, and saved.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator
from contextlib import suppress
from pathlib import Path

from adaptive.control.goodput import GoodputLength
from adaptive.control.memory import DAY, Memory, load, remembered, save
from adaptive.control.policy import LengthPolicy
from adaptive.control.sources import GoodputWithHistory
from adaptive.machine import LoadMeter, LoadWatch, identity
from adaptive.measure import Measured, measuring, where_it_runs
from adaptive.pair import Pair
from adaptive.types import SamplingParams

logger = logging.getLogger("adaptive.control")

# Seconds until the next measurement after one on a busy machine; doubled each time, up to the second number.
AGAIN_S, LONGEST_S = 30.0, 3600.0

# Seconds between two writes of ``controller.json`` while idle. Too low: a disk that sleeps is woken after each answer.
# Too high: a program that is killed loses more of what was learned.
KEEP_S = 600.0

# Seconds between two looks, while idle, at the age of the costs and at the power supply. Too low: they cost time (a
# process on macOS). Too high: a laptop on battery decodes by the costs of the mains for longer.
LOOK_S = 1800.0


class Upkeep:
    """The costs of one pair's policy. For policies without costs all methods do nothing."""

    def __init__(self, pair: Pair, policy: LengthPolicy, memory: Memory, sampling: SamplingParams) -> None:
        self.pair = pair
        drafts = pair.draft is not None or pair.remote is not None or isinstance(policy, GoodputWithHistory)
        self.policy = policy if isinstance(policy, GoodputLength) and drafts else None
        self.memory = memory
        self.machine = identity()  # when it was looked at last
        self.measured = memory.measured if memory.machine == self.machine else 0.0  # when; 0: not on this machine
        self._looked, self._gave_up = time.monotonic(), 0.0
        self.due = self._measures and memory.stale(self.machine)
        self._sampling = sampling
        self._running: Generator[None, None, Measured] | None = None
        self._not_before, self._pause = 0.0, AGAIN_S
        self.keep: Callable[[], None] | None = None  # writes ``controller.json``; None if another process does that
        self._kept = -KEEP_S  # when it was written last
        if self.policy is not None:
            self.policy.watch = LoadWatch(LoadMeter())
            if memory.costs is None:  # first use: even a busy machine's costs are better than none
                self.idle(lambda: False)

    @property
    def _measures(self) -> bool:
        return self.policy is not None and self.pair.draft is not None

    def swapped(self) -> None:
        """After a change of adapter: measure costs again at the next quiet moment."""
        self.due, self._running = self._measures, None  # half of a measurement would be of before
        self._not_before, self._pause = 0.0, AGAIN_S

    def idle(self, wanted: Callable[[], bool]) -> None:
        """While no request waits: write what was learned, if due, and measure costs, if due, until ``wanted`` returns
        True; the next call continues."""
        if self.keep is not None and time.monotonic() - self._kept >= KEEP_S:
            self._kept = time.monotonic()
            with suppress(OSError):  # reported if it fails at the end, too
                self.keep()
        if time.monotonic() - self._looked >= LOOK_S:
            self._look()
        if self.policy is None or not self.due or time.monotonic() < self._not_before:
            return
        if self._running is None:
            self._has_changed()
            self._running = measuring(self.pair, self._sampling)
        try:
            while not wanted():
                next(self._running)
        except StopIteration as end:
            self._running = None
            self._take(end.value)
        except Exception:  # of any kind, such as no memory: decoding continues with the known costs
            self._running, self.due, self._gave_up = None, False, time.time()
            logger.exception("costs could not be measured; what is known of them stays in use")

    def _look(self) -> None:
        """See whether costs have become due: the machine is run in another way, or they are a day old."""
        self._looked = time.monotonic()
        if not self._measures:
            return
        if self._has_changed():
            self._running = None  # half of that measurement would be of before
            self.swapped()
        elif not self.due and not 0 <= time.time() - max(self.measured, self._gave_up) < DAY:
            self.due = True

    def _has_changed(self) -> bool:
        """Whether the machine, or how it is run, is another one than at the last look. If so, its costs are not
        known."""
        before, self.machine = self.machine, identity()
        if self.machine == before:
            return False
        self.measured = 0.0
        return True

    def _take(self, found: Measured) -> None:
        policy = self.policy
        assert policy is not None
        busy = found.load is not None and found.load.busy
        policy.remeasured(found.costs, busy)
        plain = 1e3 * found.costs.plain_step_s
        logger.info("costs measured%s: a plain step takes %.2f ms", " beside other programs" if busy else "", plain)
        self.due = self._has_changed() or busy or not found.trusted
        if self.due:
            self._not_before = time.monotonic() + self._pause
            self._pause = min(2 * self._pause, LONGEST_S)
        else:
            self.measured = time.time()

    def save(self, file: Path, adapter: str | None) -> None:
        """Write ``controller.json``. Raises OSError if that fails."""
        if self.policy is not None:
            memory, told = self.memory, (self.machine, self.measured, adapter)
            save(file, remembered(self.policy, memory.device, *told, memory.matches))


def last_memory(file: Path, pair: Pair) -> Memory:
    """The saved state of the last session of ``pair``, as far as it applies to how the pair runs now."""
    return load(file, where_it_runs(pair))
