"""What a token of a proposal costs, and how long one is to be, from the seconds that drafts and verifications take."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

# Tokens behind one that are looked at when it is judged. More hardly changes a price, and takes longer.
AHEAD = 3


def prices(verify: Sequence[float], step: float, hope: Sequence[float]) -> tuple[list[float], list[float]]:
    """Seconds that a sure token takes: at every position from 1 where it is known, from 2 where it is still to be
    drafted. The least over how many are drafted behind it, by the tokens to be expected of all.

    ``verify[k]`` are the seconds of verifying k tokens, ``step`` those of drafting one; ``hope`` is acceptance at every
    position, given that all before it were accepted. The second token of a verification is often much dearer than those
    behind it. By itself it would not be worth its time; with what follows it may be.
    """
    longest = len(verify) - 1
    known, further = [], []
    for first in range(1, longest + 1):
        cheapest, next_cheapest, tokens, sure = math.inf, math.inf, 0.0, 1.0
        for last in range(first, min(longest, first + AHEAD) + 1):
            tokens += sure
            sure *= hope[last] if last < len(hope) else 0.0
            seconds = verify[last] - verify[first - 1] + (last - first) * step
            cheapest = min(cheapest, seconds / tokens)
            next_cheapest = min(next_cheapest, (seconds + step) / tokens)
        known.append(cheapest)
        further.append(next_cheapest)
    return known, further[1:]


@dataclass(frozen=True, slots=True)
class Terms:
    """What rounds are judged by for which earlier text has something to propose, in tokens and seconds.

    ``rate`` is that of the text behind them, in tokens per second. What a round brings more than its time does
    elsewhere: ``plain`` decoding, ``otherwise`` the best that is done where nothing is found, ``model`` the model's in
    such a round. ``token_s`` is what each committed token takes the draft later. A draft behind tokens that were found
    commits ``hope`` tokens where it is reached, in ``draft_s`` and, for each token before it, ``fed_s`` or (one by one)
    ``step_s``; it cannot pay where the first of these is no likelier than ``sure``. ``tries`` is what rounds of the
    model's in such a round's place may lose at once, in plain rounds.
    """

    rate: float
    plain: float
    otherwise: float
    model: float
    token_s: float
    hope: float
    draft_s: float
    fed_s: float
    step_s: float
    sure: float
    tries: float


def best_length(
    reach: Sequence[float], seconds: Sequence[float], rate: float, token_s: float = 0.0, least: float = 0.0
) -> tuple[int, float]:
    """How many tokens of a proposal to verify, 0 for none, and how many tokens more that brings than its time otherwise
    would. ``reach`` is of each the probability that all up to it are accepted, ``seconds[k]`` what a round takes that
    verifies k, and ``token_s`` what each of its tokens takes later; ``rate`` tokens per second otherwise. What brings
    no more than ``least`` is left alone."""
    best, most, tokens = 0, least, 1.0
    for k, sure in enumerate(reach[: len(seconds) - 1], 1):
        tokens += sure
        gain = tokens - rate * (seconds[k] + token_s * tokens)
        if gain > most:
            best, most = k, gain
    return best, most


def best_front(
    reach: Sequence[float], seconds: Sequence[float], rate: float, drafted: int, terms: Terms, fed_s: float
) -> tuple[int, float]:
    """As ``best_length`` where a draft of ``drafted`` tokens goes on behind the proposal, as the ``terms`` say of it;
    each token before it takes ``fed_s``."""
    best, most, tokens = 0, -math.inf, 1.0
    for k, sure in enumerate(reach, 1):
        if sure <= terms.sure:
            break
        tokens += sure
        gain = tokens + sure * terms.hope - rate * (seconds[k + drafted] + terms.draft_s + k * fed_s)
        if gain > most:
            best, most = k, gain
    return best, most


def best_tail(
    reach: Sequence[float], seconds: Sequence[float], rate: float, token_s: float, sure: float, before: int
) -> tuple[int, float]:
    """As ``best_length`` behind ``before`` tokens that are verified anyway, and are all accepted with probability
    ``sure``: only what comes on top counts."""
    best, most, tokens = 0, 0.0, 0.0
    for k, there in enumerate(reach[: len(seconds) - 1 - before], 1):
        tokens += sure * there
        gain = tokens - rate * (seconds[before + k] - seconds[before] + token_s * tokens)
        if gain > most:
            best, most = k, gain
    return best, most


def pays(reach: Sequence[float], seconds: Sequence[float]) -> bool:
    """Whether verifying some of a proposal says more in its time than plain decoding, whose rounds take
    ``seconds[0]``; else as ``best_length``."""
    tokens, plain_s = 1.0, seconds[0]
    for sure, whole in zip(reach, seconds[1:], strict=False):
        tokens += sure
        if tokens * plain_s > whole:
            return True
    return False
