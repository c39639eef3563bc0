"""The proposal that a drafter hands to verification."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from adaptive.drafting.queued import Queued
from adaptive.tokens import Distributions, Ids, as_list, as_tensor
from adaptive.types import GRAFT


class Proposal(NamedTuple):
    """K drafted tokens, a chain or a tree, and the exact distributions they were drawn from, over the draft's
    vocabulary.

    ``probs`` is None if nothing was drawn: the tokens are the likeliest ones, or those of a deterministic drafter. If
    the target samples, such a token is verified as drawn from a point mass. ``drafter`` is the drafter's name.

    In a tree, token i follows token ``parents[i]``, which comes before it, or for -1 the last committed one. ``tokens``
    and ``probs`` are then lists. Entry i of ``probs`` is the distribution after the parent of token i, from which the
    drawn tokens there were drawn in order and without replacement, or None if token i was not drawn. A chain has no
    ``parents``.

    In a chain of two drafters, one behind the other, the first one made ``first`` tokens; else ``first`` is 0.

    If the proposal is ``queued``, the device has yet to compute how many of its tokens count; the others do not belong
    to the proposal.
    """

    drafter: str
    tokens: Ids
    probs: Distributions | None
    parents: list[int] | None = None
    first: int = 0
    queued: Queued | None = None

    @property
    def drafted(self) -> int:
        """The number of tokens; waits for the device if the proposal is queued."""
        return len(self.tokens) if self.queued is None else self.queued.drafted

    def closed(self) -> Proposal | None:
        """The proposal without tokens that do not count, after waiting for the device; None if none counts."""
        if self.queued is None:
            return self
        count = self.queued.drafted
        probs = None if self.probs is None else self.probs[:count]
        return Proposal(self.drafter, as_list(self.tokens[:count]), probs) if count else None

    def within(self, depth: int) -> Proposal | None:
        """A tree without the nodes deeper than ``depth`` (1 for the first ones); None if none is left."""
        assert self.parents is not None
        depths, place, nodes = {-1: 0}, {-1: -1}, list[int]()
        for node, parent in enumerate(self.parents):
            depths[node] = 1 + depths[parent]
            if depths[node] <= depth:
                place[node] = len(nodes)
                nodes.append(node)
        if not nodes:
            return None
        tokens: list[int] = [self.tokens[node] for node in nodes]  # type: ignore[misc]
        probs: Any = None if self.probs is None else [self.probs[node] for node in nodes]
        return Proposal(self.drafter, tokens, probs, [place[self.parents[node]] for node in nodes])


def grafted(front: Proposal, back: Proposal) -> Proposal:
    """The chain ``back`` behind the chain ``front`` of another drafter. Every token keeps the distribution it was drawn
    from. If only one of the two was drawn, the tokens of the other get point masses."""
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


def point_masses(tokens: Ids, vocab: int) -> torch.Tensor:
    """Distributions (K, vocab) that give each of K ``tokens`` all mass. Verified against them, a token x is accepted
    with probability p(x); else another one is drawn from p without x, renormalised."""
    ids = as_tensor(tokens)
    return torch.zeros(len(ids), vocab, device=ids.device).scatter_(1, ids[:, None], 1.0)
