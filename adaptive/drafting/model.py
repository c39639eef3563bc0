"""The draft model, or a head on the target's hidden states, as the drafter: token by token, a whole proposal in one
call, or queued on a device (``queued.py``)."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch

from adaptive.control.policy import Advice, Adviser
from adaptive.drafting.proposal import Proposal
from adaptive.drafting.protocol import Drafter, Proposing, Wanted
from adaptive.drafting.queued import Choice, Queued, choice_of, kind_of
from adaptive.engines.protocol import (
    Chooses,
    Engine,
    FusedCalls,
    Mask,
    Prepares,
    ProposalCall,
    Proposed,
    ProposesTogether,
    ReadsFeatures,
    Sequence,
    Thresholds,
    sequences,
)
from adaptive.noise import race
from adaptive.sampling import LogitsProcessor, Transform, Uniform, draw_on_device, pick
from adaptive.tokens import Ids, argmax, as_array, as_tensor, join, known, likeliest
from adaptive.types import MODEL, SamplingParams

# Most tokens of an answer for which passes are prepared. Passes beyond are run unprepared; preparing more would take
# memory for answers that are rarely that long.
PREPARED = 8192


@runtime_checkable
class PreparesProposals(Protocol):
    """A drafter that prepares the passes of its proposals."""

    def prepare(self, length: int, advise: Adviser | None) -> None:
        """Prepare for a text of ``length`` tokens in all, as the function ``prepare``."""


def drafter_name(engine: Engine) -> str:
    """The name of a draft in rounds, records and figures."""
    return engine.name if isinstance(engine, ReadsFeatures) else MODEL


def prepare(target: Sequence, drafter: Drafter | None, prompt: int, most: int, advise: Adviser | None) -> None:
    """Let both models prepare their passes, before an answer of at most ``most`` tokens to a prompt of ``prompt``
    tokens, in which ``advise`` is called."""
    length = prompt + min(most, PREPARED)
    if isinstance(target, Prepares):
        target.prepare(length)
    if isinstance(drafter, PreparesProposals):
        drafter.prepare(length, advise)


def warm_up(target: Engine, draft: Engine | None, params: SamplingParams, advise: Adviser | None) -> None:
    """Prepare the passes of answers with these parameters after the models were loaded, so that the first answer does
    not wait for that either."""
    held, other = sequences(target, draft)
    drafter = None
    if draft is not None and other is not None:
        processor = LogitsProcessor(params, target.vocab_size, target.device)
        drafter = ModelDrafter(other, draft, target.vocab_size, params, processor, torch.Generator(draft.device))
    prepare(held, drafter, 0, 1, advise)


class ModelDrafter:
    """A draft model or a head (``name``) that drafts token by token, with the target's own sampling transforms."""

    def __init__(
        self,
        sequence: Sequence,
        engine: Engine,
        target_vocab: int,
        params: SamplingParams,
        processor: LogitsProcessor,
        generator: torch.Generator,
        untrained: bool = False,
    ) -> None:
        """``untrained``: a head drafts even before it was trained, so that its time can be measured."""
        self.sequence = sequence
        self.engine = engine
        self.head = engine if isinstance(engine, ReadsFeatures) and not untrained else None
        self.name = drafter_name(engine)
        self.target_vocab = target_vocab
        self.params = params
        self.transform = Transform(params)
        self.processor = processor
        self.uniform = Uniform(generator)
        self._adjusts = processor.active
        self._vocab = min(engine.vocab_size, target_vocab)
        # The engine's way of making a whole proposal in one call, if it has one for these parameters.
        self._fused = None if processor.alters else sequence.fused
        self._mask = None if processor.constraint is None else processor.constraint.place
        # The engine that makes the proposals for several texts in one call, if it can.
        self._together = engine if self._fused is not None and isinstance(engine, ProposesTogether) else None
        # Set if the engine runs a pass and the following choice as one recorded unit. ``queues``: the device works
        # through a queue while the program continues. Not with a grammar, which only the program can evaluate.
        self._chooses = sequence if isinstance(sequence, Chooses) else None
        self.queues = engine.device.type == "cuda" and processor.constraint is None

    def limit(self, committed: int) -> int:
        """The last drafted token is never fed back, so it may be one beyond the context. 0 for an untrained head."""
        if self.head is not None and not self.head.ready:
            return 0
        return max(0, self.engine.context_length - committed + 1)

    def unseen(self, committed: int) -> int:
        """The number of tokens that the next proposal feeds in its first forward, without the last committed one."""
        return committed - 1 - self.sequence.length

    def propose(self, committed: list[int], length: int, advise: Adviser | None = None) -> Proposal | None:
        """One forward per token; the first one also feeds the tokens committed since the last proposal.

        ``advise`` is called when a distribution is known and nothing has been drawn from it yet.
        """
        return self.go_on(committed, [], length, advise)

    def go_on(
        self, committed: list[int], proposed: list[int], length: int, advise: Adviser | None = None
    ) -> Proposal | None:
        """As ``propose``, behind ``proposed`` tokens of another drafter that follow the committed ones. The first
        forward feeds them too."""
        held = len(committed)
        feed = self._to_feed([*committed, *proposed] if proposed else committed)
        if self._fused is not None:
            return self._propose_fused(self._fused, proposed, feed, length, advise)
        if self.queues and (advise is None or isinstance(advise, Thresholds)):
            return self._propose_queued(held, proposed, feed, length, advise)
        return self._propose_by_token(held, proposed, feed, length, advise)

    def proposing(self, committed: list[int], length: int, advise: Adviser | None = None) -> Proposing:
        """As ``propose``, in one call with the proposals of others if the engine supports that."""
        if self._fused is None or self._together is None:
            return self.propose(committed, length, advise)
        call = self._call(self._to_feed(committed), length, advise, self._mask)
        return self._made(call, (yield Wanted(self._together, self.sequence, self._fused, call)))

    def feed(self, committed: list[int], most: int) -> None:
        """Feed at most ``most`` of the unseen tokens before the last one."""
        self.sequence.extend(self._to_feed(committed[:-1])[:most], 0)

    def _to_feed(self, committed: list[int]) -> list[int]:
        """The committed tokens that the cache lacks. A token that only the target has is replaced by another one: that
        can make a guess worse, nothing else."""
        unseen, known = committed[self.sequence.length :], self.engine.vocab_size
        return [min(token, known - 1) for token in unseen] if known < self.target_vocab else unseen

    def _propose_fused(
        self, sequence: FusedCalls, proposed: list[int], feed: list[int], length: int, advise: Adviser | None
    ) -> Proposal | None:
        call = self._call(feed, length, advise, self._mask_behind(proposed))
        return self._made(call, sequence.propose(call))

    def _mask_behind(self, proposed: list[int]) -> Mask | None:
        """The grammar's mask behind ``proposed`` tokens: the engine knows only those that it has drafted itself."""
        mask = self._mask
        if mask is None or not proposed:
            return mask
        return lambda drafted: mask([*proposed, *drafted])

    def _call(self, feed: list[int], length: int, advise: Adviser | None, mask: Mask | None) -> ProposalCall:
        params = self.params
        uniform = [] if params.greedy or params.seeded else self.uniform.ahead(length)
        return ProposalCall(feed, length, self._vocab, params, uniform, advise, mask)

    def _made(self, call: ProposalCall, proposed: Proposed) -> Proposal | None:
        tokens, probs = proposed
        if call.uniform:
            self.uniform.skip(len(tokens))
        return Proposal(self.name, tokens, probs) if tokens else None

    def prepare(self, length: int, advise: Adviser | None) -> None:
        """As the function ``prepare``, for the draft."""
        if not isinstance(self.sequence, Prepares):
            return
        chooser = None
        if self.queues and not self._adjusts and (advise is None or isinstance(advise, Thresholds)):
            with torch.inference_mode():
                kind = kind_of(self.params, self._vocab, 1, advise)
                chooser = choice_of(self.engine, kind, self.params)
                chooser.begin(advise)
        self.sequence.prepare(length, chooser)

    @torch.inference_mode()
    def _propose_queued(
        self, held: int, proposed: list[int], feed: Ids, length: int, thresholds: Thresholds | None
    ) -> Proposal | None:
        params, place = self.params, held + len(proposed)
        kind = kind_of(params, self._vocab, length, thresholds)
        choice = choice_of(self.engine, kind, params)
        numbers = self.uniform.column_ahead(length) if kind.draws else None
        choice.begin(thresholds, numbers, params.seed if kind.seeded else None, range(place, place + length))
        queued = Queued(choice, thresholds, self.uniform)
        for step in range(length):
            self._step(feed, choice, proposed, step)
            feed = choice.token
            queued.stepped()
            if step + 1 < length and not queued.goes_on():
                break
        count = queued.close()
        if not count:
            self.sequence.rollback(place)
            return None
        probs = choice.probs[:count].clone() if kind.draws else None
        return Proposal(self.name, choice.tokens[:count].clone(), probs, queued=queued)

    def _step(self, feed: Ids, choice: Choice, proposed: list[int], step: int) -> None:
        """Queue the pass over ``feed`` and the choice after it; ``step`` steps are queued already."""
        if self._adjusts:
            logits = self.sequence.extend(feed, 1)[:, : self.target_vocab]
            choice(self.processor.apply(logits, as_tensor(join([proposed, choice.tokens[:step]]))))
        elif self._chooses is not None:
            self._chooses.choose(feed, choice)
        else:
            choice(self.sequence.extend(feed, 1))

    def _propose_by_token(
        self, held: int, proposed: list[int], feed: Ids, length: int, advise: Adviser | None
    ) -> Proposal | None:
        tokens: list[Ids] = []
        probs: list[Any] = []
        for position in range(1, length + 1):
            logits = self.sequence.extend(feed, 1)
            if self.engine.vocab_size > self.target_vocab:
                logits = logits[:, : self.target_vocab]
            if self._adjusts:
                logits = self.processor.apply(logits, as_tensor(join([proposed, *tokens])))
            q, rows, advice = None, None, Advice.MORE
            if not self.params.greedy:
                q = self.transform(logits, position - 1)
                rows = as_array(q)
                if advise is not None:
                    advice = advise(position, float((q if rows is None else rows).max()))
            elif advise is None:
                feed = argmax(logits)
            else:
                sure, feed = likeliest(logits)
                advice = advise(position, sure)
            if advice is Advice.DROP:
                break
            if q is not None:
                feed = self._draw(q, rows, held + len(proposed) + position - 1)
                if not self.params.seeded:
                    probs.append(q if rows is None else rows[0])
            tokens.append(feed)
            if advice is Advice.LAST:
                break
        if not tokens:
            return None
        if probs and isinstance(probs[0], torch.Tensor):
            return Proposal(self.name, join(tokens), torch.cat(probs))
        return Proposal(self.name, join(tokens), probs or None)

    def _draw(self, q: torch.Tensor, rows: Any, place: int) -> Ids:
        """A token of q (1, vocab) for a ``place`` of the text; ``rows`` is q for numpy. If q is NaN, any token: the
        target will reject it."""
        seed = self.params.seed
        if seed is None:
            return draw_on_device(q, self.uniform) if rows is None else [pick(rows[0], self.uniform.next()) or 0]
        kernels = self.transform.kernels
        if rows is not None and kernels is not None:
            return [kernels.race(rows[0], seed, place) or 0]
        return known(race(q, seed, place))

    def reserve(self, length: int) -> None:
        """Reserve room in the draft's cache."""
        self.sequence.reserve(min(length, self.engine.context_length))

    def rollback(self, length: int) -> None:
        """Forget the rejected tokens."""
        self.sequence.rollback(length)
