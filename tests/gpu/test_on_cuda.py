"""Behaviour specific to CUDA devices: recorded graphs, one synchronisation a round, device memory. Exactness is tested
by running the exactness parts of ``benchmarks/gpu.py`` on tiny models."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import BUNDLED, Command
from gpu_parts import plan
from gpu_parts.models import Workshop
from gpu_parts.scale import TINY
from gpu_parts.work import Bench, Budget
from test_cpu_forward import CONFIGS, made, text
from test_cuda_graphs import (  # noqa: F401 - run here on the device
    test_a_proposal_over_recorded_steps_is_the_one_over_eager_steps,
    test_every_conversation_is_replayed_by_the_same_recordings,
    test_other_texts_and_adapters_reuse_the_recordings,
    test_recorded_passes_equal_the_models_own,
    test_what_was_not_prepared_is_eager_and_right,
)
from test_cuda_several import (  # noqa: F401 - as above
    test_answers_at_once_over_recorded_passes_are_those_of_each_alone,
    test_only_what_is_too_long_for_a_pass_over_several_texts_has_another_one,
    test_passes_over_several_texts_are_replayed,
    test_passes_over_several_texts_that_are_wrong_are_not_used,
)

from adaptive.assistant import Assistant
from adaptive.control.confidence import CENTRES
from adaptive.control.costs import LONGEST
from adaptive.control.policy import FixedLength
from adaptive.control.stopping import Stopping
from adaptive.decoding.round import speculative_round
from adaptive.decoding.verifier import Verifier
from adaptive.devices import device_bytes
from adaptive.drafting.model import ModelDrafter, prepare
from adaptive.engines.hf.engine import TransformersEngine
from adaptive.engines.hf.graphs import SIZES
from adaptive.engines.protocol import ExtendCall
from adaptive.pair import load_pair
from adaptive.sampling import LogitsProcessor
from adaptive.settings import load_settings
from adaptive.types import SamplingParams, StopParams
from trainers.fit import _precision
from trainers.worker import memory_is_short

# All tests in one process, which has the device to itself.
pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device that torch can use"),
    pytest.mark.xdist_group("gpu"),
]

DEVICE = torch.device("cuda:0")
EXACT = ("greedy-float32", "sampled", "graphs", "swap", "short-memory", "architectures", "greedy-bfloat16")
PARAMS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.9),
    SamplingParams(temperature=1.1, top_k=20, top_p=0.9, min_p=0.02),
    SamplingParams(temperature=0.9, seed=5),
]
IDS = ["greedy", "sampled", "cut", "seeded"]


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    workshop = Workshop(TINY, DEVICE)
    yield Bench(TINY, DEVICE, workshop, Budget(30.0), tmp_path)
    workshop.clear()


@pytest.mark.parametrize("name", EXACT)
def test_decoding_is_exact(name: str, bench: Bench) -> None:
    part = next(part for part in plan.PARTS if part.name == name)
    assert part.run(bench)  # raises if decoding is not exact


def recorded(name: str, dtype: torch.dtype = torch.float32) -> tuple[TransformersEngine, TransformersEngine]:
    """Engines of the same model with recorded passes and without."""
    model = made(name, dtype).to(DEVICE)
    engines = TransformersEngine(model), TransformersEngine(model)
    for engine in engines:
        engine.cpu_forward = None
    engines[0].record()
    return engines


def drafting(engine: TransformersEngine, params: SamplingParams) -> ModelDrafter:
    """A drafter with the same random numbers each time."""
    processor = LogitsProcessor(params, engine.vocab_size, DEVICE)
    generator = torch.Generator(DEVICE).manual_seed(7)
    return ModelDrafter(engine.sequence(), engine, engine.vocab_size, params, processor, generator)


def stopping() -> Stopping:
    """Thresholds that end some proposals early."""
    found = Stopping(LONGEST)
    found.decide(CENTRES, CENTRES, [0.02] * LONGEST, [0.04] * (LONGEST - 1))
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CONFIGS)
def test_every_size_is_captured_and_gives_the_eager_logits(name: str, dtype: torch.dtype) -> None:
    ours, eager = recorded(name, dtype)
    one, other = ours.sequence(), eager.sequence()
    one.prepare(100)
    passes = ours.recorded
    assert passes is not None
    assert passes.problem is None
    assert {which.size for which in passes.recordings} == set(SIZES)
    assert all(recording._graph is not None for recording in passes.recordings.values())
    for sequence in (one, other):
        sequence.extend(text(30), 1)
    tolerance = 1e-4 if dtype is torch.float32 else 0.05
    for count in (1, 2, 4, 8, 16, 1):
        found, right = one.extend(text(count), count).float(), other.extend(text(count), count).float()
        assert float((found - right).norm() / right.norm()) < tolerance
    assert passes.replayed == 6


def test_garbage_that_holds_a_graph_does_not_end_a_capture() -> None:
    """Python may collect garbage at any time, also while passes are captured."""
    old, engine = recorded("llama")[0], recorded("llama")[0]
    old.sequence().prepare(100)
    garbage, short, dropped = [[old]], engine.short, []
    del old

    def littering(*given: Any) -> torch.Tensor:
        if torch.cuda.is_current_stream_capturing() and garbage:
            one = garbage.pop()
            one.append(one)  # a cycle, which only the collector frees
            dropped.append(len(one))
            del one
            _ = [[] for _ in range(10_000)]
        assert short is not None
        return short(*given)

    engine.short = littering  # type: ignore[assignment]
    before = gc.get_threshold()
    gc.set_threshold(100, 1, 1)
    try:
        engine.sequence().prepare(100)
    finally:
        gc.set_threshold(*before)
    assert dropped
    assert engine.recorded is not None
    assert engine.recorded.problem is None
    assert engine.short is littering


@pytest.mark.parametrize("asked", [True, False], ids=["by confidence", "of one length"])
@pytest.mark.parametrize("params", PARAMS, ids=IDS)
def test_the_device_is_waited_for_once_a_round(params: SamplingParams, asked: bool) -> None:
    """By torch's own report of synchronising calls: only the transfer of the verdict. (The result of a draft step
    arrives by an event while the next step runs.)"""
    target, draft = recorded("qwen3")[0], recorded("qwen3")[0]
    processor = LogitsProcessor(params, target.vocab_size, DEVICE)
    verifier = Verifier(params, processor, torch.Generator(DEVICE).manual_seed(1))
    held, drafter, advise = target.sequence(), drafting(draft, params), stopping() if asked else None
    prepare(held, drafter, 20, 80, advise)
    committed = text(20).tolist()

    def a_round() -> int:
        return speculative_round(held, drafter, verifier, committed, 4, advise)[0].drafted

    with torch.inference_mode():
        for _ in range(3):  # random numbers are drawn 256 at a time, and libraries are loaded
            a_round()
        for _ in range(5):
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                torch.cuda.set_sync_debug_mode("warn")
                try:
                    a_round()
                finally:
                    torch.cuda.set_sync_debug_mode("default")
            waited = [str(one.message) for one in said if "called a synchronizing" in str(one.message)]
            assert len(waited) == 1, waited


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_passes_over_several_texts_are_captured_in_16_bits(dtype: torch.dtype) -> None:
    ours, eager = recorded("qwen3", dtype)
    ours.prepare_together(8, False)
    assert ours.recorded is not None
    assert ours.recorded.problem is None
    assert max(which.texts for which in ours.recorded.recordings) == 8
    assert all(recording._graph is not None for recording in ours.recorded.recordings.values())
    texts = [[engine.sequence() for _ in range(8)] for engine in (ours, eager)]
    for number, pair in enumerate(zip(*texts, strict=True)):
        for sequence in pair:
            sequence.extend(text(10 + 3 * number), 1)
    for count in (1, 3, 9):
        found = ours.extend_together([ExtendCall(one, text(count), count) for one in texts[0]])
        for logits, other in zip(found, texts[1], strict=True):
            right = other.extend(text(count), count).float()
            assert float((logits.float() - right).norm() / right.norm()) < 0.05
    assert ours.recorded.replayed == 3


def test_nothing_is_recorded_while_an_answer_is_under_way() -> None:
    pair = load_pair(load_settings({"device": "cuda:0", "cuda_graphs": "auto"}))
    target, draft = pair.target, pair.draft
    assert isinstance(target, TransformersEngine)
    assert isinstance(draft, TransformersEngine)
    assistant, counts = Assistant(pair, FixedLength(3), None), []
    for number, prompt in enumerate(("Hello", "Tell me of the sea.", "Hello")):
        steps = assistant.complete(prompt, SamplingParams(), StopParams(200, ignore_eos=True))
        next(steps)
        before = [len(engine.recorded.recordings) for engine in (target, draft) if engine.recorded is not None]
        for _ in steps:
            pass
        after = [len(engine.recorded.recordings) for engine in (target, draft) if engine.recorded is not None]
        assert after == before
        counts.append(after)
        assert number == 0 or counts[-1] == counts[0]


def test_a_command_answers_over_recorded_passes_of_a_draft_and_of_a_head(adaptive: Command) -> None:
    named = ["--device", "cuda:0", "--temperature", "0", "--max-new-tokens", "40", "--no-record", "--json"]
    for more in (["--cuda-graphs", "auto"], ["--cuda-graphs", "off"]):
        assert adaptive("generate", "Hello", *named, *more)[0] == 0
        assert (
            adaptive("generate", "Hello", *named, *more, "--target", str(BUNDLED / "target"), "--draft", "auto")[0] == 0
        )


def test_an_answer_drafted_in_trees_is_logged(adaptive: Command) -> None:
    """The prompt's round keeps its probability on the device, rounds of trees keep theirs as numbers."""
    drawn = ["--device", "cuda:0", "--temperature", "0.7", "--draft-length", "tree:8", "--max-new-tokens", "40"]
    assert adaptive("generate", "Hello", *drawn)[0] == 0


def test_a_draft_beside_on_the_processor_proposes_for_a_target_on_the_device(adaptive: Command) -> None:
    named = ["--temperature", "0", "--max-new-tokens", "40", "--no-record", "--dtype", "float32"]
    ways = [("cuda:0", "cpu"), ("cpu", "cuda:0"), ("cuda:0", "cuda:0")]
    answers = {adaptive("generate", "Hello", "--device", a, "--draft-device", b, *named)[1] for a, b in ways}
    assert len(answers) == 1


def test_memory_is_counted_on_the_device(adaptive: Command) -> None:
    free, total = torch.cuda.mem_get_info(DEVICE)
    held = torch.empty(64 << 20, dtype=torch.uint8, device=DEVICE)
    del held  # torch caches the memory, which stays available to this process
    assert abs(device_bytes("cuda:0") - free) < 512 << 20
    assert not memory_is_short() or free < total // 10
    with _precision(DEVICE):  # the autocast of training
        assert torch.is_autocast_enabled("cuda") == torch.cuda.is_bf16_supported(including_emulation=False)
    code, out, _ = adaptive("doctor", "--device", "cuda:0", "--json", "--target", str(BUNDLED / "target"))
    assert code == 0
    assert "memory of cuda:0" in out
