"""Recorded passes compute what the eager ones compute. On CUDA they are replayed; elsewhere the same operations run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import save_random_adapter
from test_cpu_forward import CONFIGS, SIZES, made, text
from transformers import AutoModelForCausalLM, GPTNeoXConfig, PreTrainedModel

from adaptive.assistant import Assistant
from adaptive.control.policy import FixedLength
from adaptive.engines.hf.cache import GROWTH
from adaptive.engines.hf.engine import TransformersEngine, TransformersSequence
from adaptive.engines.hf.graphs import LEAST_KEYS
from adaptive.pair import load_pair
from adaptive.settings import load_settings
from adaptive.types import SamplingParams, StopParams

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"))]


def engines(model: PreTrainedModel, device: str) -> tuple[TransformersEngine, TransformersEngine]:
    """The same model with recorded passes and without."""
    found = []
    for _ in range(2):
        engine = TransformersEngine(model.to(device))
        engine.cpu_forward = None
        found.append(engine)
    found[0].record()
    return found[0], found[1]


def same(one: TransformersSequence, other: TransformersSequence, tokens: torch.Tensor, rows: int) -> None:
    """Both say the same after these tokens."""
    found, expected = one.extend(tokens, rows), other.extend(tokens, rows)
    assert found.shape == expected.shape == (rows, SIZES["vocab_size"])
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", [*CONFIGS, "gpt-neox"])
def test_recorded_passes_equal_the_models_own(name: str, device: str) -> None:
    if name == "gpt-neox":
        torch.manual_seed(5)
        model = AutoModelForCausalLM.from_config(GPTNeoXConfig(**SIZES, rotary_pct=0.5)).double()
    else:
        model = made(name)
    recorded, plain = engines(model, device)
    one, other = recorded.sequence(), plain.sequence()
    for sequence in (one, other):
        sequence.reserve(100)
        sequence.extend(text(20), 1)
    for count, rows in ((1, 1), (4, 4), (2, 1), (9, 9), (1, 1), (3, 3)):  # windows are 7 tokens
        same(one, other, text(count), rows)
    for sequence in (one, other):
        sequence.rollback(25)
    same(one, other, text(5), 5)
    same(one, other, text(1), 1)
    assert recorded.recorded is not None
    assert recorded.recorded.problem is None
    assert {which[0] for which in one.cache.recordings} == {1, 2, 3, 5, 9}


def test_a_cache_that_cannot_grow_stays_as_it_is() -> None:
    model = made("llama")
    model.config.max_position_embeddings = 2 * GROWTH
    sequence = engines(model, "cpu")[1].sequence()
    sequence.extend(text(20), 1)
    cache = sequence.cache
    before = cache.capacity
    with pytest.raises((RuntimeError, MemoryError)):
        cache.reserve(2**50)
    assert cache.capacity == before
    sequence.extend(text(before), 1)
    assert sequence.length == 20 + before


def test_a_cache_that_grows_or_is_full_stays_right() -> None:
    model = made("llama")
    model.config.max_position_embeddings = 2 * GROWTH + 4
    recorded, plain = engines(model, "cpu")
    one, other = recorded.sequence(), plain.sequence()
    for sequence in (one, other):
        sequence.extend(text(LEAST_KEYS - 6), 1)
    for count in (1, 3, 5, 2, 1, 4):  # past the first buffer's end, and past the keys that a pass sees
        same(one, other, text(count), count)
    assert len({which[2] for which in one.cache.recordings}) == 1, "recordings over a buffer that is gone are kept"
    for sequence in (one, other):
        sequence.extend(text(2 * GROWTH - sequence.length), 1)
    for count in (3, 1):  # a pass filled up to five tokens would go beyond the context
        same(one, other, text(count), count)
    assert recorded.recorded is not None
    assert recorded.recorded.problem is None


def test_other_texts_and_adapters_reuse_the_recordings(tmp_path: Path) -> None:
    recorded, plain = engines(made("qwen3"), "cpu")
    recorded.model.save_pretrained(tmp_path / "model")
    one, other = recorded.sequence(), plain.sequence()
    for sequence in (one, other):
        sequence.extend(text(20), 1)
    same(one, other, text(2), 2)
    held = dict(one.cache.recordings)
    adapter = save_random_adapter(tmp_path / "model", tmp_path / "adapter")
    for sequence in (one, other):
        sequence.rollback(3)
        sequence.extend(text(30), 1)
    before = plain.sequence().extend(text(22), 1).clone()
    recorded.apply_adapter(adapter)  # both engines run one model
    assert not torch.allclose(plain.sequence().extend(text(22), 1), before)
    same(one, other, text(2), 2)
    assert one.cache.recordings == held
    recorded.apply_adapter(None)


def wrong(output: Any) -> Any:
    return SimpleNamespace(logits=output.logits.flip(-1))


def unable(output: Any) -> Any:
    raise RuntimeError("operation not permitted when stream is capturing\nand more")


@pytest.mark.parametrize(("fault", "said"), [(wrong, "differs from the eager one"), (unable, "not permitted")])
def test_a_model_that_cannot_be_recorded_stays_eager(
    fault: Callable[[Any], Any], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    recorded, plain = engines(made("llama"), "cpu")
    own = recorded.model.forward

    def forward(*args: Any, **named: Any) -> Any:
        output = own(*args, **named)
        return fault(output) if named["past_key_values"].is_compileable else output

    recorded.model.forward = forward  # type: ignore[method-assign]
    one, other = recorded.sequence(), plain.sequence()
    for sequence in (one, other):
        sequence.extend(text(20), 1)
    for count in (1, 4, 1):
        same(one, other, text(count), count)
    assert recorded.recorded is not None
    assert said in str(recorded.recorded.problem)
    assert caplog.text.count("stay eager") == 1


@pytest.mark.thorough
def test_answers_are_the_same_with_recorded_passes(prompts: list[str]) -> None:
    pair = load_pair(load_settings({"dtype": "float32"}))
    target, draft = pair.target, pair.draft
    assert isinstance(target, TransformersEngine)
    assert isinstance(draft, TransformersEngine)
    target.cpu_forward = draft.cpu_forward = None
    answers = []
    for record in (False, True):
        if record:
            target.record()
            draft.record()
        for length in (0, 3):
            assistant = Assistant(pair, FixedLength(length), None)
            for prompt in prompts[:2]:
                for _ in assistant.complete(prompt, SamplingParams(), StopParams(32, ignore_eos=True)):
                    pass
                assert assistant.last is not None
                answers.append(assistant.last.output)
    assert answers[0:2] == answers[2:4] == answers[4:6] == answers[6:8]
    assert target.recorded is not None
    assert target.recorded.problem is None
