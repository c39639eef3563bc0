"""Chooses the loss of each record and computes it at every output position, from logits and the log's supervision."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from adaptive.engines.head.vocabulary import columns_of
from trainers import losses
from trainers.batches import token_count
from trainers.dataset import Example
from trainers.recipe import LossName

# The loss that ``auto`` selects where the target's distribution was stored.
AUTO = "kl-tv"


def position_losses(
    logits: torch.Tensor,
    examples: Sequence[Example],
    name: LossName,
    ids: torch.Tensor | None = None,
    vocab: int = 0,
) -> torch.Tensor:
    """Loss (N,) at every output position of ``examples``, from the draft's logits (N, m) there.

    ``ids`` (m,): the tokens of these logits, if the draft cannot propose all of the target's ``vocab`` tokens; by
    default the first m. ``auto`` is the KL-TV mixture at the record's own sampling temperature, which did best
    where the draft began far from the target (docs/notes/2026-11-distillation.md). Distribution losses of
    greedy records use temperature 1. Where only text is known, the loss is cross-entropy.
    """
    device, width = logits.device, logits.shape[-1]
    vocab = max(vocab, width, token_count(examples))
    columns = columns_of(torch.arange(width, device=device) if ids is None else ids, vocab)
    soft = [e.supervision is not None and name != "cross-entropy" for e in examples]
    rows = torch.tensor([one for e, one in zip(examples, soft, strict=True) for _ in e.output], device=device)
    found = logits.new_empty(len(logits), dtype=torch.float32)
    for is_soft in set(soft):
        chosen = [e for e, one in zip(examples, soft, strict=True) if one is is_soft]
        part = logits if len(chosen) == len(examples) else logits[rows == is_soft]
        if is_soft:
            divergence = losses.DIVERGENCES[AUTO if name == "auto" else name]
            listed, logprobs, rest, temperature = _wanted(chosen, device)
            values = divergence(*losses.outcomes(part, columns[listed], logprobs, rest, temperature, vocab))
        else:
            tokens = torch.cat([torch.from_numpy(e.output) for e in chosen]).long().to(device)
            values = losses.cross_entropy(part, columns[tokens])
        found = found.masked_scatter(rows == is_soft, values)
    return found


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
