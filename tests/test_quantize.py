"""Four bits by bitsandbytes, also for models with layers that do not divide into its blocks."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from test_doctor import findings
from test_models import loaded
from transformers import LlamaConfig, LlamaForCausalLM

from adaptive.errors import AdaptiveError

pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")


def saved(folder: Path, hidden: int, inner: int) -> Path:
    config = LlamaConfig(
        num_hidden_layers=2, hidden_size=hidden, intermediate_size=inner, num_attention_heads=2, vocab_size=64
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def test_layers_that_do_not_fit_stay_as_they_are(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = saved(tmp_path / "partly", 64, 96)
    with caplog.at_level(logging.WARNING, logger="adaptive"):
        engine = loaded(folder, quantize="nf4")
    kinds = {name: type(module).__name__ for name, module in engine.model.named_modules() if "proj" in name}
    plain = {name for name, kind in kinds.items() if kind == "Linear"}
    assert plain == {"model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj"}  # those with 96 inputs
    assert {kinds[name] for name in kinds if name not in plain} == {"Linear4bit"}
    assert type(engine.model.lm_head) is torch.nn.Linear
    assert "12 of 14 linear layers fit bitsandbytes' blocks" in caplog.text
    sequence = engine.sequence()
    logits = sequence.extend([3, 5, 7], 3)
    assert torch.isfinite(logits).all()
    _, found = findings("--target", str(folder), "--draft", "none", "--device", "cpu", "--quantize", "nf4")
    assert found["target nf4"]["status"] == "note"
    assert found["target nf4"]["value"].startswith("12 of 14 linear layers fit")


def test_a_model_of_which_no_layer_fits_is_refused_before_it_is_loaded(tmp_path: Path) -> None:
    folder = saved(tmp_path / "none", 48, 80)
    (folder / "model.safetensors").write_bytes(b"read by nobody")
    with pytest.raises(AdaptiveError, match="--quantize nf4 cannot hold none: 0 of 14 linear layers fit"):
        loaded(folder, quantize="nf4")
    code, found = findings("--target", str(folder), "--draft", "none", "--device", "cpu", "--quantize", "nf4")
    assert code == 1
    assert found["target nf4"]["status"] == "broken"
    assert "leave it out" in found["target nf4"]["value"]


def test_a_model_that_fits_is_quantised_as_ever(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = saved(tmp_path / "whole", 64, 128)
    with caplog.at_level(logging.WARNING, logger="adaptive"):
        engine = loaded(folder, quantize="nf4")
    kinds = [type(module).__name__ for name, module in engine.model.named_modules() if "proj" in name]
    assert kinds == ["Linear4bit"] * 14
    assert not caplog.text
    _, found = findings("--target", str(folder), "--draft", "none", "--device", "cpu", "--quantize", "nf4")
    assert found["target nf4"]["value"].startswith("14 of 14")
