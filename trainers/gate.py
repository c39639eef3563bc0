"""The gate: an adapter is promoted for its held-out acceptance, never for its loss.

In: replays of the same held-out generations, recent and older, by the draft in use and by the
candidate. Out: the figures (``HeldOut``) and a ``Verdict`` with its reason in words.

**Evidence.** The unit is a prompt, with all its generations: the steps of an agent's task have the user's
message in common (``dataset.prompt_key``), so their gains are correlated, as are those of the positions of
one generation. Neither are ever resampled individually. The gain is the difference of acceptance, paired by
prompt. Its spread comes from a bootstrap over prompts (the same draws for before and after), and the bound
from Student's t with one degree of freedom less than there are prompts, because bootstrap percentiles over
a dozen prompts are too narrow. ``HeldOut.generations`` counts the generations of one prompt as one.

**Many runs.** An assistant that trains every day is judged again and again, and at a fixed 2.5%
it would sooner or later promote noise. So the r-th candidate since the last promotion has a chance
of a false promotion of only ``alpha(r)`` = FALSE_PROMOTION r^-1.5 / zeta(1.5). The sum over all r is
FALSE_PROMOTION, so a streak of useless candidates, however long, ends in a promotion with at
most that probability. A promotion starts a new streak. The cost: the bound is 2.1 standard errors
for the first candidate, 3.2 for the tenth, 3.8 for the fortieth; detecting the same gain after ten
rejections takes 2.4 times the held-out data of the first try. A gain that matters is far above that.

**Older records** protect from forgetting: a mean loss on them above OLDER_LOSS, or above OLDER_SHARE of the gain on
recent ones if that is more, rejects the candidate; a loss of OLDER_DOUBT more than that must be ruled out at 95%.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from checkpoints.manifest import HeldOut, Interval
from trainers.replay import Replay, expected_rounds

# Chance that a streak of candidates without any gain ever ends in a promotion. Too low: more
# held-out data is needed to detect a real gain. Too high: useless adapters are promoted now and then.
FALSE_PROMOTION = 0.05
SPENDING = 1.5
ZETA_OF_SPENDING = 2.6123753486854883  # sum over r >= 1 of r^-1.5

# Generations (those of one prompt count as one) and drafted positions below which no decision is made. With fewer,
# even the t bound has no reliable estimate of the spread.
MIN_GENERATIONS = 6
MIN_POSITIONS = 300

# Mean acceptance that may be lost on older records: OLDER_LOSS, or OLDER_SHARE of the gain on recent ones. Below the
# noise, good adapters are rejected; too high, old skills are lost in steps. Without the share, a loss of 0.011 on an
# old kind of text would forbid a new kind, however large its gain.
OLDER_LOSS = 0.01
OLDER_SHARE = 0.1
# How much more than that must be ruled out at 95%.
OLDER_DOUBT = 0.02

# Bootstrap draws. 2,000 give the standard error within about 2%.
DRAWS = 2000


@dataclass(frozen=True)
class Verdict:
    """Whether the candidate is promoted, and the reason in one sentence. ``older`` is None without older records."""

    promote: bool
    reason: str
    recent: HeldOut
    older: HeldOut | None


def alpha(streak: int) -> float:
    """The permitted chance of a false promotion of the ``streak``-th candidate (from 1) since the last promotion."""
    return float(FALSE_PROMOTION * streak**-SPENDING / ZETA_OF_SPENDING)


def held_out(before: Sequence[Replay], after: Sequence[Replay], draft_length: int) -> HeldOut:
    """Figures of one held-out set (at least one generation), with 95% intervals.

    Generations of equal ``fold`` count as one; those of an unknown one count each. A single one gives no spread, so its
    intervals cover all possible values. ``before`` and ``after`` replay the same generations in the same order.
    """
    positions = np.array([r.positions for r in before], dtype=np.float64)
    rates = [np.array([r.rate * r.positions for r in side]) for side in (before, after)]
    rounds = [expected_rounds(side, draft_length) for side in (before, after)]
    folds, of_each = np.unique([r.fold for r in before], return_inverse=True, equal_nan=False)
    weights = _draws(len(folds))[:, of_each]

    def interval(top: npt.NDArray[np.float64], bottom: npt.NDArray[np.float64], low: float, high: float) -> Interval:
        mean = float(top.sum() / bottom.sum())
        if len(folds) < 2:
            return Interval(mean, low, high)
        return _interval(mean, (weights @ top) / (weights @ bottom), len(folds))

    def plus_one(lengths: Interval) -> Interval:
        return Interval(lengths.mean + 1, lengths.low + 1, lengths.high + 1)

    return HeldOut(
        generations=len(folds),
        positions=int(positions.sum()),
        draft_length=draft_length,
        acceptance_before=interval(rates[0], positions, 0, 1),
        acceptance_after=interval(rates[1], positions, 0, 1),
        gain=interval(rates[1] - rates[0], positions, -1, 1),
        mean_acceptance_length_before=plus_one(interval(*rounds[0], 0, draft_length)),
        mean_acceptance_length_after=plus_one(interval(*rounds[1], 0, draft_length)),
    )


def judge(recent: HeldOut, older: HeldOut | None, streak: int) -> Verdict:
    """Decide on a candidate that is the ``streak``-th (from 1) since the last promotion."""
    set_size = f"answers to {recent.generations} held-out prompts ({recent.positions} positions)"
    if recent.generations < MIN_GENERATIONS or recent.positions < MIN_POSITIONS:
        return Verdict(
            False,
            f"too little to judge by: {set_size}, and at least {MIN_GENERATIONS} with {MIN_POSITIONS} are needed",
            recent,
            older,
        )
    error, gain = standard_error(recent.gain, recent.generations), recent.gain.mean
    bound = gain - student_quantile(1 - alpha(streak), recent.generations - 1) * error
    change = f"acceptance {recent.acceptance_before.mean:.3f} -> {recent.acceptance_after.mean:.3f} on {set_size}"
    if not gain > 0:  # also if it is not a number
        return Verdict(False, f"no gain: {change}", recent, older)
    if not bound > 0:
        streak_note = f" (candidate {streak} since the last promotion)" if streak > 1 else ""
        return Verdict(
            False,
            f"the gain is not certain: {change}, and a loss of {abs(bound):.3f} cannot be excluded{streak_note}",
            recent,
            older,
        )
    refusal = _forgetting(older, gain)
    if refusal is not None:
        return Verdict(False, f"{refusal}, though recent ones gain: {change}", recent, older)
    return Verdict(True, f"{change}, gain at least {bound:.3f}", recent, older)


def _forgetting(older: HeldOut | None, recent_gain: float) -> str | None:
    """The reason against promotion that the older set gives, or None; also None if the set is too small to judge by."""
    if older is None or older.generations < MIN_GENERATIONS:
        return None
    worst = older.gain.mean - student_quantile(0.95, older.generations - 1) * standard_error(
        older.gain, older.generations
    )
    allowed = max(OLDER_LOSS, OLDER_SHARE * recent_gain)
    if older.gain.mean < -allowed:
        return f"it forgets: older records lose {-older.gain.mean:.3f}"
    if worst < -allowed - OLDER_DOUBT:
        return f"a loss of {-worst:.3f} on older records of {older.generations} prompts cannot be excluded"
    return None


@lru_cache(maxsize=8)
def _draws(prompts: int) -> npt.NDArray[np.float64]:
    """How often each prompt is drawn in each bootstrap sample: (DRAWS, prompts)."""
    even = np.full(prompts, 1 / prompts)
    return np.random.default_rng(0).multinomial(prompts, even, size=DRAWS).astype(np.float64)


def _interval(mean: float, drawn: npt.NDArray[np.float64], generations: int) -> Interval:
    """Mean and 95% interval by Student's t around the bootstrap's standard error.

    The factor corrects the bootstrap's bias: resampling n values shows (n - 1) / n of their variance.
    """
    error = float(drawn.std()) * math.sqrt(generations / (generations - 1))
    half = student_quantile(0.975, generations - 1) * error
    return Interval(mean, mean - half, mean + half)


def standard_error(interval: Interval, generations: int) -> float:
    """The standard error from which a 95% interval over this many ``generations`` was made."""
    return (interval.high - interval.low) / (2 * student_quantile(0.975, generations - 1))


def student_quantile(probability: float, freedom: int) -> float:
    """Quantile of Student's t for probability > 0.5 (Abramowitz and Stegun 26.7.5, from the normal quantile).

    Within 3% of the exact value from 5 degrees of freedom up, which avoids a dependency on scipy.
    """
    z = float(NormalDist().inv_cdf(probability))
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return float(z + sum(term / freedom**power for power, term in enumerate(terms, start=1)))
