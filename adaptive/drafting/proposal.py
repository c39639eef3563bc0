"""What a drafter hands to verification."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from adaptive.drafting.queued import Queued
from adaptive.tokens import Distributions, Ids, as_list, as_tensor
from adaptive.types import GRAFT


class Proposal(NamedTuple):
    """K drafted tokens, a chain or a tree, and the very distributions they were drawn from, over the draft's
    vocabulary.

    ``probs`` is None where nothing was drawn: the likeliest tokens, or those of a drafter without chance. Where the
    target samples, such a token is verified as drawn from a point mass. ``drafter`` says who drafted.

    In a tree, token i follows token ``parents[i]``, which comes before it, or for -1 the last committed one. ``tokens``
    are then listed, and ``probs`` are too: token i's is the distribution after its parent, from which those that were
    drawn there come in their order and without replacement, or None where it was not drawn. A chain has no ``parents``.

    Of a chain that two drafters made, one behind the other, the first made ``first`` tokens; else that is 0.

    Of one that is ``queued`` a device is still to find how many of its tokens count; the others are nobody's proposal.
    """

    drafter: str
    tokens: Ids
    probs: Distributions | None
    parents: list[int] | None = None
    first: int = 0
    queued: Queued | None = None

    @property
    def drafted(self) -> int:
        """How many tokens there are; waits for a device that is still to find that."""
        return len(self.tokens) if self.queued is None else self.queued.drafted

    def closed(self) -> Proposal | None:
        """The same without what does not count, once a device has found that; None where nothing does."""
        if self.queued is None:
            return self
        count = self.queued.drafted
        probs = None if self.probs is None else self.probs[:count]
        return Proposal(self.drafter, as_list(self.tokens[:count]), probs) if count else None

    def first_path(self) -> Proposal:
        """Of a tree the chain of the first token that follows each, for who verifies chains only. It is a proposal as
        exact as the tree: the first was drawn from the distribution itself."""
        if self.parents is None:
            return self
        path = [-1]
        while path[-1] in self.parents:
            path.append(self.parents.index(path[-1]))
        nodes = path[1:]
        tokens: list[int] = [self.tokens[node] for node in nodes]  # type: ignore[misc]
        probs: list[Any] = [] if self.probs is None else [self.probs[node] for node in nodes]
        vocab = max((len(row) for row in probs if row is not None), default=0)
        if not vocab:
            return Proposal(self.drafter, tokens, None)
        masses = point_masses(tokens, max(vocab, *(token + 1 for token in tokens)))
        rows = [masses[i] if row is None else _wide(torch.as_tensor(row), masses) for i, row in enumerate(probs)]
        return Proposal(self.drafter, tokens, torch.stack(rows))


def grafted(front: Proposal, back: Proposal) -> Proposal:
    """The chain ``back`` behind the chain ``front``, of another drafter. Every token keeps what it was drawn from; that
    is a point mass for one that was not, where others were."""
    chains = [as_list(front.tokens), as_list(back.tokens)]
    tokens, probs = chains[0] + chains[1], None
    drawn = [_stacked(one.probs) for one in (front, back)]
    known = next((q for q in drawn if q is not None), None)
    if known is not None:
        undrawn = [token for q, chain in zip(drawn, chains, strict=True) if q is None for token in chain]
        width = max(known.shape[1], *(token + 1 for token in undrawn)) if undrawn else known.shape[1]
        pairs = zip(drawn, chains, strict=True)
        masses = (point_masses(chain, width).to(known) if q is None else q for q, chain in pairs)
        probs = torch.cat([torch.nn.functional.pad(q, (0, width - q.shape[1])) for q in masses])
    return Proposal(f"{front.drafter}{GRAFT}{back.drafter}", tokens, probs, None, len(chains[0]))


def _stacked(q: Distributions | None) -> torch.Tensor | None:
    if q is None or isinstance(q, torch.Tensor):
        return q
    return torch.from_numpy(np.stack(list(q)))


def _wide(row: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(row.float(), (0, like.shape[1] - len(row)))


def point_masses(tokens: Ids, vocab: int) -> torch.Tensor:
    """Distributions (K, vocab) that give each of K ``tokens`` everything. Verified against them, a token x stands with
    probability p(x), else another is drawn from p without x, renormalised."""
    ids = as_tensor(tokens)
    return torch.zeros(len(ids), vocab, device=ids.device).scatter_(1, ids[:, None], 1.0)
