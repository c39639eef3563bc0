"""Estimates the rate, in tokens per second, at which the text continues if earlier text supplies some proposals.

In: rounds in order: the tokens they committed, their seconds, and whether history found a proposal for them. Out: the
tokens per second of the rounds *after* a round. A further token committed now saves the time in which later rounds
would produce it, and those are not plain rounds: the round after one with a match usually has a match too, and a match
may begin after a round without one. So the rate is that of the rounds that followed, separately for rounds after a
match and rounds after none.

Of the rounds that followed, only those with a match count by what they committed. How many rounds had none is observed,
too, but what such a round brings is known better from the estimates of plain decoding and of the draft, which are of
more rounds: the tokens of fifty rounds differ by several percent from one fifty to the next, and a rate that is too
high by chance ends drafts that are worth their time.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence

from adaptive.control.costs import Timed

# Weight left of a round after one later round: for the general rate, and for the rate after rounds of one kind, where
# only rounds of that kind count (about 100 and 50 rounds). A longer memory reacts late to a change of subject, a
# shorter one takes chance for a change.
KEEP, KEEP_BEHIND = 0.99, 0.98
# Imaginary rounds without a match that the general rate starts from, and plain rounds at the general rate that the
# rates of the two kinds start from.
WEIGHT = 4.0

# Tokens and seconds of a round that nothing was found for, by each way to decode it.
Ways = Iterable[tuple[float, float]]


class Discounted:
    """Tokens and seconds of rounds. Older rounds weigh less."""

    def __init__(self, keep: float) -> None:
        """``keep`` is the weight left of a round after one later round."""
        self.keep = keep
        self.tokens = self.seconds = self.rounds = 0.0

    def observe(self, tokens: float, seconds: float) -> None:
        """Add one round."""
        self.tokens = self.keep * self.tokens + tokens
        self.seconds = self.keep * self.seconds + seconds
        self.rounds = self.keep * self.rounds + 1.0

    def observe_all(self, tokens: Iterable[float], seconds: Iterable[float]) -> None:
        """Add rounds, oldest first."""
        keep, all_tokens, all_seconds, rounds = self.keep, self.tokens, self.seconds, self.rounds
        for more, took in zip(tokens, seconds, strict=True):
            all_tokens = keep * all_tokens + more
            all_seconds = keep * all_seconds + took
            rounds = keep * rounds + 1.0
        self.tokens, self.seconds, self.rounds = all_tokens, all_seconds, rounds

    def passed(self, rounds: int) -> None:
        """Take in that this many rounds passed that do not count here."""
        left = self.keep**rounds
        self.tokens *= left
        self.seconds *= left
        self.rounds *= left

    def rescale(self, factor: float) -> None:
        """Multiply the seconds of all rounds by ``factor``, for costs in another unit."""
        self.seconds *= factor


class Behind:
    """The rounds that followed rounds of one kind: those with a match, and the number of those without."""

    def __init__(self) -> None:
        self.found, self.left = Discounted(KEEP_BEHIND), 0.0

    def observe(self, found: bool, tokens: Sequence[float], seconds: Sequence[float]) -> None:
        """Add rounds of one kind, oldest first."""
        rounds = len(tokens)
        remain = KEEP_BEHIND**rounds
        self.left *= remain
        if found:
            self.found.observe_all(tokens, seconds)
        else:
            self.found.passed(rounds)
            self.left += (1.0 - remain) / (1.0 - KEEP_BEHIND)


class Continuation:
    """The rates, and the part of the text in rounds for which nothing was found. All seconds are in the same unit, at
    whatever speed the machine runs now."""

    def __init__(self) -> None:
        self.found, self.left = Discounted(KEEP), Discounted(KEEP)  # rounds of the other kind count 0
        self.free = 0.0  # tokens of rounds with a match and without the draft, discounted as these
        self.behind = {False: Behind(), True: Behind()}

    def observe(
        self, found: bool, tokens: Sequence[int], seconds: Sequence[float], after: bool | None, free: bool
    ) -> None:
        """Add rounds of one text that followed each other, with the tokens that each committed. ``found``: a proposal
        from earlier text was worth verifying in each of them; ``after``: the same of the round before the first, None
        if there was none. ``free``: something was found, and the draft took no part."""
        these, others = (self.found, self.left) if found else (self.left, self.found)
        these.observe_all(tokens, seconds)
        others.passed(len(tokens))
        if free:
            for more in tokens:
                self.free = KEEP * self.free + more
        else:
            self.free *= KEEP ** len(tokens)
        if after is found:
            self.behind[found].observe(found, tokens, seconds)
            return
        if after is not None:
            self.behind[after].observe(found, tokens[:1], seconds[:1])
        self.behind[found].observe(found, tokens[1:], seconds[1:])

    def tell(
        self, rounds: Iterable[tuple[Timed, bool]], seconds_of: Callable[[Timed], float], after: bool | None
    ) -> bool | None:
        """Add rounds of one text, each with whether something was found for it, several at once because that is faster.
        ``seconds_of`` gives the seconds of a round, ``after`` is that of ``observe``. Returns it for the next round."""
        believed: dict[tuple[int, int, int], float] = {}  # most rounds are like others
        for (found, free), alike in itertools.groupby(rounds, _sort):
            tokens: list[int] = []
            seconds: list[float] = []
            for timed, _ in alike:
                kind = timed.outcome.drafted, timed.steps, timed.waiting
                took = believed.get(kind)
                if took is None:
                    took = believed[kind] = seconds_of(timed)
                tokens.append(1 + timed.outcome.accepted)
                seconds.append(took)
            self.observe(found, tokens, seconds, after, free)
            after = found
        return after

    def rescale(self, factor: float) -> None:
        """Multiply the seconds of all rounds by ``factor``."""
        for rounds in (self.found, self.left, *(behind.found for behind in self.behind.values())):
            rounds.rescale(factor)

    def rate(self, found: bool, plain_s: float, ways: Ways) -> float:
        """Tokens per second of the rounds after one for which something was ``found`` or not, if each round without a
        match is decoded in the best of these ``ways``. At least the rate of plain decoding, whose rounds take
        ``plain_s`` seconds, because it is always possible."""
        behind, imaginary_s, left = self.behind[found], WEIGHT * plain_s, self.left.rounds + WEIGHT
        best = 1 / plain_s
        for tokens, seconds in ways:
            usual = (self.found.tokens + left * tokens) / (self.found.seconds + left * seconds)
            said = behind.found.tokens + behind.left * tokens + imaginary_s * usual
            best = max(best, said / (behind.found.seconds + behind.left * seconds + imaginary_s))
        return best

    def general(self, plain_s: float) -> float:
        """Tokens per second of all rounds."""
        found, left = self.found, self.left
        return (found.tokens + left.tokens + WEIGHT) / (found.seconds + left.seconds + WEIGHT * plain_s)

    def share_left(self, plain_s: float) -> float:
        """The share of the time spent in rounds for which nothing is found."""
        left_s = self.left.seconds + WEIGHT * plain_s
        return left_s / (self.found.seconds + left_s)

    def left_a_token(self) -> float:
        """Rounds for which nothing is found, per token of all rounds."""
        return (self.left.rounds + WEIGHT) / self._tokens()

    def found_a_token(self) -> float:
        """Rounds for which something is found, per token of all rounds."""
        return self.found.rounds / self._tokens()

    def free_a_round_left(self) -> float:
        """Tokens of rounds with a match and without the draft, per round for which nothing is found."""
        return self.free / (self.left.rounds + WEIGHT)

    def _tokens(self) -> float:
        return self.found.tokens + self.left.tokens + WEIGHT


def _sort(ended: tuple[Timed, bool]) -> tuple[bool, bool]:
    """Whether something was found for an ended round, and whether the draft took no part in it then."""
    timed, found = ended
    return found, found and not timed.steps
