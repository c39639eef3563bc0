"""How many threads llama.cpp's short passes use: one, or all that were given, whichever takes less time now.

llama.cpp's threads wait for each other by spinning, some two hundred times a pass. Where another program holds
a core, each wait can last as long as that program's turn, and a pass of a millisecond takes a third of a
second. One thread alone is then a hundred times as fast; on an idle machine it is slower. So both are timed
while decoding, and the one that was not faster is tried again now and then.
"""

from __future__ import annotations

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


class ThreadChoice:
    """The number of threads for the next pass, from what earlier ones took. ``most`` is all of them."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._means: dict[tuple[int, int], float] = {}
        self._passes: dict[int, int] = {}
        self._again: dict[int, tuple[int, float]] = {}  # passes and seconds after which to try the other number
        self._seconds: dict[int, float] = {}

    def best(self, tokens: int) -> int:
        """The faster number for passes of so many tokens, as far as is known."""
        alone, together = self._means.get((tokens, 1)), self._means.get((tokens, self.most))
        return 1 if alone is not None and together is not None and alone < together else self.most

    def choose(self, tokens: int) -> int:
        """Threads for a pass of ``tokens`` tokens."""
        if self.most == 1:
            return 1
        if tokens > FEW:
            return self.best(1)
        passes = self._passes.get(tokens, 0)
        if passes < 2 * TRIES:
            return 1 if passes % 2 else self.most
        best = self.best(tokens)
        after, when = self._again.get(tokens, (2 * TRIES + AGAIN, 0.0))
        return 1 + self.most - best if passes >= after and self._seconds[tokens] >= when else best

    def observe(self, tokens: int, threads: int, seconds: float) -> None:
        """A pass of ``tokens`` tokens on so many ``threads`` took this long."""
        if self.most == 1 or tokens > FEW:
            return
        passes = self._passes[tokens] = self._passes.get(tokens, 0) + 1
        if passes <= 2:
            return
        self._seconds[tokens] = self._seconds.get(tokens, 0.0) + seconds
        before = self.best(tokens)
        mean = self._means.get((tokens, threads))
        if mean is not None and threads == before:
            seconds = mean + WEIGHT * (min(seconds, MOST * mean) - mean)
        self._means[tokens, threads] = seconds
        other = self._means.get((tokens, 1 + self.most - threads))
        if other is not None and (threads != before or self.best(tokens) != before):
            self._again[tokens] = passes + AGAIN, self._seconds[tokens] + SHARE * abs(seconds - other)
