"""Architectures with special needs: text with drafting equals text without it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import BUNDLED, Command
from counted_reads import counted_reads
from tiny_models import GREEDY, LAYERS, Greedy, alone, noisy, prompt_of, randomise, tiny_config, tiny_model
from transformers import BloomConfig, LlamaConfig, MptConfig

from adaptive.assistant import Assistant
from adaptive.control.policy import FixedLength
from adaptive.engines.hf.engine import TransformersEngine
from adaptive.engines.hf.generation import context_of
from adaptive.engines.hf.plain import PlainSequence
from adaptive.engines.load import Source, load_engine, read_config
from adaptive.pair import load_pair
from adaptive.settings import load_settings
from adaptive.types import Message, StopParams
from trainers.dataset import Example
from trainers.fit import fit
from trainers.lora import attach, linear_names
from trainers.recipe import Recipe

TOKENS = 20


def loaded(folder: Path, draft: bool = False, dtype: str = "float32", **options: str) -> TransformersEngine:
    settings = load_settings({"device": "cpu", "dtype": dtype, **options})
    source = Source(folder.name, folder, settings.quantize)
    engine = load_engine(source, settings, "cpu", lambda share: None, draft=draft)
    assert isinstance(engine, TransformersEngine)
    return engine


@pytest.mark.parametrize("model_type", ["gemma3n_text", "gemma4_text"])
def test_layers_that_reuse_keys_are_rolled_back_and_not_emptied(model_type: str) -> None:
    model = tiny_model(model_type)
    target, prompt = TransformersEngine(model), prompt_of(60)
    greedy = Greedy(target, TransformersEngine(noisy(model)), 4)
    assert greedy.say(prompt, TOKENS) == alone(model, prompt, TOKENS)
    assert 0 < greedy.accepted < 1
    rejected = sum(outcome.drafted - outcome.accepted for outcome in greedy.rounds)
    assert greedy.fed < len(prompt) + TOKENS + rejected + 10  # and not the whole text in every round
    held = greedy.target.length
    greedy.again(held - 7)
    assert greedy.target.length == held - 7


@pytest.mark.parametrize(
    "model_type", ["ministral3", "smollm3", "phi3", "granite", "olmo3", "glm4", "hunyuan_v1_dense"]
)
def test_proposals_and_verdicts_on_our_forward_leave_the_text_of_the_target(model_type: str) -> None:
    model, prompt = tiny_model(model_type), prompt_of(60)
    target, draft = TransformersEngine(model), TransformersEngine(noisy(model))
    assert target.cpu_forward is not None
    greedy = Greedy(target, draft, 4)
    assert greedy.say(prompt, TOKENS) == alone(model, prompt, TOKENS)
    assert 0 < greedy.accepted < 1


LONG = {
    "max_position_embeddings": 512,
    "original_max_position_embeddings": 64,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 8,
        "long_factor": [1.0 + 2.0 * i for i in range(8)],
        "original_max_position_embeddings": 64,
    },
}


@pytest.mark.parametrize("length", [1, 4, 9])
def test_a_text_crosses_the_border_of_a_longrope_exactly(length: int) -> None:
    """At that length transformers computes the whole text again; here a pass over several tokens crosses it."""
    model = tiny_model("phi3", num_hidden_layers=2, **LONG)
    target, draft = TransformersEngine(model), TransformersEngine(noisy(model))
    for begin in (55, 63, 64):
        prompt = prompt_of(begin)
        expected = alone(model, prompt, TOKENS)
        greedy = Greedy(target, draft, length)
        assert greedy.say(prompt, TOKENS) == expected, begin
        greedy.again(begin - 1)  # back over the border
        assert greedy.say(prompt, TOKENS) == expected, begin
    itself = Greedy(target, target, length)
    itself.say(prompt_of(55), TOKENS)
    assert itself.accepted == 1


def test_one_cache_over_that_border_says_something_else() -> None:
    """Otherwise the test above would prove nothing."""
    model = tiny_model("phi3", num_hidden_layers=2, **LONG)
    target, prompt = TransformersEngine(model), prompt_of(55)
    target._border = None
    assert Greedy(target, None).say(prompt, 2 * TOKENS) != alone(model, prompt, 2 * TOKENS)


def test_a_model_that_cannot_be_taken_back_decodes_plainly_and_says_so(tmp_path: Path) -> None:
    """Indexed attention: our cache does not hold the keys of its indexer."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(BUNDLED / "target")
    model = tiny_model("deepseek_v32", vocab_size=len(tokenizer))
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "target")
        part.save_pretrained(tmp_path / "draft")
    folders = {
        "device": "cpu",
        "target": str(tmp_path / "target"),
        "draft": str(tmp_path / "draft"),
        "dtype": "float32",
    }
    pair = load_pair(load_settings(folders))
    assert pair.draft is None
    assert any("indexed attention" in warning and "plainly" in warning for warning in pair.warnings)
    prompt = prompt_of(40)
    greedy = Greedy(pair.target, None)
    assert isinstance(greedy.target, PlainSequence)
    assert greedy.say(prompt, TOKENS) == alone(model, prompt, TOKENS)
    turn = [*prompt, *prompt_of(10)]
    greedy.again(len(prompt))
    assert greedy.say(turn, 8) == alone(model, turn, 8)


def test_a_prompt_that_comes_in_slices_is_one_pass_of_a_model_that_decodes_plainly() -> None:
    model, passes = tiny_model("deepseek_v32"), []
    handle = model.register_forward_pre_hook(lambda *_: passes.append(1))
    prompt, once, sliced = prompt_of(40), *(PlainSequence(model, torch.device("cpu"), "past_key_values") for _ in "ab")
    whole = once.extend(prompt, 2)
    assert len(passes) == 2
    for slice_of in (prompt[:16], prompt[16:30], [5, 6, 7]):
        assert sliced.extend(slice_of, 0).shape == (0, whole.shape[1])
    assert sliced.length == 33
    sliced.rollback(30)
    assert torch.equal(sliced.extend(prompt[30:], 2), whole)
    assert len(passes) == 4
    handle.remove()
    sliced.extend([5], 0)
    sliced.rollback(20)
    assert sliced.length == 0


def test_a_long_message_of_a_conversation_is_one_pass_of_a_model_that_decodes_plainly() -> None:
    model, passes = tiny_model("deepseek_v32"), []
    prompt, message = prompt_of(40), prompt_of(30)
    handle = model.register_forward_pre_hook(lambda *_: passes.append(1))
    talk, anew = (PlainSequence(model, torch.device("cpu"), "past_key_values") for _ in "ab")
    talk.extend(prompt, 1)
    said = talk.extend(message, 1)
    assert len(passes) == 2
    assert torch.equal(said, anew.extend([*prompt, *message], 1))
    handle.remove()


def test_the_longest_text_of_a_model_that_names_it_otherwise() -> None:
    assert context_of(MptConfig(max_seq_len=300)) == 300
    assert context_of(LlamaConfig(max_position_embeddings=200)) == 200
    assert context_of(BloomConfig()) == 2**31


def test_a_tensor_that_a_cache_holds_by_two_names_is_counted_once() -> None:
    sequence = PlainSequence(tiny_model("deepseek_v32"), torch.device("cpu"), "past_key_values")
    sequence.extend(prompt_of(20), 1)
    once, cache = sequence.memory.total, sequence._cache
    assert once > 0
    cache.recent = cache.layers[0].keys
    cache.heads = [cache.layers[0].keys[:, :1]]
    assert sequence.memory.total == once


def test_passes_that_disagree_are_found_when_a_model_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A selective scan that restarts in every pass, as in transformers, instead of continuing from its state."""
    from adaptive.engines.hf import calls

    def begins_anew(state: Any, function: Any, given: Any, siblings: Any) -> Any:
        call = calls.Call(calls._start(state), calls.current_pass().count, lambda before, given: before, given, {})
        state.call(call)
        return given.to(function)

    monkeypatch.setitem(calls.WRAPPERS, "mamba_selective_scan", begins_anew)
    model = tiny_model("mamba")
    model.save_pretrained(tmp_path)
    engine = loaded(tmp_path)
    assert engine.undraftable is not None
    assert "several tokens" in engine.undraftable
    assert engine.feature_width == 0
    prompt = prompt_of(30)
    assert Greedy(engine, engine, 4).say(prompt, TOKENS) == alone(model, prompt, TOKENS)


@pytest.mark.parametrize("model_type", ["rwkv", "minimax", "zamba"])
def test_whatever_keeps_its_past_in_its_own_way_decodes_plainly(model_type: str, tmp_path: Path) -> None:
    model = tiny_model(model_type)
    model.save_pretrained(tmp_path)
    engine = loaded(tmp_path)
    assert engine.undraftable is not None
    prompt = prompt_of(20)
    assert Greedy(engine, engine, 4).say(prompt, 8) == alone(model, prompt, 8)


def several_kinds(
    text_type: str, model_type: str, changes: dict[str, Any] | None = None, tied: bool = False, **small: Any
) -> Any:
    from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

    kind = CONFIG_MAPPING[model_type]
    vision = type(kind().vision_config)(**small)
    config = kind(text_config=tiny_config(text_type, **(changes or {})), vision_config=vision, tie_word_embeddings=tied)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    randomise(model, 0)
    return model


VISION = {
    "gemma3": {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2},
    "qwen3_vl": {"hidden_size": 32, "intermediate_size": 32, "depth": 1, "num_heads": 2, "out_hidden_size": 64},
    "qwen3_5": {"hidden_size": 32, "intermediate_size": 32, "depth": 1, "num_heads": 2, "out_hidden_size": 64},
}
TEXT = {"gemma3": "gemma3_text", "qwen3_vl": "qwen3_vl_text", "qwen3_5": "qwen3_5_text"}
CLASS = {"gemma3": "Gemma3ForCausalLM", "qwen3_vl": "Qwen3ForCausalLM", "qwen3_5": "Qwen3_5ForCausalLM"}


@pytest.mark.parametrize("model_type", list(VISION))
def test_of_a_checkpoint_with_vision_the_language_model_is_loaded_alone(model_type: str, tmp_path: Path) -> None:
    model = several_kinds(TEXT[model_type], model_type, **VISION[model_type])
    model.save_pretrained(tmp_path)
    engine = loaded(tmp_path)
    assert type(engine.model).__name__ == CLASS[model_type]
    assert not [name for name, _ in engine.model.named_parameters() if "vis" in name]
    assert len(engine.model.get_decoder().layers) == LAYERS
    prompt = prompt_of(30)
    greedy = Greedy(engine, TransformersEngine(noisy(engine.model)), 4)
    assert greedy.say(prompt, TOKENS) == alone(model, prompt, TOKENS)


def test_a_config_may_name_the_text_parts_values_beside_those_of_vision(tmp_path: Path) -> None:
    """As those of Qwen 2 and 2.5 VL do. The smaller ones have no projection: it is their embedding."""
    model = several_kinds("qwen2_5_vl_text", "qwen2_5_vl", tied=True, **VISION["qwen3_vl"])
    model.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    whole = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps({**whole.pop("text_config"), **whole}), encoding="utf-8")
    prompt = prompt_of(30)
    expected = alone(model, prompt, TOKENS)
    engine = loaded(tmp_path)
    assert type(engine.model).__name__ == "Qwen2ForCausalLM"
    assert Greedy(engine, None).say(prompt, TOKENS) == expected


def test_the_dtype_of_a_checkpoint_with_vision_is_that_of_its_language_model(tmp_path: Path) -> None:
    """Published configs name it once, for the whole."""
    several_kinds("gemma3_text", "gemma3", **VISION["gemma3"]).config.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    said = json.loads(file.read_text(encoding="utf-8"))
    said["dtype"] = "bfloat16"
    said["text_config"].pop("dtype", None)
    file.write_text(json.dumps(said), encoding="utf-8")
    assert read_config(Source("it", tmp_path, "none"), load_settings({})).dtype == torch.bfloat16


def test_vision_weights_are_not_read(tmp_path: Path) -> None:
    """They may even be NaN."""
    from safetensors.torch import load_file, save_file

    model = several_kinds("gemma3_text", "gemma3", **VISION["gemma3"])
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = {name: tensor for name, tensor in load_file(file).items() if "vision" not in name}
    assert len(tensors) < len(load_file(file))
    save_file(tensors, file, metadata={"format": "pt"})
    prompt = prompt_of(20)
    assert Greedy(loaded(tmp_path), None).say(prompt, 8) == alone(model, prompt, 8)


# Large enough that the language model is a small part of the file.
WIDE = {
    "gemma3": {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 2, "num_attention_heads": 8},
    "qwen3_vl": {"hidden_size": 512, "intermediate_size": 2048, "depth": 2, "num_heads": 8, "out_hidden_size": 64},
    "qwen3_5": {"hidden_size": 512, "intermediate_size": 2048, "depth": 2, "num_heads": 8, "out_hidden_size": 64},
}


@pytest.mark.parametrize("model_type", list(WIDE))
def test_of_a_checkpoint_with_vision_only_the_bytes_of_the_language_model_are_read(
    model_type: str, tmp_path: Path
) -> None:
    several_kinds(TEXT[model_type], model_type, **WIDE[model_type]).save_pretrained(tmp_path)
    with counted_reads() as read:
        engine = loaded(tmp_path)
    text = sum(parameter.nbytes for parameter in engine.model.parameters())
    assert not [name for name in read if "vis" in name]
    # A part of each tensor may be inspected before it is read.
    assert text <= sum(read.values()) <= 1.1 * text
    assert (tmp_path / "model.safetensors").stat().st_size > 10 * text


def test_routers_and_layers_that_peft_forbids_get_no_adapter() -> None:
    """A router of Llama 4 is a linear layer with its own forward; Mamba's kernels take a weight instead of a layer."""
    llama4 = tiny_model("llama4_text")
    names = linear_names(llama4)
    assert names
    assert not [name for name in names if name.endswith("router")]
    ids = torch.tensor([prompt_of(12)])
    attach(llama4, Recipe(rank=4))(input_ids=ids, labels=ids).loss.backward()
    names = linear_names(tiny_model("qwen3_next", num_hidden_layers=1, layer_types=["full_attention"]))
    assert names
    assert not [name for name in names if name.endswith(("gate_proj", "up_proj"))]  # PEFT takes them for experts
    assert linear_names(tiny_model("falcon", n_layer=1))  # linear layers of Falcon's own class
    falcon = tiny_model("falcon_h1")
    names = linear_names(falcon)
    assert any(name.endswith("in_proj") for name in names)
    assert not [name for name in names if name.endswith("out_proj")]
    attach(falcon, Recipe(rank=4))(input_ids=ids, labels=ids).loss.backward()


def test_a_model_that_cannot_be_trained_in_bfloat16_is_trained_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    model = attach(tiny_model("dbrx", n_layers=1), Recipe(rank=4))
    text = np.array(prompt_of(20), np.int32)
    example = Example(0, "", text, text, GREEDY, limited=True, supervision=None)
    fit(model, [example], lambda step: 1.0, Recipe(rank=4, loss="cross-entropy", epochs=1))
    learned = [weight for name, weight in model.named_parameters() if "lora_B" in name]
    assert learned
    assert all(weight.isfinite().all() and weight.any() for weight in learned)


def test_doctor_says_what_a_models_layers_hold(tmp_path: Path, adaptive: Command) -> None:
    for name, model_type in (("recurrent", "qwen3_5_text"), ("indexed", "deepseek_v32")):
        tiny_config(model_type).save_pretrained(tmp_path / name)
        (tmp_path / name / "model.safetensors").write_bytes(b"\x02\x00\x00\x00\x00\x00\x00\x00{}")
        settings = load_settings({"target": str(tmp_path / name), "draft": "none"})
        assert read_config(Source(name, tmp_path / name, "none"), settings).model_type == model_type
        _, out, _ = adaptive("doctor", "--target", str(tmp_path / name), "--draft", "none", "--json")
        said = {finding["name"]: finding for finding in json.loads(out)["findings"]}["target layers"]
        if name == "recurrent":
            assert said["status"] == "ok"
            assert "3 with a recurrent state, 1 of attention" in said["value"]
        else:
            assert said["status"] == "note"
            assert "indexed attention" in said["value"]
            assert "plainly" in said["advice"]


def test_a_conversation_with_a_hybrid_is_the_targets_own_also_over_an_edit(tmp_path: Path) -> None:
    """Through the assistant: two turns, a regenerated answer, an edit, and another conversation with the same start."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(BUNDLED / "target")
    model = tiny_model("qwen3_5_text", vocab_size=len(tokenizer), max_position_embeddings=1024)
    for folder, part in ((tmp_path / "target", model), (tmp_path / "draft", noisy(model))):
        part.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    folders = {"device": "cpu", "target": str(tmp_path / "target"), "draft": str(tmp_path / "draft")}
    pair = load_pair(load_settings(folders | {"dtype": "float32"}))
    assert pair.draft is not None
    assert not [warning for warning in pair.warnings if "plainly" in warning or "alone" in warning]
    stop = StopParams(max_new_tokens=16, ignore_eos=True)
    plain, drafted = (Assistant(pair, FixedLength(length), None, cache_bytes=2**30) for length in (0, 4))
    first = [Message("user", "Write a haiku about a river.")]
    accepted = 0

    def same(messages: list[Message]) -> str:
        nonlocal accepted
        texts = [[step.token for step in one.chat(messages, GREEDY, stop)] for one in (plain, drafted)]
        assert texts[0] == texts[1]
        assert drafted.last is not None
        accepted += drafted.last.accepted
        return drafted.last.text

    answer = same(first)
    turn = [*first, Message("assistant", answer), Message("user", "Another one, please.")]
    same(turn)
    assert same(turn)  # regenerated
    edited = [*first, Message("assistant", answer), Message("user", "Now about a mountain, and longer.")]
    same(edited)
    same([Message("user", "Write a haiku about a river, and one about the sea.")])
    assert accepted > 0
    held = drafted.conversations.memory
    assert min(held.keys, held.states, held.checkpoints) > 0
    assert held.features == 0
    assert drafted.conversations.nbytes == held.keys + held.states + held.checkpoints
