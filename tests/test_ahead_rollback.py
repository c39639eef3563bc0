"""The cache of a draft that drafts ahead holds the text and nothing else, whatever happens between two proposals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_ahead import GREEDY, KINDS, AllAhead, drafter_of, guessed_rightly
from test_lossless_sampled import PROMPT, VOCAB, models

from adaptive.engines.hf.engine import TransformersEngine

assert models  # a fixture


@pytest.mark.parametrize("others", [1, 5])
def test_a_right_guess_leaves_nothing_behind_when_others_end_the_answer(
    models: tuple[TransformersEngine, TransformersEngine], others: int
) -> None:
    """As a plain round does for the last token of an answer: the next one goes on with this cache."""
    draft = models[1]
    ahead, committed = guessed_rightly(draft)
    guessed = ahead.drafter._ahead[1]
    committed += [(guessed + 1) % VOCAB, 5, 4, 3, 2][:others]
    ahead.rollback(len(committed))
    holds_the_text(ahead, draft, [*committed, 0])


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_read_behind_a_proposal_is_rolled_back(
    models: tuple[TransformersEngine, TransformersEngine], kind: Any
) -> None:
    """A draft server reads the next message, which is then asked in other words."""
    draft = models[1]
    ahead = drafter_of(kind, draft, GREEDY, VOCAB)
    assert ahead.propose(list(PROMPT), 3) is not None
    ahead.rollback(len(PROMPT))
    ahead.feed([*PROMPT, 1, 2, 3, 4, 5, 6], 9)
    ahead.rollback(len(PROMPT) + 1)
    holds_the_text(ahead, draft, [*PROMPT, 1, 7, 7, 7, 7, 7])


def holds_the_text(ahead: AllAhead, draft: TransformersEngine, committed: list[int]) -> None:
    """Check that the draft's cache holds a beginning of this text."""
    known = ahead.drafter.sequence
    known.rollback(min(known.length, len(committed) - 1))
    logits = known.extend(committed[known.length :], 1).clone()
    assert torch.allclose(logits, draft.sequence().extend(committed, 1), atol=1e-5)
