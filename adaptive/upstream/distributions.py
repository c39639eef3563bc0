"""Converts the alternatives that a server reports to supervision: the target's distribution at temperature 1.

Most servers report the model's own distribution p; SGLang reports r after the temperature T: r(x) is proportional to
p(x) ** (1 / T). So p(x) is proportional to r(x) ** T, which is exact for the listed tokens. The mass of all other
tokens depends on their unknown distribution. It lies between the mass if they are all equal and the mass if each is as
likely as the last listed token; the geometric mean of the two is used, as in ``trainers/losses.py``. At T = 1 both are
the remaining mass.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from adaptive.types import SamplingParams, Supervision
from adaptive.upstream.kinds import Kind
from adaptive.upstream.reports import NONE_BELOW, Report
from adaptive.upstream.vocabulary import Vocabulary

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

# Remaining mass up to this is rounding error of the server's numbers, not the mass of unlisted tokens.
NOISE = 1e-6
# The log-probability of a token that was cut. Minus infinity would make a row's sums NaN.
GONE = -1e4


def supervision(
    reports: Sequence[Report], vocabulary: Vocabulary, sampling: SamplingParams, kind: Kind
) -> Supervision | None:
    """The supervision of the n reported tokens; None if one has no alternatives.

    Every position keeps as many alternatives as the one with the fewest.
    """
    rows = []
    for report in reports:
        named = ((vocabulary.id_of(one), one.logprob) for one in report.alternatives)
        known = {number: logprob for number, logprob in named if number is not None}
        rows.append(sorted(known.items(), key=lambda item: -item[1]))
    kept = min((len(row) for row in rows), default=0)
    if kept == 0:
        return None
    ids = np.array([[number for number, _ in row[:kept]] for row in rows], np.int32)
    reported = np.array([[logprob for _, logprob in row[:kept]] for row in rows], np.float64)
    unlisted = vocabulary.size - kept
    rest = left(reported)
    own = np.array([report.token.logprob for report in reports], np.float64)
    least = np.minimum(reported[:, -1], np.where(np.isneginf(rest), 0.0, rest))
    own = np.where(own <= NONE_BELOW, least, own)  # an unlisted token is at most as likely
    tempered = kind.tempered and not sampling.greedy and sampling.temperature != 1.0
    raw, raw_rest, raw_own = reported, rest, own
    if tempered:
        raw, raw_rest, factor = reheated(reported, rest, unlisted, sampling.temperature)
        raw_own = own * sampling.temperature - factor
    return Supervision(
        ids=ids,
        logprobs=raw.astype(np.float16),
        rest=raw_rest.astype(np.float16),
        chosen=_chosen(raw, raw_rest, raw_own, unlisted, sampling, kind.heat_last).astype(np.float16),
    )


def left(logprobs: Floats) -> Floats:
    """The log of the mass (n,) that remains beside ``logprobs`` (n, k); -inf if it is only rounding error."""
    mass = 1.0 - np.exp(logprobs).sum(axis=1)
    return np.where(mass > NOISE, np.log(np.maximum(mass, NOISE)), -np.inf)


def reheated(logprobs: Floats, rest: Floats, unlisted: int, power: float) -> tuple[Floats, Floats, Floats]:
    """The normalised distribution proportional to p(x) ** power, from the listed tokens (n, k) and the remaining mass
    ``rest`` (n,), both as logs: the new logs of both, and the log of the normalising sum (n,). ``unlisted``: number of
    unlisted tokens."""
    listed = logprobs * power
    if unlisted > 0:
        with np.errstate(invalid="ignore"):
            steep = rest + (power - 1.0) * logprobs[:, -1]
            flat = rest * power + (1.0 - power) * np.log(unlisted)
            bucket = np.where(np.isneginf(rest), -np.inf, (steep + flat) / 2)
    else:
        bucket = np.full(len(listed), -np.inf)
    factor = np.logaddexp(_sum(listed), bucket)
    return listed - factor[:, None], bucket - factor, factor


def _sum(logs: Floats) -> Floats:
    """The log of the sum of each row."""
    most = logs.max(axis=1)
    return np.asarray(most + np.log(np.exp(logs - most[:, None]).sum(axis=1)))


def _chosen(raw: Floats, rest: Floats, own: Floats, unlisted: int, sampling: SamplingParams, heat_last: bool) -> Floats:
    """Log-probability (n,) of each output token under the distribution that it was drawn from: ``raw`` (n, k) after the
    temperature and the cuts, in the server's order. Penalties and biases are ignored."""
    if sampling.greedy:
        return np.zeros(len(raw))
    heat = 1.0 / sampling.temperature
    if heat_last:
        kept, inside = _cut(raw, rest, sampling)
        _, _, factor = reheated(np.where(kept, raw, GONE), inside, unlisted, heat)
        return np.asarray(np.minimum(own * heat - factor, 0.0))
    hot, hot_rest, factor = reheated(raw, rest, unlisted, heat)
    kept, inside = _cut(hot, hot_rest, sampling)
    mass = np.where(kept, np.exp(hot), 0.0).sum(axis=1) + np.exp(inside)
    return np.asarray(np.minimum(own * heat - factor - np.log(mass), 0.0))


def _cut(logprobs: Floats, rest: Floats, sampling: SamplingParams) -> tuple[Flags, Floats]:
    """Which listed tokens (n, k) remain after top-k, top-p and min-p, and the log of the remaining mass (n,) of the
    unlisted tokens. Their single probabilities are unknown, so that mass is an estimate."""
    probs = np.exp(logprobs)
    kept = np.ones(probs.shape, bool)
    inside = np.exp(rest)
    if sampling.top_k > 0:
        kept[:, sampling.top_k :] = False
        inside = inside * (sampling.top_k > probs.shape[1])
    listed = np.where(kept, probs, 0.0).sum(axis=1)
    if sampling.top_p < 1.0:
        nucleus = sampling.top_p * (listed + inside)
        kept &= np.cumsum(probs, axis=1) - probs < nucleus[:, None]
        inside = np.minimum(inside, np.maximum(nucleus - listed, 0.0))
    if sampling.min_p > 0.0:
        kept &= probs >= sampling.min_p * probs[:, :1]
        inside = inside * (probs[:, -1] >= sampling.min_p * probs[:, 0])
    with np.errstate(divide="ignore"):
        return kept, np.log(inside)
