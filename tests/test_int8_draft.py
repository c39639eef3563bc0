"""An int8 draft guesses nearly the same tokens as the draft, follows its adapters, and does not change the output."""

from __future__ import annotations

import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from adaptive.answering import Question
from adaptive.assistant import Assistant
from adaptive.control.policy import FixedLength
from adaptive.engines import load
from adaptive.engines.cpu import families, weights
from adaptive.engines.cpu.weights import has_vnni, packs_int8
from adaptive.engines.hf.engine import TransformersEngine
from adaptive.engines.load import Source, load_engine
from adaptive.pair import BUNDLED, load_pair
from adaptive.settings import load_settings
from adaptive.types import SamplingParams, StopParams

pytestmark = pytest.mark.skipif(
    not packs_int8(torch.device("cpu")), reason="this build of torch has no int8 linear layers for this processor"
)
TEXTS = [json.loads(line) for line in (BUNDLED / "prompts" / "code.jsonl").read_text("utf-8").splitlines()[:40]]


def test_a_large_weight_is_rounded_part_by_part_as_it_would_be_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(70, 24, dtype=torch.bfloat16)
    weight[5] = 0
    whole, _, scales = weights._rounded(weight, None)
    monkeypatch.setattr(weights, "ROUNDED_ROWS", 16)
    parts, _, others = weights._rounded(weight, None)
    assert torch.equal(whole, parts)
    assert torch.equal(scales, others)
    torch.testing.assert_close(whole * scales[:, None], weight.float(), rtol=0, atol=float(scales.max()))
    assert scales.dtype == torch.float32


def draft(int8: bool) -> TransformersEngine:
    """The bundled draft."""
    return TransformersEngine(AutoModelForCausalLM.from_pretrained(BUNDLED / "draft", dtype=torch.float32), int8)


def logits(engine: TransformersEngine, tokens: list[int]) -> torch.Tensor:
    """Logits (n, vocab) at every position."""
    return engine.sequence().extend(torch.tensor(tokens), len(tokens))


def test_it_guesses_nearly_the_same(linear_layers: str) -> None:
    pair = load_pair(load_settings({"draft_quantize": "int8"}))
    assert isinstance(pair.draft, TransformersEngine)
    assert pair.draft.weights == "int8"
    exact = draft(int8=False)
    same = total = 0
    for text in TEXTS:
        tokens = pair.tokenizer.encode(json.dumps(text))
        agree = logits(pair.draft, tokens).argmax(-1) == logits(exact, tokens).argmax(-1)
        same, total = same + int(agree.sum()), total + len(agree)
    assert total > 1500
    # Without an instruction for int8 vectors torch's layers round inputs to 7 bits, so that sums do not overflow.
    seven_bits = linear_layers == "torch's" and not has_vnni()
    assert same / total > (0.94 if seven_bits else 0.97)


def test_it_follows_an_adapter_and_forgets_it(tmp_path: Path, linear_layers: str) -> None:
    tokens = list(range(5, 40))
    engine, exact = draft(int8=True), draft(int8=False)
    before = logits(engine, tokens)
    torch.manual_seed(0)
    config = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(BUNDLED / "draft", dtype=torch.float32), config)
    model.save_pretrained(tmp_path / "adapter")
    for one in (engine, exact):
        one.apply_adapter(tmp_path / "adapter")
    after, wanted = logits(engine, tokens), logits(exact, tokens)
    assert (after - wanted).norm() < 0.05 * wanted.norm()
    assert (after - before).norm() > 0.1 * before.norm()
    engine.apply_adapter(None)
    assert torch.equal(logits(engine, tokens), before)


@pytest.mark.thorough
def test_with_64_bits_the_draft_guesses_as_well() -> None:
    """The kernels of int8 know no activations of 64 bits."""
    accepted = []
    for quantised in ("none", "int8"):
        pair = load_pair(load_settings({"dtype": "float64", "draft_quantize": quantised}))
        assistant = Assistant(pair, FixedLength(4), None)
        prompt = pair.tokenizer.encode("Write a function that adds two numbers.")
        for _ in assistant.answer(
            Question(prompt, (), "", SamplingParams(temperature=0.0), StopParams(40, ignore_eos=True))
        ):
            pass
        assert assistant.last is not None
        accepted.append(sum(one.accepted for one in assistant.last.rounds))
    assert accepted[1] >= 0.8 * accepted[0] > 0


@pytest.mark.thorough
def test_greedy_output_is_the_targets_own() -> None:
    answers = []
    for quantised, length in (("none", 0), ("int8", 4)):
        pair = load_pair(load_settings({"dtype": "float32", "draft_quantize": quantised}))
        assistant = Assistant(pair, FixedLength(length), None)
        prompt = pair.tokenizer.encode("Write a function that adds two numbers.")
        for _ in assistant.answer(
            Question(prompt, (), "", SamplingParams(temperature=0.0), StopParams(60, ignore_eos=True))
        ):
            pass
        assert assistant.last is not None
        answers.append(assistant.last.output)
    assert answers[0] == answers[1]


def test_weights_for_which_there_is_no_packing_are_gone_before_others_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    read, left = load.load_model, []
    seen: list[weakref.ref[Any]] = []

    def noted(*given: Any) -> Any:
        left.append(sum(one() is not None for one in seen))
        model = read(*given)
        seen.append(weakref.ref(model))
        return model

    monkeypatch.setattr(load, "load_model", noted)
    monkeypatch.setattr(families, "PACKED_SHARE", 0.0)
    settings = load_settings({"device": "cpu", "dtype": "float32", "draft_quantize": "int8"})
    load_engine(Source("it", BUNDLED / "draft", "int8"), settings, "cpu", lambda share: None, draft=True)
    assert left == [0, 0]
