"""A seed gives the same text, whatever is drafted; and over all seeds texts have the target's distribution."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import BUNDLED, save_random_adapter
from scipy.stats import chisquare, kstest
from test_lossless_sampled import IDS, PARAMS, RUNS, VOCAB, exact_distribution, models, p_value, run_loop

from adaptive import noise as noise_module
from adaptive.assistant import Assistant, length_policy
from adaptive.control.policy import FixedLength
from adaptive.decoding import verify
from adaptive.engines.hf.engine import TransformersEngine, TransformersSequence
from adaptive.engines.load import sampling_kernels
from adaptive.errors import AdaptiveError
from adaptive.noise import noise, race
from adaptive.pair import Pair, load_pair
from adaptive.settings import load_settings
from adaptive.types import Message, SamplingParams, StopParams

assert models  # a fixture
CPU = torch.device("cpu")


@pytest.mark.thorough
@pytest.mark.parametrize("way", ["fused", "tensors"])
@pytest.mark.parametrize("params", [PARAMS[1], PARAMS[2], PARAMS[4]], ids=[IDS[1], IDS[2], IDS[4]])
def test_over_all_seeds_the_whole_loop_samples_from_the_target(
    models: tuple[TransformersEngine, TransformersEngine],
    params: SamplingParams,
    way: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runs = RUNS
    if way == "tensors":
        monkeypatch.setattr(TransformersSequence, "fused", None)
        monkeypatch.setattr("adaptive.sampling.sampling_kernels", lambda: None)
        runs //= 2  # eight times as slow; a test below checks that the kernels make the same choices as tensors
    assert p_value(run_loop(models, params, 2, runs, seeded=True), exact_distribution(models[0], params)) > 0.001


def always_the_drafts(
    p: torch.Tensor, drafted: list[int], seed: int, position: int, queued: object = None
) -> verify.Verdict:
    """A rule that accepts every drafted token."""
    choice = race(p, seed, position)
    return verify.Verdict(len(drafted), [*drafted, int(choice[-1])], p.max(-1).values.log())


def without_positions(seed: int, position: int) -> tuple[int, int]:
    """Keys that depend on the seed alone."""
    return KEYS_OF(seed, 0)


KEYS_OF = noise_module.keys_of


@pytest.mark.thorough
@pytest.mark.parametrize("broken", ["rule", "noise"])
def test_a_broken_coupling_fails_the_same_test(
    models: tuple[TransformersEngine, TransformersEngine], broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TransformersSequence, "fused", None)
    monkeypatch.setattr("adaptive.sampling.sampling_kernels", lambda: None)
    if broken == "rule":
        monkeypatch.setattr(verify, "verify_seeded", always_the_drafts)
    else:
        monkeypatch.setattr(noise_module, "keys_of", without_positions)
    # An error this large shows in a quarter of the runs.
    assert (
        p_value(run_loop(models, PARAMS[1], 2, RUNS // 4, seeded=True), exact_distribution(models[0], PARAMS[1]))
        < 0.001
    )


def test_noise_is_exponential_and_that_of_two_places_is_independent() -> None:
    rows = noise(7, 100, 40, 5000, CPU)
    assert kstest(rows.flatten().numpy(), "expon").pvalue > 0.001
    # In 10 by 10 cells of equal probability: neighbouring positions, neighbouring seeds, neighbouring tokens.
    for one, other in ((rows[:-1], rows[1:]), (rows, noise(8, 100, 40, 5000, CPU)), (rows[:, :-1], rows[:, 1:])):
        cells = [(-torch.expm1(-part) * 10).long().flatten() for part in (one, other)]
        assert chisquare(torch.bincount(cells[0] * 10 + cells[1], minlength=100).numpy()).pvalue > 0.001


@pytest.mark.skipif(sampling_kernels() is None, reason="the kernels are not built, or not for this processor")
def test_the_kernels_choose_as_tensors_do() -> None:
    kernels = sampling_kernels()
    assert kernels is not None
    torch.manual_seed(0)
    for size in (1, 7, 16, 33, 1000, 40_000):
        for number in range(60):
            p = (torch.randn(3, size) * (1 + number % 4)).softmax(-1)
            p[torch.rand(3, size) < 0.5 * (number % 3 == 0)] = 0
            p[:, number % size] += 1e-3
            seed, place = 977 * number - 2**62, 31 * number
            expected = race(p, seed, place).tolist()
            assert [kernels.race(row.numpy(), seed, place + i) for i, row in enumerate(p)] == expected
    assert kernels.race(np.zeros(100, np.float32), 1, 1) is None
    assert kernels.race(np.full(100, np.nan, np.float32), 1, 1) is None


def test_logits_that_are_no_numbers_are_said() -> None:
    p = torch.full((3, VOCAB), 1 / VOCAB)
    ours = race(p, 5, 9).tolist()
    for row in range(3):
        broken = p.clone()
        broken[row] = torch.nan
        with pytest.raises(AdaptiveError, match="not numbers"):
            verify.verify_seeded(broken, ours[:2], 5, 9)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def pair(request: pytest.FixtureRequest) -> Pair:
    """The bundled pair."""
    return load_pair(load_settings({"dtype": request.param, "device": "cpu", "threads": 1}))


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter that changes the draft's output."""
    return save_random_adapter(BUNDLED / "draft", tmp_path_factory.mktemp("adapter") / "0001")


def answers(
    pair: Pair, length: str, adapter: Path | None, prompts: list[str], temperature: float, tokens: int, seed: int = 0
) -> tuple[list[list[int]], int]:
    """The tokens of an answer to each prompt, each with its own seed; and the number of accepted draft tokens."""
    settings = load_settings({"draft_length": length})
    assistant = Assistant(pair, length_policy(settings), None)
    if adapter is not None:
        assistant.use_adapter("0001", adapter)
    said, accepted = [], 0
    for number, prompt in enumerate(prompts):
        sampling = SamplingParams(temperature, seed=seed + number)
        steps = assistant.chat([Message("user", prompt)], sampling, StopParams(tokens))
        said.append([step.token for step in steps])
        assert assistant.last is not None
        accepted += assistant.last.accepted
    assistant.use_adapter(None, None)
    return said, accepted


def same_text(
    pair: Pair, adapter: Path, prompts: list[str], temperature: float, tokens: int, lengths: tuple[str, ...]
) -> None:
    """Check that every length, with and without the adapter, gives the target's own output. ``-s`` shows the
    comparisons."""
    expected, _ = answers(pair, "0", None, prompts, temperature, tokens)
    print(
        f"\n{pair.target.weights}, temperature {temperature}: {len(prompts)} prompts, {sum(map(len, expected))} tokens"
    )
    for length in lengths:
        # Length 0 drafts nothing, and without an adapter it is the reference itself.
        for used in (adapter,) if length == "0" else (None, adapter):
            said, accepted = answers(pair, length, used, prompts, temperature, tokens)
            assert said == expected, f"length {length}, adapter {used is not None}"
            assert accepted or length in ("0", "auto") or used is not None
            which = "none" if used is None else "random"
            print(f"length {length}, adapter {which}: the same tokens, {accepted} of them drafted", flush=True)


def keeps_its_promise(pair: Pair) -> bool:
    """Whether a row's logits are independent of the rows beside it: with our kernels, and nearly so in float32."""
    return sampling_kernels() is not None or pair.target.weights == "float32"


@pytest.mark.thorough
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_a_seed_means_the_same_text_whatever_is_drafted(
    pair: Pair, adapter: Path, prompts: list[str], temperature: float
) -> None:
    if not keeps_its_promise(pair):
        pytest.skip("torch's bfloat16 GEMMs depend on the number of rows")
    same_text(pair, adapter, prompts[::5], temperature, 40, ("1", "4", "9", "auto"))
    other, _ = answers(pair, "4", None, prompts[:2], temperature, 20, seed=1000)
    assert other != answers(pair, "4", None, prompts[:2], temperature, 20)[0]


@pytest.mark.thorough
def test_a_seed_means_the_same_text_on_the_models_own_forward_too(
    adapter: Path, prompts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By tensors, without the kernels; and with penalties, which the one-call path does not support."""
    plain = load_pair(load_settings({"dtype": "float32", "device": "cpu", "threads": 1}))
    expected, _ = answers(plain, "4", None, prompts[:3], 0.8, 30)
    monkeypatch.setattr("adaptive.engines.hf.engine.cpu_forward", lambda *_, **__: None)
    monkeypatch.setattr("adaptive.engines.cpu.kernels.library", lambda: None)
    theirs = load_pair(load_settings({"dtype": "float32", "device": "cpu", "threads": 1}))
    for length in ("0", "1", "4", "9"):
        assert answers(theirs, length, adapter, prompts[:3], 0.8, 30)[0] == expected


def test_penalties_keep_the_text_of_a_seed(pair: Pair, prompts: list[str]) -> None:
    if not keeps_its_promise(pair):
        pytest.skip("torch's bfloat16 GEMMs depend on the number of rows")
    sampling = SamplingParams(0.9, top_p=0.95, repetition_penalty=1.2, presence_penalty=0.3, seed=5)
    said = []
    for length in (0, 1, 6):
        assistant = Assistant(pair, FixedLength(length), None)
        steps = assistant.chat([Message("user", prompts[0])], sampling, StopParams(40, ignore_eos=True))
        said.append([step.token for step in steps])
    assert said[0] == said[1] == said[2]


def test_without_a_seed_every_answer_is_another(pair: Pair, prompts: list[str]) -> None:
    assistant = Assistant(pair, FixedLength(4), None)
    said: list[Any] = []
    for _ in range(3):
        steps = assistant.chat([Message("user", prompts[0])], SamplingParams(1.0), StopParams(30, ignore_eos=True))
        said.append([step.token for step in steps])
    assert said[0] != said[1] != said[2] != said[0]


@pytest.mark.long
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_two_hundred_prompts(pair: Pair, adapter: Path, temperature: float) -> None:
    """Run: ``python -m pytest -m long -n 0 -s tests/test_seeded.py``."""
    import json

    files = sorted((BUNDLED / "prompts").glob("*.jsonl"))
    lines = [json.loads(line)["prompt"] for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    some = lines[:: max(1, len(lines) // 200)][:200]
    assert len(some) == 200
    same_text(pair, adapter, some, temperature, 100, ("0", "1", "4", "9", "auto"))
