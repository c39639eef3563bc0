"""Measures where the time of a speculative round goes; ``limit.py`` prints it."""

from __future__ import annotations

import dataclasses
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from timing import bare, filled, seconds, settle

from adaptive.assistant import Assistant
from adaptive.control.policy import FixedLength
from adaptive.engines.load import sampling_kernels
from adaptive.engines.protocol import Judgement, ProposalCall, Proposed, Sequence, VerificationCall
from adaptive.pair import Pair
from adaptive.sampling import Transform
from adaptive.tokens import Ids, Rows, argmax, as_array
from adaptive.types import SamplingParams, StopParams
from cli.prompts import PromptLine

# Tokens of an answer.
TOKENS = 100
# Token choices timed in one call. With more, the logits would not stay in the caches as those of a round do.
MANY = 16
# Tokens before the passes that are timed alone, as in the middle of an answer, and the number of such passes.
CONTEXT, PASSES = 150, 7


class Timed:
    """An engine or one of its sequences that sums up the wall-clock and processor seconds of its forward."""

    def __init__(self, inner: Any, owner: Timed | None = None) -> None:
        self.inner, self.owner = inner, owner or self
        self.seconds = self.processor = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def sequence(self, features: bool = False) -> Timed:
        return Timed(self.inner.sequence(features), self)

    def extend(self, tokens: Ids, rows: int) -> torch.Tensor:
        return self._timed(lambda: self.inner.extend(tokens, rows))  # type: ignore[no-any-return]

    @property
    def fused(self) -> Timed | None:
        return self if self.inner.fused is not None else None

    def propose(self, call: ProposalCall) -> Proposed:
        return self._timed(lambda: self.inner.propose(call))  # type: ignore[no-any-return]

    def verify(self, call: VerificationCall) -> tuple[Judgement, torch.Tensor]:
        return self._timed(lambda: self.inner.verify(call))  # type: ignore[no-any-return]

    def _timed(self, call: Callable[[], Any]) -> Any:
        began, used = time.perf_counter(), time.process_time()
        result = call()
        self.owner.processor += time.process_time() - used
        self.owner.seconds += time.perf_counter() - began
        return result


@dataclass
class Breakdown:
    """Seconds of many rounds, by part of the round; ``processor`` is processor seconds, the others are wall-clock."""

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
        """Wall-clock seconds in total."""
        return self.draft_model + self.drafting + self.target_model + self.verifying + self.rest

    @property
    def forwards(self) -> float:
        """The share of the total spent in the two models' forwards."""
        return (self.draft_model + self.target_model) / self.whole


class Rounds:
    """Answers with rounds of one draft length, and where their time goes, without the prompt's own pass."""

    def __init__(self, pair: Pair, length: int, sampling: SamplingParams) -> None:
        self.sampling, self.total = sampling, Breakdown()
        self._target, self._draft = Timed(pair.target), Timed(pair.draft)
        timed: Any = {"target": self._target, "draft": self._draft}
        self._assistant = Assistant(dataclasses.replace(pair, **timed), FixedLength(length), None)
        self._assistant.chance = random.Random(1)
        self._row_s, self._draw_s = seconds_of_choice(pair, sampling)
        self._whole = [pair.draft.sequence().fused, pair.target.sequence().fused]  # type: ignore[union-attr]

    def answer(self, prompt: PromptLine) -> tuple[float, float]:
        """Answer one prompt. Returns the number of rounds and seconds a token."""
        target, draft, total = self._target, self._draft, self.total
        draft.seconds = target.seconds = before = used = models = 0.0
        stop = StopParams(TOKENS, ignore_eos=True)
        for number, _ in enumerate(self._assistant.chat(prompt.messages, self.sampling, stop)):
            if number == 0:  # the prompt's own pass is over
                before = target.seconds
                used, models = time.process_time(), target.processor + draft.processor
        total.processor += time.process_time() - used
        total.processor_of_models += target.processor + draft.processor - models
        done = self._assistant.last
        assert done is not None
        total.rounds += len(done.rounds)
        draft_s, verify_s = sum(r.draft_s for r in done.rounds), sum(r.verify_s for r in done.rounds)
        drafts, verifies = draft.seconds, target.seconds - before
        # If a proposal or a verification is one fused call, the choice of tokens is not part of the forward.
        if self._whole[0]:
            drafts -= (self._row_s + self._draw_s) * sum(r.drafted for r in done.rounds)
        if self._whole[1]:
            judged = sum(r.accepted + 1 for r in done.rounds)
            verifies -= self._row_s * judged + self._draw_s * len(done.rounds)
        total.draft_model += drafts
        total.drafting += draft_s - drafts
        total.target_model += verifies
        total.verifying += verify_s - verifies
        total.rest += done.predicted_s - draft_s - verify_s
        return len(done.rounds), done.predicted_s / (TOKENS - 1)


def seconds_of_choice(pair: Pair, sampling: SamplingParams) -> tuple[float, float]:
    """Seconds in which our kernels turn a row of logits into a distribution (greedy: find its likeliest token), and in
    which they draw a token. Measured for many rows at once, since within a fused call no Python runs."""
    found = sampling_kernels()
    if found is None:
        return 0.0, 0.0
    transform = Transform(sampling)
    logits = Rows(pair.target.vocab_size)(0, MANY).normal_()
    if sampling.greedy:
        best = argmax(logits)
        assert isinstance(best, list)
        return seconds(lambda: found.judge(logits, best[:-1], 0, sampling, None, [])) / MANY, 0.0
    probs = as_array(transform(logits))
    assert probs is not None
    drawn = probs.ravel()
    return seconds(lambda: transform(logits)) / MANY, seconds(lambda: found.draw(drawn, 0.5)) / MANY


class Alone:
    """Passes timed alone: the target's over one token and over a verification's tokens, the draft's over one."""

    def __init__(self, pair: Pair, length: int) -> None:
        assert pair.draft is not None
        self.length = length
        self._target, self._draft = (filled(engine, CONTEXT) for engine in (pair.target, pair.draft))
        for sequence, count in self._kinds():
            settle(sequence, count)

    def _kinds(self) -> list[tuple[Sequence, int]]:
        return [(self._target, 1), (self._target, self.length + 1), (self._draft, 1)]

    def speed_up(self, tokens: float) -> float:
        """The speed-up that these passes allow, measured now, if a round commits ``tokens`` tokens."""
        times: list[list[float]] = [[], [], []]
        for _ in range(PASSES):
            for (sequence, count), seen in zip(self._kinds(), times, strict=True):
                seen.append(bare(sequence, count, repeats=1))
        plain, verify, draft = (statistics.median(seen) for seen in times)
        return tokens * plain / (self.length * draft + verify)


def show_round(pair: Pair, prompts: list[PromptLine], length: int) -> None:
    """Print where the time of rounds goes, greedy and sampled, and how much of the possible speed-up is reached."""
    alone = Alone(pair, length)
    for name, sampling in (("greedy", SamplingParams(seed=1)), ("sampled", SamplingParams(temperature=0.7))):
        for kind in (length, 0):
            Rounds(pair, kind, sampling).answer(prompts[0])
        rounds, plain = Rounds(pair, length, sampling), Rounds(pair, 0, sampling)
        shares = []
        for prompt in prompts:  # the measurements take turns, because the machine's speed changes
            count, each = rounds.answer(prompt)
            allowed = alone.speed_up((TOKENS - 1) / count)
            shares.append(plain.answer(prompt)[1] / each / allowed)
        b, p = rounds.total, plain.total
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
            f"of the processor's time {1 - b.processor_of_models / b.processor:.1%}; "
            f"of plain decoding {1 - p.forwards:.1%}"
        )
        low, middle, high = statistics.quantiles(shares, n=4) if len(shares) > 1 else shares * 3
        print(
            f"  the speed-up is {b.forwards / p.forwards:.1%} of what acceptance and these forwards allow; of what it "
            f"and passes timed alone allow {middle:.1%} (median of {len(shares)}; quartiles {low:.1%}, {high:.1%})"
        )
