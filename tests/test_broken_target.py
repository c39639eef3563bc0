"""Invalid logits of a target (NaN, +inf or all -inf) end an answer with an error that names the cause."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conftest import save_random_pair

from adaptive.assistant import Assistant
from adaptive.control.policy import FixedLength
from adaptive.decoding.verify import Verdict, verdict, verify_greedy, verify_greedy_on_device
from adaptive.engines.load import sampling_kernels
from adaptive.errors import AdaptiveError
from adaptive.pair import load_pair
from adaptive.sampling import Uniform
from adaptive.settings import load_settings
from adaptive.types import Message, SamplingParams, StopParams

VOCAB = 300


@pytest.fixture(scope="module", params=["qwen2", "gpt_neox"])
def checkpoints(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target whose output projection has a row of NaN, and a sound draft."""
    from transformers import AutoModelForCausalLM

    target, draft = save_random_pair(tmp_path_factory.mktemp(request.param), request.param)
    model = AutoModelForCausalLM.from_pretrained(target)
    with torch.no_grad():
        model.get_output_embeddings().weight[9] = torch.nan
    model.save_pretrained(target)
    return target, draft


@pytest.mark.parametrize("temperature", [0.0, 0.7], ids=["greedy", "sampled"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_target_that_gives_no_numbers_is_said_to_be_broken(
    checkpoints: tuple[Path, Path], dtype: str, temperature: float, linear_layers: str
) -> None:
    target, draft = map(str, checkpoints)
    pair = load_pair(load_settings({"target": target, "draft": draft, "dtype": dtype, "device": "cpu"}))
    for length in (0, 4):
        assistant = Assistant(pair, FixedLength(length), None)
        with pytest.raises(AdaptiveError, match="not numbers"):
            list(assistant.chat([Message("user", "Hello")], SamplingParams(temperature), StopParams(20)))
        assert assistant.last is not None
        assert assistant.last.output == []


@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("whole_row", [False, True])
def test_a_row_that_is_reached_must_be_numbers(number: float, whole_row: bool) -> None:
    """By torch, as on a device, and by the kernels. A row after the first rejection may hold anything."""
    torch.manual_seed(0)
    logits = torch.randn(4, VOCAB)
    drafted = logits.argmax(-1).tolist()[:3]
    rules = [verify_greedy, lambda rows, ids: verify_greedy_on_device(rows, torch.tensor(ids, dtype=torch.long))]
    if sampling_kernels() is not None:
        rules.append(_by_the_kernels)
    for rule in rules:
        for row in range(4):
            broken = logits.clone()
            broken[row, slice(None) if whole_row else int(logits[row].argmin())] = number
            if number == -torch.inf and not whole_row:  # a masked token, which is valid
                assert rule(broken, drafted).tokens == rule(logits, drafted).tokens
                continue
            with pytest.raises(AdaptiveError, match="not numbers"):
                rule(broken, drafted)
            if row:
                others = [*drafted[: row - 1], (drafted[row - 1] + 1) % VOCAB, *drafted[row:]]
                assert rule(broken, others).tokens == drafted[:row]


def _by_the_kernels(logits: torch.Tensor, drafted: list[int]) -> Verdict:
    kernels = sampling_kernels()
    assert kernels is not None
    judgement = kernels.judge(logits, drafted, 0, SamplingParams(temperature=0.0), None, [])
    return verdict(judgement, drafted, Uniform(torch.Generator()))
