"""The acceptance rule for trees: which path of a proposed tree is accepted, and which token the target adds.

Greedy, and under a seed: the target's own choice after a node is compared with the tokens that follow the node. An
equal token is accepted; if there is none, the target adds its choice.

Sampled. Tokens x_1 .. x_n follow a node; those that were drawn come from the draft's q there, in their order and
without replacement: x_i has the law q_i, where q_1 = q, and q_{i+1} is q_i without x_i, renormalised. A token that
was not drawn has a point mass for q_i. They are tried in this order against the remaining part of the target's p
(recursive rejection: Miao et al. 2024, "SpecInfer"; without replacement: Jeon et al. 2024): p_1 = p; x_i is accepted
with probability min(1, p_i(x_i) / q_i(x_i)), else p_{i+1} is max(p_i - q_i, 0), normalised; if none is accepted, a
token is drawn from p_{n+1}.

The resulting token has the law p. Proof by induction from the last token to the first. After all have been rejected, a
token is drawn from p_{n+1} itself. Let the result of the tokens after x_i have the law p_{i+1}. Then the result of x_i
and those after it is x with probability min(p_i(x), q_i(x)) + r * p_{i+1}(x), where r, the probability that x_i is
rejected, is 1 - sum min(p_i, q_i) = sum max(p_i - q_i, 0). So r * p_{i+1}(x) = max(p_i(x) - q_i(x), 0), and the sum is
p_i(x). All of this is conditional on x_1 .. x_{i-1}, given which q_i is the law of x_i. The same rule continues from
the accepted token.
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
from adaptive.sampling import LogitsProcessor, Transform, Uniform, pick

Row = npt.NDArray[np.float64]


class Choice(NamedTuple):
    """The target's choice after a node: a token, its log-probability, and the node that proposed it, if one did."""

    token: int
    chosen: float
    node: int | None


def verify_tree(
    logits: torch.Tensor,
    proposal: Proposal,
    transform: Transform,
    uniform: Uniform,
    position: int,
    processor: LogitsProcessor | None = None,
) -> tuple[Verdict, list[int]]:
    """Verify a tree of K tokens, given the target's logits (K + 1, vocab) after the last committed token, for the token
    at ``position`` of the text, and after each node. The ``processor`` changes the logits of each row that is reached,
    by the accepted tokens before it. Returns the verdict and the accepted nodes. Raises AdaptiveError if the logits of
    a row that is reached are not numbers."""
    params, path, tokens = transform.params, list[int](), list[int]()
    chosen: list[float] = []
    following: dict[int, list[int]] = {}
    for child, parent in enumerate(proposal.parents or ()):
        following.setdefault(parent, []).append(child)
    node: int | None = -1
    while node is not None:
        row, after = logits[node + 1 : node + 2], following.get(node, [])
        if processor is not None:
            row = processor.apply(row, torch.tensor(tokens, dtype=torch.long))
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
    """The first of the nodes ``after`` whose token is ``token``."""
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
        if uniform.next() * float(q[token]) < left[token]:  # false also where q is not a number
            return Choice(token, _log(float(ours[token])), node)
        rest = np.maximum(left - q, 0)
        if rest.sum() > NOTHING:  # else p equals q up to rounding, and stays
            left = rest / rest.sum()
    extra = pick(left.astype(np.float32), uniform.next())
    if extra is None:
        raise AdaptiveError(NO_NUMBERS)
    return Choice(extra, _log(float(ours[extra])), None)


def _without(proposal: Proposal, node: int, drawn: list[int], vocab: int) -> Row:
    """The distribution (vocab,) that a node's token was drawn from, given the tokens ``drawn`` after the same parent
    before it. Adds the token to ``drawn``; a token that was not drawn has a point mass."""
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
