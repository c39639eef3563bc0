"""A head is made from a target of any family, starts as the target's last layer, and is saved and loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_models import TEXT, VISION, several_kinds
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    OlmoConfig,
    PreTrainedModel,
    Qwen3Config,
)

from adaptive.engines.cpu.families import read_plan
from adaptive.engines.head.module import WEIGHTS, Head, unsuitable
from adaptive.engines.head.parts import decoder_of, parts_of_folder, parts_of_model
from adaptive.engines.load import Source, load_model
from adaptive.errors import AdaptiveError
from adaptive.service.trainer import _trained_bytes
from adaptive.settings import load_settings

BUNDLED = Path(__file__).resolve().parent.parent / "checkpoints" / "bundled" / "target"
SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "pad_token_id": 3,
}
CONFIGS = {
    "llama": LlamaConfig(**SIZES),
    "llama, tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SIZES),
    "mistral, window": MistralConfig(**SIZES, sliding_window=7),
    "gemma3, last layer full": Gemma3TextConfig(**SIZES, layer_types=["sliding_attention"] * 2 + ["full_attention"]),
    "gemma3, last layer a window": Gemma3TextConfig(**SIZES, sliding_window=7, layer_types=["sliding_attention"] * 3),
    "gemma4, last layer with other heads": Gemma4TextConfig(
        **SIZES, sliding_window=7, global_head_dim=32, hidden_size_per_layer_input=0, attention_k_eq_v=True
    ),
    "olmo, a norm without weights": OlmoConfig(**SIZES),
}
# Of checkpoints with vision: the type of the text part, and the sizes of the other one.
WITH_VISION = {name: (TEXT[name], VISION[name]) for name in ("gemma3", "qwen3_vl")} | {
    "qwen2_5_vl": ("qwen2_5_vl_text", VISION["qwen3_vl"]),
    "mistral3": ("mistral", VISION["gemma3"]),
}


def made(name: str) -> PreTrainedModel:
    """A target of random weights."""
    torch.manual_seed(3)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(CONFIGS[name]).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def last_states(model: PreTrainedModel, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Input and output of the target's last layer, (1, n, width) each, for a text (n,)."""
    seen: dict[str, torch.Tensor] = {}
    decoder = decoder_of(model)
    handles = [
        decoder.layers[-1].register_forward_pre_hook(lambda _, args: seen.update(read=args[0])),
        decoder.norm.register_forward_pre_hook(lambda _, args: seen.update(gave=args[0])),
    ]
    with torch.no_grad():
        model(input_ids=tokens[None])
    for handle in handles:
        handle.remove()
    return seen["read"], seen["gave"]


def randomised(head: Head) -> Head:
    """Change the head's own weights at random."""
    torch.manual_seed(8)
    with torch.no_grad():
        for tensor in head.own().values():
            tensor.add_(0.1 * torch.randn_like(tensor))
    return head


@pytest.mark.parametrize("name", CONFIGS)
def test_its_layer_and_projection_compute_what_the_targets_last_do(name: str) -> None:
    model = made(name)
    head = Head.from_target(model)
    tokens = torch.arange(30) % 89 + 4
    read, gave = last_states(model, tokens)
    head.fused = lambda tokens, features: features  # type: ignore[method-assign]
    with torch.no_grad():
        hidden = head(tokens[None], read)
        wanted = model(input_ids=tokens[None]).logits
    torch.testing.assert_close(hidden, gave, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(head.logits(hidden), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_row_at_a_time_over_a_cache_is_the_whole_text_at_once(name: str) -> None:
    head = randomised(Head.from_target(made(name)))
    tokens = torch.arange(20)[None] * 4
    features = torch.randn(1, 20, head.width)
    cache = DynamicCache(config=head.config)
    with torch.no_grad():
        whole = head(tokens, features)
        rows = [
            head(tokens[:, i : i + 1], features[:, i : i + 1], torch.tensor([[i]]), past_key_values=cache)
            for i in range(20)
        ]
    torch.testing.assert_close(torch.cat(rows, 1), whole, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", CONFIGS)
def test_what_is_written_is_read_again_and_is_its_own_tensors_alone(name: str, tmp_path: Path) -> None:
    model = made(name)
    model.save_pretrained(tmp_path / "target")
    head = randomised(Head.from_target(model))
    (tmp_path / "head").mkdir()
    head.write(tmp_path / "head")
    tensors = load_file(tmp_path / "head" / WEIGHTS)
    assert set(tensors) == set(head.own())
    assert not any("embed" in key or "lm_head" in key for key in tensors)
    assert sum(t.numel() for t in tensors.values()) == sum(t.numel() for t in head.own().values())
    # The trainer has only the target's folder, the engine the loaded target; both read the same head.
    for parts in (parts_of_folder(tmp_path / "target"), parts_of_model(model)):
        again = Head.read(tmp_path / "head", parts)
        text, features = torch.arange(9)[None], torch.randn(1, 9, head.width)
        with torch.no_grad():
            hidden = head(text, features)
            torch.testing.assert_close(again(text, features), hidden, atol=0, rtol=0)
            torch.testing.assert_close(again.logits(hidden), head.logits(hidden), atol=0, rtol=0)


def test_only_its_own_tensors_learn_and_the_targets_are_shared() -> None:
    model = made("llama, tied")
    head = Head.from_target(model)
    learning = {id(p) for p in head.parameters() if p.requires_grad}
    assert len(learning) == len(head.own())
    assert head.body.get_input_embeddings().weight.data_ptr() == model.get_input_embeddings().weight.data_ptr()
    assert head.body.get_output_embeddings().weight.data_ptr() == model.get_input_embeddings().weight.data_ptr()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    randomised(head)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    head.reset()
    first = Head.from_target(model).own()
    assert all(torch.equal(tensor, first[name]) for name, tensor in head.own().items())


def test_the_bundled_target_grows_one_that_our_own_forward_knows() -> None:
    head = Head(parts_of_folder(BUNDLED))
    assert sum(t.numel() for t in head.own().values()) == pytest.approx(0.94e6, rel=0.05)
    assert head.body.config.num_hidden_layers == 1
    assert head.body.config.vocab_size == 4096
    assert read_plan(head.body) is not None
    float32 = Head(parts_of_folder(BUNDLED), torch.float32)
    assert {p.dtype for p in float32.parameters()} == {torch.float32}


def test_a_tied_projection_is_held_once_in_another_dtype_too(tmp_path: Path) -> None:
    model = made("llama, tied").to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    for parts in (parts_of_folder(tmp_path), parts_of_model(model)):
        body = Head(parts, torch.float32).body
        assert body.get_output_embeddings().weight is body.get_input_embeddings().weight
        assert body.get_input_embeddings().weight.dtype == torch.float32


@pytest.mark.parametrize("model_type", WITH_VISION)
def test_the_head_on_a_checkpoint_with_vision_is_that_of_its_language_model(model_type: str, tmp_path: Path) -> None:
    text, vision = WITH_VISION[model_type]
    several_kinds(text, model_type, **vision).save_pretrained(tmp_path)
    settings = load_settings({"target": str(tmp_path), "device": "cpu", "dtype": "float32"})
    target = load_model(Source("it", tmp_path, "none"), settings, "cpu")
    held = Head(parts_of_model(target)).state_dict()
    read = Head(parts_of_folder(tmp_path)).state_dict()
    assert read.keys() == held.keys()
    assert all(torch.equal(read[name], tensor) for name, tensor in held.items())
    assert _trained_bytes(settings) > 0


def test_a_head_of_another_target_is_refused_in_one_line(tmp_path: Path) -> None:
    head = Head.from_target(made("llama"))
    head.write(tmp_path)
    with pytest.raises(AdaptiveError, match="model_type llama, and this one has qwen3"):
        Head.from_target(made("qwen3")).load(tmp_path)
    wider = AutoModelForCausalLM.from_config(LlamaConfig(**{**SIZES, "intermediate_size": 96}))
    with pytest.raises(AdaptiveError, match=r"layer\.mlp\..*\(80, 48\), and \(96, 48\) fits"):
        Head.from_target(wider).load(tmp_path)


def test_a_damaged_head_is_refused_in_one_line(tmp_path: Path) -> None:
    head = Head.from_target(made("llama"))
    head.write(tmp_path)
    tensors = head.own()
    (tmp_path / WEIGHTS).write_bytes((tmp_path / WEIGHTS).read_bytes()[:-40])
    with pytest.raises(AdaptiveError, match="cannot be read"):
        head.load(tmp_path)
    save_file({k: v.contiguous() for k, v in tensors.items() if k != "fuse.weight"}, tmp_path / WEIGHTS)
    with pytest.raises(AdaptiveError, match=r"lacks fuse\.weight"):
        head.load(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"head": {**config["head"], "format": 2}}))
    with pytest.raises(AdaptiveError, match="another format"):
        head.load(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(AdaptiveError, match="holds no head"):
        head.load(tmp_path)


def test_a_target_that_is_built_otherwise_is_refused() -> None:
    config = GPTNeoXConfig(hidden_size=48, num_attention_heads=4, num_hidden_layers=2, intermediate_size=80)
    assert "no head can be grown on a GPTNeoXForCausalLM" in str(unsuitable(config))
    assert unsuitable(CONFIGS["qwen3"]) is None
