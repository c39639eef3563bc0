"""The memory that a pair needs is estimated and reported before its weights are read. A pair that cannot fit is refused
with a remedy."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import psutil
import pytest
from conftest import BUNDLED, Command, save_random_pair
from test_cpu_forward import CONFIGS, made
from transformers import LlamaConfig

from adaptive.engines.budget import LEAST_TOKENS, PASSES, Budget, need
from adaptive.engines.cpu import families
from adaptive.engines.cpu.weights import PackedLinear
from adaptive.engines.hf.engine import TransformersEngine
from adaptive.engines.load import Forward, Source, choose_forward, load_engine
from adaptive.engines.slower import NO_ROOM
from adaptive.pair import load_pair, sources
from adaptive.settings import load_settings

TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


@pytest.mark.parametrize("options", [{"dtype": "float32"}, {"dtype": "bfloat16"}, {"dtype": "float32", "q": "nf4"}])
def test_what_is_expected_of_a_model_is_what_it_takes(options: dict[str, str], tmp_path: Path) -> None:
    target, draft = save_random_pair(tmp_path, "qwen2")
    named = {"target": str(target), "draft": str(draft), "device": "cpu", "dtype": options["dtype"]}
    settings = load_settings({**named, "quantize": options.get("q", "none")})
    source, _ = sources(settings)
    expected, engine = need(source, settings, "cpu"), load_engine(source, settings, "cpu", lambda share: None)
    assert isinstance(engine, TransformersEngine)
    parameters = {id(one): one for one in engine.model.parameters()}.values()
    weights = sum(one.nbytes for one in parameters)
    if options["dtype"] == "bfloat16":  # the file is in float32, so both what was read and the packed copy stay
        assert engine.cpu_forward is not None
        weights += sum(linear.nbytes for linear in engine.cpu_forward.plan.linears if isinstance(linear, PackedLinear))
    assert expected.weights == pytest.approx(weights, rel=0.02)
    sequence = engine.sequence()
    sequence.reserve(512)
    sequence.extend([1, 2, 3], 1)
    assert expected.token == sequence.memory.keys // 512  # bytes of keys and values for the 512 reserved tokens


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_token_takes_as_much_in_the_cache_of_an_int8_draft_as_in_its_own_dtype(dtype: str, tmp_path: Path) -> None:
    target, draft = save_random_pair(tmp_path, "qwen2")
    settings = load_settings(
        {"target": str(target), "draft": str(draft), "device": "cpu", "dtype": dtype, "draft_quantize": "int8"}
    )
    _, source = sources(settings)
    assert source is not None
    engine = load_engine(source, settings, "cpu", lambda share: None, draft=True)
    assert engine.weights == "int8"
    sequence = engine.sequence()
    sequence.reserve(512)
    sequence.extend([1, 2, 3], 1)
    assert need(source, settings, "cpu", draft=True).token == sequence.memory.keys // 512


@pytest.mark.parametrize("name", list(CONFIGS))
def test_what_a_token_takes_is_known_of_every_architecture(name: str, tmp_path: Path) -> None:
    model = made(name)
    model.save_pretrained(tmp_path)
    settings = load_settings({"target": str(tmp_path), "draft": "none", "device": "cpu", "dtype": "float64"})
    expected = need(Source("it", tmp_path, "none"), settings, "cpu")
    engine = TransformersEngine(model)
    engine.cpu_forward = None
    sequence = engine.sequence()
    sequence.reserve(512)
    sequence.extend([1, 2, 3], 1)
    own = choose_forward(Source("it", tmp_path, "none"), settings, "cpu").forward.own
    assert expected.token == sequence.memory.keys // 512 // (2 if own else 1)  # our own would use float32, not float64
    assert expected.numbers == model.num_parameters()


def too_large(folder: Path) -> Path:
    """A checkpoint whose weights in bfloat16 take 1.5 times the free memory. Its file is sparse, so it takes no disk
    space; reading it would fail."""
    width, numbers = 8192, int(0.75 * psutil.virtual_memory().available)
    layer = 4 * width * width + 3 * width * 4 * width
    config = LlamaConfig(
        vocab_size=4096, hidden_size=width, intermediate_size=4 * width, num_attention_heads=64,
        num_key_value_heads=8, num_hidden_layers=-(-numbers // layer), max_position_embeddings=4096,
    )  # fmt: skip
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    for name in TOKENIZER:
        if (BUNDLED / "target" / name).exists():
            shutil.copy(BUNDLED / "target" / name, folder)
    with (folder / "model.safetensors").open("wb") as file:
        file.truncate(2 * numbers)
    return folder


def test_a_pair_that_cannot_fit_is_refused_before_its_weights_are_read(tmp_path: Path, adaptive: Command) -> None:
    named = ["--target", str(too_large(tmp_path / "large")), "--draft", str(BUNDLED / "draft"), "--dtype", "bfloat16"]
    code, out, said = adaptive("generate", "hello", "--device", "cpu", *named)
    assert (code, out) == (2, "")
    assert said.count("\n") == 1
    assert "does not fit" in said
    assert "are free on cpu; give --quantize nf4" in said
    code, out, _ = adaptive("doctor", "--json", "--device", "cpu", *named)
    found = {one["name"]: one for one in json.loads(out)["findings"]}["memory of cpu"]
    assert (code, found["status"]) == (1, "broken")
    assert "which is not enough" in found["value"]
    assert "--quantize nf4" in found["advice"]


@pytest.mark.thorough
def test_what_fits_is_said_of_a_pair_that_does(adaptive: Command) -> None:
    code, out, _ = adaptive("doctor", "--json", "--device", "cpu")
    found = {one["name"]: one for one in json.loads(out)["findings"]}["memory of cpu"]
    assert code == 0
    assert found["status"] in ("ok", "note")
    for said in ("of weights", "kB a token of text", "to train", "are free on cpu", "tokens fit"):
        assert said in found["value"]


def test_a_budget_says_what_fits_with_training_and_without() -> None:
    budget = Budget("cuda:0", 24_000_000_000, 16_000_000_000, 100_000, 4_000_000_000, 131_072)
    assert budget.fits
    assert budget.tokens(training=False) == (8_000_000_000 - PASSES) // 100_000
    assert budget.tokens(training=True) == (4_000_000_000 - PASSES) // 100_000
    assert budget.text == (
        "16.0 GB of weights, 100 kB a token of text, 4.0 GB to train; 24.0 GB are free on cuda:0: "
        f"texts of {budget.tokens(False):,} tokens fit, {budget.tokens(True):,} while it trains"
    )
    tight = Budget("cuda:0", 16_000_000_000 + PASSES + LEAST_TOKENS * 100_000, 16_000_000_000, 100_000, 0, 131_072)
    assert tight.fits
    assert not Budget("cuda:0", tight.free - 1, tight.weights, tight.token, 0, 131_072).fits


@pytest.mark.parametrize("share", [families.PACKED_SHARE, 0.0])
def test_a_model_that_runs_slower_for_want_of_memory_is_said_to(
    share: float, adaptive: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = load_settings({"device": "cpu", "dtype": "float32", "draft_quantize": "none"})
    if not choose_forward(sources(settings)[0], settings, "cpu").forward.own:
        pytest.skip("our own forward does not run here")
    monkeypatch.setattr(families, "PACKED_SHARE", share)
    warnings = [warning for warning in load_pair(settings).warnings if NO_ROOM in warning]
    assert len(warnings) == (2 if share == 0.0 else 0)  # the target's and the draft's
    _, out, _ = adaptive("doctor", "--json", "--device", "cpu", "--dtype", "float32", "--draft-quantize", "none")
    found = {one["name"]: one for one in json.loads(out)["findings"]}
    for role in ("target", "draft"):
        told = found[f"{role} forward"]
        assert told["status"] == ("note" if share == 0.0 else "ok")
        assert told["value"].startswith(f"{Forward.TRANSFORMERS.value} (") == (share == 0.0)
        assert (NO_ROOM in told["advice"]) == (share == 0.0)
