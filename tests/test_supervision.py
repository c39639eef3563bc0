"""The distribution that the log keeps is the target's, in whatever portions the rows arrive."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from adaptive.decoding.supervision import TOP_K, SupervisionBuffer
from adaptive.engines.load import sampling_kernels


@pytest.fixture(params=["kernels", "torch"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The implementation that reduces rows: this processor's kernels, or torch as where there are none."""
    if request.param == "torch":
        monkeypatch.setattr("adaptive.decoding.supervision.sampling_kernels", lambda: None)
    elif sampling_kernels() is None:
        pytest.skip("this processor has no kernels")
    return str(request.param)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("sizes", [[1], [5, 3, 1, 9, 40, 2], [1] * 60, [200, 3]])
@pytest.mark.parametrize("vocab", [20, 33, 500, 4099])
def test_the_most_probable_tokens_are_kept_and_the_mass_of_the_rest(sizes: list[int], vocab: int) -> None:
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


def test_kernels_and_torch_keep_the_same_however_rows_are_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sharp and flat rows, equal logits, masked tokens, a row with a NaN logit; and rows that alternate with a dtype
    that the kernels do not read."""
    if sampling_kernels() is None:
        pytest.skip("this processor has no kernels")
    torch.manual_seed(1)
    logits = torch.randn(7, 1000) * torch.tensor([0.01, 1, 5, 30, 1, 1, 1])[:, None]
    logits[4] = logits[4].round()
    logits[5, 100:] = -torch.inf
    logits[6, 500] = torch.nan
    by_turns, alone = SupervisionBuffer(), []
    for row, kind in zip(logits.split(1), (torch.float32, torch.float64) * 4, strict=False):
        by_turns.append(row.to(kind), [0.0])
    for kernels in (sampling_kernels(), None):
        monkeypatch.setattr("adaptive.decoding.supervision.sampling_kernels", lambda kernels=kernels: kernels)
        buffer = SupervisionBuffer()
        buffer.append(logits, [0.0] * 7)
        alone.append(buffer.take(7))
    ours, theirs = alone
    for kept in (ours, by_turns.take(7)):
        for row in range(6):
            assert np.allclose(kept.logprobs[row], theirs.logprobs[row], atol=2e-3, rtol=2e-3)
            assert np.exp(float(kept.rest[row])) == pytest.approx(np.exp(float(theirs.rest[row])), abs=1e-3)
        for row in (0, 1, 2, 3, 5):
            assert kept.ids[row].tolist() == theirs.ids[row].tolist()
        assert np.isnan(kept.logprobs[6]).any()
    least = ours.logprobs[4].min()
    tied = [i for i, p in zip(ours.ids[4], ours.logprobs[4], strict=True) if p == least]
    assert tied == sorted(tied)


@pytest.mark.usefixtures("way")
def test_a_cut_answer_keeps_only_its_own_positions() -> None:
    buffer = SupervisionBuffer()
    buffer.append(torch.randn(4, 50), torch.arange(4.0))
    buffer.append(torch.randn(4, 50), torch.arange(4.0, 8.0))
    kept = buffer.take(6)
    assert kept.ids.shape == (6, TOP_K)
    assert kept.chosen.tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.usefixtures("way")
def test_rows_taken_one_by_one_while_it_records_are_those_of_the_whole() -> None:
    torch.manual_seed(3)
    buffer, taken = SupervisionBuffer(), []
    for size in (3, 1, 30, 2):
        buffer.append(torch.randn(size, 50), torch.rand(size))
        taken += [buffer.take(place + 1, place) for place in range(len(taken), len(taken) + size)]
    whole = buffer.take(len(taken))
    for field in ("ids", "logprobs", "rest", "chosen"):
        assert np.array_equal(np.concatenate([getattr(one, field) for one in taken]), getattr(whole, field))
