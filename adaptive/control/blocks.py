"""Schedules rounds in the mode not in use (drafted or plain), and tells when rounds of a mode have settled.

A single round of the other mode does not take the time of such rounds in a row: threads sleep, weights have left the
caches. So blocks of rounds are decoded in it, long enough to settle, within a share of the time.
"""

from __future__ import annotations

import math

# Seconds of rounds in a row until their times are stable, seconds of a block, and rounds that a block has at least. Too
# low: the times are those of threads that have to be woken. Too high: each block costs more, so blocks are rarer.
SETTLE_S, BLOCK_S, FEWEST_ROUNDS = 0.005, 0.025, 2
# Most rounds of a block, and rounds after which any mode has settled: both as if no round were shorter than 50 us,
# whatever its estimate.
MOST_ROUNDS, MOST_SETTLING = 500, 100
# Upper bound on the time of a drafted round, in plain rounds, when blocks of drafted rounds are sized: its estimate may
# be far too high.
MOST_TIMES = 2.0
# Share of the time that blocks may lose, and largest share of rounds in blocks even if they lose nothing.
BLOCK_SHARE, MOST_BLOCKS = 0.005, 0.1
# Rounds since the last block that exceed any interval between blocks.
LONG_AGO = 1e9


class Blocks:
    """Counts rounds and schedules blocks.

    ``left`` rounds of the current block are still to come, 0 outside of a block. ``until_next`` rounds remain until the
    next block.
    """

    def __init__(self) -> None:
        self.left = 0
        self._since, self._every = 0.0, math.inf  # rounds since the last block ended, and between two blocks
        self._rounds = FEWEST_ROUNDS
        self._settling = {False: 0, True: 0}  # rounds in a row after which plain (False) or drafted ones have settled
        self._drafted, self._in_a_row, self._first = False, 0, True

    @property
    def until_next(self) -> float:
        """Rounds until the next block is due; 0 or less if one is due."""
        return self._every - self._since

    def plan(self, speculating: bool, plain_s: float, drafted_s: float, rate: float, token_s: float) -> None:
        """Set the length of a block and the interval between blocks, given the seconds of a plain and of a drafted
        round, the tokens per second of drafting, and the seconds that the draft needs to catch up with a token."""
        believed_s = min(drafted_s, MOST_TIMES * plain_s)
        self._settling = {
            False: int(min(MOST_SETTLING, SETTLE_S / plain_s)),
            True: int(min(MOST_SETTLING, SETTLE_S / believed_s)),
        }
        some = math.ceil(min(MOST_ROUNDS, BLOCK_S / (plain_s if speculating else believed_s)))
        self._rounds = rounds = max(FEWEST_ROUNDS, some)
        if speculating:
            every = rounds * (plain_s - 1 / rate + token_s) / (BLOCK_SHARE * drafted_s)
        elif self._settling[True]:
            every = rounds * drafted_s * (1 - rate * plain_s) / (BLOCK_SHARE * plain_s)
        else:  # a single try takes the same time as a round in a row
            every = math.inf
        self._every = max(rounds / MOST_BLOCKS, every)
        self.left = min(self.left, rounds)  # rounds may have become longer since the block began

    def begin(self) -> None:
        """Start a block with the next round."""
        self.left, self._since = self._rounds, 0.0

    def cancel(self) -> None:
        """Drop the current block, since the mode in use has changed, and wait a whole interval for the next one."""
        self.left, self._since = 0, 0.0

    def hurry(self) -> None:
        """Make a block due at once, if blocks are needed at all."""
        self.left, self._since = 0, LONG_AGO

    def answer(self) -> None:
        """Start an answer: its first round follows the pass over a prompt."""
        self._first = True

    def passed(self, drafted: bool) -> tuple[bool, bool]:
        """Count a round. Returns whether rounds of its mode had settled, and whether it came right after another one of
        its mode."""
        if drafted is not self._drafted:
            self._drafted, self._in_a_row = drafted, 0
        settled, again = self._in_a_row >= self._settling[drafted], self._in_a_row > 0 and not self._first
        self._in_a_row += 1
        self._first = False
        if self.left:
            self.left -= 1
        else:
            self._since += 1
        return settled, again
