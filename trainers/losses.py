"""Distillation losses: pure functions of the draft's logits and the log's supervision from the target.

``outcomes`` turns both into distributions over the same outcomes, one row per position: the k tokens that
were kept and one bucket of all others. Each divergence takes their logarithms, log p of the target and
log q of the draft, (n, k + 1), and returns (n,) losses in nats (total variation: in probability), not
averaged, so that a caller can weight positions. With k == vocab there is no bucket and every loss is
exact. With k < vocab it is a lower bound of the loss over the vocabulary (data processing inequality),
tight if the bucket is small.

Acceptance at one position is sum_x min(p, q) = 1 - TV(p, q) (Leviathan et al. 2023, "Fast inference from
transformers via speculative decoding").
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

# Log-probability in place of -inf, where a loss divides by p and for tokens that a draft cannot propose: -16 is
# a ten-millionth, which float16 supervision rounds to nothing anyway. Too low: reverse KL is dominated by tokens that
# cost no acceptance. Too high: it no longer penalises them.
LOG_FLOOR = -16.0
# Logits that are worked on at a time. Too low: calls cost more than the work. Too high: they leave a core's cache, or
# take much of a GPU's memory.
PART, PART_ON_GPU = 2**18, 2**24


def target_log_probs(
    logprobs: torch.Tensor, rest: torch.Tensor, temperature: torch.Tensor, unlisted: int
) -> torch.Tensor:
    """log p (n, k + 1) over the listed tokens and the bucket, at ``temperature`` (n,); (n, k) if unlisted is 0.

    The listed tokens become logprobs / T exactly, up to normalisation. The bucket's mass at T depends
    on its shape, which was not kept: it lies between that of ``unlisted`` equal tokens and that of
    tokens as likely as the least likely listed one; the geometric mean of the two is used. At T = 1
    both bounds equal the stored mass, so the result is exact.
    """
    inverse = 1.0 / temperature
    listed = logprobs * inverse[:, None]
    if unlisted == 0:
        return listed.log_softmax(-1)
    steep = rest + (inverse - 1) * logprobs[:, -1]
    flat = rest * inverse + (1 - inverse) * math.log(unlisted)
    return torch.cat([listed, ((steep + flat) / 2)[:, None]], dim=-1).log_softmax(-1)


class _Grouped(torch.autograd.Function):
    """The logits of the listed tokens over the temperature, and behind them those of all others as one outcome.

    autograd alone would hold some six copies of all logits for this. Here the logits are gone through in parts that
    stay in a processor's cache, forward and backward, and the only copy is their gradient.
    """

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, columns: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
        """(n, k + 1) from logits (n, m), columns (n, k) of them, m for a token without one, and 1 / T (n,)."""
        found = torch.empty(len(logits), columns.shape[1] + 1, device=logits.device)
        for part, scaled in _scaled_parts(logits, inverse):
            found[part, :-1] = scaled.gather(1, columns[part])
            # Not log(1 - sum q): if the draft is certain, that cancels to 0 and has no gradient.
            found[part, -1] = scaled.scatter_(1, columns[part], -torch.inf).logsumexp(1)
        ctx.save_for_backward(logits, columns, inverse, found[:, -1])
        return found

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        """The gradient of the logits."""
        logits, columns, inverse, others = ctx.saved_tensors
        least = torch.where(others == -torch.inf, 0.0, others)[:, None]
        found = torch.empty_like(logits)
        for part, scaled in _scaled_parts(logits, inverse):
            scaled.scatter_(1, columns[part], -torch.inf).sub_(least[part]).exp_().mul_(grad[part, -1:])
            scaled.scatter_(1, columns[part], grad[part, :-1]).mul_(inverse[part, None])
            found[part] = scaled[:, :-1]
        return found, None, None


def _scaled_parts(logits: torch.Tensor, inverse: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
    """Slices of the rows, each with its logits times ``inverse`` and a last column of -inf, in memory that the next
    part overwrites."""
    rows, width = logits.shape
    count = max(1, min(rows, (PART if logits.device.type == "cpu" else PART_ON_GPU) // (width + 1)))
    buffer = torch.empty(count, width + 1, device=logits.device)
    for start in range(0, rows, count):
        part = slice(start, min(start + count, rows))
        scaled = buffer[: part.stop - start]
        torch.mul(logits[part], inverse[part, None], out=scaled[:, :-1])
        scaled[:, -1] = -torch.inf
        yield part, scaled


def draft_log_probs(
    draft_logits: torch.Tensor, columns: torch.Tensor, temperature: torch.Tensor, unlisted: int
) -> torch.Tensor:
    """log q (n, k + 1) over the listed tokens and the bucket of all others; (n, k) if ``unlisted`` is 0.

    ``columns`` (n, k): the listed tokens' places in ``draft_logits`` (n, m), m for one that the draft cannot propose.
    That one, and one with a logit of -inf, gets LOG_FLOOR and no gradient, so the optimum of a divergence is the
    target's distribution over the other tokens.
    """
    grouped: torch.Tensor = _Grouped.apply(draft_logits, columns, 1.0 / temperature)
    log_q = (grouped if unlisted else grouped[:, :-1]).log_softmax(-1)
    return torch.where(log_q == -torch.inf, LOG_FLOOR, log_q)


def outcomes(
    draft_logits: torch.Tensor,
    columns: torch.Tensor,
    logprobs: torch.Tensor,
    rest: torch.Tensor,
    temperature: float | torch.Tensor = 1.0,
    vocab: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """log p and log q (n, k + 1) over the listed tokens and the bucket, both at ``temperature``.

    ``draft_logits`` (n, m) raw, with gradient; ``columns`` (n, k) int64 the places there of the target's k most
    probable tokens, best first, m for a token that has none; ``logprobs`` (n, k) their log-probabilities at temperature
    1; ``rest`` (n,) the log of the mass of all others (-inf if none); ``temperature`` a float or (n,); ``vocab`` the
    number of the target's tokens, m by default.
    """
    rows, width = draft_logits.shape
    at = torch.as_tensor(temperature, dtype=torch.float32, device=draft_logits.device).expand(rows)
    unlisted = (width if vocab is None else vocab) - columns.shape[-1]
    log_p = target_log_probs(logprobs.float(), rest.float(), at, unlisted)
    return log_p, draft_log_probs(draft_logits, columns, at, unlisted)


def _kl(log_a: torch.Tensor, log_b: torch.Tensor) -> torch.Tensor:
    """KL(a || b) (n,), with 0 log 0 = 0."""
    return torch.where(log_a > -torch.inf, log_a.exp() * (log_a - log_b), 0.0).sum(-1)


def forward_kl(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """KL(p || q) = sum p log(p / q): penalises a draft that misses tokens of the target.

    Its gradient never vanishes, which makes it the safe choice (Zhou et al. 2024, "DistillSpec";
    Liu et al. 2024, "Online speculative decoding").
    """
    return _kl(log_p, log_q)


def reverse_kl(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """KL(q || p) = sum q log(q / p): penalises a draft that proposes tokens which the target would not choose.

    p is floored at exp(LOG_FLOOR). Used by OmniDraft (2025).
    """
    return _kl(log_q, log_p.clamp(min=LOG_FLOOR))


def jensen_shannon(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """(KL(p || m) + KL(q || m)) / 2 with m = (p + q) / 2: symmetric, at most log 2 (Lin 1991)."""
    log_m = torch.logaddexp(log_p, log_q) - math.log(2)
    return (_kl(log_p, log_m) + _kl(log_q, log_m)) / 2


def total_variation(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """sum |p - q| / 2 = 1 - sum min(p, q): the rejection rate itself.

    Its gradient is nearly zero if p and q hardly overlap, so training cannot start from a poor draft.
    """
    return (log_p.exp() - log_q.exp()).abs().sum(-1) / 2


def kl_tv(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """l KL(p || q) + (1 - l) TV(p, q), with l = exp(-3 a) and a the mean acceptance of these rows, no gradient
    through l: forward KL while the draft is poor, the rejection rate once it is good
    ("LK losses: direct acceptance rate optimization for speculative decoding", 2026, arXiv 2602.23881).
    """
    variation = total_variation(log_p, log_q)
    weight = torch.exp(-3 * (1 - variation.detach().mean()))
    return weight * _kl(log_p, log_q) + (1 - weight) * variation


def cross_entropy(draft_logits: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """-log q(token) at temperature 1, for tokens with these ``columns`` (n,) int64 in the logits (n, m): (n,).

    On a greedy record the token is the target's argmax, and the draft is accepted exactly when its argmax
    is the same. It is also the only loss where only text is known. A token that the draft cannot propose
    (no column, or -inf) has the loss -LOG_FLOOR, without a gradient.
    """
    ones = torch.ones(len(columns), device=draft_logits.device)
    return -draft_log_probs(draft_logits, columns[:, None], ones, 1)[:, 0]


DIVERGENCES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "forward-kl": forward_kl,
    "reverse-kl": reverse_kl,
    "js": jensen_shannon,
    "tv": total_variation,
    "kl-tv": kl_tv,
}
