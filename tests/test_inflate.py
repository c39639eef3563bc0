"""An inflated model costs more and computes the same output."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import hybrid
import pytest
import torch
from inflate import Size, inflate, inflate_head, write_hybrids
from inflate_hybrid import HybridSize, inflate_hybrid, small_hybrid
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from adaptive.engines.head.module import Head
from adaptive.errors import AdaptiveError


def small(dtype: torch.dtype, tied: bool = True) -> LlamaForCausalLM:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        rms_norm_eps=1e-3,
        tie_word_embeddings=tied,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model.to(dtype).eval()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("size", [Size(32, 40, 4, 2), Size(80, 96, 10, 5), Size(128, 40, 4, 3)])
def test_an_inflated_model_has_the_small_ones_distribution(size: Size, tied: bool) -> None:
    model = small(torch.float32, tied)
    tokens = torch.randint(0, 61, (2, 40))
    with torch.inference_mode():
        right, got = model(tokens).logits, inflate(model, size)(tokens).logits
    torch.testing.assert_close(got.softmax(-1), right.softmax(-1), rtol=1e-4, atol=1e-6)


def test_widths_times_four_are_exact_in_bfloat16_weights() -> None:
    model = small(torch.bfloat16)
    large = inflate(model, Size(128, 160, 16, 4)).float()
    tokens = torch.randint(0, 61, (1, 40))
    with torch.inference_mode():
        right, got = model.float()(tokens).logits, large(tokens).logits
    torch.testing.assert_close(got, right, rtol=1e-4, atol=1e-4)


def test_an_inflated_head_drafts_as_the_small_one_does(tmp_path: Path) -> None:
    model = small(torch.float32)
    large = inflate(model, Size(128, 160, 16, 4))
    head = Head.from_target(model)
    with torch.no_grad():
        for tensor in head.own().values():
            tensor.add_(0.2 * torch.randn_like(tensor))
    head.draft_among(torch.arange(3, 50))
    head.write(tmp_path)
    inflated = inflate_head(tmp_path, model, large)
    tokens, features = torch.randint(0, 61, (1, 20)), torch.randn(1, 20, 32)
    padded = torch.cat([features, torch.zeros(1, 20, 96)], -1)
    places = torch.arange(20)[None]
    with torch.inference_mode():
        right, got = head(tokens, features, places), inflated(tokens, padded, places)
        torch.testing.assert_close(got[..., :32], right, rtol=1e-4, atol=1e-4)
        assert not got[..., 32:].any()
        torch.testing.assert_close(inflated.logits(got), head.logits(right), rtol=1e-4, atol=1e-4)


def test_added_layers_have_weights_to_multiply_by() -> None:
    large = inflate(small(torch.float32), Size(32, 40, 4, 4))
    assert large.model.layers[3].mlp.up_proj.weight.abs().min() > 0


@pytest.mark.parametrize("size", [Size(16, 40, 4, 2), Size(32, 39, 4, 2), Size(32, 40, 4, 1), Size(32, 40, 5, 2)])
def test_a_size_that_does_not_contain_the_model_is_refused(size: Size) -> None:
    with pytest.raises(AdaptiveError):
        inflate(small(torch.float32), size)


def test_other_architectures_are_refused() -> None:
    config = Qwen2Config(
        vocab_size=61, hidden_size=32, intermediate_size=40, num_hidden_layers=1, num_attention_heads=4
    )
    with pytest.raises(AdaptiveError, match="Qwen2"):
        inflate(Qwen2ForCausalLM(config), Size(64, 80, 8, 2))


HYBRID = HybridSize(64, 96, 4, 2, 2, 4, 16, 16)
LARGER = HybridSize(256, 128, 8, 4, 4, 6, 16, 16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_inflated_hybrid_has_the_small_ones_distribution(dtype: torch.dtype) -> None:
    model = small_hybrid(HYBRID, vocab=61).to(dtype)
    large = inflate_hybrid(model, LARGER)
    assert sum(p.numel() for p in large.parameters()) > 4 * sum(p.numel() for p in model.parameters())
    assert large.model.layers[4].mlp.up_proj.weight.abs().min() > 0
    tokens = torch.randint(0, 61, (2, 40))
    with torch.inference_mode():
        right, got = model.float()(tokens).logits, large.float()(tokens).logits
    torch.testing.assert_close(got, right, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("changed", [{"width": 32}, {"heads": 2, "key_heads": 1}, {"head": 32}, {"key_heads": 8}])
def test_a_hybrid_is_not_made_smaller_nor_its_heads_larger(changed: dict[str, int]) -> None:
    with pytest.raises(AdaptiveError):
        inflate_hybrid(small_hybrid(HYBRID, vocab=61), replace(LARGER, **changed))


@pytest.mark.thorough
def test_the_hybrids_benchmark_runs_on_a_tiny_pair(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_hybrids(tmp_path, LARGER, HYBRID)
    given = ["--pair", str(tmp_path), "--length", "3", "--tokens", "4", "--repeats", "1", "--count", "1"]
    monkeypatch.setattr(sys, "argv", ["hybrid.py", *given])
    hybrid.main()
    said = capsys.readouterr().out
    for line in ("plain:", "passes:", "rollback:", "a round of 3, greedy", "memory of 8000 tokens"):
        assert line in said
