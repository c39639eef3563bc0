"""Under a grammar a proposal or verification in one call equals the one made token by token over masked logits."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from test_fused import PARAMS, PROMPT, VOCAB, by_token, drafter, stops
from test_fused import engine as engine

from adaptive.decoding.verifier import Verifier
from adaptive.drafting.proposal import Proposal
from adaptive.engines.cpu.kernels import library
from adaptive.engines.hf.engine import TransformersEngine
from adaptive.grammar import Constraint
from adaptive.sampling import LogitsProcessor
from adaptive.types import SamplingParams

EACH = [*PARAMS, SamplingParams(temperature=0.9, seed=5)]
IDS = ["greedy", "sampled", "cut", "seeded"]
ODD_AND_EVEN = "([0-9]*[13579] [0-9]*[02468] )+"

pytestmark = pytest.mark.skipif(library() is None, reason="the kernels are not built, or not for this processor")


class Counted:
    """A tokenizer in which each token is the text of its own number, except the last, which ends a text."""

    eos_token_id, bos_token_id = VOCAB - 1, None
    special_token_ids = (VOCAB - 1,)
    tokens = (*(f"{number} ".encode() for number in range(VOCAB - 1)), b"<end>")

    def __call__(self, text: str) -> list[int]:
        return [int(number) for number in text.split()]


def odd_and_even(params: SamplingParams) -> LogitsProcessor:
    """A processor with a grammar in which odd and even numbers alternate."""
    tokenizer = LLTokenizer(TokenizerWrapper(Counted()), n_vocab=VOCAB)
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_regex(ODD_AND_EVEN), log_level=0)
    return LogitsProcessor(params, VOCAB, torch.device("cpu"), Constraint(matcher, VOCAB))


@pytest.mark.parametrize("params", EACH, ids=IDS)
@pytest.mark.parametrize("below", [None, 0.3])
def test_under_a_grammar_it_is_the_same_as_token_by_token(
    engine: TransformersEngine, params: SamplingParams, below: float | None
) -> None:
    processors = odd_and_even(params), odd_and_even(params)
    one, other = drafter(engine, params, processor=processors[0]), by_token(engine, params, processor=processors[1])
    assert one._fused is not None
    committed, lengths = list(PROMPT), set()
    for turn in range(40):
        mine, theirs = (d.propose(committed, 1 + turn % 6, below and stops(below, [])) for d in (one, other))
        tokens = [] if mine is None else list(mine.tokens)
        assert tokens == ([] if theirs is None else theirs.tokens)
        said = [*committed[len(PROMPT) :], *tokens]
        assert all(token % 2 != place % 2 for place, token in enumerate(said) if token != VOCAB - 1)
        if mine is not None and theirs is not None and mine.probs is not None and theirs.probs is not None:
            for p, q in zip(mine.probs, theirs.probs, strict=True):
                assert np.abs(np.asarray(p) - np.asarray(q)).max() < 1e-5
        lengths.add(len(tokens))
        kept = [token for token in tokens[: turn % 3] if token != VOCAB - 1]
        kept.append(2 * turn + 1 - (len(committed) + len(kept) - len(PROMPT)) % 2)  # any other allowed token
        committed += kept
        for made, processor in zip((one, other), processors, strict=True):
            processor.commit(kept)
            made.rollback(len(committed) - 1)
    assert max(lengths) > 1


@pytest.mark.parametrize("params", EACH, ids=IDS)
def test_behind_what_history_has_proposed_the_grammar_goes_on_from_there(
    engine: TransformersEngine, params: SamplingParams
) -> None:
    """After an odd number of proposed tokens an even number comes next, after an even number an odd one."""
    for proposed in ([1], [1, 2], [1, 2, 3]):
        one, other = (made(engine, params, processor=odd_and_even(params)) for made in (drafter, by_token))
        mine, theirs = (d.go_on([*PROMPT], proposed, 4) for d in (one, other))
        assert mine is not None
        assert theirs is not None
        assert mine.tokens == theirs.tokens
        said = [*proposed, *mine.tokens]
        assert all(token % 2 != place % 2 for place, token in enumerate(said) if token != VOCAB - 1)


def test_what_is_raised_for_a_mask_is_raised(engine: TransformersEngine) -> None:
    made = drafter(engine, PARAMS[0], processor=odd_and_even(PARAMS[0]))
    usual = made._mask
    assert usual is not None

    def mask(drafted: Sequence[int]) -> int:
        if len(drafted) == 2:
            raise KeyboardInterrupt("here")
        return usual(drafted)

    made._mask = mask
    with pytest.raises(KeyboardInterrupt, match="here"):
        made.propose(PROMPT, 5)
    made._mask = usual
    again = made.propose(PROMPT, 5)
    expected = by_token(engine, PARAMS[0], processor=odd_and_even(PARAMS[0])).propose(PROMPT, 5)
    assert again is not None
    assert expected is not None
    assert again.tokens == expected.tokens


@pytest.mark.parametrize("params", EACH, ids=IDS)
def test_a_verification_under_a_grammar_is_a_pass_and_then_the_rule_over_masked_logits(
    engine: TransformersEngine, params: SamplingParams
) -> None:
    """With drafted tokens that the grammar allows and forbids. The returned logits are unmasked."""
    one, other = engine.sequence(), engine.sequence()
    made = [Verifier(params, odd_and_even(params), torch.Generator().manual_seed(11)) for _ in range(2)]
    committed, dice = list(PROMPT), random.Random(5)
    counts = set()
    for turn in range(120):
        fed, count = committed[one.length :], turn % 5
        drafted: list[int] = []
        for place in range(len(committed) - len(PROMPT), len(committed) - len(PROMPT) + count):
            logits = other.extend([*committed, *drafted][other.length :], 1)[0]
            logits[place % 2 :: 2] -= 0 if dice.random() < 0.2 else 1000  # mostly an allowed token
            drafted.append(int(logits[: VOCAB - 1].argmax()))
        other.rollback(len(committed) - len(fed))
        proposal = Proposal("model", list(drafted), None) if drafted else None
        mine, logits = made[0].verify(one, fed, proposal)
        raw = other.extend([*fed, *drafted], count + 1)
        theirs, _ = made[1].judge(other, len(fed), proposal, len(committed), raw)
        assert torch.equal(logits, raw)
        assert (mine.accepted, mine.tokens) == (theirs.accepted, theirs.tokens)
        if not params.greedy:
            assert mine.chosen == pytest.approx(theirs.chosen, abs=1e-5)
        kept = mine.tokens[: mine.tokens.index(VOCAB - 1)] if VOCAB - 1 in mine.tokens else mine.tokens
        counts.add((count, mine.accepted))
        for verifier, sequence in zip(made, (one, other), strict=True):
            verifier.processor.commit(kept)
            sequence.rollback(len(committed) + len(kept) - 1)
        committed += kept
    assert {count for count, accepted in counts if accepted == count} >= {0, 1, 2}
    assert {count for count, accepted in counts if accepted < count} >= {1, 2, 3, 4}
