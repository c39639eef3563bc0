"""Verifies proposals under one set of sampling parameters: builds the target's pass over a proposal, and applies the
acceptance rule to its logits."""

from __future__ import annotations

import torch

from adaptive.decoding.trees import verify_tree
from adaptive.decoding.verify import Verdict, verify_fused, verify_greedy, verify_logits
from adaptive.drafting.proposal import Proposal
from adaptive.engines.protocol import Sequence
from adaptive.sampling import LogitsProcessor, Transform, Uniform
from adaptive.tokens import Ids, as_tensor, join, uploaded
from adaptive.types import SamplingParams


class Verifier:
    """Turns target logits into a verdict on a proposal, under one set of sampling parameters."""

    def __init__(self, params: SamplingParams, processor: LogitsProcessor, generator: torch.Generator) -> None:
        self.params = params
        self.transform = Transform(params)
        self.processor = processor
        self.uniform = Uniform(generator)
        self.adjusts = processor.active
        self.longest: int | None = None  # most tokens of the text; None for no limit

    def verify(self, target: Sequence, fed: list[int], proposal: Proposal | None) -> tuple[Verdict, torch.Tensor]:
        """Feed the target ``fed`` and the K tokens of a proposal in one pass. Returns the verdict and the target's raw
        logits (K + 1, vocab) after the last token of ``fed`` and after each of the K. For a tree, the target keeps only
        the accepted path, and the logits are those after the last token of ``fed`` and after each node of the path."""
        fused = target.fused
        if fused is not None and proposal is not None:
            proposal = proposal.closed()  # it was queued on another device than this engine's
        drafted = [] if proposal is None else proposal.tokens
        chain = proposal is None or proposal.parents is None
        if fused is not None and chain and isinstance(drafted, list) and not self.processor.alters:
            constraint = self.processor.constraint
            mask = None if constraint is None else constraint.place
            return verify_fused(fused, self.params, fed, proposal, self.uniform, mask)
        held = target.length + len(fed)
        return self.judge(target, len(fed), proposal, held, target.extend(*pass_over(fed, proposal)))

    def judge(
        self, target: Sequence, fed: int, proposal: Proposal | None, held: int, raw: torch.Tensor
    ) -> tuple[Verdict, torch.Tensor]:
        """The same, given the target's ``raw`` logits of the pass that ``pass_over`` describes. ``fed`` is the number
        of fed tokens; the last of them is the ``held``-th token of the text."""
        drafted = [] if proposal is None else proposal.tokens
        if proposal is not None and proposal.parents is not None:
            adjusted = self.processor if self.adjusts else None
            verdict, path = verify_tree(raw, proposal, self.transform, self.uniform, held, adjusted)
            target.keep([*range(fed), *(fed + node for node in path)])
            return verdict, raw.index_select(0, uploaded([0, *(1 + node for node in path)], torch.long, raw.device))
        logits = raw
        if self.adjusts:
            logits = self.processor.apply(logits, as_tensor(drafted))
        queued = None if proposal is None else proposal.queued
        if self.params.greedy:
            return verify_greedy(logits, drafted, queued), raw
        q = None if proposal is None else proposal.probs
        return verify_logits(logits, self.transform, drafted, q, self.uniform, held, queued), raw


def pass_over(fed: list[int], proposal: Proposal | None) -> tuple[Ids, int, list[int] | None]:
    """The arguments of ``Sequence.extend`` that verify a proposal of K tokens: tokens, rows (K + 1) and parents."""
    if proposal is None:
        return fed, 1, None
    tokens, rows, parents, count = join([fed, proposal.tokens]), 1 + len(proposal.tokens), proposal.parents, len(fed)
    if parents is None:
        return tokens, rows, None
    return tokens, rows, [*range(-1, count - 1), *(count + p if p >= 0 else count - 1 for p in parents)]
