"""When looking for what may follow is worth its time: while it has paid lately, else for a small share of the time.

In: what looks took, what they were expected to save, and how long rounds took. Out: whether to look in the next one.
A look is some ten microseconds of small steps, and several times that behind a pass, which has driven them out of the
processor's caches: nothing beside a round of 40 ms, three hundredths of one of a millisecond. Text that repeats itself
does so for many rounds, so that one which finds it a few rounds late loses little.
"""

from __future__ import annotations

# Weight of one look in the means of what looks save and take. More forgets between two matches that looking pays, and
# then looks so seldom that it takes seconds to find out; less is later to stop where nothing repeats itself.
STEP = 0.025
# Share of the time that looks may take which save less than they take. More loses more where nothing repeats itself,
# less is later to find what does.
SHARE = 0.001
# Seconds that a look is believed to take at first, and to save: every round looks until some were in vain. How many
# times what is believed one may have taken: a thread that stood still says nothing.
USUAL_S, HOPED_S, MOST = 30e-6, 300e-6, 4.0


class Looks:
    """What looks of one sort have taken and saved lately, in seconds."""

    def __init__(self) -> None:
        self.took, self.saved = USUAL_S, HOPED_S

    def observe(self, took: float, saved: float) -> None:
        """One more."""
        self.took += STEP * (min(took, MOST * self.took) - self.took)
        self.saved += STEP * (saved - self.saved)


class Looking:
    """When one text is looked up: before its rounds, or behind their drafts."""

    def __init__(self, looks: Looks | None = None) -> None:
        """``looks``: of all texts of a kind, where there are several at once."""
        self.looks = looks or Looks()
        self.last = 0.0  # when the last look was, by the seconds of the rounds until then
        self.soon = True  # where something worth its look was just found the next tokens are likely found too
        self._saves = 0.0

    def due(self, now: float) -> bool:
        """Whether to look now, after rounds of so many seconds."""
        self._saves = 0.0
        return self.soon or self.wait(now) <= 0.0

    def wait(self, now: float) -> float:
        """Seconds of rounds until the next look is due, at most 0 where it is."""
        looks = self.looks
        return 0.0 if looks.saved >= looks.took else looks.took / SHARE - (now - self.last)

    def found(self, saves: float) -> None:
        """The look under way has found what is expected to save so many seconds."""
        self._saves = saves

    def looked(self, seconds: float, now: float) -> None:
        """It is over, and took so long."""
        self.looks.observe(seconds, self._saves)
        self.soon, self.last = self._saves >= self.looks.took, now
