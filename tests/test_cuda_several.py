"""Recorded passes over several texts compute the same as eager ones, and answers at once are those of each alone. On
CUDA the passes are replayed; elsewhere the same operations run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_cpu_forward import made, text
from test_cuda_graphs import DEVICE, bundled, engines

from adaptive.answering import Answering, Question
from adaptive.assistant import Assistant, encode_chat
from adaptive.control.policy import FixedLength
from adaptive.decoding.batch import Batch
from adaptive.engines.cuda.texts import Texts
from adaptive.engines.hf import graphs
from adaptive.engines.hf.cache import GROWTH, RollbackCache
from adaptive.engines.protocol import ExtendCall
from adaptive.service.slots import SLOTS, possible_slots, prepare_slots
from adaptive.types import Message, SamplingParams, StopParams

# Differences allowed in logits and hidden states in float32.
NEARLY = {"atol": 2e-4 if DEVICE == "cuda" else 2e-5, "rtol": 1e-3}


@pytest.mark.parametrize("features", [False, True])
@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral"])
def test_passes_over_several_texts_are_replayed(name: str, features: bool) -> None:
    """Texts of any lengths, each with its own number of tokens and of rows; they join, leave, grow and roll back."""
    model = made(name).float()
    model.config.max_position_embeddings = 2 * GROWTH
    recorded, plain = engines(model)
    passes = recorded.recorded
    assert passes is not None
    recorded.prepare_together(4, features)
    assert {(which.texts, which.size) for which in passes.recordings} == {
        (texts, size) for texts in (2, 3, 4) for size in graphs.SHARED
    }
    held = dict(passes.recordings)
    ours, theirs = ([engine.sequence(features) for _ in range(5)] for engine in (recorded, plain))
    for number, pair in enumerate(zip(ours, theirs, strict=True)):
        for sequence in pair:
            sequence.extend(text(GROWTH - 3 if number == 4 else 4 + 9 * number), 1)
    turns = [((0, 1), (1, 4)), ((3, 1, 0), (2, 2, 2)), ((0, 1, 2, 3), (9, 1, 5, 3)), ((2, 4), (8, 2)), ((4, 3), (1, 1))]
    for turn, (chosen, counts) in enumerate(turns, start=1):
        rows = [max(1, count - turn % 2) for count in counts]
        calls = [
            [ExtendCall(texts[i], text(n), k) for i, n, k in zip(chosen, counts, rows, strict=True)]
            for texts in (ours, theirs)
        ]
        found, expected = (
            recorded.extend_together(calls[0]),
            [call.sequence.extend(call.tokens, call.rows) for call in calls[1]],
        )
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, **NEARLY)
        assert passes.replayed == turn
        for i in chosen:
            assert ours[i].length == theirs[i].length
            if features:
                states = [texts[i].features(0, ours[i].length) for texts in (ours, theirs)]
                torch.testing.assert_close(*states, **NEARLY)
            for texts in (ours, theirs):
                texts[i].rollback(texts[i].length - turn % 2)
    assert passes.recordings == held
    assert (passes.replayed, passes.problem) == (len(turns), None)


def test_only_what_is_too_long_for_a_pass_over_several_texts_has_another_one() -> None:
    """Trees and pieces of prompts share an eager pass; a single longer piece has one of its own, which may be recorded.
    More texts than a pass has are divided."""
    recorded, plain = engines(made("llama").float())
    passes = recorded.recorded
    assert passes is not None
    recorded.prepare_together(4, False)
    recorded.sequence().prepare(100)
    ours, theirs = ([engine.sequence() for _ in range(11)] for engine in (recorded, plain))
    for number, pair in enumerate(zip(ours, theirs, strict=True)):
        for sequence in pair:
            sequence.extend(text(20 + number), 1)
    for counts, replayed in (((1, 12, 2), 2), ((1, 1, 30), 1), ((12, 3, 20, 1), 1), ((2, 1, 2, 2, 1), 0)):
        before = passes.replayed
        calls = [
            [ExtendCall(one, text(count), min(2, count)) for one, count in zip(texts, counts, strict=False)]
            for texts in (ours, theirs)
        ]
        expected = [call.sequence.extend(call.tokens, call.rows) for call in calls[1]]
        for one, other in zip(recorded.extend_together(calls[0]), expected, strict=True):
            torch.testing.assert_close(one, other, **NEARLY)
        assert passes.replayed - before == replayed
    tree = [
        ExtendCall(ours[0], text(4), 4, [-1, 0, 0, 1]),
        ExtendCall(ours[1], text(1), 1),
        ExtendCall(ours[2], text(2), 1),
    ]
    right = [
        ExtendCall(theirs[0], text(4), 4, [-1, 0, 0, 1]),
        ExtendCall(theirs[1], text(1), 1),
        ExtendCall(theirs[2], text(2), 1),
    ]
    before = passes.replayed
    for one, other in zip(recorded.extend_together(tree), plain.extend_together(right), strict=True):
        torch.testing.assert_close(one, other, **NEARLY)
    assert passes.replayed == before + 1


def test_a_lack_of_memory_leaves_what_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library's own error counts as one. For a pass without room for its padding there is the eager one."""
    recorded, plain = engines(made("llama").float())
    one, other = recorded.sequence(), plain.sequence()
    for sequence in (one, other):
        sequence.prepare(100)
        sequence.extend(text(20), 1)
    passes = recorded.recorded
    assert passes is not None
    held, short = dict(passes.recordings), recorded.short

    def full(*_: Any) -> None:
        raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling something")

    monkeypatch.setattr(passes, "_new", full)
    recorded.prepare_together(4, False)
    assert (passes.recordings, passes.problem, recorded.short) == (held, None, short)
    assert isinstance(one.cache, RollbackCache)
    monkeypatch.setattr(RollbackCache, "capacity", property(lambda cache: cache.length + 3))
    monkeypatch.setattr(one.cache, "reserve", full)
    torch.testing.assert_close(one.extend(text(2), 2), other.extend(text(2), 2), **NEARLY)
    assert passes.replayed == 1
    torch.testing.assert_close(one.extend(text(3), 3), other.extend(text(3), 3), **NEARLY)
    assert passes.replayed == 2
    monkeypatch.setattr(RollbackCache, "capacity", property(lambda cache: cache.length + 2))
    assert passes(text(3), 1, one.cache) is None
    assert passes.replayed == 2


@pytest.mark.thorough
def test_answers_at_once_over_recorded_passes_are_those_of_each_alone(prompts: list[str]) -> None:
    pair, target, _ = bundled()
    assistant = Assistant(pair, FixedLength(0), None, 500_000_000)
    assert possible_slots(assistant, "auto") == (SLOTS, None)
    said: list[list[list[int]]] = []
    for record in (False, True):
        if record:
            target.record()
            prepare_slots(assistant, 3)
        batch, going = Batch(target, lambda: True), []
        for prompt in prompts[:3]:
            question = Question(
                encode_chat(pair, (Message("user", prompt),)),
                (),
                "",
                SamplingParams(temperature=0.0),
                StopParams(24, ignore_eos=True),
            )
            going.append(assistant.begin(question))
            going[-1].decoding.begin()
            batch.join(going[-1].decoding)
            if not record:  # each alone
                run(batch, assistant, going[-1:])
        if record:
            run(batch, assistant, going)
        said.append([one.decoding.output for one in going])
    assert said[0] == said[1]
    assert target.recorded is not None
    assert target.recorded.problem is None
    assert target.recorded.replayed > 10


def run(batch: Batch, assistant: Assistant, going: list[Answering]) -> None:
    """Decode these answers to their ends."""
    left = list(going)
    while left:
        assert not batch.step()
        for one in list(left):
            for _ in one.decoding.show():
                pass
            if one.decoding.finish_reason is not None:
                batch.leave(one.decoding)
                one.decoding.end()
                assistant.end(one)
                left.remove(one)


def test_passes_over_several_texts_that_are_wrong_are_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Those over one text are used all the same."""
    recorded, plain = engines(made("llama").float())
    aim = Texts.aim
    monkeypatch.setattr(Texts, "aim", lambda self, caches: aim(self, [caches[0]] * len(caches)))
    recorded.prepare_together(3, False)
    assert recorded.recorded is not None
    assert not recorded.recorded.recordings
    assert caplog.text.count("over several texts stay eager: a recorded pass over 1 tokens differs") == 1
    one, other = recorded.sequence(), plain.sequence()
    for sequence in (one, other):
        sequence.prepare(100)
        sequence.extend(text(20), 1)
    torch.testing.assert_close(one.extend(text(2), 2), other.extend(text(2), 2), **NEARLY)
    assert recorded.recorded.replayed == 1
