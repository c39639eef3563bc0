"""Where the time of a speculative round goes; ``limit.py`` prints it."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from timing import seconds

from adaptive.assistant import Assistant
from adaptive.control.policy import FixedLength
from adaptive.decoding.params import SamplingParams, StopParams
from adaptive.decoding.sampling import Transform
from adaptive.decoding.tokens import Ids, Rows, argmax, as_array
from adaptive.engines.kernels import library
from adaptive.engines.native_decoder import Choice
from adaptive.pair import Pair
from cli.prompts import Prompt

# Tokens whose choice is timed at once.
MANY = 64


class Timed:
    """An engine or one of its sequences that adds up the seconds spent in its forward, by both clocks."""

    def __init__(self, inner: Any, owner: Timed | None = None) -> None:
        self.inner, self.owner = inner, owner or self
        self.seconds = self.processor = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def sequence(self) -> Timed:
        return Timed(self.inner.sequence(), self)

    def extend(self, tokens: Ids, rows: int) -> torch.Tensor:
        return self._timed(lambda: self.inner.extend(tokens, rows))  # type: ignore[no-any-return]

    def draft(self, tokens: list[int], choice: Choice) -> list[int]:
        """Forwards and choices in one call."""
        return self._timed(lambda: self.inner.draft(tokens, choice))  # type: ignore[no-any-return]

    def _timed(self, call: Callable[[], Any]) -> Any:
        began, used = time.perf_counter(), time.process_time()
        result = call()
        self.owner.processor += time.process_time() - used
        self.owner.seconds += time.perf_counter() - began
        return result


@dataclass
class Breakdown:
    """Seconds of many rounds, by where they went."""

    rounds: int = 0
    draft_model: float = 0.0
    drafting: float = 0.0
    target_model: float = 0.0
    verifying: float = 0.0
    rest: float = 0.0
    processor: float = 0.0
    processor_of_models: float = 0.0

    @property
    def whole(self) -> float:
        """Seconds in all."""
        return self.draft_model + self.drafting + self.target_model + self.verifying + self.rest

    @property
    def forwards(self) -> float:
        """The share of it that is one model's forward."""
        return (self.draft_model + self.target_model) / self.whole


def breakdown(pair: Pair, prompts: list[Prompt], length: int, sampling: SamplingParams) -> Breakdown:
    """Where the time of speculative rounds goes, the prompt's own pass apart."""
    total = Breakdown()
    target_model, draft_model = Timed(pair.target), Timed(pair.draft)
    choice_s = seconds_of_choice(pair, sampling)
    timed: Any = {"target": target_model, "draft": draft_model}
    assistant = Assistant(dataclasses.replace(pair, **timed), FixedLength(length), None)
    for prompt in prompts:
        draft_model.seconds = target_model.seconds = before = 0.0
        used = models = 0.0
        for number, _ in enumerate(assistant.chat(prompt.messages, sampling, StopParams(100, ignore_eos=True))):
            if number == 0:  # the prompt's own pass is over
                before = target_model.seconds
                used, models = time.process_time(), target_model.processor + draft_model.processor
        total.processor += time.process_time() - used
        total.processor_of_models += target_model.processor + draft_model.processor - models
        done = assistant.last
        assert done is not None
        total.rounds += len(done.rounds)
        draft_s, verify_s = sum(r.draft_s for r in done.rounds), sum(r.verify_s for r in done.rounds)
        forwards = draft_model.seconds - choice_s * sum(r.drafted for r in done.rounds)
        total.draft_model += forwards
        total.drafting += draft_s - forwards
        total.target_model += target_model.seconds - before
        total.verifying += verify_s - (target_model.seconds - before)
        total.rest += done.predicted_s - draft_s - verify_s
    return total


def seconds_of_choice(pair: Pair, sampling: SamplingParams) -> float:
    """Seconds in which a draft that proposes in one call chooses a token; they are not its forward's. Of many at once,
    since within that call there is nothing of Python."""
    assert pair.draft is not None
    found = library()
    if found is None or not pair.draft.sequence().drafts:
        return 0.0
    logits = Rows(pair.draft.vocab_size)(0, MANY).normal_()
    if sampling.greedy:
        return seconds(lambda: argmax(logits)) / MANY
    transform = Transform(sampling)
    probs = as_array(transform(logits))
    assert probs is not None
    drawn = probs.ravel()
    return (seconds(lambda: transform(logits)) + seconds(lambda: found.draw(drawn, 0.5))) / MANY


def show_round(pair: Pair, prompts: list[Prompt], length: int) -> None:
    """Line by line, greedy and sampled."""
    breakdown(pair, prompts[:1], length, SamplingParams(seed=1))
    for name, sampling in (("greedy", SamplingParams(seed=1)), ("sampled", SamplingParams(temperature=0.7, seed=1))):
        b = breakdown(pair, prompts, length, sampling)
        parts = {
            "draft's forward": b.draft_model,
            "drafting beside it": b.drafting,
            "target's forward": b.target_model,
            "verifying beside it": b.verifying,
            "text and bookkeeping": b.rest,
        }
        print(f"a round of {length}, {name}: {b.whole / b.rounds * 1e3:.3f} ms ({b.rounds} rounds)")
        for part, taken in parts.items():
            print(f"  {part:22} {taken / b.rounds * 1e3:8.3f} ms {taken / b.whole:6.1%}")
        print(
            f"  neither model's forward: {1 - b.forwards:.1%}, "
            f"of the processor's time {1 - b.processor_of_models / b.processor:.1%}"
        )
        # Of plain decoding some is no forward, either.
        plain = breakdown(pair, prompts, 0, sampling)
        print(
            f"  plain decoding: {1 - plain.forwards:.1%}; the speed-up is {b.forwards / plain.forwards:.1%} of what "
            "acceptance and the forwards' times allow"
        )
