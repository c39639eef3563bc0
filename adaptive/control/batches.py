"""How many rounds a policy learns from together, after which everything is decided anew.

A round's own learning is a few dozen small steps in Python, which cost several times as much when the models' passes
have driven them out of the processor's caches; one after the other they do not. More rounds are late to see a change.
So there are twice as many after each batch in which nothing was unexpected, and few again where something was. A small
model's answer is often shorter than the longest batch: it is then learned from when the next one begins, while nobody
waits for a token.
"""

from __future__ import annotations

# Rounds of the shortest and of the longest batch, and seconds of plain rounds that are no longer worth a longer one.
SHORTEST, LONGEST_BATCH, BATCH_S = 8, 128, 0.1


class Batch:
    """The batch under way has ``rounds``."""

    def __init__(self) -> None:
        self.rounds = SHORTEST

    def grow(self, plain_s: float) -> None:
        """Nothing was unexpected; a plain round takes so many seconds."""
        self.rounds = min(2 * self.rounds, max(SHORTEST, min(LONGEST_BATCH, int(BATCH_S / plain_s))))

    def restart(self) -> None:
        """Something was, or is to be seen at once."""
        self.rounds = SHORTEST
