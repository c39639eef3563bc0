"""Gemma 4 on our own forward, in one call: layers of two shapes, shared keys and per-layer inputs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_cpu_forward import ALL, GEMMA4, SIZES, TWO_SIZES, made, own, text, truth
from test_models import loaded
from test_streamed import logits_of, streamed
from tiny_models import GREEDY, Greedy, alone, noisy, prompt_of, randomise, tiny_config, tiny_model
from transformers import AutoModelForImageTextToText, Gemma4Config, Gemma4TextConfig, Gemma4VisionConfig

from adaptive.engines.budget import _cached
from adaptive.engines.cpu import kernels
from adaptive.engines.cpu.families import forward_kind
from adaptive.engines.cpu.forward import MANY, cpu_forward
from adaptive.engines.hf.engine import TransformersEngine
from trainers.dataset import Example
from trainers.fit import fit
from trainers.lora import attach, snapshot, write
from trainers.recipe import Recipe

pytestmark = pytest.mark.skipif(
    kernels.library() is None, reason="the kernels are not built, or not for this processor"
)
SHARING, DENSE = "gemma4, keys of another layer", "gemma4, values are keys"
TOKENS = 40


@pytest.mark.parametrize("model_type", ["gemma4_text", "gemma4_unified_text"])
def test_greedy_output_equals_target_alone(model_type: str) -> None:
    model, prompt = tiny_model(model_type), prompt_of(60)
    target, draft = TransformersEngine(model), TransformersEngine(noisy(model))
    assert target.cpu_forward is not None
    assert target.cpu_forward.fused
    expected = alone(model, prompt, TOKENS)
    for length in (1, 4, 9, None):
        greedy = Greedy(target, draft, length)
        assert greedy.say(prompt, TOKENS) == expected
        assert length is None or 0 < greedy.accepted < 1
        greedy.again(len(prompt) - 7)  # decode the answer again from a rolled-back prompt
        assert greedy.say(prompt, TOKENS) == expected
    itself = Greedy(target, target, 4)
    assert itself.say(prompt, TOKENS) == expected
    assert itself.accepted == 1


def test_an_adapter_of_a_draft_is_merged_and_taken_out_and_leaves_the_text_of_the_target(tmp_path: Path) -> None:
    """The adapter is trained on every linear layer, including those of the per-layer inputs."""
    model, prompt = tiny_model("gemma4_text"), prompt_of(40)
    target, other = TransformersEngine(model), noisy(model)
    answer = alone(model, prompt, TOKENS)
    draft, student = TransformersEngine(noisy(model)), attach(other, Recipe(rank=4))
    example = Example(
        0, "", np.array(prompt, np.int32), np.array(answer, np.int32), GREEDY, limited=True, supervision=None
    )
    fit(student, [example], lambda step: 1.0, Recipe(rank=4, loss="cross-entropy", epochs=3, learning_rate=0.01))
    write(student, snapshot(student), tmp_path)
    names = json.loads((tmp_path / "adapter_config.json").read_text())["target_modules"]
    assert any("per_layer" in name for name in names)
    assert draft.cpu_forward is not None
    before = draft.sequence().extend(prompt, 1).clone()
    draft.apply_adapter(tmp_path)
    with_it = draft.sequence().extend(prompt, 1).clone()
    with torch.inference_mode():
        theirs = student(input_ids=torch.tensor([prompt])).logits[0, -1:]
    torch.testing.assert_close(with_it, theirs, rtol=0, atol=1e-4 * float(theirs.abs().max()))
    assert not torch.allclose(before, with_it, atol=1e-2)
    assert Greedy(target, draft, 4).say(prompt, TOKENS) == answer
    draft.apply_adapter(None)
    assert torch.equal(before, draft.sequence().extend(prompt, 1))


@pytest.mark.parametrize("name", [SHARING, DENSE])
def test_int8_weights_say_nearly_the_same(name: str) -> None:
    model = made(name, torch.bfloat16)
    forward = cpu_forward(model, int8=True)
    assert forward is not None
    assert forward.fused
    tokens = text(30)
    got, right = forward(tokens, 30, forward.cache()), truth(model.float(), tokens)
    assert torch.nn.functional.cosine_similarity(got, right, dim=1).mean() > 0.97


def test_of_a_prompt_the_sharing_layers_compute_what_is_asked_for_and_say_the_same() -> None:
    """Layers that share keys skip prompt rows without requested logits, except where hidden states are kept."""
    forward = own(made(SHARING, torch.float32))
    assert forward.fused
    tokens = text(2 * MANY + 9)
    whole, short = forward.cache(features=True), forward.cache()
    right = forward(tokens, 3, whole).clone()
    assert torch.equal(forward(tokens, 3, short), right)
    none = forward.cache()
    forward(tokens, 0, none)  # read without asking for logits
    for token in (5, 9):
        asked = torch.tensor([token])
        assert torch.equal(forward(asked, 1, none), forward(asked, 1, whole))
    engine, found = TransformersEngine(made(SHARING, torch.float32)), []
    for kept in (True, False):  # the last rows of a tree
        sequence = engine.sequence(features=kept)
        sequence.extend(tokens[:20].tolist(), 1)
        found.append(sequence.extend([5, 6, 7, 8], 2, [-1, 0, 0, 1]).clone())
    assert torch.equal(*found)


def test_a_text_holds_one_cache_for_each_layer_that_has_keys() -> None:
    forward = own(made(SHARING, torch.float32))
    assert forward.plan.cache_shapes == [(2, 16), (2, 32), (2, 16)]
    assert [layer.cache for layer in forward.plan.layers] == [0, 1, 2, 2, 2, 1]
    cache = forward.cache()
    tokens = text(30)
    forward(tokens, 1, cache)
    stored = cache.stored()
    assert stored is not None
    other = forward.cache()
    other.restore(stored, 28)
    assert torch.equal(forward(tokens[28:], 2, other), forward(tokens, 2, forward.cache()))
    numbers = _cached(ALL[SHARING])
    assert numbers == 2 * (2 * 16 + 2 * 32 + 2 * 16)
    cache.reserve(600)
    assert cache.memory.total == 4 * numbers * cache.capacity


def test_layers_read_from_disk_say_the_same(tmp_path: Path) -> None:
    """Including the factor of the residual stream, which is a buffer and not a parameter."""
    model = tiny_model("gemma4_text", vocab_size=512, vocab_size_per_layer_input=512, num_experts=None)
    for layer in model.model.layers:
        layer.layer_scalar.fill_(0.7)
    model.save_pretrained(tmp_path)
    engine = streamed(tmp_path, "1MB")
    assert engine.cpu_forward is not None
    assert engine.cpu_forward.plan.stream is not None
    for got, right in zip(logits_of(engine), logits_of(TransformersEngine(model)), strict=True):
        assert torch.equal(got, right)


def test_of_a_checkpoint_with_vision_the_language_model_is_loaded_alone(tmp_path: Path) -> None:
    config = Gemma4Config(
        text_config=tiny_config("gemma4_text", use_bidirectional_attention="vision"),
        vision_config=Gemma4VisionConfig(
            hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2
        ),
        tie_word_embeddings=False,
    )
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    randomise(model, 0)
    model.save_pretrained(tmp_path)
    engine = loaded(tmp_path)
    assert type(engine.model).__name__ == "Gemma4ForCausalLM"
    assert not [name for name, _ in engine.model.named_parameters() if "vis" in name]
    assert engine.cpu_forward is not None
    prompt = prompt_of(30)
    greedy = Greedy(engine, TransformersEngine(noisy(engine.model)), 4)
    assert greedy.say(prompt, TOKENS) == alone(model, prompt, TOKENS)


def test_what_is_not_computed_keeps_transformers_forward() -> None:
    cpu = torch.device("cpu")

    def kind(**changes: Any) -> str | None:
        return forward_kind("Gemma4ForCausalLM", Gemma4TextConfig(**{**TWO_SIZES, **changes}), torch.float32, cpu)

    assert kind() == "fused"
    assert kind(use_bidirectional_attention="vision") == "fused"  # concerns images only, which are not supported here
    assert kind(use_bidirectional_attention="all") is None
    # Tokens without a row in the second embedding.
    assert kind(hidden_size_per_layer_input=8, vocab_size_per_layer_input=SIZES["vocab_size"] - 1) is None
    assert kind(hidden_size_per_layer_input=8, vocab_size_per_layer_input=SIZES["vocab_size"]) == "fused"
    full = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    ropes = {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}, "full_attention": full}
    assert kind(rope_parameters=ropes) is None
    assert kind(global_head_dim=24) == "native"


def test_every_kind_of_it_is_one_call() -> None:
    for name in GEMMA4:
        assert own(made(name, torch.float32)).kind == "fused"
