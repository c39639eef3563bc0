"""A draft reads a long prompt ahead in parts, so that whoever stops it waits for one part only."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

import pytest
import torch
from test_ahead import GREEDY, drafter_of
from test_lossless_sampled import VOCAB
from transformers import LlamaConfig, LlamaForCausalLM

from adaptive.drafting.ahead import AheadDrafter, ChainAhead, TreeAhead, Worker
from adaptive.drafting.outcomes import SLICE
from adaptive.engines.hf.engine import TransformersEngine

TEXT = [(7 * i * i + i) % VOCAB for i in range(5 * SLICE + 60)]


@pytest.fixture(scope="module")
def draft() -> TransformersEngine:
    """A tiny model with room for the text."""
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=2 * len(TEXT),
    )  # fmt: skip
    return TransformersEngine(LlamaForCausalLM(config))


@pytest.mark.parametrize("kind", [ChainAhead, TreeAhead])
def test_a_step_reads_a_part_of_a_long_prompt_and_the_proposal_is_the_same(
    draft: TransformersEngine, kind: Any
) -> None:
    drafter, held = drafter_of(kind, draft, GREEDY, VOCAB).drafter, [0]
    drafter.expect(TEXT, 4)
    while drafter.step():
        held.append(drafter.sequence.length)
    parts = [after - before for before, after in pairwise(held)]
    assert held[-1] == len(TEXT)
    assert max(parts) <= SLICE + 1
    drafter.rollback(len(TEXT))
    (token,) = drafter_of(kind, draft, GREEDY, VOCAB).drafter.propose(list(TEXT), 1).tokens
    proposal = drafter.propose([*TEXT, token], 4)
    fresh = drafter_of(kind, draft, GREEDY, VOCAB).drafter.propose([*TEXT, token], 4)
    assert proposal.tokens[0] == fresh.tokens[0]
    if kind is ChainAhead:  # a tree drafted ahead may cover other nodes
        assert proposal.tokens == fresh.tokens


@pytest.mark.parametrize("kind", [ChainAhead, TreeAhead])
def test_a_prompt_that_was_read_in_part_is_read_on_from_there(draft: TransformersEngine, kind: Any) -> None:
    """The target may have read it earlier."""
    drafter = drafter_of(kind, draft, GREEDY, VOCAB).drafter
    drafter.expect(TEXT, 4)
    assert drafter.step()
    assert drafter.step()
    drafter.rollback(len(TEXT))
    assert drafter.sequence.length == 2 * SLICE
    proposal = drafter.propose(list(TEXT), 4)
    assert proposal.tokens == drafter_of(kind, draft, GREEDY, VOCAB).drafter.propose(list(TEXT), 4).tokens


@pytest.mark.parametrize("kind", [ChainAhead, TreeAhead])
def test_preparing_passes_does_not_end_the_reading_of_a_prompt(draft: TransformersEngine, kind: Any) -> None:
    """The loop prepares passes after the reading has begun."""
    beside = AheadDrafter(drafter_of(kind, draft, GREEDY, VOCAB).drafter, Worker())
    beside.begin(TEXT)
    beside.prepare(len(TEXT) + 10, None)
    until = time.monotonic() + 30
    while beside.drafter.sequence.length < len(TEXT) and time.monotonic() < until:
        time.sleep(0.01)
    beside.worker.stop()
    assert beside.drafter.sequence.length >= len(TEXT)
