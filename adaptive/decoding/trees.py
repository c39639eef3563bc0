"""Which path of a proposed tree stands, and the token that the target adds behind it.

Greedy, and under a seed: the target's own choice after a node is a token that follows the node, or the one it adds.

Sampled. Tokens x_1 .. x_n follow a node; those that were drawn come from the draft's q there, in their order and
without replacement: x_i has the law q_i, where q_1 = q, and q_{i+1} is q_i without x_i, renormalised. A token that
was not drawn has a point mass for q_i. They are tried in this order against what is left of the target's p (recursive
rejection: Miao et al. 2024, "SpecInfer"; without replacement: Jeon et al. 2024): p_1 = p; x_i stands with probability
min(1, p_i(x_i) / q_i(x_i)), else p_{i+1} is max(p_i - q_i, 0), normalised; if none stands, a token is drawn from
p_{n+1}. What comes of it has the law p. For p_{n+1} there is nothing to show. If what comes of the tokens behind x_i
has the law p_{i+1}, then x comes of x_i and those behind it with probability min(p_i(x), q_i(x)) + r * p_{i+1}(x),
where r, that x_i does not stand, is 1 - sum min(p_i, q_i) = sum max(p_i - q_i, 0); so r * p_{i+1}(x) = max(p_i(x) -
q_i(x), 0), and the sum is p_i(x). All of this is under x_1 .. x_{i-1}, given which q_i is the law of x_i. From the
token that stands the same goes on.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from adaptive.decoding.verify import NO_NUMBERS, NOTHING, Verdict
from adaptive.drafting.proposal import Proposal
from adaptive.errors import AdaptiveError
from adaptive.noise import race
from adaptive.sampling import Transform, Uniform, pick

Row = npt.NDArray[np.float64]


class Choice(NamedTuple):
    """What the target says after a node: a token, its log-probability, and the node where it was proposed."""

    token: int
    chosen: float
    node: int | None


def verify_tree(
    logits: torch.Tensor, proposal: Proposal, transform: Transform, uniform: Uniform, position: int
) -> tuple[Verdict, list[int]]:
    """What stands of a tree of K tokens, given the target's logits (K + 1, vocab) after the last committed token and
    after each node; the first is for the token at ``position`` of the text. The verdict, and the nodes that stand.
    Raises AdaptiveError where the logits of a row that is reached are not numbers."""
    params, path, tokens = transform.params, list[int](), list[int]()
    chosen: list[float] = []
    following: dict[int, list[int]] = {}
    for child, parent in enumerate(proposal.parents or ()):
        following.setdefault(parent, []).append(child)
    node: int | None = -1
    while node is not None:
        row, after = logits[node + 1 : node + 2], following.get(node, [])
        if params.greedy:
            found = _greedy(row, proposal, after)
        elif params.seed is not None:
            found = _seeded(transform(row), proposal, after, params.seed, position + len(path))
        else:
            found = _sampled(transform(row), proposal, after, uniform)
        tokens.append(found.token)
        chosen.append(found.chosen)
        node = found.node
        if node is not None:
            path.append(node)
    return Verdict(len(path), tokens, None if params.greedy else chosen), path


def _named(token: int, proposal: Proposal, after: list[int]) -> int | None:
    """The first of these nodes that is this token."""
    return next((node for node in after if proposal.tokens[node] == token), None)


def _greedy(logits: torch.Tensor, proposal: Proposal, after: list[int]) -> Choice:
    top = logits[0].max(-1)
    token, sound = int(top.indices), bool(top.values.isfinite())
    if not sound:
        raise AdaptiveError(NO_NUMBERS)
    return Choice(token, 0.0, _named(token, proposal, after))


def _seeded(p: torch.Tensor, proposal: Proposal, after: list[int], seed: int, position: int) -> Choice:
    token = int(race(p, seed, position))
    return Choice(token, _log(float(p[0, token])), _named(token, proposal, after))


def _sampled(p: torch.Tensor, proposal: Proposal, after: list[int], uniform: Uniform) -> Choice:
    ours: Row = p[0].double().cpu().numpy()
    left, drawn = ours, list[int]()
    for node in after:
        token: int = proposal.tokens[node]  # type: ignore[assignment]  # a tree's tokens are listed
        q = _without(proposal, node, drawn, len(ours))
        if uniform.next() * float(q[token]) < left[token]:  # nor where q is no number
            return Choice(token, _log(float(ours[token])), node)
        rest = np.maximum(left - q, 0)
        if rest.sum() > NOTHING:  # else p is q up to rounding, and the right one
            left = rest / rest.sum()
    extra = pick(left.astype(np.float32), uniform.next())
    if extra is None:
        raise AdaptiveError(NO_NUMBERS)
    return Choice(extra, _log(float(ours[extra])), None)


def _without(proposal: Proposal, node: int, drawn: list[int], vocab: int) -> Row:
    """What a node's token was drawn from (vocab,), given the tokens ``drawn`` there before, among which it is then."""
    token: int = proposal.tokens[node]  # type: ignore[assignment]
    q: Row
    q, given = np.zeros(vocab), None if proposal.probs is None else proposal.probs[node]
    if given is None:
        q[token] = 1
        return q
    row = given.double().cpu().numpy() if isinstance(given, torch.Tensor) else given
    q[: len(row)] = row
    q[drawn] = 0
    drawn.append(token)
    q /= max(q.sum(), NOTHING)
    return q


def _log(probability: float) -> float:
    if not probability > 0 or not math.isfinite(probability):
        raise AdaptiveError(NO_NUMBERS)
    return math.log(probability)
