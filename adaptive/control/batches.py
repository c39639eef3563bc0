"""Chooses how many rounds a policy learns from together, after which it decides anew.

Learning from one round is a few dozen small steps in Python. They take several times as long right after a pass, which
evicts them from the processor's caches; in a batch only the first round pays for that. Larger batches notice a change
later. So the batch doubles after each one without a surprise, and is short again after a surprise. A small model's
answer is often shorter than the longest batch: its rounds are then learned from when the next answer begins, between
tokens.
"""

from __future__ import annotations

# Rounds of the shortest and of the longest batch, and seconds of plain rounds beyond which a batch does not grow.
SHORTEST, LONGEST_BATCH, BATCH_S = 8, 128, 0.1


class BatchSize:
    """The size of the current batch, in ``rounds``."""

    def __init__(self) -> None:
        self.rounds = SHORTEST

    def grow(self, plain_s: float) -> None:
        """Double the size after a batch without a surprise; ``plain_s`` are the seconds of a plain round."""
        self.rounds = min(2 * self.rounds, max(SHORTEST, min(LONGEST_BATCH, int(BATCH_S / plain_s))))

    def restart(self) -> None:
        """Return to the shortest batch, after a surprise or to see the next rounds soon."""
        self.rounds = SHORTEST
