"""A chat assistant on one pair: chat template, sessions that keep their cache, streaming, the log.

Every front end (command line, demo, server) uses an ``Assistant`` and consumes its stream.
"""

from __future__ import annotations

import logging
import random
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from adaptive.answering import Answering, Question
from adaptive.caches import Conversation, Conversations
from adaptive.control.goodput import GoodputLength
from adaptive.control.lengths import LengthByCost
from adaptive.control.memory import Memory
from adaptive.control.nodes import NodesByCost
from adaptive.control.policy import FixedLength, LengthPolicy, Scope
from adaptive.decoding.loop import Decoding, Request, Step
from adaptive.decoding.text import TextStream
from adaptive.decoding.verifier import Verifier
from adaptive.drafting.ahead import AheadDrafter, Worker, drafts_ahead
from adaptive.drafting.archive import History
from adaptive.drafting.model import ModelDrafter
from adaptive.drafting.protocol import Drafter
from adaptive.drafting.remote import RemoteDrafter
from adaptive.drafting.tree import TreeDrafter
from adaptive.encoding import encode_text, render_chat
from adaptive.engines.load import Forward, forward_of
from adaptive.engines.protocol import Engine, ReadsFeatures, no_trees
from adaptive.engines.protocol import Sequence as EngineSequence
from adaptive.errors import AdaptiveError, ContextFullError, first_line
from adaptive.grammar import Constraint, Grammar, Grammars
from adaptive.kept_caches import KeptCaches
from adaptive.pair import Pair
from adaptive.records.features import Features
from adaptive.records.writer import LogWriter
from adaptive.sampling import LogitsProcessor
from adaptive.settings import Settings, fixed_draft_length
from adaptive.types import Message, Round, SamplingParams, StopParams

logger = logging.getLogger("adaptive")


def length_policy(
    settings: Settings,
    memory: Memory | None = None,
    attentive: bool = True,
    clock: Callable[[], float] = time.perf_counter,
    disk: bool = False,
    trees: bool = False,
) -> LengthPolicy:
    """The policy that ``--draft-length`` names. ``auto`` starts from ``memory``, if there is one. For a target on
    ``disk`` it learns from rounds alone, and chooses a number of nodes if the draft makes ``trees``.

    ``attentive`` and ``clock`` as in ``GoodputLength``. Raises AdaptiveError as ``fixed_draft_length``.
    """
    fixed = fixed_draft_length(settings.draft_length)
    if fixed is not None:
        return FixedLength(*fixed)
    if disk:
        return NodesByCost() if trees else LengthByCost()
    if memory is not None:
        return memory.policy(attentive, settings.history != "off", clock)
    return GoodputLength(attentive=attentive, clock=clock)


class Assistant:
    """Answers with one pair. Not thread-safe; a server runs it on one engine thread.

    ``adapter`` is the id of the adapter in use. Finished generations go to ``log``, if there is one; each names the
    adapter that it began with. ``between_rounds``, if set, is called before every burst of rounds: it may swap the
    adapter, and returns whether the draft may be used. ``reading``, if set, is called before each part of a long
    prompt with the number of its tokens that are not computed yet; an exception from it ends the answer.
    """

    def __init__(
        self,
        pair: Pair,
        policy: LengthPolicy,
        log: LogWriter | None,
        cache_bytes: int = 0,
        history: History | None = None,
        kept: KeptCaches | None = None,
    ) -> None:
        """``cache_bytes`` limits the caches of several conversations; 0 keeps one conversation. ``history`` is the text
        that may be drafted from besides the model, ``kept`` keeps caches on disk. Raises AdaptiveError if the policy
        drafts trees and a model does not support them."""
        drafted = pair.draft is not None or pair.remote is not None
        for engine in (pair.target, pair.draft):
            if policy.tree and drafted and engine is not None and not engine.trees:
                raise no_trees(engine.name)
        if policy.tree and pair.remote is not None and not pair.remote.hello.trees:
            raise no_trees(f"the draft at {pair.remote.url}")
        self.pair = pair
        self.policy = policy
        self.log = log
        self.history = history if pair.target.undraftable is None else None
        self.adapter: str | None = None
        self.latest: Answering | None = None  # the answer that began most recently
        self.under_way: list[Answering] = []
        self.chance: random.Random = random.SystemRandom()  # seeds answers that have no seed
        self.between_rounds: Callable[[], bool] | None = None
        self.reading: Callable[[int], None] | None = None
        # Whether the model drafts while the target verifies: only where the target waits for its disk.
        self.drafts_ahead = forward_of(pair.target) is Forward.STREAMED and not isinstance(pair.draft, ReadsFeatures)
        self._worker = Worker()
        self._swap: tuple[str | None, Iterator[None], Sequence[float] | None] | None = None
        self.session = uuid.uuid4().hex[:12]
        self.conversations = Conversations(pair.target, pair.draft, cache_bytes, kept)
        self._ends = _end_tokens(pair)
        self.grammars = Grammars(pair.tokenizer, pair.target.vocab_size, self._ends)

    def use_adapter(self, adapter: str | None, folder: Path | None) -> None:
        """Swap the draft's adapter at once. Raises AdaptiveError if it does not fit."""
        self.begin_swap(adapter, folder)
        self.finish_swap()

    def begin_swap(
        self,
        adapter: str | None,
        folder: Path | None,
        expected: Sequence[float] | None = None,
        steps: Iterator[None] | None = None,
    ) -> None:
        """Read and check another adapter; ``finish_swap`` then merges it, in any number of calls.

        ``expected`` is the adapter's acceptance by position, for the draft-length policy. ``steps``: those of the
        draft's ``swap_adapter``, if the first one, which reads and checks, has been done before (any thread may do it
        while the draft is in use); ``folder`` is then not read. The draft must not be used until the swap is finished.
        Raises AdaptiveError if the adapter does not fit; the one in use then stays. An unfinished swap is finished
        first.
        """
        self.finish_swap()
        if self.pair.draft is None or adapter == self.adapter:
            return
        self._worker.stop()
        if steps is None:
            steps = self.pair.draft.swap_adapter(folder)
            next(steps, None)  # the weights are still the old ones
        self._swap = adapter, steps, expected

    @property
    def last(self) -> Decoding | None:
        """The decoding of the answer that began most recently."""
        return None if self.latest is None else self.latest.decoding

    @property
    def drafted_by(self) -> list[tuple[str | None, int]]:
        """``Answering.drafted_by`` of that answer."""
        return [] if self.latest is None else self.latest.drafted_by

    @property
    def rounds_by_adapter(self) -> list[tuple[str | None, tuple[Round, ...]]]:
        """``Answering.rounds_by_adapter`` of that answer."""
        return [] if self.latest is None else self.latest.rounds_by_adapter

    @property
    def swapping(self) -> bool:
        """Whether a swap has begun and is not finished."""
        return self._swap is not None

    def finish_swap(self, seconds: float = float("inf")) -> bool:
        """Continue a swap for about ``seconds``. Returns whether the draft is ready for use.

        Raises AdaptiveError if the swap cannot be finished; the draft is then used without an adapter.
        """
        if self._swap is None:
            return True
        adapter, steps, expected = self._swap
        until = time.perf_counter() + seconds
        try:
            for _ in steps:
                if time.perf_counter() >= until:
                    return False
        except BaseException:
            self._swapped(None)
            raise
        self._swapped(adapter, expected)
        return True

    def _swapped(self, adapter: str | None, expected: Sequence[float] | None = None) -> None:
        self._swap, self.adapter = None, adapter
        self.policy.swapped(expected)
        # Caches computed with other weights are stale. Answers in progress keep theirs: filling one anew could delay
        # the next token by seconds. Drafts from a stale cache are verified as usual.
        self.conversations.forget_drafts()
        for answering in self.under_way:
            answering.swapped(adapter)

    def forget(self) -> None:
        """Remove all text from memory: caches and the last answer. An answer in progress keeps what it needs until its
        end, and nothing of it is kept afterwards."""
        self.conversations.forget()
        if self.pair.remote is not None:
            self.pair.remote.forget()
        self.latest = None
        if self.history is not None:
            self.history.forget()

    def chat(
        self,
        messages: Sequence[Message],
        sampling: SamplingParams,
        stop: StopParams,
        *,
        session: str | None = None,
        domain: str | None = None,
        record: bool = True,
        grammar: Grammar | None = None,
        marks: Mapping[int, str] | None = None,
    ) -> Iterator[Step]:
        """Answer a chat; the part of it that is in the caches is not computed again. ``marks`` as in ``Question``. A
        ``grammar`` applies from the first token, so it turns thinking off in templates that have a switch for it."""
        prompt = encode_chat(self.pair, messages, thinks=grammar is None)
        return self.answer(
            Question(prompt, tuple(messages), "", sampling, stop, session, domain, record, grammar=grammar, marks=marks)
        )

    def complete(
        self,
        text: str,
        sampling: SamplingParams,
        stop: StopParams,
        *,
        session: str | None = None,
        domain: str | None = None,
        record: bool = True,
        grammar: Grammar | None = None,
    ) -> Iterator[Step]:
        """Continue a raw text, without the chat template."""
        prompt = encode_text(self.pair.tokenizer, text, self.pair.target.context_length)
        return self.answer(Question(prompt, (), text, sampling, stop, session, domain, record, grammar=grammar))

    def answer(self, question: Question) -> Iterator[Step]:
        """Answer a prompt of token ids. Raises AdaptiveError as ``begin``."""
        answering = self.begin(question)
        try:
            yield from answering.decoding.steps()
        finally:
            self.end(answering)

    def begin(self, question: Question) -> Answering:
        """Begin an answer. The caller runs its ``decoding`` by ``steps`` or in a batch, and then calls ``end``.
        Raises AdaptiveError for a request that cannot be answered."""
        prompt, sampling = question.prompt, question.sampling
        context = self.pair.target.context_length
        if not prompt:
            raise AdaptiveError("the prompt is empty; give at least one token")
        if len(prompt) >= context:
            raise ContextFullError(
                f"the prompt has {len(prompt)} tokens and the target's context holds {context}; "
                "shorten it or start anew"
            )
        constraint = None
        if question.grammar is not None:
            constraint = self.grammars.constraint(question.grammar)
            sampling = replace(sampling, constrained=True)
        record = question.record and self.log is not None and not question.forgotten.is_set()
        conversation = self.conversations.take(prompt, question.messages, question.client, question.session)
        session = question.session or (
            conversation.name if question.client or self.conversations.limit else self.session
        )
        scope = Scope(session, sampling.temperature, sampling.seeded)
        self.policy.begin(scope)
        stop = question.stop
        drawn = sampling
        if self.policy.tree and sampling.seed is None:  # a tree is drafted for known noise (drafting/tree.py)
            drawn = replace(sampling, seed=self.chance.getrandbits(63))
        request = Request(prompt, drawn, stop, self._end_set(stop), record or question.supervise)
        before = () if question.messages and not question.goes_on else prompt
        stream = TextStream(self.pair.tokenizer, stop.stop, before, question.marks)
        decoding = self._decoding(request, conversation, stream, question.owner, constraint, scope)
        answering = Answering(question, decoding, conversation, session, sampling, self.adapter, record)
        answering.hold()
        conversation.under_way = True
        conversation.private = conversation.private or not record
        self.under_way.append(answering)
        self.latest = answering
        return answering

    def has_room(self, tokens: int) -> bool:
        """Whether there is memory for the caches of one more answer of ``tokens`` tokens, including its prompt."""
        return self.conversations.has_room(tokens, (answering.conversation for answering in self.under_way))

    def end(self, answering: Answering) -> None:
        """End an answer that has begun, whether it is complete or not, and log it."""
        decoding, conversation = answering.decoding, answering.conversation
        self.under_way.remove(answering)
        if decoding.output:
            self.policy.ended(len(decoding.output))
        conversation.under_way = False
        answering.hold()
        if self.history is not None and decoding.history is not None:
            self.history.release(decoding.history)
        if answering.record and decoding.output and self.log is not None:
            self.log.write(answering.generation(self.pair.target.name), self._features(answering))

    def _features(self, answering: Answering) -> Features | None:
        """The hidden states to be kept beside a record; None if the draft reads none, if the caches were dropped, or if
        there is no memory for a copy of them: the record is worth more than they are."""
        if not isinstance(self.pair.draft, ReadsFeatures) or not answering.conversation.target.sequence.length:
            return None
        try:
            return answering.features()
        except (RuntimeError, MemoryError, ValueError) as error:  # torch's error of a full GPU is a RuntimeError
            logger.warning(
                "an answer is logged without its hidden states, which could not be copied: %s", first_line(error)
            )
            return None

    def _end_set(self, stop: StopParams) -> frozenset[int]:
        return frozenset(stop.stop_token_ids) | (frozenset() if stop.ignore_eos else self._ends)

    def _generator(self, device: torch.device) -> torch.Generator:
        """A random generator for an answer without a seed."""
        return torch.Generator(device).manual_seed(self.chance.getrandbits(63))

    def _decoding(
        self,
        request: Request,
        conversation: Conversation,
        stream: TextStream,
        owner: str,
        constraint: Constraint | None,
        scope: Scope,
    ) -> Decoding:
        """Wire caches, drafter, verifier and text stream for one request."""
        target, sampling = self.pair.target, request.sampling
        processor = LogitsProcessor(sampling, target.vocab_size, target.device, constraint)
        conversation.target.keep_prefix_of(request.prompt)
        drafter: Drafter | None = None
        if self.pair.remote is not None:
            there = RemoteDrafter(self.pair.remote, conversation, target.vocab_size, sampling, self.policy.tree)
            there.begin(request.prompt)
            drafter = there
        elif conversation.draft is not None and self.pair.draft is not None:
            conversation.draft.keep_prefix_of(request.prompt)
            drafter = self._drafter(conversation.draft.sequence, self.pair.draft, sampling, processor)
            # Nothing may run on a draft that is being changed.
            if isinstance(drafter, AheadDrafter) and not self.swapping:
                drafter.begin(request.prompt)
        verifier = Verifier(sampling, processor, self._generator(target.device))
        decoding = Decoding(
            request,
            conversation.target.sequence,
            target.context_length,
            drafter,
            verifier,
            self.policy,
            stream,
            self.between_rounds,
            None if self.history is None else self.history.drafter(owner, sampling.temperature),
            scope,
        )
        decoding.reading = self.reading
        if target.undraftable is not None:
            decoding.grammar = None
        return decoding

    def _drafter(
        self, sequence: EngineSequence, draft: Engine, sampling: SamplingParams, processor: LogitsProcessor
    ) -> Drafter:
        """The model as a drafter, which drafts ahead beside a target that waits for its disk."""
        given = sequence, draft, self.pair.target.vocab_size, sampling, processor, self._generator(draft.device)
        if not self.drafts_ahead:
            return (TreeDrafter if self.policy.tree else ModelDrafter)(*given)
        return AheadDrafter(drafts_ahead(draft, self.policy.tree)(*given), self._worker)


def encode_chat(pair: Pair, messages: Sequence[Message], thinks: bool = True) -> list[int]:
    """Token ids of a chat with the generation prompt; unless it ``thinks``, without thinking, if the template can turn
    it off. Raises AdaptiveError as ``render_chat``."""
    chat = [{"role": m.role, "content": m.content} for m in messages]
    variables = None if thinks else {"enable_thinking": False}
    return render_chat(pair.tokenizer, chat, pair.target.context_length, None, variables)


def _end_tokens(pair: Pair) -> frozenset[int]:
    """Every id that the tokenizer or the model's generation config calls the end of a sequence."""
    ends = pair.target.end_tokens
    eos = pair.tokenizer.eos_token_id
    return ends | (frozenset([eos]) if isinstance(eos, int) else frozenset())


def sampling_params(settings: Settings, pair: Pair) -> SamplingParams:
    """Sampling parameters from the settings; the checkpoint's recommendation gives the defaults."""
    default = pair.target.sampling

    def said(name: str) -> float:
        value = getattr(settings, name)
        return getattr(default, name) if value is None else value  # type: ignore[no-any-return]

    return SamplingParams(
        temperature=said("temperature"),
        top_k=int(said("top_k")),
        top_p=said("top_p"),
        min_p=said("min_p"),
        repetition_penalty=said("repetition_penalty"),
        presence_penalty=settings.presence_penalty,
        frequency_penalty=settings.frequency_penalty,
        seed=settings.seed,
    )
