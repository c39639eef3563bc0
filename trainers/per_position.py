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
    # The number of alternatives known at each position, 0 for text alone. Records of one number are computed together.
    known = [0 if e.supervision is None or name == "cross-entropy" else e.supervision.ids.shape[1] for e in examples]
    rows = torch.tensor([one for e, one in zip(examples, known, strict=True) for _ in e.output], device=device)
    found = logits.new_empty(len(logits), dtype=torch.float32)
    for count in set(known):
        chosen = [e for e, one in zip(examples, known, strict=True) if one == count]
        part = logits if len(chosen) == len(examples) else logits[rows == count]
        if count:
            divergence = losses.DIVERGENCES[AUTO if name == "auto" else name]
            listed, logprobs, rest, temperature = _wanted(chosen, device)
            values = divergence(*losses.outcomes(part, columns[listed], logprobs, rest, temperature, vocab))
        else:
            tokens = torch.cat([torch.from_numpy(e.output) for e in chosen]).long().to(device)
            values = losses.cross_entropy(part, columns[tokens])
        found = found.masked_scatter(rows == count, values)
    return found


def _wanted(
    examples: Sequence[Example], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """ids, logprobs, rest and temperature of all positions together, for records with one number of alternatives."""
    held = [e.supervision for e in examples if e.supervision is not None]
    temperature = [torch.full((len(e.output),), 1.0 if e.sampling.greedy else e.sampling.temperature) for e in examples]
    return (
        torch.cat([torch.from_numpy(s.ids) for s in held]).long().to(device),
        torch.cat([torch.from_numpy(s.logprobs).float() for s in held]).to(device),
        torch.cat([torch.from_numpy(s.rest).float() for s in held]).to(device),
        torch.cat(temperature).to(device),
    )
