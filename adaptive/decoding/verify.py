"""The acceptance rule: which drafted tokens the target accepts, and the token that it adds itself.

Greedy: a drafted token is accepted while it is the target's own argmax. Sampled (Leviathan et al. 2023; Chen et al.
2023): token x drawn from q is accepted with probability min(1, p(x) / q(x)); at the first rejection, the target's token
is drawn from max(p - q, 0), normalised. Either way the output has the target's own distribution, whatever q was. A
drafted token without q was not drawn at all: its q is a point mass.

Under a seed (``adaptive/noise.py``): a drafted token is accepted while it is the token that the target itself draws
there with the seed's noise. The text is again the target's own, and the same for every drafter.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from adaptive.drafting.proposal import Proposal, point_masses
from adaptive.drafting.queued import Queued
from adaptive.engines.protocol import FusedCalls, Judgement, Mask, VerificationCall
from adaptive.errors import AdaptiveError
from adaptive.noise import race
from adaptive.sampling import Transform, Uniform, draw_at, draw_on_device, pick
from adaptive.tokens import Distributions, Ids, as_array, as_list, as_tensor, common_prefix, moved
from adaptive.types import SamplingParams

# Share of p that is added to what is left of p - q. It is below the rounding of any draw, unless nothing is left.
NOTHING = 1e-30
NO_NUMBERS = "the target's logits are not numbers, so that no token can be chosen: is its checkpoint damaged?"


@dataclass(slots=True)  # made once a round; a frozen one takes three times as long to make
class Verdict:
    """The number of accepted drafted tokens, all tokens that the round commits (accepted + 1), and the log-probability
    of each of these under the distribution it was drawn from (None when greedy: it is 0)."""

    accepted: int
    tokens: list[int]
    chosen: torch.Tensor | list[float] | None


def verify_greedy(logits: torch.Tensor, drafted: Ids, queued: Queued | None = None) -> Verdict:
    """The greedy rule, given the target's logits (K + 1, vocab) and K drafted tokens, of which a ``queued`` proposal
    may count only the first ones. Raises AdaptiveError if the logits of a row that is reached are not numbers."""
    rows = as_array(logits)
    if rows is None or queued is not None:
        return verify_greedy_on_device(logits, moved(as_tensor(drafted), logits.device), queued)
    proposed = as_list(drafted)
    best = rows.argmax(-1)
    tops = rows[np.arange(len(best)), best].tolist()  # NaN if any number of the row is
    return _greedy_verdict(best.tolist(), proposed, map(math.isfinite, tops))


def verify_greedy_on_device(logits: torch.Tensor, drafted: torch.Tensor, queued: Queued | None = None) -> Verdict:
    """The same for logits and drafted tokens on a device; synchronises with it once."""
    top = logits.max(-1)
    count = len(drafted)
    known: list[int] = torch.cat([drafted, top.indices, top.values.isfinite()]).tolist()
    proposed = known[: count if queued is None else queued.drafted]
    return _greedy_verdict(known[count : 2 * count + 1], proposed, known[2 * count + 1 :])


def _greedy_verdict(best: list[int], drafted: list[int], sound: Iterable[object]) -> Verdict:
    """The verdict, given the target's likeliest tokens (K + 1) and whether their logits are finite."""
    # An accepted drafted token equals the target's choice, so the committed tokens are the target's choices.
    accepted = common_prefix(best, drafted)
    if not all(itertools.islice(sound, accepted + 1)):
        raise AdaptiveError(NO_NUMBERS)
    return Verdict(accepted, best[: accepted + 1], None)


def verify_logits(
    logits: torch.Tensor,
    transform: Transform,
    drafted: Ids,
    q: Distributions | None,
    uniform: Uniform,
    position: int,
    queued: Queued | None = None,
) -> Verdict:
    """The fastest way from the target's logits (K + 1, vocab), of which the first is for the token at ``position`` of
    the text, to a verdict under ``transform``, which is not greedy. The other arguments are as below."""
    kernels, params = transform.kernels, transform.params
    if kernels is None or queued is not None or as_array(logits) is None:
        probs = transform(logits)
        if params.seed is not None:
            return verify_seeded(probs, drafted, params.seed, position, queued)
        if q is None:
            q = point_masses(moved(as_tensor(drafted), probs.device), probs.shape[1])
        if queued is not None:
            return verify_on_device(probs, moved(as_tensor(drafted), probs.device), _like(probs, q), uniform, queued)
        return verify_sampled(probs, drafted, q, uniform)
    proposed = as_list(drafted)
    random = [] if params.seeded else uniform.ahead(len(proposed) + 2)
    return verdict(kernels.judge(logits, proposed, position, params, rows(q), random), proposed, uniform)


def verify_fused(
    target: FusedCalls,
    params: SamplingParams,
    fed: list[int],
    proposal: Proposal | None,
    uniform: Uniform,
    mask: Mask | None = None,
) -> tuple[Verdict, torch.Tensor]:
    """Feed the target ``fed`` and the proposal, and apply the acceptance rule in the same call, under the ``mask`` if
    there is one. Returns the verdict and the raw logits."""
    proposed: list[int] = [] if proposal is None else proposal.tokens  # type: ignore[assignment]
    q = None if proposal is None else rows(proposal.probs)
    random = [] if params.greedy or params.seeded else uniform.ahead(len(proposed) + 2)
    allowed = () if mask is None else [mask(proposed[:row]) for row in range(len(proposed) + 1)]
    judgement, logits = target.verify(VerificationCall(fed, proposed, params, q, random, allowed))
    return verdict(judgement, proposed, uniform), logits


def verdict(judgement: Judgement, proposed: list[int], uniform: Uniform) -> Verdict:
    """The verdict for a judgement of the kernels. Raises AdaptiveError if the logits were not numbers."""
    accepted, extra, used, chosen = judgement
    if extra < 0:
        raise AdaptiveError(NO_NUMBERS)
    uniform.skip(used)
    return Verdict(accepted, [*proposed[:accepted], extra], chosen)


def verify_seeded(p: torch.Tensor, drafted: Ids, seed: int, position: int, queued: Queued | None = None) -> Verdict:
    """The rule under a seed: a drafted token is accepted if it is the target's own choice, given the noise of its place
    in the text. Takes target probabilities p (K + 1, vocab), the first of them at ``position``, and K drafted tokens.
    Synchronises with a device once. Raises AdaptiveError if the p of a row that is reached are not numbers."""
    count = len(drafted)
    choice = race(p, seed, position)
    likely = p.gather(1, choice[:, None])[:, 0]
    ids = moved(as_tensor(drafted), p.device)
    known: list[int] = torch.cat([ids, choice, likely.isfinite() & (likely > 0)]).tolist()
    proposed = known[: count if queued is None else queued.drafted]
    ours, sound = known[count : 2 * count + 1], known[2 * count + 1 :]
    accepted = common_prefix(ours, proposed)
    if not all(sound[: accepted + 1]):
        raise AdaptiveError(NO_NUMBERS)
    return Verdict(accepted, ours[: accepted + 1], likely[: accepted + 1].log())


def rows(q: Distributions | None) -> torch.Tensor | None:
    """q in the form that the kernels read: float32, contiguous, on the CPU."""
    if q is None or hasattr(q, "address"):
        return q  # type: ignore[return-value]
    if isinstance(q, list):
        q = np.stack(q)
    return torch.as_tensor(q).float().cpu().contiguous()


def verify_sampled(p: torch.Tensor, drafted: Ids, q: Distributions, uniform: Uniform) -> Verdict:
    """The sampled rule, given target probabilities p (K + 1, vocab), K drafted tokens, and the K distributions q that
    they were drawn from, over no more tokens than p. Raises AdaptiveError if the p are not numbers.
    """
    ours = as_array(p)
    if ours is None:
        return verify_on_device(p, moved(as_tensor(drafted), p.device), _like(p, q), uniform)
    theirs = q.cpu().numpy() if isinstance(q, torch.Tensor) else q
    proposed = as_list(drafted)
    chosen: list[float] = []
    for token, p_n, q_n in zip(proposed, ours, theirs, strict=False):
        p_x = float(p_n[token])
        if not uniform.next() * float(q_n[token]) < p_x:  # rejects also where q is not a number
            break
        chosen.append(math.log(p_x))
    accepted = len(chosen)
    p_n, extra = ours[accepted], None
    if accepted < len(proposed):
        extra = pick(p_n, uniform.next(), less=theirs[accepted])
    if extra is None:  # all accepted; or p == q up to rounding left nothing to draw from, and p is the right law
        extra = pick(p_n, uniform.next())
    if extra is None:
        raise AdaptiveError(NO_NUMBERS)
    chosen.append(math.log(float(p_n[extra])))
    return Verdict(accepted, [*proposed[:accepted], extra], chosen)


def verify_on_device(
    p: torch.Tensor, drafted: torch.Tensor, q: torch.Tensor, uniform: Uniform, queued: Queued | None = None
) -> Verdict:
    """The same in tensor operations, which synchronise with the device once; q is (K, vocab). Of the K tokens of a
    ``queued`` proposal, only the first ``queued.count`` count."""
    most = drafted.shape[0]
    if not most:
        extra = draw_on_device(p, uniform)
        probability = p.index_select(1, extra)[0]
        token, sound = torch.cat([extra, probability.isfinite()]).tolist()
        if not sound:
            raise AdaptiveError(NO_NUMBERS)
        return Verdict(0, [token], probability.log())
    at, places = drafted[:, None], torch.arange(most, device=p.device)
    count = _count(most, p.device) if queued is None or queued.count is None else queued.count.to(p.device)[None]
    p_x, q_x = p[:-1].gather(1, at)[:, 0], q.gather(1, at)[:, 0]
    numbers = uniform.column_ahead(most + 1)
    stands = (numbers[:-1, 0] * q_x < p_x) & (places < count)
    reached = stands.int().cumprod(0).sum(0, keepdim=True)
    p_n = p.index_select(0, reached)
    # If all are accepted, there is no q to subtract, and the draw is from p itself.
    q_n = q.index_select(0, reached.clamp(max=most - 1)).mul_(reached < count)
    residual = (p_n - q_n).nan_to_num_(nan=0.0).clamp_(min=0)  # NaN in q costs rejections only
    # If p == q up to rounding, nothing is left to draw from; then p is the right distribution.
    extra = draw_at(residual.add_(p_n, alpha=NOTHING), numbers.index_select(0, count))
    probability = p_n.index_select(1, extra)[0]
    # The round's one synchronisation.
    *tokens, accepted, sound = torch.cat([drafted, extra, reached, probability.isfinite()]).tolist()
    uniform.skip_column(1 + (most if queued is None else queued.drafted))
    if not sound:
        raise AdaptiveError(NO_NUMBERS)
    chosen = torch.cat([p_x[:accepted], probability]).log()
    return Verdict(accepted, [*tokens[:accepted], tokens[most]], chosen)


def _count(number: int, device: torch.device) -> torch.Tensor:
    """``number`` as a tensor (1,)."""
    return torch.full((1,), number, dtype=torch.long, device=device)


def _like(p: torch.Tensor, q: Distributions) -> torch.Tensor:
    """q as a tensor (K, vocab) on p's device, 0 for tokens that only the target has."""
    if not isinstance(q, torch.Tensor):
        q = torch.from_numpy(np.stack(list(q))) if len(q) else p.new_empty(0, p.shape[1])
    return torch.nn.functional.pad(q.to(p.device), (0, p.shape[1] - q.shape[1]))
