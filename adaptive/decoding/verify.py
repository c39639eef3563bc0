"""The acceptance rule: which drafted tokens the target keeps, and the token it adds itself.

Greedy: a drafted token is kept while it is the target's own argmax. Sampled (Leviathan et al. 2023;
Chen et al. 2023): token x drawn from q is kept with probability min(1, p(x) / q(x)); at the first
one that is not, the target's token is drawn from max(p - q, 0), normalised. Either way the output is
the target's own, whatever q was.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from adaptive.decoding.sampling import draw
from adaptive.decoding.tokens import Ids, argmax, as_array, as_tensor, join

# Share of p beside what is left of p - q: less than the rounding of any draw unless that is nothing.
NOTHING = 1e-30


@dataclass(frozen=True)
class Proposal:
    """K drafted tokens, and the very distributions (K, vocab) they were drawn from.

    ``probs`` is None for a greedy proposal. ``drafter`` says who drafted.
    """

    drafter: str
    tokens: Ids
    probs: torch.Tensor | None


@dataclass(slots=True)  # one a round, and a frozen one takes three times as long to make
class Verdict:
    """How many drafted tokens stand, all tokens that the round commits (accepted + 1), and the
    log-probability of each of them under the distribution it was drawn from (None when greedy: it is 0)."""

    accepted: int
    tokens: list[int]
    chosen: torch.Tensor | list[float] | None


def verify_greedy(logits: torch.Tensor, drafted: Ids) -> Verdict:
    """logits (K + 1, vocab) of the target, K drafted tokens."""
    best = argmax(logits)
    if isinstance(best, list) and isinstance(drafted, list):
        proposed = drafted
    else:
        count = len(best)
        both = torch.as_tensor(join([drafted, best])).tolist()  # the round's one synchronisation
        best, proposed = both[-count:], both[:-count]
    # The target's choice stands in every row that is reached: an accepted draft is that choice.
    accepted = next((i for i, (a, b) in enumerate(zip(best, proposed, strict=False)) if a != b), len(proposed))
    return Verdict(accepted, best[: accepted + 1], None)


def verify_sampled(p: torch.Tensor, drafted: Ids, q: torch.Tensor, generator: torch.Generator) -> Verdict:
    """Target probabilities p (K + 1, vocab), K drafted tokens drawn from q (K, vocab); p and q on one device."""
    ours, theirs = as_array(p), as_array(q)
    if ours is None or theirs is None:
        return verify_on_device(p, as_tensor(drafted).to(p.device), q, generator)
    proposed: list[int] = drafted if isinstance(drafted, list) else drafted.tolist()
    *uniform, share = torch.rand(len(proposed) + 1, generator=generator, dtype=torch.float64).tolist()
    chosen: list[float] = []
    for row, (token, u) in enumerate(zip(proposed, uniform, strict=True)):
        p_x = float(ours[row, token])
        if u * float(theirs[row, token]) >= p_x:
            break
        chosen.append(math.log(p_x))
    accepted = len(chosen)
    p_n = ours[accepted]
    left = np.maximum(p_n - theirs[accepted], 0) if accepted < len(proposed) else p_n
    mass = left.cumsum(dtype=np.float64)
    if not mass[-1] > 0:  # p == q up to rounding leaves nothing to draw from; then p is the right distribution
        mass = p_n.cumsum(dtype=np.float64)
    extra = min(int(mass.searchsorted(share * mass[-1], side="right")), len(mass) - 1)
    chosen.append(math.log(max(float(p_n[extra]), NOTHING)))
    return Verdict(accepted, [*proposed[:accepted], extra], chosen)


def verify_on_device(p: torch.Tensor, drafted: torch.Tensor, q: torch.Tensor, generator: torch.Generator) -> Verdict:
    """The same in tensor operations, which wait for the device once."""
    count = drafted.shape[0]
    if not count:
        extra = draw(p, generator)
        return Verdict(0, extra.tolist(), p.index_select(1, extra)[0].log())
    at = drafted[:, None]
    p_x, q_x = p[:-1].gather(1, at)[:, 0], q.gather(1, at)[:, 0]
    uniform = torch.rand(count, generator=generator, device=p.device, dtype=p.dtype)
    reached = (uniform * q_x < p_x).int().cumprod(0).sum(0, keepdim=True)
    p_n = p.index_select(0, reached)
    # Where all are accepted there is no q to take away, and the draw is from p itself.
    q_n = q.index_select(0, reached.clamp(max=count - 1)).mul_(reached < count)
    residual = (p_n - q_n).clamp_(min=0)
    # p == q up to rounding leaves nothing to draw from; then p is the right distribution.
    extra = draw(residual.add_(p_n, alpha=NOTHING), generator)
    *tokens, accepted = torch.cat([drafted, extra, reached]).tolist()  # the round's one synchronisation
    chosen = torch.cat([p_x[:accepted], p_n.index_select(1, extra)[0]]).log()
    return Verdict(accepted, [*tokens[:accepted], tokens[count]], chosen)
