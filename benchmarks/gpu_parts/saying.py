"""Answers and texts for the other parts: answers of a pair under a draft-length policy, and real text for timed
passes."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from adaptive.answering import Question
from adaptive.assistant import Assistant, encode_chat
from adaptive.control.goodput import GoodputLength
from adaptive.control.policy import LengthPolicy
from adaptive.decoding.loop import Decoding
from adaptive.engines.hf.engine import TransformersEngine
from adaptive.engines.protocol import Engine
from adaptive.measure import attentive_on
from adaptive.pair import Pair
from adaptive.types import SamplingParams, StopParams
from cli.bench import of_every_kind
from gpu_parts.work import Bench, Budget

# Tokens of an answer that only shows how long others take; and answers to fit into a budget.
SHORT, TURNS = 16, 2
GREEDY = SamplingParams(temperature=0.0)
SAMPLED = SamplingParams(temperature=0.7)


class Speaker:
    """Answers every prompt anew on the same caches, always with the requested number of tokens."""

    def __init__(self, pair: Pair, policy: LengthPolicy, sampling: SamplingParams = GREEDY) -> None:
        self.assistant = Assistant(pair, policy, None)
        self.sampling = sampling

    def say(
        self, prompt: list[int], tokens: int, between: Callable[[], bool] | None = None, supervise: bool = False
    ) -> Decoding:
        """The answer. ``between`` is called between rounds; ``supervise`` keeps the target's distributions."""
        assistant = self.assistant
        assistant.chance, assistant.between_rounds = random.Random(1), between
        stop = StopParams(tokens, ignore_eos=True)
        for _ in assistant.answer(Question(prompt, (), "", self.sampling, stop, supervise=supervise)):
            pass
        assert assistant.last is not None
        return assistant.last


def fitting(says: Sequence[Callable[[int], object]], budget: Budget, most: int) -> int:
    """How many tokens (at most ``most``) an answer may have if each of ``says``, called with that number, is to answer
    ``TURNS`` times within the budget: by the time of a short answer, after one that is not counted."""
    short = min(SHORT, most)
    for say in says:
        say(short)
    began = time.perf_counter()
    for say in says:
        say(short)
    turn = (time.perf_counter() - began) / short
    return max(short, min(most, int(budget.left / TURNS / turn)))


def controller(pair: Pair) -> GoodputLength:
    """The default policy, with nothing learned yet."""
    return GoodputLength(attentive=attentive_on(pair))


def prompts(bench: Bench, pair: Pair) -> list[list[int]]:
    """Real prompts of every kind, as token ids."""
    return [encode_chat(pair, prompt.messages) for prompt in of_every_kind(bench.scale.prompts)]


def text(bench: Bench, pair: Pair, tokens: int) -> list[int]:
    """``tokens`` tokens of real text, repeated as needed."""
    found = [token for prompt in prompts(bench, pair) for token in prompt]
    return (found * (1 + tokens // len(found)))[:tokens]


def model_of(engine: Engine | None) -> TransformersEngine:
    """The engine of the workshop, with its actual type."""
    assert isinstance(engine, TransformersEngine)
    return engine


def continued(engine: Engine, prompt: list[int], tokens: int) -> list[int]:
    """The greedy continuation of the prompt by transformers' own ``generate`` with the same model."""
    ids = torch.tensor([prompt], device=engine.device)
    given: dict[str, Any] = {"max_new_tokens": tokens, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    given |= {"repetition_penalty": 1.0}  # the checkpoint's would change the text
    with torch.inference_mode():
        out = model_of(engine).model.generate(ids, attention_mask=torch.ones_like(ids), **given)  # type: ignore[operator]
    continuation: list[int] = out[0, len(prompt) :].tolist()
    return continuation
