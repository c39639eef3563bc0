"""Chooses the draft length for another server: most tokens a round by replay per second of a round on that server.

A round of k drafted tokens takes ``round_s + k * token_s``: the pass of the target, and for each token a step of the
draft and its row in that pass. Both follow from answers with different numbers of drafted tokens a round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from adaptive.upstream.measure import Measured

# Longest draft length considered.
LONGEST = 16
# Assumed time of a drafted token, as a share of a round without a draft, if it cannot be measured.
ASSUMED_SHARE = 0.1
# Least coefficient of variation, over answers, of the drafted tokens a round, to separate the two costs. Too low: the
# fit amplifies noise. Too high: the assumed share is used although the costs could be measured.
LEAST_SPREAD = 0.05


@dataclass(frozen=True)
class RoundCosts:
    """Seconds of a round without a draft, and of each drafted token. ``assumed``: their ratio is ASSUMED_SHARE."""

    round_s: float
    token_s: float
    assumed: bool


@dataclass(frozen=True)
class Advice:
    """The best draft length, 0 for no drafting; the expected tokens per second with it and with plain decoding; and the
    acceptance rate that replay expects with it."""

    length: int
    tokens_per_second: float
    plain_per_second: float
    acceptance: float


def round_costs(measured: Sequence[Measured]) -> RoundCosts | None:
    """The costs of rounds, from these measurements; None if the number of rounds is unknown."""
    rows = [row for one in measured for row in _rows(one) if row[0] > 0]
    if not rows:
        return None
    rounds, drafted, seconds = np.array(rows, np.float64).T
    each = drafted / rounds
    if each.max() > 0 and each.std() > LEAST_SPREAD * each.mean():
        # Least squares weighted by each answer's rounds, because the noise of a round is the same in all answers.
        weights = 1 / np.sqrt(rounds)
        table = np.stack([rounds, drafted], axis=1) * weights[:, None]
        round_s, token_s = np.linalg.lstsq(table, seconds * weights, rcond=None)[0]
        if round_s > 0 and token_s >= 0:
            return RoundCosts(float(round_s), float(token_s), False)
    whole = seconds.sum() / rounds.sum()
    round_s = whole / (1 + ASSUMED_SHARE * drafted.sum() / rounds.sum())
    return RoundCosts(float(round_s), float(round_s * ASSUMED_SHARE), True)


def _rows(measured: Measured) -> list[tuple[int, int, float]]:
    """Rounds, drafted tokens and seconds of each answer; of all together if the server counts only these."""
    answers = measured.answers
    rows = [(one.tokens, one.drafted, one.accepted, one.seconds) for one in answers]
    if any(one.drafted is None or one.accepted is None for one in answers):
        tokens, seconds = sum(one.tokens for one in answers), sum(one.seconds for one in answers)
        rows = [(tokens, measured.drafted, measured.accepted, seconds)]
    return [
        (tokens - accepted, drafted, seconds)
        for tokens, drafted, accepted, seconds in rows
        if drafted is not None and accepted is not None
    ]


def advise(tokens_a_round: Sequence[float], costs: RoundCosts) -> Advice:
    """The best draft length. ``tokens_a_round`` are the tokens a round at draft lengths 0, 1, ... by replay."""
    rates = [tokens / (costs.round_s + k * costs.token_s) for k, tokens in enumerate(tokens_a_round)]
    best = max(range(len(rates)), key=rates.__getitem__)
    acceptance = (tokens_a_round[best] - 1) / best if best else 0.0
    return Advice(best, rates[best], rates[0], acceptance)
