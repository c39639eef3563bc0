"""Decides when a history lookup is worth its time: always while lookups have recently saved more time than they cost,
otherwise within a small share of the decoding time.

In: the seconds that lookups took and were expected to save, and the seconds of rounds. Out: whether to look up history
before the next round. A lookup takes some ten microseconds, and several times that right after a pass, which evicts its
code and data from the processor's caches. That is negligible in a round of 40 ms but 3% of a round of 1 ms. Repeated
text spans many rounds, so finding it a few rounds late costs little.
"""

from __future__ import annotations

# Weight of one lookup in the running means of seconds saved and seconds taken. Too high: between two matches it forgets
# that lookups pay, and then looks so rarely that it needs seconds to notice again. Too low: it stops late when text
# does not repeat.
STEP = 0.025
# Share of the decoding time for lookups that save less than they take. Too high: more time is lost when nothing
# repeats. Too low: repetition is found late.
SHARE = 0.0005
# Initial estimates, in seconds, of what a lookup takes and saves: every round looks until some lookups were in vain.
# One lookup counts at most MOST times the current estimate, since its thread may have been off the core.
USUAL_S, HOPED_S, MOST = 30e-6, 300e-6, 4.0


class Looks:
    """Running means of the seconds that lookups of one kind take and save."""

    def __init__(self) -> None:
        self.took, self.saved = USUAL_S, HOPED_S

    def observe(self, took: float, saved: float) -> None:
        """Add one lookup."""
        self.took += STEP * (min(took, MOST * self.took) - self.took)
        self.saved += STEP * (saved - self.saved)


class Looking:
    """When to look up history for one text, either before its rounds or behind their drafts."""

    def __init__(self, looks: Looks | None = None) -> None:
        """``looks``: shared means, if several texts are decoded at once."""
        self.looks = looks or Looks()
        self.last = 0.0  # time of the last lookup, in seconds of rounds
        self.soon = True  # the last lookup was worth its time, so the next tokens are likely to be found too
        self._saves = 0.0

    def due(self, now: float) -> bool:
        """Whether to look now. ``now``: seconds of rounds so far."""
        self._saves = 0.0
        return self.soon or self.wait(now) <= 0.0

    def wait(self, now: float) -> float:
        """Seconds of rounds until the next lookup is due; 0 or less if it is due."""
        looks = self.looks
        return 0.0 if looks.saved >= looks.took else looks.took / SHARE - (now - self.last)

    def skipped(self, now: float) -> None:
        """Put off a lookup that was due by the time from one to the next. Without this it stays due: every round would
        prepare for it."""
        self.soon, self.last = False, now

    def found(self, saves: float) -> None:
        """Set the seconds that the current lookup's result is expected to save."""
        self._saves = saves

    def looked(self, seconds: float, now: float) -> None:
        """Finish the current lookup, which took ``seconds``."""
        self.looks.observe(seconds, self._saves)
        self.soon, self.last = self._saves >= self.looks.took, now
