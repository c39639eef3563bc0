"""Chooses the tokens that a head may draft: those that this user's records contain, as many as pay.

A head's step reads its layer and one row of the target's projection for each of its N tokens; a token outside of them
is never drafted (q = 0), in training and in use. The candidates are ordered by their use in the records. For each N
the weights read by a step are known, and the share of answers, not used for the order, that lies within the N tokens.
The N with the most expected tokens for the weights that a round reads is chosen, or all tokens.

The loss stays that of the target's whole distribution: tokens that a head cannot draft have no gradient
(``losses.py``), so it learns the target's distribution over the others and loses nothing by the rest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from adaptive.engines.head.module import VOCABULARY, Head
from trainers.dataset import Example

# Targets with at most this many tokens keep all of them: there is little to save, and tokens left out cannot be drafted
# until the next run. Too high: projections are read whole unnecessarily. Too low: tokens are lost for little.
WHOLE = 8192
# The fewest tokens that are tried. Fewer save next to nothing: at width 1,024, 2,048 rows are an eighth of a layer.
FEWEST = 2048
# How much better than all tokens the best N has to be. With 1, noise in a small log would reduce the vocabulary.
PAYS = 1.03
# The assumed acceptance rate of drafted tokens that the vocabulary contains. With a lower value, a token outside of it
# costs fewer of the tokens behind it, and fewer tokens are kept. Assuming the same rate for all tokens keeps too many
# rather than too few: rare tokens were hardly ever accepted (docs/notes/2026-11-heads.md).
ACCEPTED = 0.7
# The weight of a prompt's token in the order; an answer's token has 1. Words of a question often occur in the answer,
# but a prompt's instructions are the same in every record.
OF_PROMPT = 0.1

Masses = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Reads:
    """Numbers of weights that are read: by a head's step without its projection (``layer``), for each token of the
    projection (``row``), and by a pass of the ``target``. On a CPU, reading them takes most of the time. A mixture of
    experts is counted with all its experts, which keeps more tokens than its step would justify."""

    layer: int
    row: int
    target: int

    @classmethod
    def of(cls, head: Head) -> Reads:
        """The numbers of a head and its target."""
        layer = sum(p.numel() for p in head.layer.parameters())
        return cls(
            layer + head.fuse.weight.numel(), head.width, head.target_layers * layer + head.vocab_size * head.width
        )


def choose_vocabulary(examples: Sequence[Example], vocab: int, reads: Reads, draft_length: int) -> torch.Tensor | None:
    """The tokens (N,) int64, increasing, that a head on a target of ``vocab`` tokens may draft; None for all.

    ``draft_length`` is the number of steps of a round. The same examples give the same tokens.
    """
    if vocab <= WHOLE or not examples:
        return None
    covered = held_out_coverage(examples, vocab, sizes(vocab))
    size = best_size(covered, reads, vocab, draft_length)
    if size == vocab:
        return None
    return torch.from_numpy(np.sort(order(*said(examples, vocab))[:size]))


def sizes(vocab: int) -> list[int]:
    """The N that are tried, all below ``vocab``: powers of two, and 1.5 times each."""
    steps = (FEWEST * 2**power * half // 2 for power in range(20) for half in (2, 3))
    return [size for size in steps if size < vocab]


def best_size(covered: dict[int, float], reads: Reads, vocab: int, draft_length: int) -> int:
    """The N with the most expected tokens for the weights that a round reads; ``vocab`` if none is clearly better than
    all tokens. ``covered`` maps each N to the share of answer tokens that lie within it.

    A round of K steps yields 1 + a + ... + a^K tokens, where a is the acceptance rate (Leviathan et al. 2023),
    here ``ACCEPTED`` times the covered share.
    """

    def worth(size: int, share: float) -> float:
        tokens = sum((ACCEPTED * share) ** step for step in range(draft_length + 1))
        return tokens / (reads.target + draft_length * (reads.layer + size * reads.row))

    best = max(covered, key=lambda size: worth(size, covered[size]), default=vocab)
    return best if best in covered and worth(best, covered[best]) >= PAYS * worth(vocab, 1.0) else vocab


def said(examples: Sequence[Example], vocab: int) -> tuple[Masses, Masses]:
    """The mass (vocab,) of each token in answers, one per position, and its count (vocab,) in prompts.

    A sampled position counts with the target's distribution as far as it was stored. A greedy position, or one without
    supervision, counts with its token.
    """
    mass, asked = np.zeros(vocab), np.zeros(vocab)
    for example in examples:
        asked += np.bincount(example.prompt, minlength=vocab)[:vocab]
        stored = None if example.sampling.greedy else example.supervision
        if stored is None:
            mass += np.bincount(example.output, minlength=vocab)[:vocab]
        else:
            share = np.exp(stored.logprobs.astype(np.float64))
            np.add.at(mass, stored.ids.reshape(-1), (share / share.sum(1, keepdims=True)).reshape(-1))
    return mass, asked


def order(mass: Masses, asked: Masses) -> npt.NDArray[np.int64]:
    """All tokens (vocab,), the most useful first. Of tokens that occur in no record the lowest ids come first:
    tokenizers number merged pairs by their frequency."""
    worth = mass + OF_PROMPT * asked
    return np.lexsort((np.arange(len(worth)), -worth))


def held_out_coverage(examples: Sequence[Example], vocab: int, counts: Sequence[int]) -> dict[int, float]:
    """For each N, the share of answer tokens within the first N tokens of the order, computed on answers that were not
    used for the order: each half of the prompts is ordered by the other half. The whole log gives a better order than a
    half, so this is a lower bound."""
    parts: tuple[list[Example], list[Example]] = [], []
    for number, example in enumerate(examples):
        parts[number % 2 if math.isnan(example.fold) else int(example.fold * 2**20) % 2].append(example)
    halves = [said(part, vocab) for part in parts]
    inside = dict.fromkeys(counts, 0.0)
    for ordering, judged in (halves, halves[::-1]):
        sums = np.cumsum(judged[0][order(*ordering)])
        for count in counts:
            inside[count] += float(sums[count - 1])
    whole = sum(float(half[0].sum()) for half in halves)
    return {count: share / whole if whole else 0.0 for count, share in inside.items()}


def noted(state: dict[str, torch.Tensor], vocab: int, examples: Sequence[Example]) -> dict[str, Any]:
    """The manifest's entries on a head's draft vocabulary: its size, the target's size, and the share of the tokens of
    ``examples``, by which it was not chosen, that lie within it. Empty for a head without one."""
    if VOCABULARY not in state:
        return {}
    ids = state[VOCABULARY].numpy()
    output = np.concatenate([example.output for example in examples] or [np.zeros(0, np.int32)])
    coverage = float(np.isin(output, ids).mean()) if len(output) else 0.0
    return {"vocabulary": len(ids), "vocabulary_of": vocab, "vocabulary_coverage": round(coverage, 4)}
