"""The decoding loop: one speculative round, and the generation made of rounds.

In: engines' sequences, a prompt, what was asked. Out: a stream of ``Step``, one a token, which every
front end consumes; the ``Decoding`` that made it then holds all that the log keeps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from adaptive.control.policy import LengthPolicy
from adaptive.decoding.drafters import Adviser, Drafter
from adaptive.decoding.params import SamplingParams, StopParams
from adaptive.decoding.sampling import Penalties, transform_logits
from adaptive.decoding.supervision import SupervisionTape
from adaptive.decoding.text import TextStream
from adaptive.decoding.tokens import as_tensor
from adaptive.decoding.verify import Proposal, Verdict, verify_greedy, verify_sampled
from adaptive.engines.protocol import Sequence
from adaptive.records.types import Round, Supervision, Timings


@dataclass(frozen=True)
class Counters:
    """Where a generation stands: tokens and seconds, rounds, drafted and accepted tokens."""

    timings: Timings
    rounds: int
    drafted: int
    accepted: int


@dataclass(frozen=True)
class Step:
    """One token of the answer and the text that is certain since the last one.

    ``finish_reason`` is set on the last step only: ``stop`` or ``length``.
    """

    text: str
    token: int
    from_draft: bool
    counters: Counters
    finish_reason: str | None = None


@dataclass(frozen=True)
class Request:
    """One prompt, as token ids, and what was asked of its answer.

    ``end_tokens`` end the answer (end of sequence, stop token ids). ``record`` keeps supervision.
    """

    prompt: list[int]
    sampling: SamplingParams
    stop: StopParams
    end_tokens: frozenset[int]
    record: bool = True


class TargetSampler:
    """Turns target logits into a verdict on a proposal, under one set of sampling parameters."""

    def __init__(self, params: SamplingParams, penalties: Penalties, generator: torch.Generator) -> None:
        self.params = params
        self.penalties = penalties
        self.generator = generator
        self._nothing = torch.empty(0, dtype=torch.long, device=generator.device)

    def verify(self, logits: torch.Tensor, proposal: Proposal | None) -> Verdict:
        """logits (K + 1, vocab) after the last committed token and after each of K drafted ones."""
        drafted = self._nothing if proposal is None else proposal.tokens.to(logits.device)
        if self.penalties.active or self.penalties.bias is not None:
            logits = self.penalties.apply(logits, drafted)
        if self.params.greedy:
            return verify_greedy(logits, drafted)
        p = transform_logits(logits.float(), self.params).softmax(-1)
        if proposal is None:
            q = p[:0]
        else:
            assert proposal.probs is not None
            q = proposal.probs.to(p.device)
            if q.shape[1] < p.shape[1]:
                q = torch.nn.functional.pad(q, (0, p.shape[1] - q.shape[1]))
        return verify_sampled(p, drafted, q, self.generator)


def speculative_round(
    target: Sequence,
    drafter: Drafter | None,
    sampler: TargetSampler,
    committed: list[int],
    draft_length: int,
    advise: Adviser | None = None,
) -> tuple[Round, Verdict, torch.Tensor]:
    """Draft, verify in one target pass, keep what stands; ``committed`` grows by accepted + 1 tokens.

    ``draft_length`` is the most that is drafted; ``advise`` may end the draft before.

    Before and after, the caches hold at most all committed tokens but the last one: the token that
    the target added itself has not been fed to anybody yet. Returns the target's raw logits of the
    committed positions (accepted + 1, vocab) as well.
    """
    held = len(committed)
    began = time.perf_counter()
    proposal = None
    if drafter is not None and draft_length > 0:
        proposal = drafter.propose(committed, draft_length, advise)
    proposed = time.perf_counter()

    fed, drafted = as_tensor(committed[target.length :]), 0
    if proposal is not None:
        fed, drafted = torch.cat([fed.to(proposal.tokens.device), proposal.tokens]), len(proposal.tokens)
    logits = target.extend(fed, 1 + drafted)
    verdict = sampler.verify(logits, proposal)

    committed += verdict.tokens
    target.rollback(held + verdict.accepted)
    if drafter is not None:
        drafter.rollback(held + verdict.accepted)
    sampler.penalties.commit(verdict.tokens)
    verified = time.perf_counter()
    outcome = Round(
        drafter=proposal.drafter if proposal else "none",
        drafted=drafted,
        accepted=verdict.accepted,
        draft_s=proposed - began,
        verify_s=verified - proposed,
    )
    return outcome, verdict, logits if verdict.accepted == drafted else logits[: verdict.accepted + 1]


class Decoding:
    """One generation: rounds until a stop, a limit, or the caller's loss of interest.

    ``steps()`` is the stream. Everything else is filled in along the way and complete when the
    stream has ended, also when the caller closes it early (``finish_reason`` is then ``cancelled``).
    """

    def __init__(
        self,
        request: Request,
        target: Sequence,
        context_length: int,
        drafter: Drafter | None,
        sampler: TargetSampler,
        policy: LengthPolicy,
        stream: TextStream,
        between: Callable[[], bool] | None = None,
    ) -> None:
        """``between`` is called before every round but the prompt's, when nothing is under way and weights may
        change; it says whether the draft may be used in that round."""
        self.request = request
        self.target = target
        self.drafter = drafter
        self.sampler = sampler
        self.policy = policy
        self.stream = stream
        self.between = between or (lambda: True)
        self.committed = list(request.prompt)
        self.cached = target.length
        self.room = min(request.stop.max_new_tokens, context_length - len(request.prompt))
        self.output: list[int] = []
        self.text = ""
        self.finish_reason: str | None = None
        self.rounds: list[Round] = []
        self.tape: SupervisionTape | None = None
        self.supervision: Supervision | None = None
        self.drafted = self.accepted = 0
        self.prompt_s = self.predicted_s = self.expected_s = 0.0

    def steps(self) -> Iterator[Step]:
        """Answer the prompt, of which the target's cache may already hold a beginning; a ``Step`` a token."""
        self.target.reserve(len(self.committed) + self.room)
        self.sampler.penalties.start(torch.tensor(self.committed))
        tape = self.tape = SupervisionTape() if self.request.record else None
        advise = self.policy.advise if self.policy.attentive else None
        began = time.perf_counter()
        try:
            # The first round scores the prompt. Its time is the prompt's, and nothing is drafted before it.
            _, verdict, logits = speculative_round(self.target, None, self.sampler, self.committed, 0)
            self.prompt_s = time.perf_counter() - began
            first = time.perf_counter()
            while True:
                if tape is not None:
                    tape.append(logits, verdict.chosen)
                self.predicted_s = time.perf_counter() - first
                yield from self._commit(verdict)
                if self.finish_reason is not None:
                    return
                limit = self._limit() if self.between() else 0
                length = self.policy.next_length(limit, self._waiting(), len(self.committed))
                outcome, verdict, logits = speculative_round(
                    self.target, self.drafter, self.sampler, self.committed, length, advise
                )
                self.policy.observe(outcome)
                self.rounds.append(outcome)
                if self.policy.expected:
                    self.expected_s += len(verdict.tokens) / self.policy.expected
                self.drafted += outcome.drafted
                self.accepted += outcome.accepted
        finally:
            self.finish_reason = self.finish_reason or "cancelled"
            # Tokens of the last round after a stop are in nobody's text: the caches forget them.
            known = len(self.request.prompt) + len(self.output)
            self.target.rollback(known)
            if self.drafter is not None:
                self.drafter.rollback(known)
            if tape is not None and self.output:
                self.supervision = tape.take(len(self.output))

    def _limit(self) -> int:
        """The longest draft worth proposing: a round commits one token more than it accepts."""
        if self.drafter is None:
            return 0
        return max(0, min(self.room - len(self.output) - 1, self.drafter.limit(len(self.committed))))

    def _waiting(self) -> int:
        return 0 if self.drafter is None else self.drafter.waiting(len(self.committed))

    def _commit(self, verdict: Verdict) -> Iterator[Step]:
        """Show the tokens of one verdict, up to and including the one that ends the answer."""
        for index, token in enumerate(verdict.tokens):
            self.output.append(token)
            ends = token in self.request.end_tokens
            text = "" if ends else self.stream.push(token)
            if ends or self.stream.stopped:
                self.finish_reason = "stop"
            elif len(self.output) >= self.room:
                self.finish_reason = "length"
            if self.finish_reason is not None:
                text += self.stream.finish()
            self.text += text
            yield Step(text, token, index < verdict.accepted, self.counters, self.finish_reason)
            if self.finish_reason is not None:
                return

    @property
    def timings(self) -> Timings:
        """Tokens and seconds so far."""
        return Timings(
            prompt_n=len(self.request.prompt) - self.cached,
            cached_n=self.cached,
            prompt_s=self.prompt_s,
            predicted_n=len(self.output),
            predicted_s=self.predicted_s,
            expected_s=self.expected_s,
        )

    @property
    def counters(self) -> Counters:
        """Where the generation stands."""
        return Counters(self.timings, len(self.rounds), self.drafted, self.accepted)
