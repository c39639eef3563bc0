"""How many threads llama.cpp's short passes use: one, or all that were given, whichever takes less time now.

llama.cpp's threads wait for each other by spinning, some two hundred times a pass. Where another program holds
a core, each wait can last as long as that program's turn, and a pass of a millisecond takes a third of a
second. One thread alone is then a hundred times as fast; on an idle machine it is slower. So the number that is
not in use is tried now and then, and compared with the passes just before: a machine's speed changes from second
to second by more than lies between the two.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median

# Tokens up to which passes are timed, each number for itself. Longer ones are a prompt's, which all threads
# compute unless single tokens are better off with one.
FEW = 16
# Passes of a trial, and those before it that they are compared with, by their medians. A first pass does not count:
# it builds a graph, or wakes a thread that has gone to sleep, and takes up to half as long again. Fewer, and a
# moment in which the machine did something else is taken for the rule.
TRIES, RECENT = 5, 9
# One thread must take at most this share of the time of all. The pace of a machine changes by as much within
# the few passes of a trial; what one thread is chosen for is a factor of a hundred.
CLEAR = 0.8
# A trial ends with a pass that takes so many times as long as the others, and one begins when passes do.
DECISIVE = 4.0
# The other number is tried again after so many passes, and after so many times the seconds that the last trial
# lost. On one thread nothing but a trial says that a machine has become idle: a hundredth of the time goes into
# them. On all threads a machine that has become busy is seen by its passes, and a trial only finds what is lost
# by less than DECISIVE: a five-hundredth. More often costs more, more seldom stays with the wrong number longer.
AGAIN, SHARE_ONE, SHARE_ALL = 400, 100, 500


@dataclass(slots=True)
class Passes:
    """What is known of passes over one number of tokens.

    ``best`` is the number of threads in use, ``recent`` are the seconds that it takes; ``left`` passes are left of a
    trial of the ``other`` number, which has ``tried`` these. ``settling`` passes do not count. A trial begins with
    pass ``again``, after ``when`` seconds, or when passes take much longer than the ``slower`` number did in the last.
    """

    best: int
    other: int = 1
    count: int = 0
    seconds: float = 0.0
    settling: int = 1
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    left: int = 0
    tried: list[float] = field(default_factory=list)
    slower: float = float("inf")
    again: int = 0
    when: float = 0.0


class ThreadChoice:
    """The number of threads for the next pass, from what earlier ones took. ``most`` is all of them."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._passes = [Passes(most) for _ in range(FEW + 1)]  # by number of tokens

    def best(self, tokens: int) -> int:
        """The faster number for passes of so many tokens, as far as is known."""
        return self._passes[tokens].best

    def choose(self, tokens: int) -> int:
        """Threads for a pass of ``tokens`` tokens."""
        if self.most == 1:
            return 1
        if tokens > FEW:
            return self.best(1)
        known = self._passes[tokens]
        return known.other if known.left else known.best

    def observe(self, tokens: int, seconds: float) -> None:
        """The pass of ``tokens`` tokens, on the threads last chosen, took this long."""
        if self.most == 1 or tokens > FEW:
            return
        known = self._passes[tokens]
        known.count += 1
        known.seconds += seconds
        if known.left:
            self._try(known, seconds)
        elif known.settling:
            known.settling -= 1
        else:
            known.recent.append(seconds)
            due = known.count >= known.again and known.seconds >= known.when
            limit = DECISIVE * known.slower
            if len(known.recent) == RECENT and (due or seconds > limit):
                usual = median(known.recent)  # a pass that is nothing like it says that the others are of the past
                if seconds < DECISIVE * usual and (due or usual > limit):
                    known.left, known.settling = TRIES, 1

    def _try(self, known: Passes, seconds: float) -> None:
        """One pass of a trial; its end says which number is the best one."""
        known.tried.append(seconds)
        if seconds < DECISIVE * median(known.recent):
            if known.settling:
                known.settling -= 1
                return
            known.left -= 1
            if known.left:
                return
        mine, others = median(known.recent), median(known.tried[-TRIES:])
        known.again = known.count + AGAIN
        lost = max(0.0, sum(known.tried) - len(known.tried) * mine)
        known.slower = max(mine, others)
        if others * CLEAR < mine if known.best == 1 else others < CLEAR * mine:
            known.best, known.other = known.other, known.best
        known.when = known.seconds + lost * (SHARE_ONE if known.best == 1 else SHARE_ALL)
        known.left, known.settling = 0, 1
        known.tried.clear()
        known.recent.clear()
