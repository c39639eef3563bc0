"""A chat assistant on one pair: chat template, sessions that keep their cache, streaming, the log.

Every front end (command line, demo, server) talks to an ``Assistant`` and consumes its stream.
"""

from __future__ import annotations

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
from adaptive.control.memory import Memory
from adaptive.control.nodes import NodesByCost
from adaptive.control.policy import FixedLength, LengthPolicy, Scope
from adaptive.decoding.loop import Decoding, Request, Step
from adaptive.decoding.text import TextStream
from adaptive.decoding.verifier import Verifier
from adaptive.drafting.ahead import Beside, Worker, drafts_ahead
from adaptive.drafting.archive import History
from adaptive.drafting.model import ModelDrafter
from adaptive.drafting.protocol import Drafter
from adaptive.drafting.remote import RemoteDrafter
from adaptive.drafting.tree import TreeDrafter
from adaptive.encoding import encode_text, render_chat
from adaptive.engines.load import Forward, forward_of
from adaptive.engines.protocol import Engine, ReadsFeatures, no_trees
from adaptive.engines.protocol import Sequence as EngineSequence
from adaptive.errors import AdaptiveError, ContextFullError
from adaptive.grammar import Constraint, Grammar, Grammars
from adaptive.kept import KeptCaches
from adaptive.pair import Pair
from adaptive.records.writer import LogWriter
from adaptive.sampling import LogitsProcessor
from adaptive.settings import Settings, fixed_draft_length
from adaptive.types import Message, Round, SamplingParams, StopParams


def length_policy(
    settings: Settings,
    memory: Memory | None = None,
    attentive: bool = True,
    clock: Callable[[], float] = time.perf_counter,
    trees: bool = False,
) -> LengthPolicy:
    """The policy that ``--draft-length`` names; ``auto`` starts from ``memory``, if there is one, and where ``trees``
    pay chooses how many nodes they have.

    ``attentive`` and ``clock`` as in ``LengthPolicy``. Raises AdaptiveError as ``fixed_draft_length``.
    """
    fixed = fixed_draft_length(settings.draft_length)
    if fixed is not None:
        return FixedLength(*fixed)
    if trees:
        return NodesByCost()
    if memory is not None:
        return memory.policy(attentive, settings.history != "off", clock)
    return GoodputLength(attentive=attentive, clock=clock)


class Assistant:
    """Answers with one pair. Not for several threads at once; a server gives it one engine thread.

    ``adapter`` is the id of the adapter in use. Finished generations go to ``log``, if there is one; each
    names the adapter that it began with. ``between_rounds``, if set, is called between two rounds of an
    answer: it may swap, and says whether the draft may be used. ``reading``, if set, is called before each part of a
    long prompt with the tokens of it that are still to be computed; what it raises ends the answer.
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
        """``cache_bytes`` is what the caches of several conversations may take; 0 keeps one conversation. ``history``
        is what may be drafted from beside the model, ``kept`` keeps caches on disk. Raises AdaptiveError for trees
        where a model takes none."""
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
        self.latest: Answering | None = None  # the answer that began last
        self.under_way: list[Answering] = []
        self.chance: random.Random = random.SystemRandom()  # where answers without a seed begin
        self.between_rounds: Callable[[], bool] | None = None
        self.reading: Callable[[int], None] | None = None
        # Whether the model drafts while the target verifies: where that waits for its disk.
        self.drafts_ahead = forward_of(pair.target) is Forward.STREAMED and not isinstance(pair.draft, ReadsFeatures)
        self._worker = Worker()
        self._swap: tuple[str | None, Iterator[None], Sequence[float] | None] | None = None
        self.session = uuid.uuid4().hex[:12]
        self.conversations = Conversations(pair.target, pair.draft, cache_bytes, kept)
        self._ends = _end_tokens(pair)
        self.grammars = Grammars(pair.tokenizer, pair.target.vocab_size, self._ends)

    def use_adapter(self, adapter: str | None, folder: Path | None) -> None:
        """Swap the draft's adapter now, wholly. Raises AdaptiveError if it does not fit."""
        self.begin_swap(adapter, folder)
        self.finish_swap()

    def begin_swap(self, adapter: str | None, folder: Path | None, expected: Sequence[float] | None = None) -> None:
        """Read and check another adapter; ``finish_swap`` then merges it, in as many calls as are wanted.

        ``expected`` is the acceptance by position that it promises, for the draft-length policy.
        No draft may be asked for meanwhile. Raises AdaptiveError if the adapter does not fit; the one in
        use then stays. A swap that is under way is finished first.
        """
        self.finish_swap()
        if self.pair.draft is None or adapter == self.adapter:
            return
        self._worker.stop()
        steps = self.pair.draft.swap_adapter(folder)
        next(steps, None)  # the weights are still the old ones
        self._swap = adapter, steps, expected

    @property
    def last(self) -> Decoding | None:
        """The answer that began last."""
        return None if self.latest is None else self.latest.decoding

    @property
    def drafted_by(self) -> list[tuple[str | None, int]]:
        """Of that answer, as of ``Answering``."""
        return [] if self.latest is None else self.latest.drafted_by

    @property
    def rounds_by_adapter(self) -> list[tuple[str | None, tuple[Round, ...]]]:
        """Of that answer, as of ``Answering``."""
        return [] if self.latest is None else self.latest.rounds_by_adapter

    @property
    def swapping(self) -> bool:
        """Whether a swap has begun and is not finished."""
        return self._swap is not None

    def finish_swap(self, seconds: float = float("inf")) -> bool:
        """Go on with a swap that has begun, for about ``seconds``; whether the draft is ready for use.

        Raises AdaptiveError where it cannot be finished; the plain draft is then in use.
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
        # The caches of other weights are stale. Answers under way keep their own: to fill one anew could
        # hold back its next token for seconds. What was drafted from it is verified as ever.
        self.conversations.forget_drafts()
        for answering in self.under_way:
            answering.swapped(adapter)

    def forget(self) -> None:
        """Have nothing of what was said in memory: neither caches nor the last answer. An answer that is under way
        keeps what it needs to its end, and nothing of it is kept after that."""
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
    ) -> Iterator[Step]:
        """Answer a chat; the part of it that the caches already hold is not computed again."""
        prompt = encode_chat(self.pair, messages)
        return self.answer(prompt, tuple(messages), "", sampling, stop, session, domain, record, grammar=grammar)

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
        return self.answer(prompt, (), text, sampling, stop, session, domain, record, grammar=grammar)

    def answer(
        self,
        prompt: list[int],
        messages: tuple[Message, ...],
        text: str,
        sampling: SamplingParams,
        stop: StopParams,
        session: str | None = None,
        domain: str | None = None,
        record: bool = True,
        supervise: bool = False,
        client: str = "",
        owner: str = "",
        goes_on: bool = False,
        grammar: Grammar | None = None,
        marks: Mapping[int, str] | None = None,
    ) -> Iterator[Step]:
        """Answer a prompt of token ids, which came from ``messages`` or from a raw ``text``.

        ``goes_on`` is a prompt that ends within an answer, which this one continues. The answer keeps to the
        ``grammar``, if there is one, unless a limit cuts it.

        Without a ``session``, where several conversations are kept, how it began and ``client`` tell which one
        this is. ``owner`` is whom the record belongs to, and whose records are drafted from.
        ``supervise`` keeps the target's distribution also where nothing is recorded. ``marks`` are special tokens that
        are part of the text (``TextStream``).
        """
        question = Question(
            prompt, messages, text, sampling, stop, session, domain, record, supervise, client, owner, goes_on, grammar,
            marks,
        )  # fmt: skip
        return self._steps(question)

    def _steps(self, question: Question) -> Iterator[Step]:
        answering = self.begin(question)
        try:
            yield from answering.decoding.steps()
        finally:
            self.end(answering)

    def begin(self, question: Question) -> Answering:
        """An answer whose ``decoding`` is to be gone through by ``steps`` or in a batch, and then ``end`` to be called.
        Raises AdaptiveError for what cannot be answered."""
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
        record = question.record and self.log is not None
        conversation = self.conversations.take(prompt, question.messages, question.client, question.session)
        session = question.session or (conversation.name if self.conversations.limit else self.session)
        scope = Scope(session, sampling.temperature, sampling.seeded)
        self.policy.begin(scope)
        stop = question.stop
        request = Request(prompt, sampling, stop, self._end_set(stop), record or question.supervise)
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
        """Whether there is memory for the caches of one more answer of so many tokens, its prompt among them."""
        return self.conversations.has_room(tokens, (answering.conversation for answering in self.under_way))

    def end(self, answering: Answering) -> None:
        """An answer that has begun is over, whether it came to its end or not: it goes to the log."""
        decoding, conversation = answering.decoding, answering.conversation
        self.under_way.remove(answering)
        conversation.under_way = False
        answering.hold()
        if self.history is not None and decoding.history is not None:
            self.history.release(decoding.history)
        if answering.record and decoding.output and self.log is not None:
            features = answering.features() if isinstance(self.pair.draft, ReadsFeatures) else None
            self.log.write(answering.generation(self.pair.target.name), features)

    def _end_set(self, stop: StopParams) -> frozenset[int]:
        return frozenset(stop.stop_token_ids) | (frozenset() if stop.ignore_eos else self._ends)

    def _generator(self, device: torch.device) -> torch.Generator:
        """Random numbers for an answer without a seed."""
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
            there = RemoteDrafter(
                self.pair.remote, conversation, target.vocab_size, sampling, processor, self.policy.tree
            )
            there.begin(request.prompt)
            drafter = there
        elif conversation.draft is not None and self.pair.draft is not None:
            conversation.draft.keep_prefix_of(request.prompt)
            drafter = self._drafter(conversation.draft.sequence, self.pair.draft, sampling, processor)
            if isinstance(drafter, Beside):
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
            decoding.forced = None
        return decoding

    def _drafter(
        self, sequence: EngineSequence, draft: Engine, sampling: SamplingParams, processor: LogitsProcessor
    ) -> Drafter:
        """The model as a drafter: beside a target that waits for its disk it drafts ahead."""
        given = sequence, draft, self.pair.target.vocab_size, sampling, processor, self._generator(draft.device)
        if not self.drafts_ahead:
            return (TreeDrafter if self.policy.tree else ModelDrafter)(*given)
        return Beside(drafts_ahead(draft, self.policy.tree)(*given), self._worker)


def encode_chat(pair: Pair, messages: Sequence[Message]) -> list[int]:
    """Token ids of a chat with the generation prompt. Raises AdaptiveError as ``render_chat``."""
    chat = [{"role": m.role, "content": m.content} for m in messages]
    return render_chat(pair.tokenizer, chat, pair.target.context_length)


def _end_tokens(pair: Pair) -> frozenset[int]:
    """Every id that the tokenizer or the model's generation config calls the end of a sequence."""
    ends = pair.target.end_tokens
    eos = pair.tokenizer.eos_token_id
    return ends | (frozenset([eos]) if isinstance(eos, int) else frozenset())


def sampling_params(settings: Settings, pair: Pair) -> SamplingParams:
    """What the settings say, and the checkpoint's own recommendation where they say nothing."""
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
