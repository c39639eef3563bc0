"""When some rounds are decoded the way that is not in use, drafted or plain, and when rounds of either have settled.

A single round of the other way does not take what such rounds take in a row: threads sleep, weights have left the
caches. So blocks of rounds are made of it, long enough to settle, within a share of the time.
"""

from __future__ import annotations

import math

# Seconds of rounds in a row until they take what they go on taking, and of a block; rounds that a block has at least.
# Less is decided by threads that have to be woken, more is lost more seldom.
SETTLE_S, BLOCK_S, FEWEST_ROUNDS = 0.005, 0.025, 2
# Rounds of a block at most, and after which any have settled: no round is shorter than 50 us, whatever is believed.
MOST_ROUNDS, MOST_SETTLING = 500, 100
# Plain rounds' time that a drafted one is taken to take at most where blocks are made of them: belief may be far too
# high.
MOST_TIMES = 2.0
# Share of the time that blocks may lose, and of the rounds that may be in them where they lose nothing.
BLOCK_SHARE, MOST_BLOCKS = 0.005, 0.1
# Rounds since the last block that are more than those between any two.
LONG_AGO = 1e9


class Blocks:
    """The rounds that passed, and those of blocks to come.

    ``left`` rounds of the block under way are still to come, 0 while there is none; ``until_next`` are between now and
    the next one.
    """

    def __init__(self) -> None:
        self.left = 0
        self._since, self._every = 0.0, math.inf  # rounds since the last block ended, and from that to the next one
        self._rounds = FEWEST_ROUNDS
        self._settling = {False: 0, True: 0}  # rounds after which plain or drafted ones have settled
        self._drafted, self._in_a_row, self._first = False, 0, True

    @property
    def until_next(self) -> float:
        """Rounds until the next block is due, at most 0 where one is."""
        return self._every - self._since

    def plan(self, speculating: bool, plain_s: float, drafted_s: float, rate: float, token_s: float) -> None:
        """From seconds of a plain and of a drafted round, the tokens per second of drafting and the seconds in which
        the draft catches up with a token: how long a block is, and how far one from the next."""
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
        else:  # a single try takes what a round in a row takes
            every = math.inf
        self._every = max(rounds / MOST_BLOCKS, every)
        self.left = min(self.left, rounds)  # rounds may have become longer since the block began

    def begin(self) -> None:
        """The next rounds are a block."""
        self.left, self._since = self._rounds, 0.0

    def cancel(self) -> None:
        """The way in use is another one: no block is under way, and the next one is as far off as any."""
        self.left, self._since = 0, 0.0

    def hurry(self) -> None:
        """A block is due at once, where any are needed."""
        self.left, self._since = 0, LONG_AGO

    def answer(self) -> None:
        """An answer begins: its first round follows a prompt's pass."""
        self._first = True

    def passed(self, drafted: bool) -> tuple[bool, bool]:
        """A round has passed. Whether it had settled, and whether it came right after another of its sort."""
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
