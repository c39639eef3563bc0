"""Training computes the same hidden states of a head as drafting does."""

from __future__ import annotations

import pytest
import torch
from test_head_module import CONFIGS, made, randomised
from transformers import DynamicCache

from adaptive.engines.head.module import Head
from trainers.unroll import unrolled

LENGTH, STEPS = 14, 4


def drafted(head: Head, tokens: torch.Tensor, features: torch.Tensor, start: int) -> list[torch.Tensor]:
    """Hidden states (width,) of a draft that starts at row ``start``, computed row by row over a cache."""
    cache = DynamicCache()
    found = []
    made = features[:, :1]
    for row in range(min(start + STEPS, LENGTH)):
        feature = features[:, row : row + 1] if row <= start else made
        window = getattr(head.config, "sliding_window", None)
        kinds = getattr(head.config, "layer_types", None)
        keys = torch.arange(row + 1)
        far = window and (kinds is None or kinds[0] == "sliding_attention")
        hidden_away = keys <= row - window if far else torch.zeros(row + 1, dtype=torch.bool)
        mask = torch.zeros(1, 1, 1, row + 1, dtype=features.dtype)
        mask.masked_fill_(hidden_away, torch.finfo(features.dtype).min)
        made = head(tokens[:, row : row + 1], feature, torch.tensor([[row]]), mask, cache)
        if row >= start:
            found.append(made[0, 0])
    return found


@pytest.mark.parametrize("name", CONFIGS)
def test_each_step_of_each_row_is_what_a_draft_computes_there(name: str) -> None:
    head = randomised(Head.from_target(made(name))).double()
    tokens = torch.arange(2 * LENGTH).reshape(2, LENGTH) * 3
    features = torch.randn(2, LENGTH, head.width, dtype=torch.float64)
    with torch.no_grad():
        # The second text's rows begin in its middle and run past its end.
        rows = torch.stack([torch.arange(LENGTH), torch.arange(5, LENGTH + 5)])
        steps = list(unrolled(head, tokens, features, rows, STEPS))
        for text, first in enumerate((0, 5)):
            for start in range(first, LENGTH):
                one = tokens[text : text + 1], features[text : text + 1]
                for step, hidden in enumerate(drafted(head, *one, start)):
                    found = steps[step][text, start + step - first]
                    torch.testing.assert_close(found, hidden, atol=1e-6, rtol=1e-5)


def test_gradients_reach_the_first_step_through_the_features_that_it_made() -> None:
    head = Head.from_target(made("llama"))
    features = torch.randn(1, LENGTH, head.width, requires_grad=True)
    *_, last = unrolled(head, torch.arange(LENGTH)[None], features, torch.arange(LENGTH)[None], 3)
    last[0, 9].sum().backward()
    assert features.grad is not None
    reached = features.grad[0].abs().sum(-1) > 0
    assert reached[:8].all(), "the draft of row 9 at step 2 started at row 7, and sees what stands before"
    assert not reached[8:].any(), "and nothing of the target behind"
