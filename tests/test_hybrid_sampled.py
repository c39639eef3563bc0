"""Sampled output of a hybrid model has the target's distribution, whatever is drafted and rolled back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_lossless_sampled import IDS, PARAMS, VOCAB, exact_distribution, p_value, run_loop
from test_recurrent import engine_of
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from adaptive.engines.cpu import kernels
from adaptive.engines.cpu.delta import States
from adaptive.engines.hf.engine import TransformersEngine

RUNS = 2000
Models = tuple[TransformersEngine, TransformersEngine]


def made(ours: bool) -> Models:
    """Two tiny hybrids with a vocabulary of eight tokens that disagree in some places."""
    engines = []
    for seed in (3, 4):
        torch.manual_seed(seed)
        config: Any = Qwen3_5TextConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            layer_types=["linear_attention", "full_attention"],
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            linear_num_key_heads=2,
            linear_num_value_heads=2,
            linear_key_head_dim=16,
            linear_value_head_dim=16,
            max_position_embeddings=64,
        )
        model = Qwen3_5ForCausalLM(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.ndim >= 2:
                    parameter.mul_(40 if "lm_head" in name else 10)
        engines.append(engine_of(model, ours))
    return engines[0], engines[1]


@pytest.fixture(scope="module")
def models() -> Models:
    if kernels.library() is None:
        pytest.skip("the kernels are not built, or not for this processor")
    return made(ours=True)


@pytest.mark.thorough
@pytest.mark.parametrize("params", [PARAMS[1], PARAMS[2], PARAMS[4]], ids=[IDS[1], IDS[2], IDS[4]])
def test_a_hybrid_samples_from_the_target(models: Models, params: Any) -> None:
    assert p_value(run_loop(models, params, length=2, runs=RUNS), exact_distribution(models[0], params)) > 0.001


@pytest.mark.thorough
def test_a_hybrid_by_transformers_forward_samples_from_the_target() -> None:
    models = made(ours=False)
    exact = exact_distribution(models[0], PARAMS[1])
    assert p_value(run_loop(models, PARAMS[1], length=2, runs=600), exact) > 0.001


@pytest.mark.thorough
def test_a_state_that_is_not_taken_back_fails_the_same_test(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    exact, taken_back = exact_distribution(models[0], PARAMS[1]), States.rollback

    def keeps(self: States, length: int) -> int:
        if self.length - length in (1, 2) and self._base is not None and self._base < length:
            self._base -= self.length - length  # leaves the rejected tokens in the state
            self.length = length
            return length
        return taken_back(self, length)

    monkeypatch.setattr(States, "rollback", keeps)
    assert p_value(run_loop(models, PARAMS[1], length=2, runs=RUNS), exact) < 0.001
