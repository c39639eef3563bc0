"""The decoding loop: a generation made of rounds (``round.py``).

In: the engines' sequences and a request. Out: a stream of ``Step``, one per token, which every front end consumes. The
``Decoding`` that made the stream then holds everything that is logged.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from adaptive.control.policy import LengthPolicy, Scope, SharedLength
from adaptive.decoding.round import commit, proposing, round_of, speculative_round
from adaptive.decoding.supervision import SupervisionBuffer
from adaptive.decoding.text import TextStream
from adaptive.decoding.verifier import Verifier, pass_over
from adaptive.decoding.verify import Verdict
from adaptive.drafting.grafting import Grafting
from adaptive.drafting.grammar import GrammarDrafter
from adaptive.drafting.history import HistoryDrafter
from adaptive.drafting.model import prepare
from adaptive.drafting.proposal import Proposal
from adaptive.drafting.protocol import Drafter, Proposer, Wanted
from adaptive.engines.protocol import ExtendCall, Proposed, Sequence
from adaptive.types import FREE, HISTORY, Round, SamplingParams, StopParams, Supervision, Timings

# Seconds of rounds whose tokens are shown together: one frame of a screen. The work between two rounds (text, hooks,
# the caller) is cheap when repeated, but expensive right after a pass over the weights, which evicts its code and data
# from the processor's caches. Too high: text appears in jerks. Too low: that work is repeated more often.
BURST_S = 0.016
# Relative difference between two clocks, read one after the other, up to which they count as equal.
SAME = 0.001
# Tokens of an answer for which the caches are reserved at first, and the least growth later. Most answers are shorter
# than their limit. Too low: a long answer's cache is copied more often. Too high: memory is wasted.
ANSWER_RESERVE = 1024
# Tokens after the committed ones that are always reserved as well: a recorded pass writes up to 17.
AHEAD = 32
# Tokens that a draft catches up with in a round shared by several answers. Too high: the other answers wait longer. Too
# low: the draft's weights are read more often.
SLICE = 128
# The same while other answers wait for their first token: the tokens of a few rounds without the draft.
FEW = 32
# Tokens of a lone prompt after which the caller checks for new requests and for a client that has gone. Passes of
# transformers' own forward have this size, those of our own forward are smaller.
PART = 512


class Step(NamedTuple):
    """One token of the answer, and the text that has become certain since the previous step.

    ``finish_reason`` is set on the last step only: ``stop`` or ``length``.
    """

    text: str
    token: int
    from_draft: bool
    finish_reason: str | None = None


@dataclass(frozen=True)
class Request:
    """One prompt, as token ids, and the parameters of its answer.

    ``end_tokens`` end the answer (end of sequence, stop token ids). ``record`` keeps supervision.
    """

    prompt: list[int]
    sampling: SamplingParams
    stop: StopParams
    end_tokens: frozenset[int]
    record: bool = True


def _report(policy: LengthPolicy | SharedLength, outcome: Round) -> None:
    """Report a finished round to the policy: of the draft or plain, or of a proposer without forwards."""
    if outcome.drafter in FREE:
        policy.observe_free(outcome)
    else:
        policy.observe(outcome)


def clock_ratio(seconds: float, own: float) -> float:
    """The ratio of the seconds by one clock to the seconds by another (``own``)."""
    return seconds / own if own > 0 else 1.0


@dataclass(slots=True)
class Turn:
    """One answer's part of a pass over several answers: the ``call``, with 0 rows for a slice of its prompt that does
    not end it. ``fed`` of the call's tokens belong to the text, up to its ``held``-th; the others are the proposal,
    made by ``drafter`` in ``draft_s`` seconds. ``steps``: tokens that the draft computed, dropped ones included."""

    call: ExtendCall
    fed: int
    held: int
    proposal: Proposal | None = None
    drafter: Proposer | None = None
    steps: int = 0
    draft_s: float = 0.0


class Decoding:
    """One generation: rounds until a stop, a limit, or until the caller ends it.

    ``steps()`` is the stream. All other attributes are filled in along the way and complete when the stream has ended,
    also when the caller closes it early (``finish_reason`` is then ``cancelled``). ``clock`` measures all seconds that
    are kept; the policy observes rounds by its own clock.

    Code that decodes several answers (``batch.py``) takes the same steps separately: ``begin``; then either ``alone``
    or, for a pass over several answers, ``prompt_turn`` or ``turn`` followed by ``judge``; each time ``show``; at last
    ``end``.
    """

    clock: Callable[[], float] = staticmethod(time.perf_counter)

    def __init__(
        self,
        request: Request,
        target: Sequence,
        context_length: int,
        drafter: Drafter | None,
        verifier: Verifier,
        policy: LengthPolicy,
        stream: TextStream,
        between: Callable[[], bool] | None = None,
        history: HistoryDrafter | None = None,
        scope: Scope | None = None,
    ) -> None:
        """``between`` is called before every burst of rounds, when no pass runs and weights may change; it returns
        whether the draft may be used in these rounds. ``history`` proposes instead of the drafter, before it or after
        it, if the policy expects more of that. ``scope`` selects the policy's estimates for this answer."""
        self.request = request
        self.target = target
        self.drafter = drafter
        self.verifier = verifier
        self.policy = policy
        self.stream = stream
        self.between = between or (lambda: True)
        self.reading: Callable[[int], None] | None = None  # as ``Assistant.reading``
        self.history = history
        self.grafting = None if history is None else Grafting(drafter, history, policy)
        sampling = request.sampling
        self.scope = scope or Scope("", sampling.temperature, sampling.seeded)
        self._shared_length: SharedLength | None = None  # chooses lengths in shared rounds
        self._shared_grafting: Grafting | None = None
        constraint = verifier.processor.constraint
        self.grammar = None if constraint is None else GrammarDrafter(constraint)
        self.committed = list(request.prompt)
        self.cached = target.length
        self.most_tokens = min(request.stop.max_new_tokens, context_length - len(request.prompt))
        self._longest = len(request.prompt) + self.most_tokens  # tokens of the longest possible text
        verifier.longest = self._longest
        # Most tokens that the caches hold. The nodes of a tree are more than its accepted tokens can be.
        self._most_held = context_length if policy.tree else self._longest
        self.output: list[int] = []
        self.text = ""
        self.finish_reason: str | None = None
        self.rounds: list[Round] = []
        self.buffer: SupervisionBuffer | None = None
        self.supervision: Supervision | None = None
        self.prompt_s = self.predicted_s = self._began = 0.0
        self._first: float | None = None  # when the prompt had been computed
        self._timed = 0  # rounds whose seconds ``predicted_s`` has
        self._expected: list[float] = []  # seconds that the policy expected of each round
        self._unshown: list[Verdict] = []
        self._left = self.most_tokens  # tokens that may still be decoded
        self._ended = False  # whether the last decoded token ends the answer
        self._reserved = self._draft_reserved = 0  # tokens that the caches are reserved for

    def steps(self) -> Iterator[Step]:
        """Answer the prompt, whose beginning the target's cache may already hold. Yields a ``Step`` per token."""
        try:
            self.begin()
            while self.reading is not None and self.unread > PART:  # without ``reading``, one call computes all of it
                self.reading(self.unread)
                self.alone(False, PART)
            self.alone(False)
            while True:
                yield from self.show()
                if self.finish_reason is not None:
                    return
                self.alone(self.between())
        finally:
            self.end()

    def begin(self) -> None:
        """Prepare passes and reserve the initial memory. Raises AdaptiveError if there is not enough memory."""
        prepare(self.target, self.drafter, len(self.committed), self.most_tokens + AHEAD, self.policy.adviser)
        self._reserve(0)
        self.verifier.processor.start(torch.tensor(self.committed))
        self.buffer = SupervisionBuffer() if self.request.record else None
        self._began = self.clock()

    def alone(self, speculate: bool, most: int | None = None) -> None:
        """Compute the prompt, or the next ``most`` tokens of it; once it is computed, run a burst of rounds.
        ``speculate``: whether the draft may be used in them."""
        if self._first is not None:
            self._burst(speculate)
        elif most is not None and self.unread > most:
            self.target.extend(self.committed[self.target.length :][:most], 0)
        else:
            # The first round scores the prompt. Its time counts as the prompt's, and it drafts nothing.
            self._read(*speculative_round(self.target, None, self.verifier, self.committed, 0, clock=self.clock)[1:])

    def _read(self, verdict: Verdict, logits: torch.Tensor) -> None:
        """Finish the prompt: keep its first token, and stop drafting ahead until rounds begin."""
        if self.drafter is not None:
            self.drafter.rollback(len(self.request.prompt))
        self._keep(verdict, logits)
        self._first = self.clock()
        self.prompt_s = self._first - self._began

    @property
    def unread(self) -> int:
        """Tokens of the prompt that are not computed yet."""
        return 0 if self._first is not None else len(self.committed) - self.target.length

    @property
    def ended(self) -> bool:
        """Whether the last decoded token ends the answer; stop strings are found only by ``show``."""
        return self._ended

    def prompt_turn(self, most: int) -> Turn:
        """The answer's part of a shared pass while its prompt is unread: at most ``most`` tokens of it."""
        fed, rows = self.committed[self.target.length :], 1
        if len(fed) > most:
            fed, rows = fed[:most], 0
        return Turn(ExtendCall(self.target, fed, rows), len(fed), len(self.committed))

    def turn(self, answers: int, speculate: bool, hurried: bool = False) -> Generator[Wanted, Proposed, Turn]:
        """The answer's part of a shared pass once its prompt is read: a round, whose pass is shared by ``answers``
        answers. ``speculate``: whether the draft may be used. ``hurried``: others wait for their first token, so the
        draft does not read a long rest of this prompt now. Yields the calls that it wants of the draft."""
        committed = self.committed
        if self._shared_length is None:
            self._shared_length = self.policy.among(self.scope)
            if self.history is not None:
                self._shared_grafting = Grafting(self.drafter, self.history, self._shared_length)
        shared, limit, unseen = self._shared_length, 0, 0
        if speculate and self.drafter is not None:
            limit = self._limit(self.drafter)
            unseen = self.drafter.unseen(len(committed))
        shared.decoded = len(committed) - len(self.request.prompt)
        length = shared.next_length(limit, answers, unseen)
        if length and self.drafter is not None:
            # A draft that lacks much of the text reads one slice now and proposes nothing in this round.
            if unseen > SLICE and not hurried:
                self._reserve(length)
                self.drafter.feed(committed, SLICE)
            if unseen > (FEW if hurried else SLICE):
                length = 0
                shared.reads()
        drafter, most = self._who_drafts(length, self._shared_grafting)
        self._reserve(most)
        proposal = yield from proposing(drafter, self.verifier, committed, most, shared.adviser)
        fed = committed[self.target.length :]
        call = ExtendCall(self.target, *pass_over(fed, proposal))
        steps = shared.steps
        if not steps and proposal is not None and proposal.drafter not in FREE:
            steps = len(proposal.tokens)
        return Turn(call, len(fed), len(committed), proposal, drafter, steps)

    def judge(self, turn: Turn, logits: torch.Tensor, seconds: float, ratio: float, others: int) -> None:
        """Take in the logits of a pass shared with ``others`` answers. ``seconds`` is this answer's share of the pass
        by the policy's clock; ``ratio`` is that of the answer's clock to the policy's."""
        if not turn.call.rows:
            return
        verdict, raw = self.verifier.judge(self.target, turn.fed, turn.proposal, turn.held, logits)
        commit(self.target, turn.drafter, self.verifier, self.committed, turn.proposal, verdict)
        if self._first is None:
            self._read(verdict, raw)
            return
        self._keep(verdict, raw)
        outcome = round_of(turn.proposal, verdict, turn.draft_s, seconds)._replace(shared=others)
        self.rounds.append(outcome)
        assert self._shared_length is not None
        expected = self._shared_length.expected
        self._expected.append((1 + verdict.accepted) / expected if expected else 0.0)
        if self._shared_grafting is not None and turn.drafter is self._shared_grafting:
            self._shared_grafting.observe(verdict.tokens)
        _report(self._shared_length, outcome)
        self._stretch(len(self.rounds) - 1, ratio)

    def end(self) -> None:
        """Complete the fields of the answer, however it ended, and roll the caches back to the shown tokens."""
        self.finish_reason = self.finish_reason or "cancelled"
        if self.history is not None:
            self.history.settle()
        # Tokens after a stop are not in the text: their rounds are left out of the figures, the caches drop them.
        self._forget_rounds()
        known = len(self.request.prompt) + len(self.output)
        self.target.rollback(known)
        if self.drafter is not None:
            self.drafter.rollback(known)
        if self.buffer is not None and self.output:
            self.supervision = self.buffer.take(len(self.output))

    @torch.inference_mode()
    def _burst(self, speculate: bool) -> None:
        """Run rounds until it is time to show their tokens or the answer ends."""
        policy, clock, own_clock = self.policy, self.clock, self.policy.clock
        advise = policy.adviser
        began, own_began, first, late = clock(), own_clock(), len(self.rounds), False
        until = began + BURST_S
        while not self._ended and not late:
            limit = unseen = 0
            if speculate and self.drafter is not None:
                limit = self._limit(self.drafter)
                unseen = self.drafter.unseen(len(self.committed))
            length = policy.next_length(limit, unseen, len(self.committed))
            rounds_left, begins = policy.steady, len(self.rounds)
            end = len(self.committed) + limit  # where a round has no room for drafted tokens
            while True:
                most = min(length, max(0, end - len(self.committed))) if self._left > 1 else 0
                drafter, most = self._who_drafts(most, self.grafting, len(self.rounds) - begins)
                self._reserve(most)
                outcome, verdict, logits = speculative_round(
                    self.target, drafter, self.verifier, self.committed, most, advise, own_clock
                )
                self._keep(verdict, logits)
                self.rounds.append(outcome)
                rounds_left -= 1
                # The policy learns from a round of two proposers, or of a grammar, before the next round.
                two_or_grammar = outcome.first or outcome.drafter in FREE or outcome.drafted > length
                if two_or_grammar and outcome.drafter != HISTORY:
                    rounds_left = 0
                if self.grafting is not None and drafter is self.grafting:
                    self.grafting.observe(verdict.tokens)
                late = clock() >= until
                if late or self._ended or rounds_left <= 0 or (length and len(self.committed) >= end):
                    break
            for outcome in self.rounds[begins:]:
                _report(policy, outcome)
                self._expected.append((1 + outcome.accepted) / policy.expected if policy.expected else 0.0)
        if own_clock is not clock:
            self._stretch(first, clock_ratio(clock() - began, own_clock() - own_began))

    def _stretch(self, first: int, ratio: float) -> None:
        """Multiply the seconds of the rounds from ``first`` on, and those expected of them, by ``ratio``."""
        if abs(ratio - 1.0) > SAME:
            self.rounds[first:] = [outcome.stretched(ratio) for outcome in self.rounds[first:]]
            self._expected[first:] = [ratio * seconds for seconds in self._expected[first:]]

    def _limit(self, drafter: Drafter) -> int:
        """The most tokens that the drafter may propose in the next round, which commits one token more than it accepts.
        The nodes of a tree need only have room in the caches: one that is too deep is cut (``round.py``)."""
        committed = len(self.committed)
        room = self._most_held - committed - (not self.policy.tree)
        return max(0, min(room, drafter.limit(committed))) if self._left > 1 else 0

    def _who_drafts(self, length: int, grafting: Grafting | None, passed: int = 0) -> tuple[Proposer | None, int]:
        """The drafter of the next round and the number of tokens it may draft: the grammar, if it leaves no choice for
        more than ``length`` tokens; else history instead of or with the model, if ``grafting`` plans that; else the
        model with ``length`` tokens, as the policy chose ``passed`` rounds ago."""
        if self.grammar is not None:
            certain = self.grammar.look(min(AHEAD, self._left) - 1)
            if certain > length:
                return self.grammar, certain
        if grafting is not None:
            # A round commits one token more than it accepts.
            most = grafting.plan(self.committed, length, self._left - 1, passed)
            if most is not None:
                return grafting, most
        return self.drafter, length

    def _reserve(self, length: int) -> None:
        """Reserve the caches for a round of ``length`` drafted tokens; the draft's cache follows the target's."""
        needed = len(self.committed) + max(AHEAD, 1 + length)
        most = max(self._longest, min(needed, self._most_held))
        if self._reserved < needed and self._reserved < most:
            more = max(ANSWER_RESERVE, self._reserved // 2)
            reserved = min(most, max(needed, (self._reserved or len(self.committed)) + more))
            self.target.reserve(reserved)
            self._reserved = reserved
        if length and self.drafter is not None and self._draft_reserved < self._reserved:
            self.drafter.reserve(self._reserved)
            self._draft_reserved = self._reserved

    def _keep(self, verdict: Verdict, logits: torch.Tensor) -> None:
        """Take in the tokens of one round, to be shown later."""
        tokens = verdict.tokens
        if self.buffer is not None:
            self.buffer.append(logits, verdict.chosen, len(tokens))
        self._unshown.append(verdict)
        self._left -= len(tokens)
        self._ended = self._left <= 0 or not self.request.end_tokens.isdisjoint(tokens)

    def show(self) -> Iterator[Step]:
        """Show the tokens of the last rounds, up to and including the one that ends the answer."""
        self.predicted_s = 0.0 if self._first is None else self.clock() - self._first
        self._timed = len(self.rounds)
        verdicts, self._unshown = self._unshown, []
        for verdict in verdicts:
            for index, token in enumerate(verdict.tokens):
                self.output.append(token)
                ends = token in self.request.end_tokens
                text = "" if ends else self.stream.push(token)
                if ends or self.stream.stopped:
                    self.finish_reason = "stop"
                elif len(self.output) >= self.most_tokens:
                    self.finish_reason = "length"
                if self.finish_reason is not None:
                    text += self.stream.finish()
                self.text += text
                yield Step(text, token, index < verdict.accepted, self.finish_reason)
                if self.finish_reason is not None:
                    return

    def _forget_rounds(self) -> None:
        """Drop the rounds of which no token was shown, and their time. In the last remaining round, the drafted tokens
        after the last shown one count neither as drafted nor as accepted."""
        shown = 1  # by the prompt's pass
        for number, outcome in enumerate(self.rounds):
            left = len(self.output) - shown
            if left <= 0:
                self.predicted_s -= sum(r.draft_s + r.verify_s for r in self.rounds[number : self._timed])
                del self.rounds[number:], self._expected[number:]
                return
            if outcome.accepted >= left:
                self.rounds[number] = outcome.cut(left)
            shown += 1 + outcome.accepted

    @property
    def drafted(self) -> int:
        """Tokens that were drafted."""
        return sum(outcome.drafted for outcome in self.rounds)

    @property
    def accepted(self) -> int:
        """Tokens that were drafted and accepted."""
        return sum(outcome.accepted for outcome in self.rounds)

    @property
    def timings(self) -> Timings:
        """Tokens and seconds so far."""
        return Timings(
            prompt_n=len(self.request.prompt) - self.cached,
            cached_n=self.cached,
            prompt_s=self.prompt_s,
            predicted_n=len(self.output),
            predicted_s=self.predicted_s,
            expected_s=sum(self._expected),
        )
