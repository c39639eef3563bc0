"""How many threads llama.cpp's short passes use: one, or all that were given, whichever takes less time now.

llama.cpp's threads wait for each other by spinning, some two hundred times a pass. Where another program holds
a core, each wait can last as long as that program's turn, and a pass of a millisecond takes a third of a
second. One thread alone is then a hundred times as fast; on an idle machine it is slower. So both are timed
while decoding, and the one that was not faster is tried again now and then.
"""

from __future__ import annotations

from dataclasses import dataclass, field

# Tokens up to which passes are timed, each number for itself. Longer ones are a prompt's, which all threads
# compute unless single tokens are better off with one.
FEW = 16
# Passes of each kind at the beginning, in turn; the first of each builds its graph and does not count.
TRIES = 3
# The other number is tried once more after so many passes, and after so many times the seconds that the last try
# lost: trying costs a hundredth of the time at most, and a machine that has become idle is noticed within
# seconds. More often costs more, more seldom stays on one thread for longer than the other program ran.
AGAIN, SHARE = 200, 100
# Weight of the newest pass in the mean of its number. Higher follows a single slow moment, lower stays slow for
# longer. What a number that is only tried takes is believed at once: in use, it soon shows.
WEIGHT = 0.1
# A pass counts as at most so many times the mean: one slow moment must not change the choice.
MOST = 4.0


@dataclass(slots=True)
class Passes:
    """What is known of passes over one number of tokens.

    ``means`` are seconds by number of threads; the ``other`` number than the ``best`` is tried once more after
    ``again`` passes and ``when`` seconds.
    """

    best: int
    other: int = 1
    count: int = 0
    seconds: float = 0.0
    again: int = 2 * TRIES + AGAIN
    when: float = 0.0
    means: dict[int, float] = field(default_factory=dict)


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
        if known.count < 2 * TRIES:
            return 1 if known.count % 2 else self.most
        return known.other if known.count >= known.again and known.seconds >= known.when else known.best

    def observe(self, tokens: int, threads: int, seconds: float) -> None:
        """A pass of ``tokens`` tokens on so many ``threads`` took this long."""
        if self.most == 1 or tokens > FEW:
            return
        known = self._passes[tokens]
        known.count += 1
        if known.count <= 2:
            return
        known.seconds += seconds
        mean = known.means.get(threads)
        if mean is not None and threads == known.best:
            seconds = mean + WEIGHT * (min(seconds, MOST * mean) - mean)
        known.means[threads] = seconds
        self._compare(known, threads)

    def _compare(self, known: Passes, threads: int) -> None:
        """See which number is the best one now that one of them is known better."""
        alone, together = known.means.get(1), known.means.get(self.most)
        if alone is None or together is None:
            return
        best = 1 if alone < together else self.most
        if threads != known.best or best != known.best:  # a try, or a change of mind
            known.again = known.count + AGAIN
            known.when = known.seconds + SHARE * abs(alone - together)
        known.best, known.other = best, 1 + self.most - best
