"""Quantised checkpoints: those that transformers can read here decode, draft and learn as the weights they represent;
others are refused before any weights are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import BUNDLED
from foreign_heads import save_with_mtp
from quantised_checkpoints import (
    AWQ,
    CHANNELS,
    FP8,
    GPTQ,
    MXFP4,
    PACKED,
    awq,
    channels,
    fp8,
    gptq,
    mxfp4,
    packed,
    quantise,
    say,
)
from safetensors.torch import load_file
from test_doctor import findings
from test_models import TEXT, VISION, loaded, several_kinds
from tiny_models import Greedy, alone, noisy, prompt_of, tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

from adaptive.engines.head.kinds import HeadKind
from adaptive.engines.head.parts import parts_of_folder, parts_of_model
from adaptive.engines.hf.quantised import float32_bytes, multiplied
from adaptive.engines.load import Source, load_model
from adaptive.engines.load_head import load_head
from adaptive.errors import AdaptiveError
from adaptive.pair import load_pair
from adaptive.settings import load_settings
from trainers.lora import Recipe, attach

TOKENS = 20
SMALL = {"num_hidden_layers": 2}
FORMATS: dict[str, tuple[str, Any, dict[str, Any], dict[str, Any]]] = {
    "fp8": ("llama", fp8, FP8, SMALL),
    "mxfp4": ("gpt_oss", mxfp4, MXFP4, {**SMALL, "layer_types": ["sliding_attention", "full_attention"]}),
    "compressed-tensors fp8": ("llama", channels, CHANNELS, SMALL),
    "compressed-tensors int4": ("llama", packed, PACKED, SMALL),
}


def dense(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def unreadable(folder: Path) -> Path:
    """Make any attempt to read the weights fail."""
    (folder / "model.safetensors").write_bytes(b"read by nobody")
    return folder


@pytest.mark.parametrize("name", FORMATS)
def test_it_decodes_drafts_and_learns_as_the_weights_it_stands_for(name: str, tmp_path: Path) -> None:
    if name.startswith("compressed"):
        pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    kind, made, config, changes = FORMATS[name]
    for model, title in ((tiny_model(kind, **changes), "target"), (noisy(tiny_model(kind, **changes)), "draft")):
        model.save_pretrained(tmp_path / f"dense {title}")
        quantise(tmp_path / f"dense {title}", tmp_path / title, made, config)
    target, draft = loaded(tmp_path / "target"), loaded(tmp_path / "draft", draft=True)
    assert target.cpu_forward is not None or kind != "llama"
    assert not target.quantised
    prompt = prompt_of(30)
    expected = alone(dense(tmp_path / "dense target"), prompt, TOKENS)
    greedy = Greedy(target, draft, 4)
    assert greedy.say(prompt, TOKENS) == expected
    assert 0 < greedy.accepted < 1

    trained = attach(
        load_model(Source("draft", tmp_path / "draft", "none"), load_settings({"dtype": "float32"}), "cpu"),
        Recipe(rank=4),
    )
    text = torch.tensor([prompt])
    for _ in range(2):  # B is zero at first, so A learns nothing in the first step
        trained(text).logits.logsumexp(-1).mean().backward()
        with torch.no_grad():
            for weight in trained.parameters():
                if weight.requires_grad:
                    assert weight.grad is not None
                    weight.sub_(0.1 * weight.grad / weight.grad.norm().clamp_min(1e-6))
                    weight.grad = None
    trained.save_pretrained(tmp_path / "adapter")
    sequence = draft.sequence()
    before = sequence.extend(prompt, len(prompt)).clone()
    draft.apply_adapter(tmp_path / "adapter")
    sequence.rollback(0)
    after = sequence.extend(prompt, len(prompt))
    with torch.inference_mode():
        wanted = trained.eval()(text).logits[0]
    scale = wanted.abs().max()
    torch.testing.assert_close(after / scale, wanted / scale, rtol=0, atol=1e-3)
    assert not torch.allclose(before / scale, wanted / scale, atol=1e-2)


def test_in_sixteen_bits_every_weight_is(tmp_path: Path) -> None:
    """Also weights that the checkpoint stores in another dtype."""
    tiny_model("llama", **SMALL).save_pretrained(tmp_path / "dense")
    quantise(tmp_path / "dense", tmp_path / "fp8", fp8, FP8)
    engine = loaded(tmp_path / "fp8", dtype="bfloat16")
    assert {parameter.dtype for parameter in engine.model.parameters()} == {torch.bfloat16}
    assert engine.cpu_forward is not None


@pytest.mark.parametrize("bits", ["nf4", "int8"])
def test_bitsandbytes_keeps_a_target_and_a_draft_is_dequantised(bits: str, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    tiny_model("llama", **SMALL, intermediate_size=128).save_pretrained(tmp_path / "plain")
    asked = (
        BitsAndBytesConfig(load_in_8bit=True)
        if bits == "int8"
        else BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float16)
    )
    AutoModelForCausalLM.from_pretrained(
        tmp_path / "plain", dtype=torch.float32, quantization_config=asked, device_map={"": "cpu"}
    ).save_pretrained(tmp_path / "given")
    target, draft = loaded(tmp_path / "given"), loaded(tmp_path / "given", draft=True, draft_quantize="none")
    assert target.quantised
    assert target.cpu_forward is None
    assert draft.cpu_forward is not None
    assert not draft.quantised
    greedy = Greedy(target, draft, 4)
    assert len(greedy.say(prompt_of(30), TOKENS)) == TOKENS
    assert greedy.accepted > 0.5  # the same weights, rounded elsewhere
    trained = load_model(Source("draft", tmp_path / "given", "none"), load_settings({"dtype": "float32"}), "cpu")
    trained(torch.tensor([prompt_of(9)])).logits.sum().backward()
    assert all(weight.grad is not None for weight in trained.parameters())
    _, found = findings("--target", str(tmp_path / "given"), "--draft", "none", "--device", "cpu")
    assert found["target weights"]["value"] == "bitsandbytes in the checkpoint, kept so"


@pytest.mark.parametrize(("made", "config"), [(gptq, GPTQ), (awq, AWQ)], ids=["gptq", "awq"])
def test_what_gptqmodel_multiplies_is_kept_and_drafted_for(made: Any, config: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("gptqmodel", reason="gptqmodel is not installed")
    model = tiny_model("llama", **SMALL)
    model.save_pretrained(tmp_path / "dense")
    noisy(model).save_pretrained(tmp_path / "draft")
    quantise(tmp_path / "dense", tmp_path / "target", made, config)
    target, draft = loaded(tmp_path / "target"), loaded(tmp_path / "draft", draft=True)
    assert target.quantised
    assert "gptqmodel" in type(target.model.get_submodule("model.layers.0.mlp.down_proj")).__module__
    prompt, right = prompt_of(30), dense(tmp_path / "dense")
    with torch.inference_mode():
        wanted = right(torch.tensor([prompt])).logits[0]
    # The package's kernels multiply in sixteen bits.
    near = 2**-8 * float(wanted.abs().max())
    torch.testing.assert_close(target.sequence().extend(prompt, 30).float(), wanted, rtol=0, atol=near)
    greedy = Greedy(target, draft, 4)
    assert greedy.say(prompt, TOKENS) == alone(right, prompt, TOKENS)
    assert 0 < greedy.accepted < 1


def test_the_language_model_of_one_with_vision_is_dequantised_alone(tmp_path: Path) -> None:
    several_kinds(TEXT["qwen3_5"], "qwen3_5", **VISION["qwen3_5"]).save_pretrained(tmp_path / "dense")
    kept = [f"model.language_model.layers.{layer}.linear_attn.in_proj_{part}" for layer in range(3) for part in "ab"]
    quantise(tmp_path / "dense", tmp_path / "fp8", fp8, FP8 | {"modules_to_not_convert": ["lm_head", *kept]})
    assert [name for name in load_file(tmp_path / "fp8" / "model.safetensors") if name.endswith("scale_inv")]
    engine, whole = loaded(tmp_path / "fp8"), loaded(tmp_path / "dense")
    assert type(engine.model).__name__ == "Qwen3_5ForCausalLM"
    prompt = prompt_of(30)
    assert Greedy(engine, None).say(prompt, TOKENS) == Greedy(whole, None).say(prompt, TOKENS)


@pytest.mark.parametrize("kept", [False, True], ids=["dequantised", "kept"])
def test_a_head_inside_of_it_and_one_that_is_grown_have_its_numbers(kept: bool, tmp_path: Path) -> None:
    save_with_mtp("qwen3_5_text", tmp_path / "dense", alike=False, vocab_size=256)
    quantise(tmp_path / "dense", tmp_path / "fp8", fp8, FP8)
    names = load_file(tmp_path / "fp8" / "model.safetensors")
    assert [name for name in names if name.startswith("mtp.layers") and name.endswith("scale_inv")]
    weights = []
    for title in ("dense", "fp8"):
        target = loaded(tmp_path / title)
        if kept:  # as on a GPU: the weights stay in 8 bits and are not converted when they are read
            del target.model._weight_conversions
        source = Source("mtp", tmp_path / title, "none", head=HeadKind.MTP)
        head = load_head(source, load_settings({"dtype": "float32"}), target)
        weights.append(head.head.body.state_dict())
        ours, read = parts_of_model(target.model).layer, parts_of_folder(tmp_path / title).layer
        assert ours
        for name, tensor in ours.items():
            torch.testing.assert_close(read[name], tensor)
    assert weights[0].keys() == weights[1].keys()
    for name, tensor in weights[0].items():
        torch.testing.assert_close(weights[1][name], tensor)


REFUSED = {
    "gptq": ({"quant_method": "gptq", "bits": 4}, r"is quantised as gptq, .*install .*gptqmodel.*or name another"),
    "awq": ({"quant_method": "awq", "bits": 4}, r"is quantised as awq, .*install .*gptqmodel.*or name another"),
    "compressed-tensors": (PACKED, r"is quantised as compressed-tensors, .*install .*compressed-tensors>=0.15"),
    "on a GPU alone": ({"quant_method": "hqq"}, r"is quantised as hqq, which runs on CUDA alone; take --device cuda"),
    "unknown": ({"quant_method": "exl3"}, r"is quantised as exl3, which transformers does not read; name another"),
    "without a name": ({"bits": 3}, r"a format without a name, which transformers does not read; name another"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_read_is_refused_before_weights_are(name: str, tmp_path: Path) -> None:
    config, words = REFUSED[name]
    package = {"compressed-tensors": "compressed_tensors", "gptq": "gptqmodel", "awq": "gptqmodel"}.get(name)
    if package is not None and _importable(package):
        pytest.skip(f"{package} is installed")
    tiny_model("llama", **SMALL).save_pretrained(tmp_path / "model")
    say(unreadable(tmp_path / "model"), config)
    with pytest.raises(AdaptiveError, match=words):
        loaded(tmp_path / "model")
    code, found = findings("--target", str(tmp_path / "model"), "--draft", "none", "--device", "cpu")
    assert code == 1
    assert "is quantised as" in found["pair"]["value"]


def _importable(package: str) -> bool:
    try:
        __import__(package)
    except ImportError:
        return False
    return True


def test_a_draft_that_cannot_learn_is_refused_before_the_target_is_read(tmp_path: Path) -> None:
    for name in ("target", "draft"):
        tiny_model("llama", **SMALL).save_pretrained(tmp_path / name)
        AutoTokenizer.from_pretrained(BUNDLED / "target").save_pretrained(tmp_path / name)
        unreadable(tmp_path / name)
    say(tmp_path / "draft", {"quant_method": "gptq", "bits": 4})
    settings = load_settings({name: str(tmp_path / name) for name in ("target", "draft")} | {"device": "cpu"})
    with pytest.raises(AdaptiveError, match=r"draft is quantised as gptq, .*name the checkpoint that it was made from"):
        load_pair(settings)


def test_it_is_not_quantised_anew_and_doctor_says_how_it_is_held(tmp_path: Path) -> None:
    tiny_model("llama", **SMALL).save_pretrained(tmp_path / "dense")
    quantise(tmp_path / "dense", tmp_path / "fp8", fp8, FP8)
    with pytest.raises(AdaptiveError, match=r"--quantize nf4: fp8 is quantised already \(fp8\); leave it out"):
        loaded(tmp_path / "fp8", quantize="nf4")
    size = float32_bytes(tmp_path / "dense")
    assert size == sum(tensor.nbytes for tensor in load_file(tmp_path / "dense" / "model.safetensors").values())
    assert size <= float32_bytes(tmp_path / "fp8") <= 1.01 * size
    _, found = findings("--target", str(tmp_path / "fp8"), "--draft", "none", "--device", "cpu")
    assert found["target weights"]["value"] == "fp8 in the checkpoint, dequantised as it is read"
    assert found["target forward"]["value"].startswith("our own")


@pytest.mark.parametrize(("rows", "columns"), [(960, 256), (576, 200), (128, 7), (300, 300)])
def test_the_last_block_of_scales_may_be_smaller(rows: int, columns: int) -> None:
    torch.manual_seed(rows)
    weight = torch.randn(rows, columns).to(torch.float8_e4m3fn)
    scales = torch.rand(-(-rows // 128), -(-columns // 128)) + 0.5
    whole = scales.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
    found = multiplied({"w": weight, "w_scale_inv": scales})
    assert found is not None
    assert torch.equal(found["w"], weight.float() * whole)
    by_row = torch.rand(rows)
    found = multiplied({"w": weight, "w_scale": by_row})
    assert found is not None
    assert torch.equal(found["w"], weight.float() * by_row[:, None])
    assert multiplied({"w": weight, "w_scale": torch.rand(rows + 1)}) is None
