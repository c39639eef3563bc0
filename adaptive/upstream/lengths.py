"""The draft length for another server: tokens a round by replay, over what a round takes there.

A round of k drafted tokens takes ``round_s + k * token_s``: the pass of the target, and for each token a step of the
draft and its row in that pass. Both are told by answers that drafted different numbers of tokens a round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from adaptive.upstream.measure import Answered

# Longest draft that is considered.
LONGEST = 16
# What a drafted token takes, as a share of a round, where nothing tells: a draft of a tenth of the target.
ASSUMED_SHARE = 0.1
# How much the tokens drafted a round must differ between answers (the coefficient of variation) to tell the two costs
# apart. Less, and noise is divided by next to nothing.
LEAST_SPREAD = 0.05


@dataclass(frozen=True)
class RoundCosts:
    """Seconds of a round without a draft, and of each drafted token; ``assumed`` where the share was not measured."""

    round_s: float
    token_s: float
    assumed: bool


@dataclass(frozen=True)
class Advice:
    """The draft length to use, 0 for none; the tokens per second that are expected of it and of decoding plainly, and
    the share of drafted tokens that replay expects to be accepted at it."""

    length: int
    tokens_per_second: float
    plain_per_second: float
    acceptance: float


def round_costs(answers: Sequence[Answered]) -> RoundCosts | None:
    """What rounds take in these answers; None where nothing tells how many they took."""
    known = [one for one in answers if one.drafted is not None and one.accepted is not None]
    rows = [(one.tokens - (one.accepted or 0), one.drafted or 0, one.seconds) for one in known]
    rows = [row for row in rows if row[0] > 0]
    if not rows:
        return None
    rounds, drafted, seconds = np.array(rows, np.float64).T
    each = drafted / rounds
    if each.max() > 0 and each.std() > LEAST_SPREAD * each.mean():
        # Each answer counts by its rounds, so that the noise of one round counts the same everywhere.
        weights = 1 / np.sqrt(rounds)
        table = np.stack([rounds, drafted], axis=1) * weights[:, None]
        round_s, token_s = np.linalg.lstsq(table, seconds * weights, rcond=None)[0]
        if round_s > 0 and token_s >= 0:
            return RoundCosts(float(round_s), float(token_s), False)
    whole = seconds.sum() / rounds.sum()
    round_s = whole / (1 + ASSUMED_SHARE * drafted.sum() / rounds.sum())
    return RoundCosts(float(round_s), float(round_s * ASSUMED_SHARE), True)


def advise(tokens_a_round: Sequence[float], costs: RoundCosts) -> Advice:
    """The best draft length: ``tokens_a_round`` are those at lengths 0, 1, ... by replay."""
    rates = [tokens / (costs.round_s + k * costs.token_s) for k, tokens in enumerate(tokens_a_round)]
    best = max(range(len(rates)), key=rates.__getitem__)
    acceptance = (tokens_a_round[best] - 1) / best if best else 0.0
    return Advice(best, rates[best], rates[0], acceptance)
