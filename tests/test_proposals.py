"""A proposal in one call is the proposal made token by token."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from adaptive.control.policy import Advice
from adaptive.decoding.drafters import ModelDrafter
from adaptive.decoding.params import SamplingParams
from adaptive.decoding.sampling import Penalties
from adaptive.engines.kernels import library
from adaptive.engines.transformers import TransformersEngine

VOCAB = 300
PROMPT = [5, 17, 203, 44, 8, 91, 150]
PARAMS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.9),
    SamplingParams(temperature=1.3, top_k=20, top_p=0.9, min_p=0.02),
]

pytestmark = pytest.mark.skipif(library() is None, reason="the kernels are not built, or not for this processor")


@pytest.fixture(scope="module")
def engine() -> TransformersEngine:
    """A small draft, whose distributions are neither flat nor sure."""
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=512,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(4.0)
        model.lm_head.weight.mul_(5.0)
    return TransformersEngine(model)


def drafter(engine: TransformersEngine, params: SamplingParams, target_vocab: int = VOCAB) -> ModelDrafter:
    """With the same random numbers each time."""
    penalties = Penalties(params, target_vocab, torch.device("cpu"))
    generator = torch.Generator().manual_seed(7)
    return ModelDrafter(engine.sequence(), engine, target_vocab, params, penalties, generator)


def by_token(engine: TransformersEngine, params: SamplingParams, target_vocab: int = VOCAB) -> ModelDrafter:
    """One that asks for every token."""
    made = drafter(engine, params, target_vocab)
    made._choice = None
    return made


def stops(below: float, asked: list[tuple[int, float]]) -> Callable[[int, float], Advice]:
    """Advice by confidence, which is noted."""

    def advise(position: int, confidence: float) -> Advice:
        asked.append((position, confidence))
        if confidence < below:
            return Advice.DROP
        return Advice.LAST if confidence < 1.5 * below else Advice.MORE

    return advise


@pytest.mark.parametrize("params", PARAMS, ids=["greedy", "sampled", "cut"])
@pytest.mark.parametrize("below", [None, 0.3, 0.5])
@pytest.mark.parametrize("target_vocab", [VOCAB, VOCAB - 60, VOCAB + 60])
def test_it_is_the_same_as_token_by_token(
    engine: TransformersEngine, params: SamplingParams, below: float | None, target_vocab: int
) -> None:
    one, other = drafter(engine, params, target_vocab), by_token(engine, params, target_vocab)
    assert one._choice is not None
    committed = [min(token, target_vocab - 1) for token in PROMPT]
    lengths = set()
    for turn in range(40):
        asked: tuple[list[tuple[int, float]], list[tuple[int, float]]] = ([], [])
        mine, theirs = (
            d.propose(committed, 1 + turn % 6, None if below is None else stops(below, said))
            for d, said in zip((one, other), asked, strict=True)
        )
        assert [position for position, _ in asked[0]] == [position for position, _ in asked[1]]
        assert [sure for _, sure in asked[0]] == pytest.approx([sure for _, sure in asked[1]], rel=1e-4)
        assert one.sequence.length == other.sequence.length
        assert (mine is None) == (theirs is None)
        lengths.add(0 if mine is None else len(mine.tokens))
        if mine is not None and theirs is not None:
            assert mine.tokens == theirs.tokens
            assert (mine.probs is None) == (theirs.probs is None)
            if mine.probs is not None and theirs.probs is not None:
                for p, q in zip(mine.probs, theirs.probs, strict=True):
                    assert abs(p - q).max() < 1e-5
            # Some of it stands, some does not.
            committed = [*committed, *mine.tokens[: turn % 3]]
        committed.append(turn % target_vocab)
        for made in (one, other):
            made.rollback(len(committed) - 1)
    assert lengths >= ({1, 2, 3, 4, 5, 6} if below is None else {0, 1, 2})


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_what_the_adviser_raises_is_raised(engine: TransformersEngine, error: type[BaseException]) -> None:
    made = drafter(engine, PARAMS[0])

    def advise(position: int, confidence: float) -> Advice:
        if position == 3:
            raise error("here")
        return Advice.MORE

    with pytest.raises(error, match="here"):
        made.propose(PROMPT, 5, advise)
    # Nothing of it is left, and the next proposal is one.
    again = made.propose(PROMPT, 5)
    assert again is not None
    expected = by_token(engine, PARAMS[0]).propose(PROMPT, 5)
    assert expected is not None
    assert again.tokens == expected.tokens


def test_nothing_is_kept_of_an_answer(engine: TransformersEngine) -> None:
    made = drafter(engine, PARAMS[1])
    assert made.propose(PROMPT, 5, stops(0.3, [])) is not None
    room = weakref.ref(made._choice)
    gc.disable()  # distributions of a large vocabulary are not to wait for it
    try:
        del made
        assert room() is None
    finally:
        gc.enable()


def test_a_long_text_is_caught_up_with(engine: TransformersEngine) -> None:
    text = [(7 * i) % VOCAB for i in range(300)]
    mine, theirs = (make(engine, PARAMS[0]).propose(text, 4) for make in (drafter, by_token))
    assert mine is not None
    assert theirs is not None
    assert mine.tokens == theirs.tokens


def test_penalties_and_biases_are_asked_for_token_by_token(engine: TransformersEngine) -> None:
    assert drafter(engine, SamplingParams(repetition_penalty=1.3))._choice is None
    assert drafter(engine, SamplingParams(logit_bias={3: 2.0}))._choice is None


def test_a_text_has_the_same_logits_however_it_is_cut_into_passes(engine: TransformersEngine) -> None:
    text = [(11 * i) % VOCAB for i in range(290)]
    whole = engine.sequence().extend(text, len(text)).clone()
    for cuts in ([290], [1, 289], [128, 1, 161], [33] * 8 + [26], [5] * 58):
        sequence, begin = engine.sequence(), 0
        for count in cuts:
            rows = max(1, count // 2)
            found = sequence.extend(text[begin : begin + count], rows)
            begin += count
            assert torch.equal(found, whole[begin - rows : begin])
    assert sequence.extend([], 0).shape == (0, VOCAB)
