"""Which tokens a head drafts among: those that this person's records use, as many as pay.

A head's step reads its layer and one row of the target's projection for each of its N tokens; a token outside is never
drafted (q = 0), in training as in use. The candidates are ordered by what the records say; of each N it is known what a
step reads, and how much of answers that had no part in the order lies within. N is the one with the most expected
tokens for what a round reads, or all tokens.

The loss stays that of the target's whole distribution: what a head cannot say has no gradient (``losses.py``), so that
it learns the target's distribution over the others, and what it can never gain costs it nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from adaptive.engines.head.module import VOCABULARY, Head
from trainers.dataset import Example

# Targets with so many tokens or fewer are not cut: there is little to save, and what a head cannot say stays unsaid
# until the next run. With more, projections are read whole that need not be; with less, tokens are lost for little.
WHOLE = 8192
# The fewest tokens that are tried. Fewer save next to nothing: at width 1,024, 2,048 rows are an eighth of a layer.
FEWEST = 2048
# How much better than all tokens the best N has to be. With 1, noise in a small log would cut for nothing.
PAYS = 1.03
# The share of drafted tokens that is taken to be accepted, of those that can be drafted. With less, a token that cannot
# be drafted costs fewer of those behind it, and fewer tokens are kept. Taking every token for as likely to be
# accepted keeps too many rather than too few: rare ones were hardly ever (docs/notes/2026-11-heads.md).
ACCEPTED = 0.7
# What a token of a prompt weighs in the order, one of an answer 1: what is asked about is often answered with, but a
# prompt's instructions are the same in every record.
OF_PROMPT = 0.1

Masses = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Reads:
    """Numbers of weights that are read: by a head's step beside its projection (``layer``), for each token in that
    (``row``), and by a pass of the ``target``. Where a processor decodes, reading them is what takes the time. A
    mixture is counted with all of its experts, which keeps more tokens than its step would ask for."""

    layer: int
    row: int
    target: int

    @classmethod
    def of(cls, head: Head) -> Reads:
        """Those of a head and its target."""
        layer = sum(p.numel() for p in head.layer.parameters())
        return cls(
            layer + head.fuse.weight.numel(), head.width, head.target_layers * layer + head.vocab_size * head.width
        )


def choose_vocabulary(examples: Sequence[Example], vocab: int, reads: Reads, draft_length: int) -> torch.Tensor | None:
    """The tokens (N,) int64, increasing, that a head on a target of ``vocab`` tokens is to draft among; None for all.

    ``draft_length`` is how many steps a round has. The same examples give the same tokens.
    """
    if vocab <= WHOLE or not examples:
        return None
    covered = held_out_coverage(examples, vocab, sizes(vocab))
    size = best_size(covered, reads, vocab, draft_length)
    if size == vocab:
        return None
    return torch.from_numpy(np.sort(order(*said(examples, vocab))[:size]))


def sizes(vocab: int) -> list[int]:
    """The N that are tried, fewer than ``vocab``: powers of two, and one between each two."""
    steps = (FEWEST * 2**power * half // 2 for power in range(20) for half in (2, 3))
    return [size for size in steps if size < vocab]


def best_size(covered: dict[int, float], reads: Reads, vocab: int, draft_length: int) -> int:
    """The N of ``covered`` (by N, the share of what is said that lies within) with the most expected tokens for what a
    round reads; ``vocab`` where none is clearly better than that.

    A round of K steps yields 1 + a + ... + a^K tokens, where a is the share that is accepted (Leviathan et al. 2023),
    here ``ACCEPTED`` of what is covered.
    """

    def worth(size: int, share: float) -> float:
        tokens = sum((ACCEPTED * share) ** step for step in range(draft_length + 1))
        return tokens / (reads.target + draft_length * (reads.layer + size * reads.row))

    best = max(covered, key=lambda size: worth(size, covered[size]), default=vocab)
    return best if best in covered and worth(best, covered[best]) >= PAYS * worth(vocab, 1.0) else vocab


def said(examples: Sequence[Example], vocab: int) -> tuple[Masses, Masses]:
    """The mass (vocab,) of each token in answers, one a position, and the count (vocab,) of it in prompts.

    A position that was sampled counts with what the target would have said, as far as that was stored; a greedy one, or
    one of which the text alone is known, with its token.
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
    """All tokens (vocab,), the most useful first. Of those that nobody has said the first ids come first: tokenizers
    number the pairs that they merge by how frequent they are."""
    worth = mass + OF_PROMPT * asked
    return np.lexsort((np.arange(len(worth)), -worth))


def held_out_coverage(examples: Sequence[Example], vocab: int, counts: Sequence[int]) -> dict[int, float]:
    """By N, the share of what is said that lies among the first N tokens of the order, in answers that had no part in
    it: every other example orders for the others. The whole log orders better than its half, so this is a bound from
    below."""
    halves = [said(examples[half::2], vocab) for half in (0, 1)]
    inside = dict.fromkeys(counts, 0.0)
    for ordering, judged in (halves, halves[::-1]):
        sums = np.cumsum(judged[0][order(*ordering)])
        for count in counts:
            inside[count] += float(sums[count - 1])
    whole = sum(float(half[0].sum()) for half in halves)
    return {count: share / whole if whole else 0.0 for count, share in inside.items()}


def noted(state: dict[str, torch.Tensor], vocab: int, examples: Sequence[Example]) -> dict[str, Any]:
    """What a manifest says of a head's draft vocabulary, nothing of one that has none: its size, the target's, and the
    share of the tokens of these ``examples``, which it was not chosen by, that lie within."""
    if VOCABULARY not in state:
        return {}
    ids = state[VOCABULARY].numpy()
    output = np.concatenate([example.output for example in examples] or [np.zeros(0, np.int32)])
    coverage = float(np.isin(output, ids).mean()) if len(output) else 0.0
    return {"vocabulary": len(ids), "vocabulary_of": vocab, "vocabulary_coverage": round(coverage, 4)}
