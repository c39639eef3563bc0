"""Hidden states kept by a sequence equal transformers', on every forward and for every way of building the text."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_cpu_forward import CONFIGS, SIZES, made, own, text
from tiny_models import tiny_model
from transformers import AutoModelForCausalLM, GPT2Config, GPTNeoXConfig, PreTrainedModel

from adaptive.engines.cpu import kernels
from adaptive.engines.cpu.forward import FEW, MANY
from adaptive.engines.hf.cache import GROWTH
from adaptive.engines.hf.engine import TransformersEngine, TransformersSequence
from adaptive.engines.hf.features import final_norm
from adaptive.engines.protocol import ProposalCall, VerificationCall
from adaptive.types import SamplingParams

OTHERS: dict[str, Any] = {
    "gpt-neox": GPTNeoXConfig(**SIZES, rotary_pct=0.5),
    "gpt-2": GPT2Config(vocab_size=97, n_embd=48, n_layer=3, n_head=4, n_positions=512),
}
GREEDY = SamplingParams(temperature=0.0)


def model_of(name: str) -> PreTrainedModel:
    """A model in float32 with a context for long texts."""
    if name in OTHERS:
        torch.manual_seed(5)
        return AutoModelForCausalLM.from_config(OTHERS[name]).eval()
    model = made(name, torch.float32)
    model.config.max_position_embeddings = 4096
    return model


def truth(model: PreTrainedModel, tokens: torch.Tensor) -> torch.Tensor:
    """The last layer's output (n, width) for a text (n,). Transformers' last hidden state is its norm."""
    norm, given = final_norm(model), []
    assert norm is not None
    layers = next(m for m in model.get_decoder().children() if isinstance(m, torch.nn.ModuleList))
    handle = layers[-1].register_forward_hook(
        lambda module, args, output: given.append(output if isinstance(output, torch.Tensor) else output[0])
    )
    try:
        with torch.inference_mode():
            said = model(input_ids=tokens[None], output_hidden_states=True).hidden_states
            torch.testing.assert_close(norm(given[0]), said[-1], rtol=0, atol=1e-5)
    finally:
        handle.remove()
    return given[0][0]


def engine_of(model: PreTrainedModel, forward: str) -> TransformersEngine:
    """An engine on our forward (fused or layer by layer), or on transformers' (eager or with recorded passes)."""
    engine = TransformersEngine(model)
    if forward == "layers" and engine.cpu_forward is not None:
        engine.cpu_forward.fused = False
    elif forward not in ("own", "torch"):
        engine.cpu_forward = None
    if forward == "recorded":
        engine.record()
    return engine


def close(sequence: TransformersSequence, right: torch.Tensor, begin: int = 0) -> None:
    """Check the sequence's features from ``begin`` on against the right ones (n, width) of the whole text."""
    found = sequence.features(begin, sequence.length)
    assert found.dtype == torch.float32
    scale = right.abs().max()
    torch.testing.assert_close(found / scale, right[begin : sequence.length] / scale, rtol=0, atol=1e-4)


def grow(sequence: TransformersSequence, tokens: torch.Tensor, counts: tuple[int, ...]) -> None:
    """Append the next tokens of the text, in passes of ``counts`` tokens."""
    for count in counts:
        given = tokens[sequence.length : sequence.length + count]
        sequence.extend(given.tolist() if count % 2 else given, min(count, 1))


@pytest.mark.parametrize("forward", ["own", "layers", "torch", "transformers", "recorded"])
@pytest.mark.parametrize("name", CONFIGS)
def test_features_are_what_the_last_layer_gives(name: str, forward: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if forward == "torch":  # our own forward, without the kernels
        monkeypatch.setattr(kernels, "library", lambda: None)
    model, tokens = model_of(name), text(600)
    right = truth(model, tokens)
    engine = engine_of(model, forward)
    assert engine.feature_width == SIZES["hidden_size"]
    sequence = engine.sequence(features=True)
    sequence.prepare(len(tokens))
    grow(sequence, tokens, (9, 1, 5, 2, FEW + 4, 1, MANY + 60))
    close(sequence, right)
    sequence.rollback(30)
    with pytest.raises(ValueError):
        sequence.features(0, 31)
    sequence.extend(text(7).tolist(), 1)  # rolled back below
    sequence.rollback(30)
    grow(sequence, tokens, (3, 1, GROWTH))  # beyond the end of the buffer
    close(sequence, right)
    copied = engine.sequence(features=True)
    copied.extend(text(12).tolist(), 1)
    copied.copy_prefix(sequence, 100)
    copied.prepare(len(tokens))
    assert copied.length == 100
    close(copied, right)
    grow(copied, tokens, (1, 6, 1))
    close(copied, right, 90)
    close(sequence, right)


@pytest.mark.parametrize("forward", ["transformers", "recorded"])
@pytest.mark.parametrize("name", OTHERS)
def test_features_of_models_that_only_transformers_knows(name: str, forward: str) -> None:
    model, tokens = model_of(name), text(60)
    right = truth(model, tokens)
    engine = engine_of(model, forward)
    sequence = engine.sequence(features=True)
    sequence.prepare(len(tokens))
    grow(sequence, tokens, (9, 1, 5, 2, FEW + 4))
    assert engine.recorded is None or engine.recorded.replayed == 3
    close(sequence, right)


def test_features_are_float32_whatever_the_weights_are() -> None:
    for dtype in (torch.bfloat16, torch.float64):
        for forward in ("own", "transformers"):
            sequence = engine_of(made("llama", dtype), forward).sequence(features=True)
            sequence.extend(text(9), 1)
            assert sequence.features(2, 5).dtype == torch.float32
            assert sequence.features(2, 5).shape == (3, SIZES["hidden_size"])


@pytest.mark.skipif(kernels.library() is None, reason="the kernels are not built, or not for this processor")
def test_calls_that_propose_and_verify_keep_features_too() -> None:
    model = model_of("llama")
    engine = engine_of(model, "own")
    sequence = engine.sequence(features=True)
    assert sequence.fused is not None
    given = text(FEW + 9).tolist()
    drafted = sequence.propose(ProposalCall(given, 4, 97, GREEDY, [], None)).tokens
    sequence.verify(VerificationCall(drafted[3:], [5, 6, 7], GREEDY, None, []))
    close(sequence, truth(model, torch.tensor([*given, *drafted, 5, 6, 7])))


@pytest.mark.parametrize("forward", ["own", "transformers"])
def test_they_cost_nothing_where_nobody_asks(forward: str) -> None:
    model = model_of("llama")
    engine = engine_of(model, forward)
    norm = final_norm(model)
    assert norm is not None
    plain = engine.sequence()
    assert not norm._forward_pre_hooks
    keeping = engine.sequence(features=True)
    for sequence in (plain, keeping):
        sequence.reserve(GROWTH)
        sequence.extend(text(9), 1)
    assert keeping.memory.total == plain.memory.total + GROWTH * engine.feature_width * 4
    with pytest.raises(ValueError):
        plain.features(0, 9)


@pytest.mark.parametrize("forward", ["own", "transformers"])
def test_a_cache_that_cannot_grow_keeps_its_features(forward: str) -> None:
    model, tokens = model_of("llama"), text(60)
    right = truth(model, tokens)
    sequence = engine_of(model, forward).sequence(features=True)
    grow(sequence, tokens, (20,))
    with pytest.raises((RuntimeError, MemoryError)):
        sequence.cache.reserve(2**50)
    close(sequence, right)
    grow(sequence, tokens, (9, 1))
    close(sequence, right)


def test_a_float64_forward_is_exact_in_its_features() -> None:
    model = made("gemma3")
    forward, tokens = own(model), text(40)
    cache = forward.cache(features=True)
    forward(tokens, 1, cache)
    right = truth(model, tokens)
    torch.testing.assert_close(
        cache.features(0, 40).double() / right.abs().max(), right / right.abs().max(), rtol=0, atol=1e-6
    )


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "gemma4_text", "gpt2", "gpt_neox", "phi", "glm4_moe"])
def test_the_final_norm_is_the_one_that_gives_the_last_hidden_state(kind: str) -> None:
    model = tiny_model(kind)
    norm, given = final_norm(model), list[torch.Tensor]()
    assert norm is not None
    norm.register_forward_hook(lambda module, inputs, output: given.append(output))
    with torch.inference_mode():
        last = model.get_decoder()(input_ids=torch.arange(6)[None]).last_hidden_state
    assert torch.equal(given[-1], last)


def test_layers_that_see_only_the_last_tokens_give_no_features() -> None:
    """Gemma 4 with shared keys, by transformers' own forward."""
    model = tiny_model("gemma4_text")
    shared = bool(getattr(model.config, "num_kv_shared_layers", 0))
    again = TransformersEngine(model.to(torch.float16))  # a dtype without a forward of our own
    assert again.cpu_forward is None
    assert (again.feature_width == 0) == shared
