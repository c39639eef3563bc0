"""A pass over several sequences gives each of them the logits of a pass of its own."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from test_cpu_forward import CONFIGS, SIZES, VARIED, made, text
from test_features import OTHERS, engine_of, model_of
from tiny_models import tiny_model
from transformers import AutoModelForCausalLM, BloomConfig

from adaptive.engines.cpu import joint as cpu_joint
from adaptive.engines.cpu import kernels
from adaptive.engines.cpu.cache import GROWTH
from adaptive.engines.cpu.forward import MANY
from adaptive.engines.hf import joint as hf_joint
from adaptive.engines.hf.engine import TransformersEngine, TransformersSequence
from adaptive.engines.protocol import ExtendCall

FUSED = [
    name
    for name in CONFIGS
    if name.startswith(("llama", "mistral", "qwen3", "gemma3")) and "biases" not in name and "activation" not in name
] + VARIED
# Tokens that each sequence holds at first, within a window and beyond it, and tokens appended to each per turn.
HELD = (0, 3, 40, 9)
TURNS = ((5, 1, 3, 9), (1, 1, 1, 1), (2, 30, 1, 4), (0, 3, 0, 8))


def pairs(engine: TransformersEngine) -> list[tuple[TransformersSequence, TransformersSequence]]:
    """Sequences, some of which keep features, each with a twin of the same content."""
    found = []
    for number, held in enumerate(HELD):
        pair = engine.sequence(features=number % 2 == 0), engine.sequence(features=number % 2 == 0)
        for sequence in pair:
            sequence.prepare(100)
            if held:
                sequence.extend(text(held).tolist(), 1)
        found.append(pair)
    return found


def extended(
    engine: TransformersEngine, sequences: Sequence[TransformersSequence], counts: Sequence[int], salt: int
) -> tuple[list[list[int]], list[int], list[torch.Tensor]]:
    """The tokens appended to each sequence in one joint pass, the rows asked for, and their logits. Some sequences get
    no tokens."""
    tokens = [text(1000 * salt + 50 * number + count)[:count].tolist() for number, count in enumerate(counts)]
    rows = [(count + number) % (count + 1) for number, count in enumerate(counts)]
    calls = [ExtendCall(*given) for given in zip(sequences, tokens, rows, strict=True) if given[1]]
    logits = iter(engine.extend_together(calls))
    return tokens, rows, [next(logits) if given else torch.empty(0, SIZES["vocab_size"]) for given in tokens]


def check(engine: TransformersEngine, tolerance: float) -> None:
    """Compare several turns of joint passes, with rollbacks between them, with separate passes."""
    both = pairs(engine)
    ours, alone = zip(*both, strict=True)
    for turn, counts in enumerate(TURNS):
        tokens, rows, found = extended(engine, ours, counts, turn + 1)
        for number, sequence in enumerate(alone):
            if not tokens[number]:
                continue
            right = sequence.extend(tokens[number], rows[number])
            assert ours[number].length == sequence.length
            assert found[number].shape == (rows[number], SIZES["vocab_size"])
            if rows[number]:
                same(found[number], right, tolerance)
        for one, other in both:
            for sequence in (one, other):
                sequence.rollback(sequence.length - turn % 2)
    for number, (one, other) in enumerate(both):
        if number % 2 == 0:
            same(one.features(0, one.length), other.features(0, other.length), tolerance)
        same(one.extend([1, 2, 3], 3), other.extend([1, 2, 3], 3), tolerance)


def same(found: torch.Tensor, right: torch.Tensor, tolerance: float) -> None:
    """Equal bit for bit, or with a tolerance within that share of the largest number."""
    if not tolerance:
        assert torch.equal(found, right)
        return
    scale = right.abs().max()
    torch.testing.assert_close(found / scale, right / scale, rtol=0, atol=tolerance)
    assert torch.equal(found.argmax(-1), right.argmax(-1))


native = pytest.mark.skipif(kernels.library() is None, reason="the kernels are not built, or not for this processor")


@native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FUSED)
def test_on_our_forward_every_text_has_the_logits_of_a_lone_pass(name: str, dtype: torch.dtype) -> None:
    engine = TransformersEngine(made(name, dtype))
    assert engine.joint
    check(engine, 0.0)


@native
def test_int8_weights_too() -> None:
    engine = TransformersEngine(made("llama", torch.bfloat16), int8=True)
    assert engine.weights == "int8"
    assert engine.joint
    check(engine, 0.0)


@native
def test_any_number_of_threads_computes_the_same() -> None:
    given = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        engine = TransformersEngine(made("llama", torch.float32))
        engine.cpu_forward.threads.held = 2  # type: ignore[union-attr]
        check(engine, 0.0)
    finally:
        torch.set_num_threads(given)


@pytest.mark.parametrize("forward", ["transformers", "recorded"])
@pytest.mark.parametrize("name", [*CONFIGS, *OTHERS])
def test_on_transformers_own_forward_they_are_those_to_rounding(name: str, forward: str) -> None:
    model = model_of(name)
    ran: list[int] = []
    model.get_input_embeddings().register_forward_hook(lambda module, given, output: ran.append(given[0].numel()))
    engine = engine_of(model, forward)
    assert engine.joint
    check(engine, 2e-5)
    sequences = [engine.sequence() for _ in range(3)]
    ran.clear()
    extended(engine, sequences, (4, 1, 7), 9)
    assert ran == [12], "more than one forward, or tokens that nobody asked for"


@pytest.mark.parametrize("forward", ["own", "transformers"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3"])
def test_float64_is_the_same_however_it_is_computed(name: str, forward: str) -> None:
    """Our own forward by torch's operations makes no joint passes, but takes the same calls."""
    engine = engine_of(made(name), forward)
    assert engine.joint == (forward == "transformers")
    check(engine, 1e-6 if name == "gemma2" else 1e-9)


def test_a_model_that_cannot_is_found_out_and_passes_come_one_after_the_other() -> None:
    """Bloom's attention takes positions from a mask and calls no attention function."""
    torch.manual_seed(5)
    config = BloomConfig(vocab_size=97, hidden_size=48, n_layer=2, n_head=4)
    model = AutoModelForCausalLM.from_config(config).eval()
    engine = TransformersEngine(model)
    assert not engine.joint
    check(engine, 1e-5)
    assert model.config._attn_implementation != hf_joint.NAME


@native
def test_a_model_that_asks_for_the_length_of_the_text_makes_no_joint_passes() -> None:
    """The attention of Llama 4 depends on that beyond some thousands of tokens, where the test of joint passes, which
    is short, would not see it."""
    model = tiny_model("llama4_text", floor_scale=32, attn_temperature_tuning=True)
    engine = TransformersEngine(model)
    assert not engine.joint
    assert not engine.trees
    texts = [text(200).tolist(), text(180).tolist()]
    alone = [engine.sequence().extend(one, 1) for one in texts]
    held = [engine.sequence() for _ in texts]
    for sequence, one in zip(held, texts, strict=True):
        sequence.extend(one[:-1], 1)
    together = engine.extend_together([ExtendCall(a, one[-1:], 1) for a, one in zip(held, texts, strict=True)])
    for one, other in zip(together, alone, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


def test_more_tokens_than_one_call_takes_are_several_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    once = cpu_joint._pass
    monkeypatch.setattr(
        cpu_joint, "_pass", lambda f, parts, count, at: (sizes.append(count), once(f, parts, count, at))
    )
    engine = TransformersEngine(model_of("llama"))
    counts = (9, MANY + 40, 100, 30, 5)  # the second sequence gets passes of its own
    ours, alone = ([engine.sequence() for _ in counts] for _ in range(2))
    tokens, rows, found = extended(engine, ours, counts, 3)
    for number, sequence in enumerate(alone):
        right = sequence.extend(tokens[number], rows[number])
        assert torch.equal(found[number], right)
    assert sizes == [109, 35]


@native
def test_caches_and_tables_that_grow_on_the_way() -> None:
    engine = TransformersEngine(model_of("mistral, window"))
    counts = (2040, GROWTH - 3, 2)
    ours, alone = ([engine.sequence() for _ in counts] for _ in range(2))
    for sequences in (ours, alone):
        for sequence, count in zip(sequences, counts, strict=True):
            sequence.extend(text(count).tolist(), 0)
    tokens, rows, found = extended(engine, ours, (3, 9, 20), 5)  # beyond the first rotation table and beyond a buffer
    for number, sequence in enumerate(alone):
        assert torch.equal(found[number], sequence.extend(tokens[number], rows[number]))


@pytest.mark.parametrize("forward", ["own", "transformers"])
def test_what_cannot_be_is_refused_and_leaves_nothing_behind(forward: str) -> None:
    engine = engine_of(model_of("llama"), forward)
    one, other = engine.sequence(features=True), engine.sequence()
    for sequence in (one, other):
        sequence.extend([5, 6, 7], 1)
    with pytest.raises(ValueError, match="once"):
        engine.extend_together([ExtendCall(one, [1], 1), ExtendCall(one, [2], 1)])
    with pytest.raises(IndexError):
        engine.extend_together([ExtendCall(one, [1, 2], 1), ExtendCall(other, [97], 1)])
    for sequence in (one, other):
        sequence.rollback(3)
    fresh = engine.sequence()
    right = fresh.extend([5, 6, 7, 1], 1)
    found = engine.extend_together([ExtendCall(one, [1], 1), ExtendCall(other, torch.tensor([1]), 1)])
    for logits in found:
        torch.testing.assert_close(logits, right, rtol=0, atol=1e-4)
