"""Compares live acceptance after a swap with that before it, to roll back an adapter that made the draft worse.

In: the rounds of every answer, with the adapter that drafted them. Out: a reason to roll back, or None, and the state
of this judgement in one sentence.

Only **drafted positions that the target judged** count: every accepted token, and the first rejected one of a round.
Rounds that drafted nothing do not count, so an adapter is never rolled back for not being used.

**The reference** is the acceptance under the draft before, less DOUBT standard errors. If the gate has judged the
adapter, the reference is at most the lower end of the acceptance that the gate found for it, because before the swap
the controller may have drafted only tokens that were almost certain. The limit is 1 - REAL_DROP of the reference; an
adapter with lower acceptance is bad.

**The test** is a likelihood ratio of "below the limit" (an even mixture of acceptances below it) against "at the
limit", over the newest answers that drafted. With a draft at the limit or better it exceeds 1 / ERROR with a
probability of at most ERROR, however often it is evaluated (Ville's inequality). A few answers suffice if hardly any
token is accepted; a small drop needs many. The unit is the answer: the tokens of one answer are correlated (ALIKE), so
their counts are modelled as beta-binomial.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from adaptive.records.figures import FiguresTable
from adaptive.records.log import Log
from adaptive.records.stats import JudgedTokens, RoundCount, judged_tokens
from checkpoints.manifest import Manifest

# Maximum number of answers that drafted, the newest ones: of the draft before for the reference, and of the adapter.
# Too low: a small drop is not detected. Too high: they include answers on other subjects.
WINDOW = 60
# Consecutive answers without drafting after which the adapter is reported as not drafting. Too low: also while the
# controller, though decoding plainly, still tries the draft in about every other answer.
IDLE_ANSWERS = 5
# Minimum answers and judged tokens of the draft before, for a reference.
FEWEST_ANSWERS, FEWEST_JUDGED = 5, 30
# Share of the reference acceptance that must be lost. Too low: a mere change of subject rolls an adapter back.
REAL_DROP = 0.15
# Standard errors subtracted from the mean acceptance of the draft before, to allow for chance.
DOUBT = 1.0
# Probability of rolling back, within one window of answers, a draft that is just at the limit. Too high: an adapter is
# wrongly rolled back in one of its many windows. Too low: more answers are needed, a quarter more for a tenth of it.
ERROR = 1e-3
# Correlation of the acceptance of two tokens of one answer. Too high: a drop in long answers is detected late. Too low:
# a single unusual answer counts like many.
ALIKE = 0.05
# The acceptances of the mixture "below the limit", as shares of the limit.
WORSE = tuple(step / 10 for step in range(10))


class Watch:
    """Judged tokens by adapter. One thread calls ``observe``; another may call the other methods."""

    def __init__(self) -> None:
        self._answers: dict[str | None, deque[JudgedTokens]] = {}  # the newest that drafted, by adapter
        self._references: dict[str | None, tuple[JudgedTokens, ...]] = {}  # for each, those of the draft before it
        self._latest: str | None = None  # the adapter of the newest answer that drafted
        self._undrafted: dict[str | None, int] = {}  # by adapter: newest consecutive answers that drafted nothing
        self._lock = threading.Lock()

    def observe(self, adapter: str | None, rounds: Iterable[RoundCount]) -> None:
        """Add the rounds of one answer; without any, as with a single token, it says nothing of the draft. The first of
        an adapter mean that it has come into use. Answers of the draft before it may still follow, where several are
        decoded at once."""
        counts = tuple(rounds)
        if counts:
            with self._lock:
                self._add(adapter, judged_tokens(counts))

    def restore(self, log: Log, adapter: str | None, settled: int) -> None:
        """After a restart: observe the answers of ``log`` by which ``adapter``, which is in use, is judged, without
        those up to id ``settled`` and those under a seed. Answers that were observed meanwhile are newer than these,
        which are then left out. Raises AdaptiveError if the log cannot be read now."""
        table = log.figures()
        ids = np.array(table.ids, np.int64)
        counts = ids > settled
        places = judges(table, counts, adapter)
        while seeded := log.seeded(ids[places].tolist()):
            counts &= ~np.isin(ids, list(seeded))
            places = judges(table, counts, adapter)
        with self._lock:
            for place in [] if self._answers else places:
                self._add(table.adapters[place], judged_tokens(table.own[place]))

    def _add(self, adapter: str | None, seen: JudgedTokens) -> None:
        """Add an answer with rounds, with the lock held."""
        if adapter not in self._answers:
            before = self._answers.get(self._latest, ())
            known = tuple(before) if _is_measure(before) else self._references.get(self._latest, ())
            self._references[adapter], self._answers[adapter] = known, deque(maxlen=WINDOW)
        if seen.judged:
            self._answers[adapter].append(seen)
            self._latest = adapter
        self._undrafted[adapter] = 0 if seen.judged else self._undrafted.get(adapter, 0) + 1

    def rolled_back(self, adapter: str) -> None:
        """After a rollback: forget the adapter's answers, so that only new ones count if it returns."""
        with self._lock:
            self._answers.pop(adapter, None)

    def forgive(self) -> None:
        """Another draft came into use after a review: forget what was measured, which was of other text in part."""
        with self._lock:
            self._answers.clear()
            self._references.clear()

    def verdict(self, manifest: Manifest | None) -> str | None:
        """The reason to roll back the adapter in use, or None. ``manifest`` is that of the adapter."""
        now, before, _ = self._of(manifest)
        if manifest is None or not now or not before:
            return None
        limit = _limit(before, manifest)
        if evidence(now, limit) < math.log(1 / ERROR):
            return None
        return (
            f"live acceptance fell from {_acceptance(before):.2f} to {_acceptance(now):.2f} of the drafted tokens, "
            f"{_amount(now)}; {_promise(manifest)}"
        )

    def state(self, manifest: Manifest | None) -> str:
        """The state of the judgement in words. ``manifest`` is that of the adapter in use, None without one."""
        now, before, undrafted = self._of(manifest)
        if manifest is None:
            return "no adapter in use"
        if not now and not undrafted:
            return "not judged: no answer yet"
        if not now or undrafted >= IDLE_ANSWERS:
            return "not judged: not drafting"
        seen = f"{_acceptance(now):.2f} of the drafted tokens accepted, {_amount(now)}"
        if not before:
            return f"{seen}; not judged: nothing is known of the draft before"
        return f"{seen}; goes back where that is surely below {_limit(before, manifest):.2f}"

    def _of(self, manifest: Manifest | None) -> tuple[tuple[JudgedTokens, ...], tuple[JudgedTokens, ...], int]:
        """An adapter's answers, those of its reference, and its newest consecutive answers that drafted nothing."""
        if manifest is None:
            return (), (), 0
        with self._lock:
            now, before = self._answers.get(manifest.id, ()), self._references.get(manifest.id, ())
            return tuple(now), before, self._undrafted.get(manifest.id, 0)


def judges(table: FiguresTable, counts: npt.NDArray[np.bool_], adapter: str | None) -> list[int]:
    """The places in ``table`` of the answers by which ``adapter`` is judged, oldest first, of those that ``counts``
    allows: its newest ones, and those of the draft before its first one; if these are too few for a reference, also
    those of the draft before that one, and so on."""
    adapters, drafted = np.array(table.adapters, object), counts & table.drafted()
    own = adapters == adapter
    with_rounds = counts & (np.diff(table.own.ends, prepend=0) > 0)
    found = set(np.flatnonzero(own & with_rounds)[-IDLE_ANSWERS:].tolist())
    found |= set(np.flatnonzero(own & drafted)[-WINDOW:].tolist())
    first = np.flatnonzero(own & with_rounds)[:1]
    before = drafted & (np.arange(len(table)) < (first[0] if len(first) else len(table)))
    while before.any():
        own = adapters == adapters[np.flatnonzero(before)[-1]]
        newest = np.flatnonzero(own & before)[-WINDOW:].tolist()
        found |= set(newest)
        if _is_measure([judged_tokens(table.own[place]) for place in newest]):
            break
        before[np.flatnonzero(own & before)[0] :] = False
    return sorted(found)


def evidence(answers: Sequence[JudgedTokens], limit: float) -> float:
    """The natural logarithm of the likelihood of ``answers`` with an acceptance below ``limit``, relative to at it."""
    at_limit = _log_likelihood(answers, limit)
    ratios = [_log_likelihood(answers, max(share * limit, 1e-3)) - at_limit for share in WORSE]
    best = max(ratios)
    return best + math.log(math.fsum(math.exp(ratio - best) for ratio in ratios) / len(ratios))


def _log_likelihood(answers: Sequence[JudgedTokens], acceptance: float) -> float:
    """The log-likelihood of beta-binomial counts with this mean and correlation ALIKE, without constant terms."""
    spread = (1 - ALIKE) / ALIKE
    a, b = acceptance * spread, (1 - acceptance) * spread
    of_nothing = _log_beta(a, b)
    return math.fsum(_log_beta(a + seen.accepted, b + seen.judged - seen.accepted) - of_nothing for seen in answers)


def _log_beta(a: float, b: float) -> float:
    return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)


def _limit(before: Sequence[JudgedTokens], manifest: Manifest) -> float:
    """The acceptance below which an adapter is bad, strictly between 0 and 1."""
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
    """The gate's result for the adapter, in words."""
    if manifest.recent is None:
        return "the gate had not judged it"
    before, after = manifest.recent.acceptance_before, manifest.recent.acceptance_after
    return f"the gate had promised {after.mean:.2f} after {before.mean:.2f}"
