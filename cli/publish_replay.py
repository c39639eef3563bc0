"""Predicts by replay which acceptance an external server reports for the answers by which it was measured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from adaptive.types import SamplingParams
from adaptive.upstream.kinds import LLAMA_SERVER, Kind
from adaptive.upstream.measure import Measured
from adaptive.upstream.reports import Choice
from adaptive.upstream.vocabulary import Vocabulary
from trainers.dataset import Example
from trainers.replay import Replay, expected_rounds

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def answered_examples(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Sequence[int]], measured: Measured
) -> list[Example]:
    """The greedy answers to ``prompts`` (token ids) whose tokens follow with certainty from their text."""
    vocabulary = Vocabulary(tokenizer)
    found = []
    for number, (prompt, answer) in enumerate(zip(prompts, measured.answers, strict=True)):
        said = Choice(pieces=[answer.text], finish_reason=answer.finish_reason)
        output = vocabulary.output(said, answer.tokens)
        if output is not None and len(output.ids) >= 2:
            found.append(
                Example(
                    id=number,
                    domain="",
                    prompt=np.array(prompt, np.int32),
                    output=np.array(output.ids, np.int32),
                    sampling=SamplingParams(),
                    limited=answer.finish_reason == "length",
                    supervision=None,
                )
            )
    return found


def expected_acceptance(replays: Iterable[Replay], length: int, kind: Kind, max_tokens: int) -> float | None:
    """The share of drafted tokens that the server will report as accepted in these greedy answers, at draft length
    ``length``; None if nothing would be drafted. ``max_tokens`` was the limit of the answers."""
    replays = list(replays)
    if not replays:
        return None
    if kind is LLAMA_SERVER:
        counts = [_llama_counts(replay, length, max_tokens) for replay in replays]
        drafted, accepted = (float(sum(column)) for column in zip(*counts, strict=True))
    else:
        hits, rounds = expected_rounds(replays, length)
        drafted, accepted = length * float(rounds.sum()), float(hits.sum())
    return accepted / drafted if drafted else None


def _llama_counts(replay: Replay, length: int, max_tokens: int) -> tuple[int, int]:
    """Drafted and accepted tokens of a greedy answer as llama.cpp's server counts them: it drafts no more than the
    limit leaves room for, does not check a draft beyond the end of an answer, and counts the end token as accepted only
    at the last place of a draft (``common_sampler_sample_and_accept_n``)."""
    right = replay.acceptance > 0.5  # by step of a draft, where that makes a difference
    steps, positions = right.shape
    at = drafted = accepted = 0
    while at < positions:
        draft = min(length, max_tokens - at - 2)
        hits = 0
        while hits < draft and at + hits < positions and right[min(hits, steps - 1), at + hits]:
            hits += 1
        ended_within = not replay.limited and at + hits == positions and hits < draft
        drafted += max(0, draft)
        accepted += hits - (ended_within and hits > 0)
        at += hits + 1
    return drafted, accepted
