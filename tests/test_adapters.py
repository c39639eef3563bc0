"""Merging an adapter into a model's own weights equals PEFT's own model, and is undone bit for bit."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from adaptive.engines.hf.lora import MergedAdapter
from adaptive.errors import AdaptiveError

VOCABULARY = 96
TOKENS = torch.arange(1, 25)[None]


def llama(dtype: torch.dtype = torch.float32, tied: bool = False) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config).to(dtype).eval()


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=2, n_positions=64)).eval()


def write_adapter(folder: Path, make: Callable[[], PreTrainedModel], seed: int = 1, **options: object) -> Path:
    """A PEFT folder with random weights in every LoRA tensor."""
    options = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"], **options}
    model = get_peft_model(make(), LoraConfig(**options))  # type: ignore[arg-type]
    torch.manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_magnitude" in name:
            parameter.data *= 1 + 0.3 * torch.rand_like(parameter)
        elif "lora_" in name:
            parameter.data.normal_(0, 0.1)
    model.save_pretrained(str(folder))
    return folder


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=TOKENS, use_cache=False).logits.float()


def bits(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same_bits(model: torch.nn.Module, before: dict[str, torch.Tensor]) -> bool:
    now = model.state_dict()
    return now.keys() == before.keys() and all(torch.equal(now[name], before[name]) for name in before)


KINDS: dict[str, dict[str, object]] = {
    "lora": {},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "patterns": {"rank_pattern": {"layers.1.self_attn.q_proj": 7}, "alpha_pattern": {"down_proj": 32}},
    "embedding": {"target_modules": ["embed_tokens", "q_proj", "lm_head"]},
    "all-linear": {"target_modules": "all-linear"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_merged_logits_equal_peft_unmerged_and_merged(tmp_path: Path, kind: str) -> None:
    folder = write_adapter(tmp_path / "a", llama, **KINDS[kind])
    model = llama()
    plain = logits(model)
    MergedAdapter(model).apply(folder)
    unmerged = PeftModel.from_pretrained(llama(), str(folder)).eval()
    torch.testing.assert_close(logits(model), logits(unmerged), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(logits(model), logits(unmerged.merge_and_unload()), rtol=1e-4, atol=1e-5)
    assert (logits(model) - plain).abs().max() > 1e-3


def test_an_adapter_is_used_without_peft_which_takes_a_second_to_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_adapter(tmp_path / "a", llama)
    model, reference = llama(), PeftModel.from_pretrained(llama(), str(folder)).eval()
    monkeypatch.setitem(sys.modules, "peft", None)
    MergedAdapter(model).apply(folder)
    torch.testing.assert_close(logits(model), logits(reference), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dora", [False, True])
def test_weights_stored_transposed_merge_as_peft_merges_them(tmp_path: Path, dora: bool) -> None:
    targets = ["c_attn", "c_proj"] if dora else ["c_attn", "c_proj", "wpe"]
    folder = write_adapter(tmp_path / "a", gpt2, target_modules=targets, fan_in_fan_out=True, use_dora=dora)
    model = gpt2()
    before = bits(model)
    merged = MergedAdapter(model)
    merged.apply(folder)
    torch.testing.assert_close(logits(model), logits(PeftModel.from_pretrained(gpt2(), str(folder)).eval()))
    merged.apply(None)
    assert same_bits(model, before)


def test_bfloat16_weights_are_rounded_once(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a", llama)
    model = llama(torch.bfloat16)
    pristine = model.model.layers[0].self_attn.q_proj.weight.detach().clone()
    MergedAdapter(model).apply(folder)
    saved = load_file(folder / "adapter_model.safetensors")
    a, b = (saved[f"base_model.model.model.layers.0.self_attn.q_proj.lora_{part}.weight"] for part in "AB")
    expected = (pristine.double() + 2.0 * (b.double() @ a.double())).to(torch.bfloat16)
    same = (model.model.layers[0].self_attn.q_proj.weight == expected).float().mean()
    assert same > 0.999  # float32 rounding may break a tie the other way
    reference = PeftModel.from_pretrained(llama(torch.bfloat16), str(folder)).eval()
    torch.testing.assert_close(logits(model), logits(reference), rtol=0.05, atol=0.05)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_no_trace_of_an_adapter_remains_after_it(tmp_path: Path, dtype: torch.dtype) -> None:
    first = write_adapter(tmp_path / "a", llama, seed=1, target_modules=["q_proj", "embed_tokens", "up_proj"])
    second = write_adapter(tmp_path / "b", llama, seed=2, target_modules=["q_proj", "o_proj"], use_dora=True)
    model = llama(dtype)
    before, places = bits(model), {name: p.data_ptr() for name, p in model.named_parameters()}
    merged = MergedAdapter(model)
    merged.apply(second)
    alone = bits(model)
    merged.apply(first)
    assert not same_bits(model, alone)
    merged.apply(second)
    assert same_bits(model, alone)
    assert merged.active == second
    merged.apply(None)
    assert same_bits(model, before)
    assert merged.active is None
    assert {name: p.data_ptr() for name, p in model.named_parameters()} == places  # captured graphs stay valid


def test_listeners_hear_which_modules_changed(tmp_path: Path) -> None:
    model = llama()
    merged = MergedAdapter(model)
    heard: list[frozenset[str]] = []
    merged.listeners.append(heard.append)
    changed = []
    for folder in (
        write_adapter(tmp_path / "a", llama, target_modules=["q_proj"]),
        write_adapter(tmp_path / "b", llama, target_modules=["v_proj"]),
        None,
    ):
        merged.apply(folder)
        changed.append(frozenset().union(*heard))
        heard.clear()
    queries = {f"model.layers.{layer}.self_attn.q_proj" for layer in range(2)}
    values = {f"model.layers.{layer}.self_attn.v_proj" for layer in range(2)}
    assert changed == [queries, queries | values, values]


def test_an_adapter_on_tied_embeddings_is_refused(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a", lambda: llama(tied=True), target_modules=["lm_head", "q_proj"])
    model = llama(tied=True)
    before = bits(model)
    with pytest.raises(AdaptiveError, match=r"changes lm_head, whose weight is also that of model\.embed_tokens"):
        MergedAdapter(model).apply(folder)
    assert same_bits(model, before)


def _other_shape(folder: Path) -> None:
    tensors = load_file(folder / "adapter_model.safetensors")
    key = "base_model.model.model.layers.1.mlp.down_proj.lora_A.weight"
    save_file({**tensors, key: tensors[key][:, :50].contiguous()}, folder / "adapter_model.safetensors")


def _other_module(folder: Path) -> None:
    tensors = load_file(folder / "adapter_model.safetensors")
    renamed = {key.replace("layers.1.", "layers.9."): tensor for key, tensor in tensors.items()}
    save_file(renamed, folder / "adapter_model.safetensors")


def _not_finite(folder: Path) -> None:
    tensors = load_file(folder / "adapter_model.safetensors")
    tensors["base_model.model.model.layers.0.mlp.down_proj.lora_B.weight"][0, 0] = float("nan")
    save_file(tensors, folder / "adapter_model.safetensors")


def _half_a_pair(folder: Path) -> None:
    tensors = load_file(folder / "adapter_model.safetensors")
    del tensors["base_model.model.model.layers.0.mlp.down_proj.lora_B.weight"]
    save_file(tensors, folder / "adapter_model.safetensors")


def _truncated(folder: Path) -> None:
    whole = (folder / "adapter_model.safetensors").read_bytes()
    (folder / "adapter_model.safetensors").write_bytes(whole[: len(whole) // 2])


def _setting(name: str, value: object) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        file = folder / "adapter_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), name: value}))

    return spoil


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (_other_shape, r"layers\.1\.mlp\.down_proj\.lora_A\.weight must have shape \(4, 128\).*has \(4, 50\)"),
        (_other_module, r"no module model\.layers\.9"),
        (_not_finite, r"layers\.0\.mlp\.down_proj\.lora_B.*not finite"),
        (_half_a_pair, r"lora_B\.weight must have shape .* has none"),
        (_truncated, r"adapter_model\.safetensors cannot be read"),
        (_setting("r", 8), r"must have shape \(8, "),
        (_setting("modules_to_save", ["lm_head"]), "modules_to_save, which is not supported"),
        (_setting("lora_bias", True), "lora_bias, which is not supported"),
        (_setting("init_lora_weights", "pissa"), "pissa, which changes the base weights"),
        (_setting("peft_type", "IA3"), "not LoRA"),
        (_setting("kasa_config", {"beta": 1e-4}), "kasa_config, which is not supported"),
        (_setting("lora_alpha", "much"), r"adapter_config\.json cannot be read: lora_alpha: .*number"),
        (_setting("r", 0), r"cannot be read: r: "),
        (lambda folder: (folder / "adapter_config.json").unlink(), "no adapter_config"),
        (lambda folder: (folder / "adapter_model.safetensors").unlink(), "no adapter_model"),
    ],
)
def test_an_adapter_that_does_not_fit_is_named_and_changes_nothing(
    tmp_path: Path, spoil: Callable[[Path], None], says: str
) -> None:
    good = write_adapter(tmp_path / "good", llama)
    bad = write_adapter(tmp_path / "bad", llama, seed=2)
    spoil(bad)
    model = llama()
    merged = MergedAdapter(model)
    merged.apply(good)
    before = bits(model)
    with pytest.raises(AdaptiveError, match=says) as caught:
        merged.apply(bad)
    assert "\n" not in str(caught.value)
    assert same_bits(model, before)
    assert merged.active == good


def test_a_changed_embedding_beside_the_adapter_is_refused(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a", llama, target_modules=["embed_tokens"])
    tensors = load_file(folder / "adapter_model.safetensors")
    copies = [key for key in tensors if "lora_" not in key]
    assert copies  # PEFT saves the embedding table too; it is ignored while it equals the model's own
    save_file({**tensors, copies[0]: tensors[copies[0]] + 1}, folder / "adapter_model.safetensors")
    with pytest.raises(AdaptiveError, match=r"embed_tokens.*is not a LoRA weight"):
        MergedAdapter(llama()).apply(folder)


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_a_quantised_draft_keeps_the_adapter_beside_its_weights(tmp_path: Path, kind: str) -> None:
    pytest.importorskip("bitsandbytes")
    from transformers import BitsAndBytesConfig

    llama().save_pretrained(tmp_path / "base")
    quantised = (
        BitsAndBytesConfig(load_in_8bit=True)
        if kind == "int8"
        else BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    )

    def load() -> PreTrainedModel:
        return LlamaForCausalLM.from_pretrained(
            tmp_path / "base", dtype=torch.float32, quantization_config=quantised, device_map={"": "cpu"}
        )

    first, second = (write_adapter(tmp_path / name, llama, seed=seed) for name, seed in (("a", 1), ("b", 2)))
    model = load()
    plain, modules = logits(model), dict(model.named_modules())
    merged = MergedAdapter(model)
    merged.apply(first)
    with_first = logits(model)
    assert torch.equal(with_first, logits(PeftModel.from_pretrained(load(), str(first)).eval()))
    merged.apply(second)
    assert not torch.equal(logits(model), with_first)
    merged.apply(first)
    assert torch.equal(logits(model), with_first)
    merged.apply(None)
    assert torch.equal(logits(model), plain)
    assert dict(model.named_modules()) == modules
