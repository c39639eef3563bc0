"""One speculative round: propose tokens, verify them in one pass of the target, keep the accepted ones.

In: the sequences of target and drafter, and the committed tokens. Out: the same, grown, and the round's figures.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from adaptive.control.policy import Adviser
from adaptive.decoding.verifier import Verifier
from adaptive.decoding.verify import Verdict
from adaptive.drafting.proposal import Proposal
from adaptive.drafting.protocol import Proposer, Proposing, proposes_with_others
from adaptive.engines.protocol import Sequence
from adaptive.types import Round


def speculative_round(
    target: Sequence,
    drafter: Proposer | None,
    verifier: Verifier,
    committed: list[int],
    draft_length: int,
    advise: Adviser | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[Round, Verdict, torch.Tensor]:
    """Draft, verify in one pass of the target, keep the accepted tokens; ``committed`` grows by accepted + 1 tokens.

    At most ``draft_length`` tokens are drafted; ``advise`` may end the draft earlier. ``clock`` gives the round's
    seconds.

    Before and after the round the caches hold at most all committed tokens except the last one: the token that the
    target added itself has not been fed to any model yet. Also returns the target's raw logits (drafted + 1, vocab);
    the first accepted + 1 rows belong to the newly committed tokens.
    """
    began = proposed = clock()
    proposal = propose(drafter, verifier, committed, draft_length, advise)
    if drafter is not None and draft_length > 0:  # nothing was asked in a plain round, which saves reading the clock
        proposed = clock()
    verdict, logits = verifier.verify(target, committed[target.length :], proposal)
    commit(target, drafter, verifier, committed, proposal, verdict)
    return round_of(proposal, verdict, proposed - began, clock() - proposed), verdict, logits


def propose(
    drafter: Proposer | None, verifier: Verifier, committed: list[int], length: int, advise: Adviser | None
) -> Proposal | None:
    """The drafter's proposal in a form that the verifier accepts; None for a plain round."""
    if drafter is None or length <= 0:
        return None
    return _verifiable(drafter.propose(committed, length, advise), verifier, len(committed))


def proposing(
    drafter: Proposer | None, verifier: Verifier, committed: list[int], length: int, advise: Adviser | None
) -> Proposing:
    """``propose``, in one call with the proposals of other answers if the drafter supports that."""
    if length <= 0 or not proposes_with_others(drafter):
        return propose(drafter, verifier, committed, length, advise)
    return _verifiable((yield from drafter.proposing(committed, length, advise)), verifier, len(committed))


def _verifiable(proposal: Proposal | None, verifier: Verifier, committed: int) -> Proposal | None:
    """The proposal; of a tree, the part that fits into the text. A round commits one token more than it accepts."""
    if proposal is not None and proposal.parents is not None and verifier.longest is not None:
        return proposal.within(verifier.longest - 1 - committed)
    return proposal


def commit(
    target: Sequence,
    drafter: Proposer | None,
    verifier: Verifier,
    committed: list[int],
    proposal: Proposal | None,
    verdict: Verdict,
) -> None:
    """Append the tokens that a verdict commits, and roll both caches back to the accepted tokens."""
    stands = len(committed) + verdict.accepted
    committed += verdict.tokens
    if proposal is not None and drafter is not None:
        target.rollback(stands)
        drafter.rollback(stands)
    if verifier.adjusts:
        verifier.processor.commit(verdict.tokens)


def round_of(proposal: Proposal | None, verdict: Verdict, draft_s: float, verify_s: float) -> Round:
    """The figures of a finished round: its seconds of drafting and of the rest. For a proposal queued on a device, the
    device's own events say how the seconds divide."""
    if proposal is not None and proposal.queued is not None:
        draft_s, verify_s = proposal.queued.split(draft_s, verify_s)
    if proposal is None or not proposal.drafted:
        return Round("none", 0, verdict.accepted, draft_s, verify_s)
    return Round(proposal.drafter, proposal.drafted, verdict.accepted, draft_s, verify_s, proposal.first)
