"""Chooses the loss of each record and computes it at every output position, from logits and the log's supervision."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trainers import losses
from trainers.batches import over_all_tokens
from trainers.dataset import Example
from trainers.recipe import LossName

# The loss that ``auto`` selects where the target's distribution was stored.
AUTO = "kl-tv"


def position_losses(logits: torch.Tensor, examples: Sequence[Example], name: LossName) -> torch.Tensor:
    """Loss (N,) at every output position of ``examples``, from the draft's logits (N, vocab) there.

    ``auto`` is the KL-TV mixture at the record's own sampling temperature, which did best
    where the draft began far from the target (docs/notes/2026-11-distillation.md). Distribution losses of
    greedy records use temperature 1. Where only text is known, the loss is cross-entropy.
    """
    logits = over_all_tokens(logits, examples)
    soft = [e.supervision is not None and name != "cross-entropy" for e in examples]
    parts = logits.split([len(e.output) for e in examples])
    values: list[torch.Tensor | None] = [None] * len(parts)
    hard = [i for i, is_soft in enumerate(soft) if not is_soft]
    if hard:
        tokens = torch.cat([torch.from_numpy(examples[i].output) for i in hard]).long().to(logits.device)
        found = losses.cross_entropy(torch.cat([parts[i] for i in hard]), tokens)
        for i, value in zip(hard, found.split([len(parts[i]) for i in hard]), strict=True):
            values[i] = value
    chosen = [i for i, is_soft in enumerate(soft) if is_soft]
    if chosen:
        divergence = losses.DIVERGENCES[AUTO if name == "auto" else name]
        wanted = _wanted([examples[i] for i in chosen], logits.device)
        found = divergence(*losses.outcomes(torch.cat([parts[i] for i in chosen]), *wanted))
        for i, value in zip(chosen, found.split([len(parts[i]) for i in chosen]), strict=True):
            values[i] = value
    return torch.cat([value for value in values if value is not None])


def _wanted(
    examples: Sequence[Example], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """ids, logprobs, rest and temperature of all positions together.

    Records may keep different numbers of entries: all are cut to the fewest, and the mass cut off is added to the rest.
    """
    held = [e.supervision for e in examples if e.supervision is not None]
    k = min(s.ids.shape[1] for s in held)
    logprobs = [torch.from_numpy(s.logprobs).float() for s in held]
    rest = [
        torch.cat([torch.from_numpy(s.rest).float()[:, None], listed[:, k:]], dim=1).logsumexp(-1)
        for s, listed in zip(held, logprobs, strict=True)
    ]
    temperature = [torch.full((len(e.output),), 1.0 if e.sampling.greedy else e.sampling.temperature) for e in examples]
    return (
        torch.cat([torch.from_numpy(s.ids[:, :k]) for s in held]).long().to(device),
        torch.cat([listed[:, :k] for listed in logprobs]).to(device),
        torch.cat(rest).to(device),
        torch.cat(temperature).to(device),
    )
