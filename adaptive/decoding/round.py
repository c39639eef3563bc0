"""One speculative round: propose, verify in one pass of the target, keep what stands.

In: the sequences of target and drafter, and the committed tokens. Out: these, grown, and what the round was.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from adaptive.control.policy import Adviser
from adaptive.decoding.verifier import Verifier
from adaptive.decoding.verify import Verdict
from adaptive.drafting.proposal import Proposal
from adaptive.drafting.protocol import Drafter, Making, made_together
from adaptive.engines.protocol import Sequence
from adaptive.types import Round


def speculative_round(
    target: Sequence,
    drafter: Drafter | None,
    verifier: Verifier,
    committed: list[int],
    draft_length: int,
    advise: Adviser | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[Round, Verdict, torch.Tensor]:
    """Draft, verify in one target pass, keep what stands; ``committed`` grows by accepted + 1 tokens.

    ``draft_length`` is the most that is drafted; ``advise`` may end the draft before. ``clock`` is what the round's
    seconds are by.

    Before and after, the caches hold at most all committed tokens but the last one: the token that
    the target added itself has not been fed to anybody yet. Returns the target's raw logits
    (drafted + 1, vocab) as well, of which the first accepted + 1 rows are those of the committed tokens.
    """
    began = clock()
    proposal = propose(drafter, verifier, committed, draft_length, advise)
    proposed = clock()
    verdict, logits = verifier.verify(target, committed[target.length :], proposal)
    commit(target, drafter, verifier, committed, proposal, verdict)
    return outcome_of(proposal, verdict, proposed - began, clock() - proposed), verdict, logits


def propose(
    drafter: Drafter | None, verifier: Verifier, committed: list[int], length: int, advise: Adviser | None
) -> Proposal | None:
    """What the drafter has to say, as the verifier takes it."""
    if drafter is None or length <= 0:
        return None
    return _verifiable(drafter.propose(committed, length, advise), verifier)


def making(
    drafter: Drafter | None, verifier: Verifier, committed: list[int], length: int, advise: Adviser | None
) -> Making:
    """The same, made together with the proposals for other answers where the drafter can."""
    if length <= 0 or not made_together(drafter):
        return propose(drafter, verifier, committed, length, advise)
    return _verifiable((yield from drafter.making(committed, length, advise)), verifier)


def _verifiable(proposal: Proposal | None, verifier: Verifier) -> Proposal | None:
    if proposal is not None and proposal.parents is not None and verifier.adjusts:
        return proposal.first_path()  # what a token's logits are changed by is the path before it
    return proposal


def commit(
    target: Sequence,
    drafter: Drafter | None,
    verifier: Verifier,
    committed: list[int],
    proposal: Proposal | None,
    verdict: Verdict,
) -> None:
    """Append what a verdict commits; what did not stand is forgotten by both caches."""
    stands = len(committed) + verdict.accepted
    committed += verdict.tokens
    if proposal is not None and drafter is not None:
        target.rollback(stands)
        drafter.rollback(stands)
    if verifier.adjusts:
        verifier.processor.commit(verdict.tokens)


def outcome_of(proposal: Proposal | None, verdict: Verdict, draft_s: float, verify_s: float) -> Round:
    """A round that has ended, in seconds of drafting and of the rest; of what was queued a device says what it took."""
    if proposal is not None and proposal.queued is not None:
        draft_s, verify_s = proposal.queued.split(draft_s, verify_s)
    if proposal is None or not proposal.drafted:
        return Round("none", 0, verdict.accepted, draft_s, verify_s)
    return Round(proposal.drafter, proposal.drafted, verdict.accepted, draft_s, verify_s, proposal.first)
