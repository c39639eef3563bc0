"""The numbers that a model is loaded in, where nobody says which."""

from __future__ import annotations

import pytest
import torch
from transformers import GPT2Config, LlamaConfig, PreTrainedConfig

from adaptive.engines.cpu import dtype, weights
from adaptive.engines.load import choose_dtype


def config(kind: type[PreTrainedConfig], architecture: str) -> PreTrainedConfig:
    """As a checkpoint of this class has it."""
    made = kind()
    made.architectures = [architecture]
    return made


@pytest.mark.parametrize("multiplied", [True, False])
def test_bfloat16_is_for_what_is_multiplied_in_it(multiplied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "packs", lambda kind, device: multiplied)
    monkeypatch.setattr(dtype, "fastest_dtype", lambda width: torch.bfloat16)
    known, unknown = config(LlamaConfig, "LlamaForCausalLM"), config(GPT2Config, "GPT2LMHeadModel")
    assert choose_dtype("auto", "cpu", known) == torch.bfloat16
    assert choose_dtype("auto", "cpu", unknown) == (torch.bfloat16 if multiplied else torch.float32)
    assert choose_dtype("bfloat16", "cpu", unknown) == torch.bfloat16  # what is asked for is what is used
