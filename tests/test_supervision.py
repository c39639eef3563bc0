"""What the log keeps of the target's distribution is that distribution, however the rows came in."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from adaptive.decoding.supervision import TOP_K, SupervisionBuffer


@pytest.mark.parametrize("sizes", [[1], [5, 3, 1, 9, 40, 2], [1] * 60])
@pytest.mark.parametrize("vocab", [20, 500])
def test_the_tape_keeps_the_most_probable_tokens_and_the_mass_of_the_rest(sizes: list[int], vocab: int) -> None:
    torch.manual_seed(len(sizes))
    logits = torch.randn(sum(sizes), vocab) * 3
    buffer = SupervisionBuffer()
    for rows in logits.split(sizes):
        buffer.append(rows, torch.zeros(len(rows)))
    kept = buffer.take(sum(sizes))
    probabilities = logits.softmax(-1).numpy()
    assert kept.ids.shape == (sum(sizes), min(TOP_K, vocab))
    for row, ids, logprobs, rest in zip(probabilities, kept.ids, kept.logprobs, kept.rest, strict=True):
        assert set(ids) == set(np.argsort(row)[::-1][: len(ids)])
        assert np.exp(logprobs.astype(float)) == pytest.approx(row[ids], rel=0.01)
        assert np.exp(float(rest)) == pytest.approx(1 - row[ids].sum(), rel=0.01, abs=1e-5)


def test_a_cut_answer_keeps_only_its_own_positions() -> None:
    buffer = SupervisionBuffer()
    buffer.append(torch.randn(4, 50), torch.arange(4.0))
    buffer.append(torch.randn(4, 50), torch.arange(4.0, 8.0))
    kept = buffer.take(6)
    assert kept.ids.shape == (6, TOP_K)
    assert kept.chosen.tolist() == [0, 1, 2, 3, 4, 5]


def test_rows_taken_one_by_one_while_it_records_are_those_of_the_whole() -> None:
    torch.manual_seed(3)
    buffer, taken = SupervisionBuffer(), []
    for size in (3, 1, 30, 2):
        buffer.append(torch.randn(size, 50), torch.rand(size))
        taken += [buffer.take(place + 1, place) for place in range(len(taken), len(taken) + size)]
    whole = buffer.take(len(taken))
    for field in ("ids", "logprobs", "rest", "chosen"):
        assert np.array_equal(np.concatenate([getattr(one, field) for one in taken]), getattr(whole, field))
