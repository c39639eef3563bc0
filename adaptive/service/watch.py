"""Live acceptance after a swap, against what it was before: a draft that really got worse goes back.

In: the rounds of every answer, with the adapter that drafted them. Out: a reason to roll back, or None, and in a
sentence how far the adapter in use has been judged.

Only **drafted positions that the target judged** count: every accepted token, and the first rejected one of a round.
A round that drafted nothing says nothing, so that an adapter is never rolled back for not being used.

**The measure** is the acceptance under the draft before, at the lower end of what its answers allow; of an adapter
that the gate let through no more is asked than the gate had promised at least, since before the swap the controller
may have drafted sure tokens only. The adapter is bad where acceptance is below 1 - REAL_DROP of that.

**The test** is a likelihood ratio of "worse than that" (an even mixture of acceptances below the limit) against "just
at the limit", over the newest answers that drafted. Under a draft at the limit or better it exceeds 1 / ERROR with a
probability of at most ERROR, however often it is looked at (Ville's inequality). A few answers suffice where hardly
anything is accepted any more, and many are taken where the drop is small. The answer is the unit: tokens of one
answer hang together, by ALIKE, and count as beta-binomial draws.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Iterable, Sequence

from adaptive.records.stats import JudgedTokens, RoundCount, judged_tokens
from checkpoints.manifest import Manifest

# Answers that drafted, the newest ones: those of the draft before are the measure, those of the adapter are judged.
# Fewer leave a small drop unseen, more reach back into other work.
WINDOW = 60
# Answers in a row without a draft after which the adapter counts as not drafted with: a controller that decodes
# plainly tries it in every other answer or so.
IDLE_ANSWERS = 5
# Answers and judged tokens of the draft before without which there is no measure.
FEWEST_ANSWERS, FEWEST_JUDGED = 5, 30
# Share of the acceptance before that must be lost. Less is within what a change of subject does.
REAL_DROP = 0.15
# Standard errors that the measure is taken below its mean, for what chance had in it.
DOUBT = 1.0
# Chance of rolling back, in one window of answers, a draft that is just at the limit. There are many windows in the
# life of an adapter. Smaller needs more answers: a ten times smaller one about a quarter more.
ERROR = 1e-3
# How much alike the tokens of one answer are: the correlation of two of them. Larger is slower to see a drop in long
# answers, smaller takes one odd answer for many.
ALIKE = 0.05
# Acceptances below the limit that are held against it, as shares of the limit.
WORSE = tuple(step / 10 for step in range(10))


class Watch:
    """Judged tokens by adapter. One thread reports them; ``verdict`` and ``state`` may be asked by another."""

    def __init__(self) -> None:
        self._adapter: str | None = None
        self._before: tuple[JudgedTokens, ...] = ()
        self._now: deque[JudgedTokens] = deque(maxlen=WINDOW)
        self._undrafted = 0  # answers in a row, up to now, that drafted nothing
        self._lock = threading.Lock()

    def observe(self, adapter: str | None, rounds: Iterable[RoundCount]) -> None:
        """The rounds of one answer. Another adapter than before is a swap."""
        seen = judged_tokens(rounds)
        with self._lock:
            if adapter != self._adapter:
                if _is_measure(self._now):  # else what was before that stays the measure
                    self._before = tuple(self._now)
                self._adapter = adapter
                self._now.clear()
                self._undrafted = 0
            if seen.judged:
                self._now.append(seen)
            self._undrafted = 0 if seen.judged else self._undrafted + 1

    def rolled_back(self) -> None:
        """The adapter has gone back. Should it return, only what it does from then on counts."""
        with self._lock:
            self._now.clear()

    def forgive(self) -> None:
        """What was before is no measure any more: it was other text."""
        with self._lock:
            self._before = ()

    def verdict(self, manifest: Manifest | None) -> str | None:
        """Why the adapter in use must go, or None. ``manifest`` is its own."""
        with self._lock:
            now, adapter, before = tuple(self._now), self._adapter, self._before
        if manifest is None or manifest.id != adapter or not now or not before:
            return None
        limit = _limit(before, manifest)
        if evidence(now, limit) < math.log(1 / ERROR):
            return None
        return (
            f"live acceptance fell from {_acceptance(before):.2f} to {_acceptance(now):.2f} of the drafted tokens, "
            f"{_amount(now)}; {_promise(manifest)}"
        )

    def state(self, manifest: Manifest | None) -> str:
        """How far the adapter in use has been judged, in words. ``manifest`` is its own, None for the plain draft."""
        with self._lock:
            now, adapter, before, undrafted = tuple(self._now), self._adapter, self._before, self._undrafted
        if manifest is None:
            return "no adapter in use"
        if manifest.id != adapter:
            return "not judged: no answer yet"
        if not now or undrafted >= IDLE_ANSWERS:
            return "not judged: not drafting"
        seen = f"{_acceptance(now):.2f} of the drafted tokens accepted, {_amount(now)}"
        if not before:
            return f"{seen}; not judged: nothing is known of the draft before"
        return f"{seen}; goes back where that is surely below {_limit(before, manifest):.2f}"


def evidence(answers: Sequence[JudgedTokens], limit: float) -> float:
    """The natural logarithm of how much likelier ``answers`` are under an acceptance below ``limit`` than at it."""
    at_limit = _log_likelihood(answers, limit)
    ratios = [_log_likelihood(answers, max(share * limit, 1e-3)) - at_limit for share in WORSE]
    best = max(ratios)
    return best + math.log(math.fsum(math.exp(ratio - best) for ratio in ratios) / len(ratios))


def _log_likelihood(answers: Sequence[JudgedTokens], acceptance: float) -> float:
    """Of beta-binomial counts with this mean and the correlation ALIKE, apart from what no mean changes."""
    spread = (1 - ALIKE) / ALIKE
    a, b = acceptance * spread, (1 - acceptance) * spread
    of_nothing = _log_beta(a, b)
    return math.fsum(_log_beta(a + seen.accepted, b + seen.judged - seen.accepted) - of_nothing for seen in answers)


def _log_beta(a: float, b: float) -> float:
    return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)


def _limit(before: Sequence[JudgedTokens], manifest: Manifest) -> float:
    """The acceptance below which the adapter is bad, above 0 and below 1."""
    mean = _acceptance(before)
    independent = sum(seen.judged / (1 + ALIKE * (seen.judged - 1)) for seen in before)
    least = mean - DOUBT * math.sqrt(mean * (1 - mean) / independent)
    if manifest.recent is not None:
        least = min(least, manifest.recent.acceptance_after.low)
    return min(max((1 - REAL_DROP) * least, 1e-3), 1 - 1e-3)


def _acceptance(answers: Sequence[JudgedTokens]) -> float:
    return sum(seen.accepted for seen in answers) / sum(seen.judged for seen in answers)


def _amount(answers: Sequence[JudgedTokens]) -> str:
    return f"{sum(seen.judged for seen in answers)} of them in {len(answers)} answer{'s' * (len(answers) != 1)}"


def _is_measure(answers: Sequence[JudgedTokens]) -> bool:
    return len(answers) >= FEWEST_ANSWERS and sum(seen.judged for seen in answers) >= FEWEST_JUDGED


def _promise(manifest: Manifest) -> str:
    """What the gate had said."""
    if manifest.recent is None:
        return "the gate had not judged it"
    before, after = manifest.recent.acceptance_before, manifest.recent.acceptance_after
    return f"the gate had promised {after.mean:.2f} after {before.mean:.2f}"
