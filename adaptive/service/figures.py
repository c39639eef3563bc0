"""Figures of a response: OpenAI's ``usage``, timings, and the objects of ``generate --json``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from adaptive.records.stats import figures_object
from adaptive.service.jobs import Answer


def usage(answers: Sequence[Answer], n: int = 1, thought: int | None = None) -> dict[str, Any]:
    """Token counts. A prompt counts once for its ``n`` answers, and so do the tokens of it that the cache held when the
    first of them began. ``thought``: the tokens of thinking; None for answers without it."""
    first = [a for a in answers if a.index % n == 0]
    prompt = sum(a.prompt_tokens for a in first)
    completion = sum(len(a.tokens) for a in answers)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(a.timings.cached_n for a in first)},
        **({} if thought is None else {"completion_tokens_details": {"reasoning_tokens": min(thought, completion)}}),
    }


def tokens_of(texts: Iterable[str], tokenizer: PreTrainedTokenizerBase) -> int:
    """The number of tokens of these texts, by tokenizing them again."""
    return sum(len(tokenizer.encode(text, add_special_tokens=False)) for text in texts if text)


def figures(answers: Sequence[Answer]) -> dict[str, Any]:
    """Timings in milliseconds and how they were decoded, over all answers of the request."""
    rounds = [outcome for a in answers for outcome in a.rounds]
    seconds = sum(a.timings.predicted_s for a in answers)
    timed = sum(a.timings.predicted_n - 1 for a in answers if a.timings.predicted_s > 0)
    return {
        "timings": {
            "prompt_n": sum(a.timings.prompt_n for a in answers),
            "cache_n": sum(a.timings.cached_n for a in answers),
            "prompt_ms": 1000 * sum(a.timings.prompt_s for a in answers),
            "predicted_n": sum(a.timings.predicted_n for a in answers),
            "predicted_ms": 1000 * seconds,
            "predicted_per_second": timed / seconds if seconds > 0 else 0.0,
            "draft_n": sum(outcome.drafted for outcome in rounds),
            "draft_n_accepted": sum(outcome.accepted for outcome in rounds),
        },
        **figures_object(rounds),
        "adapter": answers[-1].adapter if answers else None,
    }
