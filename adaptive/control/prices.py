"""Computes the cost of a proposal's token and the best length of a proposal, from the seconds of drafts and
verifications."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

# Tokens after a token that are considered in its price. More hardly change the price, and take longer to compute.
AHEAD = 3
# How far the rounds after a proposal that is accepted completely are expected to be like it (0: like all others), since
# earlier text goes on where it was found. Too low: where text repeats, a long proposal is preferred to several short
# ones that bring more together. At 1, the worth of a sure proposal would be infinite.
RUN = 0.95


def prices(verify: Sequence[float], step: float, hope: Sequence[float]) -> tuple[list[float], list[float]]:
    """Seconds of a sure token: at every position from 1 if the token is known, and from 2 if it still has to be
    drafted. Each is the least ratio of seconds to expected tokens, over the number of tokens drafted after it.

    ``verify[k]`` are the seconds of verifying k tokens, ``step`` those of drafting one. ``hope`` is the acceptance at
    every position, given that all before it were accepted. The second token of a verification often costs much more
    than the following ones: alone it would not be worth its time, together with them it may be.
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
    """The quantities by which a round is judged if earlier text has a proposal for it, in tokens and seconds.

    ``rate`` is the tokens per second of the text after the round. The gain of a round is its tokens minus the tokens
    that its time yields at that rate: ``plain`` for plain decoding, ``otherwise`` for the best that is done if nothing
    is found, ``model`` for a round of the model in its place. ``token_s`` are the later seconds of the draft for each
    committed token. A draft after found tokens commits ``hope`` tokens if it is reached. It takes ``draft_s``, and for
    each token before it ``fed_s``, or ``step_s`` if these are read one by one. It cannot pay if the first found token
    has at most the probability ``sure``. ``tries`` is what tries of the model in history's place may lose at once, in
    plain rounds.
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
    """How many tokens of a proposal to verify, 0 for none, and the gain: expected tokens minus those that the time
    yields otherwise. ``reach`` is, for each token, the probability that all up to it are accepted. ``seconds[k]`` are
    the seconds of a round that verifies k tokens, and ``token_s`` those that each committed token takes later. ``rate``
    is the tokens per second otherwise. Only a gain above ``least`` counts.

    Of several such lengths, that with the largest gain until a rejection is chosen: if a round gains G and is accepted
    completely with probability p, and the rounds after it are alike, they gain G / (1 - p) together."""
    best, most, tokens, gained = 0, -math.inf, 1.0, least
    for k, sure in enumerate(reach[: len(seconds) - 1], 1):
        tokens += sure
        gain = tokens - rate * (seconds[k] + token_s * tokens)
        if gain > least:
            worth = gain / (1.0 - RUN * sure) if gain > 0.0 else gain
            if worth > most:
                best, most, gained = k, worth, gain
    return best, gained


def best_fixed(
    hope: Sequence[float], seconds: Callable[[int], float], plain_s: float, marginal: float
) -> tuple[int, float]:
    """The fixed draft length, at least 1, of the most tokens per second, and these by ``seconds`` alone. ``hope`` is as
    in ``prices``, ``seconds`` what a round of a length takes, and ``marginal`` the real cost of a second beyond a plain
    round's ``plain_s``."""
    best, rate, predicted, reach, tokens = 1, 0.0, 0.0, 1.0, 1.0
    for length, accepted in enumerate(hope, 1):
        reach *= accepted
        tokens += reach
        whole = seconds(length)
        here = tokens / (plain_s + marginal * (whole - plain_s))
        if here > rate:
            best, rate, predicted = length, here, tokens / whole
        elif length > best + 2:
            break
    return best, predicted


def best_front(
    reach: Sequence[float], seconds: Sequence[float], rate: float, drafted: int, terms: Terms, fed_s: float
) -> tuple[int, float]:
    """As ``best_length`` if a draft of ``drafted`` tokens follows the proposal, as described in ``Terms``. Each token
    before the draft takes ``fed_s``."""
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
    """As ``best_length`` after ``before`` tokens that are verified anyway, all of which are accepted with probability
    ``sure``. Only the additional gain counts."""
    best, most, tokens = 0, 0.0, 0.0
    for k, there in enumerate(reach[: len(seconds) - 1 - before], 1):
        tokens += sure * there
        gain = tokens - rate * (seconds[before + k] - seconds[before] + token_s * tokens)
        if gain > most:
            best, most = k, gain
    return best, most


def pays(reach: Sequence[float], seconds: Sequence[float]) -> bool:
    """Whether verifying some of a proposal yields more tokens per second than plain decoding, whose rounds take
    ``seconds[0]``. The arguments are those of ``best_length``."""
    tokens, plain_s = 1.0, seconds[0]
    for sure, whole in zip(reach, seconds[1:], strict=False):
        tokens += sure
        if tokens * plain_s > whole:
            return True
    return False
