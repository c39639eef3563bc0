"""Sampled text has the target's law where several answers share each pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from test_batch import a_round_a_burst
from test_lossless_sampled import IDS, PARAMS, PROMPT, VOCAB, NoText, exact_distribution, models, p_value

from adaptive.control.policy import FixedLength
from adaptive.decoding.batch import Batch
from adaptive.decoding.loop import Decoding, Request
from adaptive.decoding.verifier import Verifier
from adaptive.drafting.model import ModelDrafter
from adaptive.engines.hf.engine import TransformersEngine
from adaptive.engines.protocol import ExtendCall, sequences
from adaptive.sampling import LogitsProcessor
from adaptive.types import SamplingParams, StopParams

assert models  # fixtures
assert a_round_a_burst


@pytest.mark.thorough
@pytest.mark.parametrize("params", [PARAMS[1], PARAMS[2], PARAMS[4]], ids=[IDS[1], IDS[2], IDS[4]])
def test_in_joint_rounds_sampled_text_has_the_law_of_the_target(
    models: tuple[TransformersEngine, TransformersEngine], params: SamplingParams
) -> None:
    assert p_value(joint_counts(models, params), exact_distribution(models[0], params)) > 0.001


@pytest.mark.thorough
def test_joint_rounds_that_judge_with_anothers_logits_fail_the_same_test(
    models: tuple[TransformersEngine, TransformersEngine],
) -> None:
    class Crossed:
        def extend_together(self, calls: Sequence[ExtendCall]) -> list[torch.Tensor]:
            found = models[0].extend_together(calls)
            same = len({len(logits) for logits in found}) == 1
            return [*found[1:], found[0]] if same else found

    counts = joint_counts(models, PARAMS[1], Crossed())
    assert p_value(counts, exact_distribution(models[0], PARAMS[1])) < 0.001


def joint_counts(
    models: tuple[TransformersEngine, TransformersEngine], params: SamplingParams, engine: Any = None, runs: int = 1000
) -> Counter[tuple[int, ...]]:
    """Counts of the first three of four tokens, over 4 * ``runs`` answers in batches of four whose draft lengths are
    one and two."""
    target, draft = models
    texts = [sequences(target, draft) for _ in range(4)]
    generator = torch.Generator().manual_seed(12)
    counts: Counter[tuple[int, ...]] = Counter()
    for _ in range(runs):
        batch = Batch(engine or target, lambda: True)
        decodings = []
        for number, (one, other) in enumerate(texts):
            assert other is not None
            one.rollback(len(PROMPT) - 1)
            other.rollback(len(PROMPT) - 1)
            penalties = LogitsProcessor(params, VOCAB, torch.device("cpu"))
            request = Request(PROMPT, params, StopParams(max_new_tokens=4), frozenset(), record=False)
            drafter = ModelDrafter(other, draft, VOCAB, params, penalties, generator)
            verifier = Verifier(params, penalties, generator)
            policy, text = FixedLength(1 + number % 2), NoText()
            decodings.append(Decoding(request, one, 64, drafter, verifier, policy, text))  # type: ignore[arg-type]
            decodings[-1].begin()
            batch.join(decodings[-1])
        while batch.under_way:
            assert not batch.step()
            for decoding in list(batch.under_way):
                list(decoding.show())
                if decoding.finish_reason is not None:
                    batch.leave(decoding)
        counts.update(tuple(decoding.output[:3]) for decoding in decodings)
    return counts
