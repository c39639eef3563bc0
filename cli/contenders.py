"""Ways of decoding the same prompts, timed side by side: transformers' own and ours.

In: a pair, prompts. Out: a ``Result`` for each contender and prompt. The contenders take turns at every
prompt, in rotating order, so that a slow moment of the machine affects all of them.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from adaptive.assistant import Assistant, encode_chat
from adaptive.control.policy import FixedLength, LengthPolicy
from adaptive.errors import AdaptiveError
from adaptive.pair import Pair
from adaptive.records.stats import count_rounds, tokens_per_round
from adaptive.types import SamplingParams, StopParams
from cli.peer import complete
from cli.prompts import PromptLine, bare_prompt

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# The unrecorded answer that every contender gives first: to a prompt of its own, since ours and servers find a prompt
# that they have answered in their caches. And its tokens.
WARM_UP_PROMPT, WARM_UP = "Which of the months of the year have thirty days?", 16


@dataclass(frozen=True)
class Result:
    """One answer: its token ids, seconds from prompt to last token, and tokens a round, over all rounds (None if the
    contender does not report them)."""

    contender: str
    prompt: int
    tokens: tuple[int, ...]
    seconds: float
    tokens_per_round: float | None


@dataclass(frozen=True)
class Row:
    """One contender over all prompts. ``tokens_per_second`` is from the median over prompts of the seconds a token,
    ``against`` how many times faster than the first contender (ratio of medians), ``tokens_per_round`` the mean over
    prompts, ``same`` the share of answers equal to the first contender's, ``loops`` the share of 8-grams that repeat an
    earlier one."""

    contender: str
    tokens_per_second: float
    against: float
    tokens_per_round: float | None
    same: float
    loops: float


Answer = Callable[[PromptLine, int], tuple[list[int], float | None]]


@dataclass(frozen=True)
class Contender:
    """``answer(prompt, tokens)`` returns that many token ids and its tokens a round."""

    name: str
    answer: Answer


def ours(name: str, pair: Pair, policy: LengthPolicy, sampling: SamplingParams, ends: bool = False) -> Contender:
    """Our own loop under a draft-length policy, with its own cache. An answer has the requested number of tokens
    or, with ``ends``, stops where the target ends it."""
    assistant = Assistant(pair, policy, None)
    assistant.chance = random.Random(1)  # the same answers in every run

    def answer(prompt: PromptLine, tokens: int) -> tuple[list[int], float | None]:
        for _ in assistant.chat(prompt.messages, sampling, StopParams(tokens, ignore_eos=not ends)):
            pass
        assert assistant.last is not None
        return assistant.last.output, tokens_per_round(count_rounds(assistant.last.rounds))

    return Contender(name, answer)


def theirs(name: str, pair: Pair, sampling: SamplingParams, threads: int, **how: Any) -> Contender:
    """transformers' ``generate`` on the target with ``threads`` threads. ``how``: ``assisted`` for its assisted
    generation with its defaults, ``length`` for a fixed number of drafted tokens, ``lookup`` for prompt lookup."""
    target = transformers_model(pair.target)
    draft = transformers_model(pair.draft) if "assisted" in how else None
    arguments: dict[str, Any] = {"do_sample": not sampling.greedy, "use_cache": True, "eos_token_id": None}
    # Not the checkpoint's own: a penalty would change the text and take time, and ours follows ``sampling`` alone.
    arguments["repetition_penalty"] = sampling.repetition_penalty
    if not sampling.greedy:
        arguments |= {"temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p}
        if sampling.min_p:  # a 0 would cost time at every token
            arguments["min_p"] = sampling.min_p
    if "lookup" in how:
        arguments["prompt_lookup_num_tokens"] = how["lookup"]

    def answer(prompt: PromptLine, tokens: int) -> tuple[list[int], float | None]:
        ids = torch.tensor([encode_chat(pair, prompt.messages)], device=target.device)
        given = torch.get_num_threads()
        torch.set_num_threads(threads)
        end = target.generation_config.eos_token_id
        target.generation_config.eos_token_id = None
        if draft is not None:
            arguments["assistant_model"] = draft
            settings = draft.generation_config
            before = {n: getattr(settings, n) for n in ASSISTED}
            if "length" in how:
                for field, value in zip(ASSISTED, (how["length"], "constant", 0.0), strict=True):
                    setattr(settings, field, value)
        try:
            out = target.generate(  # type: ignore[operator]
                ids, max_new_tokens=tokens, attention_mask=torch.ones_like(ids), **arguments
            )
        finally:
            torch.set_num_threads(given)
            target.generation_config.eos_token_id = end
            if draft is not None:
                for field, value in before.items():
                    setattr(settings, field, value)
        return out[0, ids.shape[1] :].tolist(), None

    return Contender(name, answer)


def peer(url: str, pair: Pair, sampling: SamplingParams) -> Contender:
    """llama.cpp's server at ``url``, given the same prompt token ids through its own HTTP API; its model
    must have the target's vocabulary. Raises AdaptiveError if no such server answers there."""

    def answer(prompt: PromptLine, tokens: int) -> tuple[list[int], float | None]:
        asked = {
            "prompt": encode_chat(pair, prompt.messages),
            "n_predict": tokens,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
            "seed": 1 if sampling.seed is None else sampling.seed,
            "ignore_eos": True,
            "return_tokens": True,
        }
        output, drafted = complete(url, asked)
        return output, len(output) / max(1, len(output) - drafted)

    return Contender("peer", answer)


ASSISTED = ("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold")


def transformers_model(engine: object) -> PreTrainedModel:
    """The transformers model behind an engine. Raises AdaptiveError for an engine without one."""
    model: PreTrainedModel | None = getattr(engine, "model", None)
    if model is None:
        raise AdaptiveError("this comparison needs two models that transformers runs; give --target and --draft")
    return model


def race(
    contenders: Sequence[Contender],
    prompts: Sequence[PromptLine],
    tokens: int,
    clock: Callable[[], float] = time.perf_counter,
    warm_up: bool = True,
) -> Iterator[Result]:
    """Every contender on every prompt, in rotating order, timed by ``clock``; before, with ``warm_up``, each answers
    another prompt briefly."""
    for contender in contenders if warm_up else ():
        contender.answer(bare_prompt(WARM_UP_PROMPT), WARM_UP)
    for number, prompt in enumerate(prompts):
        start = number % len(contenders)
        for contender in (*contenders[start:], *contenders[:start]):
            began = clock()
            output, per_round = contender.answer(prompt, tokens)
            yield Result(contender.name, number, tuple(output), clock() - began, per_round)


def table(contenders: Sequence[Contender], results: Sequence[Result]) -> list[Row]:
    """One row per contender, compared with the first one."""
    by_name = {one.name: [r for r in results if r.contender == one.name] for one in contenders}
    first = {r.prompt: r.tokens for r in by_name[contenders[0].name]}
    costs = {
        name: statistics.median(r.seconds / max(1, len(r.tokens)) for r in found) for name, found in by_name.items()
    }
    return [
        Row(
            contender=name,
            tokens_per_second=1 / costs[name],
            against=costs[contenders[0].name] / costs[name],
            tokens_per_round=_mean([r.tokens_per_round for r in found]),
            same=statistics.fmean(r.tokens == first[r.prompt] for r in found),
            loops=statistics.fmean(repeated(r.tokens) for r in found),
        )
        for name, found in by_name.items()
    ]


def _mean(values: Sequence[float | None]) -> float | None:
    said = [value for value in values if value is not None]
    return statistics.fmean(said) if said else None


def repeated(tokens: Sequence[int], n: int = 8) -> float:
    """Share of a text's n-grams that occurred earlier in it."""
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def fastest_threads(pair: Pair, prompt: PromptLine, tokens: int = 24) -> int:
    """The number of threads at which transformers itself decodes faster here: 1, or all it has.

    transformers is timed at its best; our own engine chooses for itself.
    """
    everything = torch.get_num_threads()
    if everything == 1:
        return 1
    plain = {threads: theirs("plain", pair, SamplingParams(), threads) for threads in (1, everything)}
    times: dict[int, list[float]] = {threads: [] for threads in plain}
    for _ in range(4):
        for threads, contender in plain.items():
            began = time.perf_counter()
            contender.answer(prompt, tokens)
            times[threads].append(time.perf_counter() - began)
    return min(times, key=lambda threads: statistics.median(times[threads][1:]))


def policies(lengths: Sequence[int]) -> dict[str, LengthPolicy]:
    """Fixed draft lengths, by the contender's name in a table."""
    return {f"ours, fixed {length}": FixedLength(length) for length in lengths}
