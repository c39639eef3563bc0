"""When looking for what may follow is worth its time: while it has paid lately, else for a small share of the time.

In: what looks took, what they were expected to save, and how long rounds took. Out: whether to look in the next one.
A look is some ten microseconds of small steps, and several times that behind a pass, which has driven them out of the
processor's caches: nothing beside a round of 40 ms, three hundredths of one of a millisecond. Text that repeats itself
does so for many rounds, so that one which finds it a few rounds late loses little.
"""

from __future__ import annotations

# Weight of one look in the means of what looks bring and take. More forgets between two matches that looking pays.
STEP = 0.05
# Share of the time that looks may take which bring less than they take. More loses more where nothing repeats itself,
# less is later to find what does.
SHARE = 0.002
# Seconds that a look is believed to take at first, and to save: every round looks until some were in vain. How many
# times what is believed one may have taken: a thread that stood still says nothing.
USUAL_S, HOPED_S, MOST = 30e-6, 300e-6, 4.0


class Looking:
    """Whether looks of one sort are due: those before a round, or those behind its draft."""

    def __init__(self) -> None:
        self.took = USUAL_S
        self.brought = HOPED_S  # seconds that a look saved
        self.since = 0.0  # seconds of the rounds since the last one
        self.soon = True  # where something was just found the next tokens are likely found too
        self._saved = 0.0

    def due(self) -> bool:
        """Whether to look now."""
        self._saved = 0.0
        return self.soon or self.brought >= self.took or self.since * SHARE >= self.took

    def found(self, saved: float) -> None:
        """The look under way has found what is expected to save so many seconds."""
        self._saved = saved

    def looked(self, seconds: float) -> None:
        """It is over, and took so long."""
        self.took += STEP * (min(seconds, MOST * self.took) - self.took)
        self.brought += STEP * (self._saved - self.brought)
        self.soon, self.since = self._saved > 0.0, 0.0
