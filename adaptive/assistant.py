"""A chat assistant on one pair: chat template, sessions that keep their cache, streaming, the log.

Every front end (command line, demo, server) talks to an ``Assistant`` and consumes its stream.
"""

from __future__ import annotations

import dataclasses
import secrets
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from adaptive.control.goodput import GoodputLength
from adaptive.control.memory import Memory
from adaptive.control.policy import FixedLength, LengthPolicy, Scope
from adaptive.decoding.drafters import ModelDrafter
from adaptive.decoding.loop import Decoding, Request, Step, TargetSampler
from adaptive.decoding.params import SamplingParams, StopParams
from adaptive.decoding.sampling import Penalties
from adaptive.decoding.text import TextStream
from adaptive.engines.protocol import Engine
from adaptive.engines.protocol import Sequence as EngineSequence
from adaptive.errors import AdaptiveError
from adaptive.pair import Pair
from adaptive.records.types import Generation, Message
from adaptive.records.writer import LogWriter
from adaptive.settings import Settings

# Keeps the draft's random numbers apart from the target's under one seed.
DRAFT_SEED = 0x5DEECE66D


def length_policy(settings: Settings, memory: Memory | None = None, attentive: bool = True) -> LengthPolicy:
    """The policy that ``--draft-length`` names; ``auto`` starts from ``memory``, if there is one.

    ``attentive`` as in ``LengthPolicy``. Raises AdaptiveError for anything else than auto or a number.
    """
    if settings.draft_length == "auto":
        return memory.policy(attentive) if memory else GoodputLength(attentive=attentive)
    if not settings.draft_length.isdigit() or int(settings.draft_length) > 64:
        raise AdaptiveError(f"--draft-length is {settings.draft_length!r}; give auto or a number from 0 to 64")
    return FixedLength(int(settings.draft_length))


class CachedSequence:
    """An engine's sequence, and the tokens that its cache holds."""

    def __init__(self, engine: Engine) -> None:
        self.sequence: EngineSequence = engine.sequence()
        self.tokens: list[int] = []

    def keep_prefix_of(self, prompt: list[int]) -> None:
        """Forget everything after the common beginning with ``prompt``, whose last token is always fed anew."""
        held = self.tokens[: self.sequence.length]
        common = next(
            (i for i, (a, b) in enumerate(zip(held, prompt, strict=False)) if a != b), min(len(held), len(prompt))
        )
        self.sequence.rollback(min(common, len(prompt) - 1))


class Assistant:
    """Answers with one pair. Not for several threads at once; a server gives it one engine thread.

    ``adapter`` is the id of the adapter in use. Finished generations go to ``log``, if there is one.
    """

    def __init__(self, pair: Pair, policy: LengthPolicy, log: LogWriter | None) -> None:
        self.pair = pair
        self.policy = policy
        self.log = log
        self.adapter: str | None = None
        self.last: Decoding | None = None
        self.session = uuid.uuid4().hex[:12]
        self._target = CachedSequence(pair.target)
        self._draft = CachedSequence(pair.draft) if pair.draft else None
        self._ends = _end_tokens(pair)

    def use_adapter(self, adapter: str | None, folder: Path | None) -> None:
        """Swap the draft's adapter between two answers. Raises AdaptiveError if it does not fit."""
        if self.pair.draft is None or adapter == self.adapter:
            return
        self.pair.draft.apply_adapter(folder)
        self.adapter = adapter
        self.policy.swapped()
        # The draft's cache was made by other weights: start it again, it is cheap to fill.
        self._draft = CachedSequence(self.pair.draft)

    def chat(
        self,
        messages: Sequence[Message],
        sampling: SamplingParams,
        stop: StopParams,
        *,
        session: str | None = None,
        domain: str | None = None,
        record: bool = True,
    ) -> Iterator[Step]:
        """Answer a chat; the part of it that the caches already hold is not computed again."""
        prompt = encode_chat(self.pair, messages)
        return self._answer(prompt, tuple(messages), "", sampling, stop, session, domain, record)

    def complete(
        self,
        text: str,
        sampling: SamplingParams,
        stop: StopParams,
        *,
        session: str | None = None,
        domain: str | None = None,
        record: bool = True,
    ) -> Iterator[Step]:
        """Continue a raw text, without the chat template."""
        prompt: list[int] = self.pair.tokenizer.encode(text)
        return self._answer(prompt, (), text, sampling, stop, session, domain, record)

    def _answer(
        self,
        prompt: list[int],
        messages: tuple[Message, ...],
        text: str,
        sampling: SamplingParams,
        stop: StopParams,
        session: str | None,
        domain: str | None,
        record: bool,
    ) -> Iterator[Step]:
        context = self.pair.target.context_length
        if not prompt:
            raise AdaptiveError("the prompt is empty; give at least one token")
        if len(prompt) >= context:
            raise AdaptiveError(
                f"the prompt has {len(prompt)} tokens and the target's context holds {context}; "
                "shorten it or start anew"
            )
        created = time.time()
        if sampling.seed is None:
            sampling = dataclasses.replace(sampling, seed=secrets.randbits(63))
        record = record and self.log is not None
        self.policy.begin(Scope(session or self.session, sampling.temperature))
        decoding = self.last = self._decoding(Request(prompt, sampling, stop, self._end_set(stop), record))
        try:
            yield from decoding.steps()
        finally:
            self._target.tokens = decoding.committed
            if self._draft:
                self._draft.tokens = decoding.committed
            if record and decoding.output and self.log is not None:
                self.log.write(
                    Generation(
                        session=session or self.session,
                        created=created,
                        messages=messages,
                        prompt_text=text,
                        text=decoding.text,
                        prompt=np.array(prompt, dtype=np.int32),
                        output=np.array(decoding.output, dtype=np.int32),
                        sampling=sampling,
                        adapter=self.adapter,
                        engine=self.pair.target.name,
                        domain=domain,
                        finish_reason=decoding.finish_reason or "cancelled",
                        rounds=tuple(decoding.rounds),
                        timings=decoding.timings,
                        supervision=decoding.supervision,
                    )
                )

    def _end_set(self, stop: StopParams) -> frozenset[int]:
        return frozenset(stop.stop_token_ids) | (frozenset() if stop.ignore_eos else self._ends)

    def _decoding(self, request: Request) -> Decoding:
        """Wire caches, drafter, sampler and text stream for one request."""
        target, sampling = self.pair.target, request.sampling
        seed = sampling.seed or 0
        penalties = Penalties(sampling, target.vocab_size, target.device)
        self._target.keep_prefix_of(request.prompt)
        drafter = None
        if self._draft is not None and self.pair.draft is not None:
            self._draft.keep_prefix_of(request.prompt)
            drafter = ModelDrafter(
                self._draft.sequence,
                self.pair.draft.context_length,
                target.vocab_size,
                sampling,
                penalties,
                torch.Generator(self.pair.draft.device).manual_seed(seed ^ DRAFT_SEED),
            )
        sampler = TargetSampler(sampling, penalties, torch.Generator(target.device).manual_seed(seed))
        stream = TextStream(self.pair.tokenizer, request.stop.stop)
        return Decoding(request, self._target.sequence, target.context_length, drafter, sampler, self.policy, stream)


def encode_chat(pair: Pair, messages: Sequence[Message]) -> list[int]:
    """Token ids of a chat with the generation prompt.

    Raises AdaptiveError where the tokenizer has no chat template or the template refuses the chat.
    """
    tokenizer = pair.tokenizer
    if not tokenizer.chat_template:
        raise AdaptiveError("the target's tokenizer has no chat template; it can only continue raw text (--raw)")
    chat = [{"role": m.role, "content": m.content} for m in messages]
    try:
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # a template raises whatever its author chose
        raise AdaptiveError(f"the target's chat template refuses this chat: {error}") from error
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return ids


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
