"""A proposal in one call equals one made token by token; a verification in one call equals a pass and then the rule."""

from __future__ import annotations

import copy
import gc
import random
import weakref
from collections.abc import Callable

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from adaptive.control.confidence import CENTRES
from adaptive.control.policy import Advice
from adaptive.control.stopping import Stopping
from adaptive.decoding.verifier import Verifier
from adaptive.decoding.verify import verify_greedy, verify_sampled
from adaptive.drafting.model import ModelDrafter
from adaptive.drafting.proposal import Proposal
from adaptive.drafting.protocol import Proposing
from adaptive.engines.cpu.forward import cpu_forward
from adaptive.engines.cpu.kernels import library
from adaptive.engines.hf.engine import TransformersEngine
from adaptive.engines.protocol import Proposed
from adaptive.errors import AdaptiveError
from adaptive.sampling import LogitsProcessor, Transform, Uniform
from adaptive.types import SamplingParams

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
    """A small draft whose distributions are neither flat nor certain."""
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


def drafter(
    engine: TransformersEngine,
    params: SamplingParams,
    target_vocab: int = VOCAB,
    processor: LogitsProcessor | None = None,
) -> ModelDrafter:
    """A drafter with the same random numbers each time."""
    penalties = processor or LogitsProcessor(params, target_vocab, torch.device("cpu"))
    generator = torch.Generator().manual_seed(7)
    return ModelDrafter(engine.sequence(), engine, target_vocab, params, penalties, generator)


def by_token(
    engine: TransformersEngine,
    params: SamplingParams,
    target_vocab: int = VOCAB,
    processor: LogitsProcessor | None = None,
) -> ModelDrafter:
    """A drafter that runs a separate pass for every token."""
    made = drafter(engine, params, target_vocab, processor)
    made._fused = None
    return made


def stops(below: float, asked: list[tuple[int, float]]) -> Callable[[int, float], Advice]:
    """An adviser that ends drafts by confidence and notes its arguments in ``asked``."""

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
    assert one._fused is not None
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
                    assert np.abs(np.asarray(p) - np.asarray(q)).max() < 1e-5
            # Accept none or some of its tokens.
            committed = [*committed, *mine.tokens[: turn % 3]]
        committed.append(turn % target_vocab)
        for made in (one, other):
            made.rollback(len(committed) - 1)
    if below is None:
        assert lengths == {1, 2, 3, 4, 5, 6}
    else:
        assert min(lengths) == 0
        assert max(lengths) > 1


def test_proposals_for_several_texts_in_one_call_are_those_of_one_after_the_other(engine: TransformersEngine) -> None:
    """Greedy, seeded and sampled proposals of different lengths, with and without thresholds."""
    together, alone = [], []
    for made in (together, alone):
        for number in range(8):
            params = [*PARAMS, SamplingParams(temperature=0.9, seed=number)][number % 4]
            made.append(drafter(engine, params))
    texts = [[*PROMPT[: 1 + number % 5], number] for number in range(8)]
    rules: list[list[Stopping]] = [[Stopping(6) for _ in range(8)] for _ in range(2)]
    for rule in (*rules[0], *rules[1]):
        rule.decide(CENTRES, CENTRES, [0.4] * 6, [0.25] * 6)
    lengths = set()
    for turn in range(12):
        advice = [[None if n % 3 == 0 else rule for n, rule in enumerate(side)] for side in rules]
        each = zip(together, texts, advice[0], strict=True)
        proposals = [made.proposing(text, 1 + (n + turn) % 6, rule) for n, (made, text, rule) in enumerate(each)]
        wanted = [next(one) for one in proposals]
        found = engine.propose_together([(one.sequence, one.call) for one in wanted])
        for number, (one, given) in enumerate(zip(proposals, found, strict=True)):
            mine = ended(one, given)
            theirs = alone[number].propose(texts[number], 1 + (number + turn) % 6, advice[1][number])
            assert rules[0][number].bins_of() == rules[1][number].bins_of()
            assert (mine is None) == (theirs is None)
            lengths.add(0 if mine is None else len(mine.tokens))
            if mine is not None and theirs is not None:
                assert mine.tokens == theirs.tokens
                if theirs.probs is not None:
                    assert torch.equal(torch.as_tensor(mine.probs), torch.as_tensor(theirs.probs))
                texts[number] = [*texts[number], *mine.tokens[: turn % 3]]
            texts[number] = [*texts[number], (turn * 31 + number) % VOCAB]
            for made in (together, alone):
                made[number].rollback(len(texts[number]) - 1)
                rules[0][number].clear()
                rules[1][number].clear()
    assert min(lengths) == 0
    assert max(lengths) == 6


def ended(proposing: Proposing, given: Proposed) -> Proposal | None:
    """The finished proposal of a generator that is sent its last input."""
    try:
        proposing.send(given)
    except StopIteration as end:
        proposal: Proposal | None = end.value
        return proposal
    raise AssertionError("it wants more")


@pytest.mark.parametrize("params", PARAMS, ids=["greedy", "sampled", "cut"])
def test_thresholds_end_a_draft_where_asking_for_them_would(engine: TransformersEngine, params: SamplingParams) -> None:
    """Tokens, confidence bins and cache lengths are the same, for random thresholds."""
    one, other, dice = drafter(engine, params), by_token(engine, params), random.Random(5)
    rules = Stopping(6), Stopping(6)
    committed, ends = list(PROMPT), set()
    for turn in range(120):
        table, follow = (sorted(dice.random() for _ in CENTRES) for _ in range(2))
        drop_below = [0.4 * dice.random() ** (1 + i) for i in range(6)]
        last_below = [1.5 * low for low in drop_below[1:]]
        for rule in rules:
            rule.decide(table, follow, drop_below, last_below)
        length = 2 + turn % 5
        mine, theirs = (made.propose(committed, length, asked) for made, asked in zip((one, other), rules, strict=True))
        assert rules[0].bins_of() == rules[1].bins_of()
        assert (mine and mine.tokens) == (theirs and theirs.tokens)
        assert one.sequence.length == other.sequence.length
        count = len(mine.tokens) if mine else 0
        ends.add("dropped" if count < len(rules[0].bins_of()) else "full" if count == length else "last")
        committed = [*committed, *(mine.tokens[: turn % 3] if mine else []), turn % VOCAB]
        for made in (one, other):
            made.rollback(len(committed) - 1)
    assert ends == {"dropped", "last", "full"}
    rules[0].clear()
    assert rules[0].bins_of() == []


def test_how_sure_each_of_some_drafts_was_is_kept(engine: TransformersEngine) -> None:
    one, other = drafter(engine, PARAMS[0]), by_token(engine, PARAMS[0])
    rules = Stopping(4, 5), Stopping(4, 5)
    for rule in rules:
        rule.decide(CENTRES, CENTRES, [0.0] * 4, [0.2] * 3)
        rule.clear()
    lengths = [4, 1, 3, 4, 2]
    for number, length in enumerate(lengths):
        committed = [*PROMPT, *range(number)]
        for made, rule in zip((one, other), rules, strict=True):
            made.propose(committed, length, rule)
            made.rollback(len(committed) - 1)
    kept = [[rule.bins_of(number) for number in range(6)] for rule in rules]
    assert kept[0] == kept[1]
    assert all(1 <= len(bins) <= length for bins, length in zip(kept[0], lengths, strict=False))
    assert len({tuple(bins) for bins in kept[0]}) > 2
    assert kept[0][5] == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_what_the_adviser_raises_is_raised(engine: TransformersEngine, error: type[BaseException]) -> None:
    made = drafter(engine, PARAMS[0])

    def advise(position: int, confidence: float) -> Advice:
        if position == 3:
            raise error("here")
        return Advice.MORE

    with pytest.raises(error, match="here"):
        made.propose(PROMPT, 5, advise)
    # The failed call leaves nothing behind, and the next proposal is correct.
    again = made.propose(PROMPT, 5)
    assert again is not None
    expected = by_token(engine, PARAMS[0]).propose(PROMPT, 5)
    assert expected is not None
    assert again.tokens == expected.tokens


def test_nothing_is_kept_of_an_answer(engine: TransformersEngine) -> None:
    made = drafter(engine, PARAMS[1])
    assert made.propose(PROMPT, 5, stops(0.3, [])) is not None
    kept = weakref.ref(made.sequence)
    gc.disable()  # large distributions must be freed without garbage collection
    try:
        del made
        assert kept() is None
    finally:
        gc.enable()


def test_a_long_text_is_caught_up_with(engine: TransformersEngine) -> None:
    text = [(7 * i) % VOCAB for i in range(300)]
    mine, theirs = (make(engine, PARAMS[0]).propose(text, 4) for make in (drafter, by_token))
    assert mine is not None
    assert theirs is not None
    assert mine.tokens == theirs.tokens


def test_penalties_and_biases_are_asked_for_token_by_token(engine: TransformersEngine) -> None:
    assert drafter(engine, SamplingParams(repetition_penalty=1.3))._fused is None
    assert drafter(engine, SamplingParams(logit_bias={3: 2.0}))._fused is None


def verifier(params: SamplingParams) -> Verifier:
    """A verifier with the same random numbers each time."""
    penalties = LogitsProcessor(params, VOCAB, torch.device("cpu"))
    return Verifier(params, penalties, torch.Generator().manual_seed(11))


@pytest.mark.parametrize("params", PARAMS, ids=["greedy", "sampled", "cut"])
@pytest.mark.parametrize("draft_vocab", [VOCAB, VOCAB - 60])
def test_a_verification_is_a_pass_and_then_the_rule(
    engine: TransformersEngine, params: SamplingParams, draft_vocab: int
) -> None:
    """Accepted tokens, their probabilities and the logits are the same for the same random numbers."""
    one, other, judge = engine.sequence(), engine.sequence(), verifier(params)
    assert one.fused is not None
    transform, uniform = Transform(params), Uniform(torch.Generator().manual_seed(11))
    committed, draw = list(PROMPT), torch.Generator().manual_seed(5)
    counts = set()
    for turn in range(120):
        fed, count = committed[one.length :], turn % 5
        # Draft from the target's own distributions, flattened, so that the draft is often right.
        drafted, q = [], []
        for _ in range(count):
            p = torch.softmax(0.6 * other.extend([*committed, *drafted][other.length :], 1)[0, :draft_vocab], 0)
            if params.greedy and turn % 2:
                drafted.append(int(p.argmax()))
            else:
                drafted.append(int(torch.multinomial(p, 1, generator=draw)))
            q.append(p)
        other.rollback(len(committed) - len(fed))
        probs = torch.stack(q) if q and not params.greedy else None
        proposal = Proposal("model", list(drafted), probs) if drafted else None
        mine, logits = judge.verify(one, fed, proposal)
        raw = other.extend([*fed, *drafted], count + 1)
        if params.greedy:
            theirs = verify_greedy(raw, drafted)
        else:
            theirs = verify_sampled(transform(raw), drafted, [] if probs is None else probs, uniform)
        assert torch.equal(logits, raw)
        assert (mine.accepted, mine.tokens) == (theirs.accepted, theirs.tokens)
        if params.greedy:
            assert mine.chosen is theirs.chosen is None
        else:
            assert mine.chosen == pytest.approx(theirs.chosen, abs=1e-5)
        committed += mine.tokens
        counts.add((count, mine.accepted))
        for sequence in (one, other):
            sequence.rollback(len(committed) - 1)
    assert {count for count, accepted in counts if accepted == count} >= {0, 1, 2}
    assert {count for count, accepted in counts if accepted < count} >= {1, 2, 3, 4}


@pytest.mark.parametrize("params", PARAMS[:2], ids=["greedy", "sampled"])
def test_a_long_text_is_verified_as_a_short_one(engine: TransformersEngine, params: SamplingParams) -> None:
    text = [(7 * i) % VOCAB for i in range(300)]
    proposal = Proposal("model", [3, 4], None if params.greedy else torch.full((2, VOCAB), 1 / VOCAB))
    one, other = engine.sequence(), engine.sequence()
    mine, logits = verifier(params).verify(one, text, proposal)
    other.extend(text[:-1], 0)
    theirs, expected = verifier(params).verify(other, text[-1:], proposal)
    assert (mine.accepted, mine.tokens) == (theirs.accepted, theirs.tokens)
    assert torch.equal(logits, expected)
    assert one.length == other.length == 302


@pytest.mark.parametrize("params", PARAMS[:2], ids=["greedy", "sampled"])
def test_a_token_beyond_the_vocabulary_is_refused(engine: TransformersEngine, params: SamplingParams) -> None:
    made = engine.sequence()
    q = None if params.greedy else torch.full((1, VOCAB), 1 / VOCAB)
    with pytest.raises(IndexError, match="vocabulary"):
        verifier(params).verify(made, PROMPT, Proposal("model", [VOCAB], q))
    assert made.length == 0


def test_a_target_that_gives_no_numbers_is_said_to_be_broken(engine: TransformersEngine) -> None:
    broken = TransformersEngine(copy.deepcopy(engine.model))
    with torch.no_grad():
        broken.model.lm_head.weight[5] = torch.nan
    broken.cpu_forward = cpu_forward(broken.model)
    with pytest.raises(AdaptiveError, match="not numbers"):
        verifier(PARAMS[1]).verify(broken.sequence(), PROMPT, None)


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
