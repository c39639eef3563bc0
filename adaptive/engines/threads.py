"""How many threads short passes use: one, or all that were given, whichever takes less time now.

A pass's threads wait for each other after every product, a hundred times and more. On an idle machine all of them
are faster, but for the smallest models on some processors; where another program holds a core, each wait can last
as long as that program's turn, so that a pass of two milliseconds takes fifteen, or (llama.cpp's threads spin) three
hundred. So the number that is not in use is tried now and then.

What counts is the mean, since a program that is in the way makes some passes ten times as long and leaves the others
as they were; and a machine's speed changes from second to second by as much as lies between the two numbers, so that
one has to beat the other as it was before the trial and as it is after it.

Each number of tokens is judged by itself. Of passes over one token only those count that follow another such pass, as
in plain decoding, where all threads stay awake. A single one among drafts and verifications may have to wake the others
first: what is better there says nothing of plain decoding, with which drafting is compared.

Where the operating system's accounts say that others take most of a core, all threads are not even tried: a single pass
on two threads beside programs that keep both cores busy was seen to take half a second, for one millisecond alone.

On one thread only a trial shows that all of them are faster again. Trials are rare there, because beside another
program they are dear; where the accounts say that the others have ended, one is made at once. A moment's load may send
a single number of tokens to one thread and leave the others on all: nobody has been in the way since, or they would
have gone there too. So the time in which passes on all threads did well is evidence against one thread, and enough of
it brings the next trial on.
"""

from __future__ import annotations

import enum
import time
from dataclasses import dataclass, field
from typing import Any

from adaptive.machine import LoadMeter, LoadWatch

resource: Any
try:
    import resource
except ImportError:  # Windows
    resource = None
# The argument of ``getrusage`` for the calling thread; None where the system has none.
RUSAGE_THREAD: int | None = getattr(resource, "RUSAGE_THREAD", None)

# Tokens up to which passes are timed, each number for itself. Longer ones are a prompt's.
FEW = 17
# What a mean is taken over, at least: so many passes, and the seconds of some turns of another program. Fewer, and a
# moment in which the machine did something else is taken for the rule; more, and trials cost more.
LEAST, SPAN = 5, 0.02
# Two passes are enough where they take so many times that long.
LONG = 10
# The other number is chosen if it takes less than this share of the time: equals do not change places.
BETTER = 0.95
# At this share the number in use need not be measured again.
CLEAR = 0.5
# A trial ends when it has taken so many times as long as it should.
DECISIVE = 4.0
# The other number is tried again after so many times the seconds that the last trial lost. On one thread nothing but
# a trial says that a machine has become idle: a hundredth of the time goes into them. On all threads a machine that
# has become busy is seen by its passes, which then take longer than the other number's: a five-hundredth.
SHARE_ONE, SHARE_ALL = 100, 500
# And not before so many times the seconds that the last trial took.
REST = 25
# On one thread also after so many times its seconds in which all threads did well for other numbers of tokens; twice
# as many after each trial that was in vain, up to so many times.
EVIDENCE, MOST_DOUBT = 25, 32


@dataclass(slots=True)
class Pace:
    """The mean of what passes take, of the last ones above all."""

    seconds: float = 0.0
    passes: float = 0.0

    def add(self, seconds: float) -> None:
        """One more pass."""
        if self.passes >= 2 * LEAST and self.seconds >= 2 * SPAN:
            self.seconds, self.passes = self.seconds / 2, self.passes / 2
        self.seconds += seconds
        self.passes += 1

    @property
    def known(self) -> bool:
        """Whether this is enough to compare."""
        if self.passes < LEAST:
            return self.passes >= 2 and self.seconds >= LONG * SPAN
        return self.seconds >= SPAN

    @property
    def mean(self) -> float:
        """Seconds a pass."""
        return self.seconds / self.passes


class Phase(enum.Enum):
    """What the passes of one number of tokens are for."""

    USUAL = 0
    TRIAL = 1  # of the other number of threads
    AFTER = 2  # the number in use once more


@dataclass(slots=True)
class Passes:
    """What is known of passes over one number of tokens: ``best`` threads are in use, and take ``pace``. A trial begins
    after ``when`` seconds of passes, or from ``soon`` on where they take longer than the other number in the last
    trial, ``others``, and do so twice (``slow``). The first pass of a phase does not count: it wakes threads that
    have gone to sleep, or builds a graph."""

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
    rest: float = 0.0  # the seconds after the last trial in which there is no other one; 0 before the first
    again: float = float("inf")  # the evidence for all threads from which on there is one
    doubt: int = 1  # so many times as much is asked for: trials in a row were in vain

    def begin(self, phase: Phase) -> None:
        """From the next pass on."""
        self.phase, self.fresh = phase, True


class ThreadChoice:
    """The number of threads for the next pass, from what earlier ones took. ``most`` is all of them.

    While ``held`` is a number, passes use so many and nothing is tried or learned: what is tried meanwhile is not what
    a pass costs that somebody measures. ``meter`` tells whether other programs use the machine. ``alone`` is whether
    short passes have one thread whatever they take: there is no other, or other programs leave no room for it.
    ``trials_s`` are the seconds by which passes that were tried on another number of threads took longer than usual.
    """

    def __init__(self, most: int, meter: LoadMeter | None = None) -> None:
        self.most = most
        self.held: int | None = None
        self.trials_s = 0.0
        self.alone = most == 1
        self._watch = None if meter is None else LoadWatch(meter)
        self._worked = 0.0  # seconds of passes since the load was last read
        self._evidence = 0.0  # seconds of passes in which all threads did well
        self._last = most
        self._passes: dict[int, Passes] = {}  # by number of tokens
        self._before, self._counts = 0, False  # tokens of the last pass, and whether its time is learned from

    def best(self, tokens: int) -> int:
        """The faster number for passes of so many tokens, as far as is known."""
        known = self._passes.get(tokens)
        return 1 if self.crowded else self._last if known is None else known.best

    @property
    def crowded(self) -> bool:
        """Whether other programs leave no room for a thread on each core."""
        return self._watch is not None and self._watch.crowded

    def choose(self, tokens: int) -> int:
        """Threads for a pass of ``tokens`` tokens."""
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
        """The pass of ``tokens`` tokens, on the threads last chosen, took this long."""
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
                else:  # once may be chance
                    known.slow, known.pace = True, Pace()
            else:
                known.slow = False

    def _begun(self, tokens: int) -> Passes:
        """The first pass of so many tokens: what other passes do now is the best guess. Between two numbers of tokens
        that were tried and agree it is good enough to wait with a trial as long as they do between theirs."""
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
        """One pass of a trial."""
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
        """The machine has become idle: all threads are better again for one number of tokens, and mostly for all, since
        what they take is the reading of the same weights. Those that are seldom passed would wait for minutes until
        they are tried; they go along, and are tried like any other. That a machine has become busy, each sees by its
        own passes."""
        for other in self._passes.values():
            if other.best != self.most and other.phase is Phase.USUAL:
                other.best, other.pace, other.slow, other.others = self.most, Pace(), False, float("inf")
                other.when = other.soon = other.seconds + other.rest
                other.begin(Phase.USUAL)

    def _look(self) -> None:
        """Whether others use the machine. When they have ended, all threads are tried wherever one is in use."""
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
        """A trial is over, and has shown whether the other number is ``better``."""
        tried, took = known.tried, known.seconds - known.begun
        lost = max(0.0, tried.seconds - tried.passes * known.before)
        if better:
            known.best, known.pace, known.others = self._other(known), tried, known.before
            if known.rest and known.best == self.most:  # it was tried before, and one was better then
                self._follow()
        else:
            known.others = tried.mean
        self._last = known.best
        known.doubt = 1 if better else min(2 * known.doubt, MOST_DOUBT)
        # What a trial takes where nobody is in the way: with evidence of that, it will.
        known.again = self._evidence + EVIDENCE * known.doubt * min(took, 3 * max(SPAN, LEAST * known.before))
        known.rest = REST * took
        known.soon = known.seconds + known.rest
        known.when = known.seconds + max(known.rest, lost * (SHARE_ONE if known.best == 1 else SHARE_ALL))
        known.slow = False
        known.begin(Phase.USUAL)


class WorkClock:
    """Seconds by which rounds are compared with each other.

    Beside programs that leave a pass one thread (``ThreadChoice.alone``) that is the time in which the calling thread
    was at work. On the wall a few rounds then take ten times as long as the others, because it waited for a core, and
    by chance drafted ones or plain ones. Elsewhere it is the time on the wall, which takes a tenth of the time to ask
    and counts what a pass's threads wait for each other.

    What trials of another number of threads took longer is left out. Of a draft length that is seldom used every third
    pass may be a trial's: with these it looked a quarter dearer than it is, and went on being seldom used.
    """

    def __init__(self, first: ThreadChoice, second: ThreadChoice) -> None:
        self._first, self._second = first, second
        self._alone, self._offset = False, 0.0  # which clock was asked last, and what to add to it
        self._own = OwnClock()

    def __call__(self) -> float:
        """Seconds since some moment."""
        first, second = self._first, self._second
        alone = first.alone or second.alone
        if alone is not self._alone:  # what passed until now is by the clock of until now
            now = self._seconds(self._alone)
            self._offset += now - self._seconds(alone)
            self._alone = alone
        return self._seconds(alone) + self._offset - first.trials_s - second.trials_s

    def _seconds(self, alone: bool) -> float:
        return self._own() if alone else time.perf_counter()


class OwnClock:
    """The processor time of the calling thread, in seconds. Only one thread may read it.

    It equals ``time.thread_time``, but reads that clock only after a context switch of the thread, which
    ``getrusage`` reports (Linux). Between two switches the thread never leaves its core, so that the wall clock
    advances by the same. ``time.thread_time`` makes the scheduler bring its accounts up to date, and a program with a
    better claim to the core then gets it at once instead of at the next tick: beside programs of a higher priority, a
    thread that read it every half a millisecond got a quarter less done.
    """

    def __init__(self) -> None:
        self._switches = -1
        self._ahead = 0.0  # of the wall clock
        self._latest = 0.0

    def __call__(self) -> float:
        """Seconds since an arbitrary moment."""
        if RUSAGE_THREAD is None:
            return time.thread_time()
        usage = resource.getrusage(RUSAGE_THREAD)
        switches = usage.ru_nvcsw + usage.ru_nivcsw
        now = time.perf_counter()
        if switches != self._switches:
            self._switches, self._ahead = switches, time.thread_time() - now
        self._latest = max(self._latest, now + self._ahead)  # a switch between the two reads would make it go back
        return self._latest
