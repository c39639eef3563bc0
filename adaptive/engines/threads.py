"""Chooses the number of threads for short passes: one or all, whichever takes less time at present.

The threads of a pass wait for each other after every product, a hundred times or more. On an idle machine all threads
are faster, except for the smallest models on some processors. If another program holds a core, each wait can last a
time slice of that program: a pass of 2 ms then takes 15 ms, or 300 ms with llama.cpp's spinning threads. So the number
of threads that is not in use is tried from time to time.

The mean counts, because a program in the way makes some passes ten times as long and leaves the others unchanged. A
machine's speed changes from second to second by as much as the two numbers differ. So to replace the other, a number
must be faster than the other was before the trial and is after it.

Each number of tokens is judged by itself. A pass over one token counts only after another such pass, as in plain
decoding, where all threads stay awake. A single one among drafts and verifications may have to wake the threads first,
so its time does not apply to plain decoding, with which drafting is compared.

If the operating system's accounts show that other programs use most of a core, all threads are not tried at all: beside
programs that keep both of two cores busy, a single pass on two threads took half a second, where one thread takes 1 ms.

On one thread only a trial shows that all threads are faster again. Such trials are rare, because they are expensive
beside another program; when the accounts show that the load has ended, a trial starts at once. A short load may move
one number of tokens to one thread and leave the others on all threads. If a load had followed, they would have moved as
well. So the time of good passes on all threads is evidence against one thread, and enough of it starts the next trial.
"""

from __future__ import annotations

import enum
import os
import time
from dataclasses import dataclass, field
from typing import Any

from adaptive.machine import LoadMeter, LoadWatch

resource: Any
try:
    import resource
except ImportError:  # Windows
    resource = None
# The argument of ``getrusage`` for the calling thread; None on systems without it.
RUSAGE_THREAD: int | None = getattr(resource, "RUSAGE_THREAD", None)

# Tokens up to which passes are timed, each number of tokens for itself. Longer passes belong to prompts.
FEW = 17
# A mean needs at least LEAST passes, and SPAN seconds: some time slices of another program. Too low: a moment's load
# counts as the rule. Too high: trials cost more.
LEAST, SPAN = 5, 0.02
# Two passes are enough if they take LONG times SPAN seconds.
LONG = 10
# The other number is chosen if it takes less than this share of the time, so that equals do not alternate.
BETTER = 0.95
# Below this share the number in use is not measured again after the trial.
CLEAR = 0.5
# A trial is ended, as failed, when it has taken this multiple of its normal time.
DECISIVE = 4.0
# The other number is tried again after this multiple of the seconds that the last trial lost. On one thread only trials
# show that a machine has become idle, so 1/100 of the time goes into them. On all threads the passes show that a
# machine has become busy, because they take longer than the other number's; 1/500 is enough.
SHARE_ONE, SHARE_ALL = 100, 500
# Least time to the next trial, in multiples of the last trial's time.
REST = 25
# On one thread a trial also starts when all threads have done well for other numbers of tokens for EVIDENCE times the
# seconds of a trial; this doubles after each failed trial, up to a factor of MOST_DOUBT.
EVIDENCE, MOST_DOUBT = 25, 32


@dataclass(slots=True)
class Pace:
    """The mean time of passes, in which recent passes weigh more."""

    seconds: float = 0.0
    passes: float = 0.0

    def add(self, seconds: float) -> None:
        """Add one pass."""
        if self.passes >= 2 * LEAST and self.seconds >= 2 * SPAN:
            self.seconds, self.passes = self.seconds / 2, self.passes / 2
        self.seconds += seconds
        self.passes += 1

    @property
    def known(self) -> bool:
        """Whether there are enough passes for a comparison."""
        if self.passes < LEAST:
            return self.passes >= 2 and self.seconds >= LONG * SPAN
        return self.seconds >= SPAN

    @property
    def mean(self) -> float:
        """Mean seconds of a pass."""
        return self.seconds / self.passes


class Phase(enum.Enum):
    """The purpose of the next passes over a number of tokens."""

    USUAL = 0
    TRIAL = 1  # of the other number of threads
    AFTER = 2  # the number in use again, after a trial


@dataclass(slots=True)
class Passes:
    """The state for passes over one number of tokens. ``best`` threads are in use, with the times ``pace``. A trial
    begins after ``when`` seconds of passes; or already after ``soon`` seconds if passes are twice (``slow``) found to
    take longer than those of the other number in the last trial, ``others``. The first pass of a phase does not count:
    it wakes sleeping threads, or builds a graph."""

    best: int
    phase: Phase = Phase.USUAL
    pace: Pace = field(default_factory=Pace)
    tried: Pace = field(default_factory=Pace)
    fresh: bool = True
    slow: bool = False
    before: float = 0.0
    others: float = float("inf")
    seconds: float = 0.0
    begun: float = 0.0
    when: float = 0.0
    soon: float = 0.0
    rest: float = 0.0  # least seconds from the last trial to the next; 0 before the first
    again: float = float("inf")  # the total evidence for all threads at which the next trial starts
    doubt: int = 1  # factor of the required evidence, after failed trials in a row

    def begin(self, phase: Phase) -> None:
        """Begin a phase with the next pass."""
        self.phase, self.fresh = phase, True


class ThreadChoice:
    """Chooses the number of threads for the next pass from the times of earlier ones. ``most`` is all threads.

    While ``held`` is a number, passes use that many, and nothing is tried or learned, so that trials do not distort
    measured costs. ``meter`` measures the load of other programs. ``alone``: short passes use one thread in any case,
    because there is only one, or other programs leave no room for more. ``trials_s``: seconds by which trial passes
    took longer than usual ones.
    """

    def __init__(self, most: int, meter: LoadMeter | None = None) -> None:
        self.most = most
        self.held: int | None = None
        self.trials_s = 0.0
        self.alone = most == 1
        self._watch = None if meter is None else LoadWatch(meter)
        self._worked = 0.0  # seconds of passes since the last read of the load
        self._evidence = 0.0  # seconds of passes in which all threads did well
        self._last = most
        self._passes: dict[int, Passes] = {}  # by number of tokens
        self._before, self._counts = 0, False  # tokens of the last pass, and whether its time counts

    def best(self, tokens: int) -> int:
        """The faster number for passes of ``tokens`` tokens, as far as known."""
        known = self._passes.get(tokens)
        return 1 if self.crowded else self._last if known is None else known.best

    @property
    def crowded(self) -> bool:
        """Whether other programs leave no room for one thread per core."""
        return self._watch is not None and self._watch.crowded

    def choose(self, tokens: int) -> int:
        """The number of threads for the next pass, of ``tokens`` tokens."""
        if self.held is not None:
            return min(self.held, self.most)
        if self.most == 1:
            return 1
        self._look()
        if self.crowded:
            self._counts = False
            return 1
        self._counts, self._before = tokens <= FEW and (tokens > 1 or self._before == 1), tokens
        if not self._counts:
            return self.best(1)
        known = self._passes.get(tokens)
        if known is None:
            known = self._passes[tokens] = self._begun(tokens)
        return known.best if known.phase is not Phase.TRIAL else self._other(known)

    def observe(self, tokens: int, seconds: float) -> None:
        """Take in the seconds of the pass of ``tokens`` tokens, on the threads last chosen."""
        if self.most == 1 or self.held is not None:
            return
        self._worked += seconds
        if not self._counts:
            return
        known = self._passes[tokens]
        known.seconds += seconds
        fresh, known.fresh = known.fresh, False
        if known.phase is Phase.TRIAL:
            self.trials_s += max(0.0, seconds - known.before)
            self._try(known, seconds, fresh)
        elif not fresh:
            known.pace.add(seconds)
            if known.best == self.most and not known.slow:
                self._evidence += seconds
            if not known.pace.known:
                return
            if known.phase is Phase.AFTER:
                self._end(known, known.tried.mean < BETTER * min(known.before, known.pace.mean))
            elif known.seconds >= known.when or (known.best == 1 and self._evidence >= known.again):
                self._begin(known)
            elif known.seconds >= known.soon and known.pace.mean > known.others:
                if known.slow:
                    self._begin(known)
                else:  # a single time may be chance
                    known.slow, known.pace = True, Pace()
            else:
                known.slow = False

    def _begun(self, tokens: int) -> Passes:
        """The state for a new number of tokens: the latest choice for other passes is the best guess. Between two tried
        numbers of tokens that agree, their choice is reliable enough to postpone the first trial as long as theirs."""
        below, above = [n for n in self._passes if n < tokens], [n for n in self._passes if n > tokens]
        if not below or not above:
            return Passes(self._last)
        lower, upper = self._passes[max(below)], self._passes[min(above)]
        if lower.best != upper.best or not lower.rest or not upper.rest:
            return Passes(self._last)
        rest = max(lower.rest, upper.rest)
        return Passes(lower.best, when=rest, soon=rest, rest=rest)

    def _other(self, known: Passes) -> int:
        return self.most if known.best == 1 else 1

    def _begin(self, known: Passes) -> None:
        known.before, known.begun, known.tried = known.pace.mean, known.seconds, Pace()
        known.begin(Phase.TRIAL)

    def _try(self, known: Passes, seconds: float, fresh: bool) -> None:
        """Take in one pass of a trial."""
        if not fresh:
            known.tried.add(seconds)
        if known.seconds - known.begun > DECISIVE * max(SPAN, LEAST * known.before):
            if fresh:
                known.tried.add(seconds)
            self._end(known, False)
        elif not fresh and known.tried.known:
            if known.tried.mean < CLEAR * known.before:
                self._end(known, True)
            else:
                known.pace = Pace()
                known.begin(Phase.AFTER)

    def _follow(self) -> None:
        """Move all numbers of tokens to all threads, after a trial found these faster for one of them: the machine has
        become idle, and passes mostly agree, since they read the same weights. Rarely used numbers would wait minutes
        for their own trial; they still get one later. There is no such step for a machine that becomes busy, which
        shows in every pass."""
        for other in self._passes.values():
            if other.best != self.most and other.phase is Phase.USUAL:
                other.best, other.pace, other.slow, other.others = self.most, Pace(), False, float("inf")
                other.when = other.soon = other.seconds + other.rest
                other.begin(Phase.USUAL)

    def _look(self) -> None:
        """Read the load of other programs. After its end, try all threads for every number of tokens on one thread."""
        watch = self._watch
        if watch is None:
            return
        was_busy = watch.busy
        if not watch.look(self._worked):
            return
        self._worked, self.alone = 0.0, watch.crowded
        if was_busy and not watch.busy:
            for known in self._passes.values():
                if known.best == 1:
                    known.when = known.soon = known.seconds

    def _end(self, known: Passes, better: bool) -> None:
        """End a trial; ``better``: the tried number is the faster one."""
        tried, took = known.tried, known.seconds - known.begun
        lost = max(0.0, tried.seconds - tried.passes * known.before)
        if better:
            known.best, known.pace, known.others = self._other(known), tried, known.before
            if known.rest and known.best == self.most:  # an earlier trial had found one thread better
                self._follow()
        else:
            known.others = tried.mean
        self._last = known.best
        known.doubt = 1 if better else min(2 * known.doubt, MOST_DOUBT)
        # The last factor is the time of a trial on an idle machine, which the evidence suggests.
        known.again = self._evidence + EVIDENCE * known.doubt * min(took, 3 * max(SPAN, LEAST * known.before))
        known.rest = REST * took
        known.soon = known.seconds + known.rest
        known.when = known.seconds + max(known.rest, lost * (SHARE_ONE if known.best == 1 else SHARE_ALL))
        known.slow = False
        known.begin(Phase.USUAL)


class WorkClock:
    """The clock for comparing rounds, in seconds.

    Beside programs that leave a pass only one thread (``ThreadChoice.alone``) it is that thread's own (``OwnClock``).
    By the wall clock some rounds would then take ten times as long, because they waited for a core, and it is chance
    whether these are drafted or plain ones. Otherwise it is the wall clock, which is five times as fast to read and
    includes the time in which a pass's threads wait for each other.

    The extra time of trials of another number of threads is left out. For a rarely used draft length every third pass
    may be a trial's: with them it looked 25% more expensive than it is, and so stayed rarely used.
    """

    def __init__(self, first: ThreadChoice, second: ThreadChoice) -> None:
        self._first, self._second = first, second
        self._alone, self._offset = False, 0.0  # which clock was last used, and the offset to add
        self._own = OwnClock()

    def __call__(self) -> float:
        """Seconds since an arbitrary moment."""
        first, second = self._first, self._second
        alone = first.alone or second.alone
        if alone is not self._alone:  # the time until now counts by the previous clock
            now = self._seconds(self._alone)
            self._offset += now - self._seconds(alone)
            self._alone = alone
        return self._seconds(alone) + self._offset - first.trials_s - second.trials_s

    def _seconds(self, alone: bool) -> float:
        return self._own() if alone else time.perf_counter()


class OwnClock:
    """Seconds without those in which the calling thread was ready to run while other programs had the cores. Only one
    thread may read it.

    The kernel counts these seconds (``waited``). They change with a context switch of the thread, which ``getrusage``
    reports; between two switches the clock advances like the wall clock. If the kernel does not count them, the clock
    is the thread's processor time, which also stands still while the thread sleeps.

    Processor time is the second choice because reading it makes the scheduler update its accounts, and a program with a
    higher claim to the core then gets it at once instead of at the next tick. Beside programs of a higher priority, a
    thread that read it every half millisecond got a quarter less done, and one that read it after context switches 5%.
    """

    def __init__(self) -> None:
        self._switches = -1
        self._ahead = 0.0  # difference to the wall clock
        self._latest = 0.0

    def __call__(self) -> float:
        """Seconds since an arbitrary moment."""
        if RUSAGE_THREAD is None:
            return time.thread_time()
        usage = resource.getrusage(RUSAGE_THREAD)
        switches = usage.ru_nvcsw + usage.ru_nivcsw
        now = time.perf_counter()
        if switches != self._switches:
            lost = waited()
            self._switches, self._ahead = switches, time.thread_time() - now if lost is None else -lost
        self._latest = max(self._latest, now + self._ahead)  # a switch between the two reads must not set it back
        return self._latest


def waited() -> float | None:
    """Seconds in which the calling thread was ready to run without a core; None if the system does not count them."""
    try:
        file = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
        try:
            ran, ready, _ = map(int, os.read(file, 64).split())
        finally:
            os.close(file)
    except (OSError, ValueError):
        return None
    return ready * 1e-9 if ran else None  # all are 0 if the kernel's accounts of them are turned off
