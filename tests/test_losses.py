"""Losses agree with a plain reference over the whole vocabulary, and their gradients with finite differences."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from trainers import losses
from trainers.losses import (
    DIVERGENCES,
    LOG_FLOOR,
    cross_entropy,
    draft_log_probs,
    forward_kl,
    kl_tv,
    outcomes,
    target_log_probs,
    total_variation,
)

VOCAB, ROWS = 23, 7


def made(k: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draft logits, target logits, and the part of the latter that the log would keep."""
    generator = torch.Generator().manual_seed(seed)
    draft = torch.randn(ROWS, VOCAB, generator=generator) * 2
    target = torch.randn(ROWS, VOCAB, generator=generator) * 2
    top = target.log_softmax(-1).topk(k, dim=-1)
    rest = (1 - top.values.exp().sum(-1)).clamp_(min=0).log() if k < VOCAB else torch.full((ROWS,), -torch.inf)
    return draft, target, top.indices, top.values, rest


def reference(name: str, draft: torch.Tensor, target: torch.Tensor, temperature: float) -> list[float]:
    """The loss straight from its definition, one row and one token at a time."""
    rows = []
    overlaps = []
    for q_row, p_row in zip(
        (draft / temperature).softmax(-1).tolist(), (target / temperature).softmax(-1).tolist(), strict=True
    ):
        pairs = list(zip(p_row, q_row, strict=True))
        kl = sum(p * math.log(p / q) for p, q in pairs)
        tv = sum(abs(p - q) for p, q in pairs) / 2
        overlaps.append(sum(min(p, q) for p, q in pairs))
        rows.append(
            {
                "forward-kl": kl,
                "reverse-kl": sum(q * (math.log(q) - max(math.log(p), LOG_FLOOR)) for p, q in pairs),
                "js": sum(p * math.log(2 * p / (p + q)) + q * math.log(2 * q / (p + q)) for p, q in pairs) / 2,
                "tv": tv,
                "kl-tv": (kl, tv),
            }[name]
        )
    if name == "kl-tv":
        weight = math.exp(-3 * sum(overlaps) / len(overlaps))
        return [weight * kl + (1 - weight) * tv for kl, tv in rows]  # type: ignore[misc]
    return rows  # type: ignore[return-value]


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
@pytest.mark.parametrize("name", DIVERGENCES)
def test_every_loss_is_exact_when_the_whole_vocabulary_is_kept(name: str, temperature: float) -> None:
    draft, target, ids, logprobs, rest = made(VOCAB)
    found = DIVERGENCES[name](*outcomes(draft, ids, logprobs, rest, temperature))
    torch.testing.assert_close(found, torch.tensor(reference(name, draft, target, temperature)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_with_a_rest_bucket_the_loss_is_that_over_the_grouped_vocabulary(name: str) -> None:
    draft, target, ids, logprobs, rest = made(5)

    def grouped(logits: torch.Tensor) -> torch.Tensor:
        probs = logits.softmax(-1)
        listed = probs.gather(-1, ids)
        return torch.cat([listed, 1 - listed.sum(-1, keepdim=True)], dim=-1).log()

    found = DIVERGENCES[name](*outcomes(draft, ids, logprobs, rest, 1.0))
    wanted = torch.tensor(reference(name, grouped(draft), grouped(target), 1.0))
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ["forward-kl", "reverse-kl", "js", "tv"])
def test_the_rest_bucket_never_overstates_the_loss(name: str) -> None:
    draft, target, ids, logprobs, rest = made(5)
    found = DIVERGENCES[name](*outcomes(draft, ids, logprobs, rest, 1.0))
    assert (found <= torch.tensor(reference(name, draft, target, 1.0)) + 1e-4).all()


@pytest.mark.parametrize("k", [5, VOCAB])
@pytest.mark.parametrize("name", DIVERGENCES)
def test_gradients_agree_with_finite_differences(name: str, k: int) -> None:
    draft, _, ids, logprobs, rest = made(k)
    temperature = torch.linspace(0.6, 1.4, ROWS)
    draft.requires_grad_()
    # No gradient flows through kl-tv's weight: take differences with the weight fixed, as the sum of its parts.
    if name == "kl-tv":
        overlap = 1 - total_variation(*outcomes(draft, ids, logprobs, rest, temperature)).detach().mean()
        weight = torch.exp(-3 * overlap)

        def loss(logits: torch.Tensor) -> torch.Tensor:
            parts = (forward_kl, total_variation)
            kl, tv = (f(*outcomes(logits, ids, logprobs, rest, temperature)).sum() for f in parts)
            return weight * kl + (1 - weight) * tv
    else:

        def loss(logits: torch.Tensor) -> torch.Tensor:
            return DIVERGENCES[name](*outcomes(logits, ids, logprobs, rest, temperature)).sum()

    DIVERGENCES[name](*outcomes(draft, ids, logprobs, rest, temperature)).sum().backward()
    assert draft.grad is not None
    generator = torch.Generator().manual_seed(1)
    for _ in range(5):
        direction = torch.randn(draft.shape, generator=generator)
        with torch.no_grad():
            difference = (loss(draft + 1e-2 * direction) - loss(draft - 1e-2 * direction)) / 2e-2
        assert float((draft.grad * direction).sum()) == pytest.approx(float(difference), abs=2e-2, rel=2e-2)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_no_loss_or_gradient_is_infinite_where_the_target_is_certain(name: str) -> None:
    draft = torch.randn(2, VOCAB) * 20
    draft.requires_grad_()
    ids = torch.tensor([[0, 1, 2], [3, 4, 5]])
    logprobs = torch.tensor([[0.0, -torch.inf, -torch.inf], [0.0, -60.0, -70.0]])
    rest = torch.full((2,), -torch.inf)
    loss = DIVERGENCES[name](*outcomes(draft, ids, logprobs, rest, torch.tensor([0.7, 1.3])))
    loss.sum().backward()
    assert loss.isfinite().all()
    assert draft.grad is not None
    assert draft.grad.isfinite().all()


@pytest.mark.parametrize("name", DIVERGENCES)
def test_a_draft_equal_to_the_target_has_no_loss(name: str) -> None:
    _, target, ids, logprobs, rest = made(5)
    found = DIVERGENCES[name](*outcomes(target, ids, logprobs, rest, 1.0))
    torch.testing.assert_close(found, torch.zeros(ROWS), atol=1e-4, rtol=0)


def test_rows_may_have_temperatures_of_their_own() -> None:
    draft, _, ids, logprobs, rest = made(5)
    temperature = torch.linspace(0.5, 1.5, ROWS)
    together = forward_kl(*outcomes(draft, ids, logprobs, rest, temperature))
    alone = [
        forward_kl(*outcomes(*(t[i : i + 1] for t in (draft, ids, logprobs, rest)), float(temperature[i])))
        for i in range(ROWS)
    ]
    torch.testing.assert_close(together, torch.cat(alone))


@pytest.mark.parametrize("temperature", [0.5, 0.7, 1.3, 2.0])
def test_the_tail_at_another_temperature_lies_between_its_bounds(temperature: float) -> None:
    _, target, _, logprobs, rest = made(5)
    at = torch.full((ROWS,), temperature)
    log_p = target_log_probs(logprobs, rest, at, VOCAB - 5)
    exact = (target / temperature).log_softmax(-1).topk(5, dim=-1).values
    torch.testing.assert_close(log_p.logsumexp(-1), torch.zeros(ROWS), atol=1e-5, rtol=0)
    torch.testing.assert_close(log_p[:, :5] - log_p[:, :1], exact - exact[:, :1], atol=1e-4, rtol=1e-4)
    # The error is less than the mass of the tail itself.
    tail = 1 - exact.exp().sum(-1)
    assert ((log_p[:, -1].exp() - tail).abs() < tail).all()


def test_the_rest_of_a_sure_draft_keeps_its_gradient() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 0] = 40.0
    logits.requires_grad_()
    draft_log_probs(logits, torch.tensor([[0]]), torch.ones(1), 1)[0, -1].backward()
    assert logits.grad is not None
    assert float(logits.grad[0, 0]) == pytest.approx(-1.0)


@pytest.mark.parametrize("part", [1, 5 * (VOCAB + 1), 2**18])
def test_losses_and_gradients_are_those_of_all_logits_at_once(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are worked on in parts; the reference is autograd on the whole, with a token that the draft lacks."""
    monkeypatch.setattr(losses, "PART", part)
    draft, _, ids, logprobs, rest = made(5)
    few = torch.arange(0, VOCAB, 2)  # the draft's tokens
    places = torch.full((VOCAB,), len(few))
    places[few] = torch.arange(len(few))
    assert (places[ids] == len(few)).any()
    temperature = torch.linspace(0.6, 1.4, ROWS)
    narrow = draft[:, few].clone().requires_grad_()
    wide = torch.full((ROWS, VOCAB), -torch.inf).index_copy(1, few, draft[:, few]).requires_grad_()
    scaled = wide / temperature[:, None]
    listed = scaled.gather(1, ids)
    others = scaled.scatter(1, ids, -torch.inf).logsumexp(1, keepdim=True)
    log_q = torch.cat([listed, others], dim=1).log_softmax(1)
    log_q = torch.where(log_q == -torch.inf, LOG_FLOOR, log_q)
    log_p = target_log_probs(logprobs, rest, temperature, VOCAB - 5)
    expected = kl_tv(log_p, log_q)
    found = kl_tv(*outcomes(narrow, places[ids], logprobs, rest, temperature, VOCAB))
    torch.testing.assert_close(found, expected)
    expected.sum().backward()
    found.sum().backward()
    assert wide.grad is not None
    torch.testing.assert_close(narrow.grad, wide.grad[:, few], rtol=1e-4, atol=1e-6)


def test_training_holds_logits_and_their_gradient_and_nothing_else_of_their_size() -> None:
    rows, vocab = 64, 30_000
    logits = torch.randn(rows, vocab, requires_grad=True)
    top = logits.detach().log_softmax(-1).topk(32, dim=-1)
    rest = torch.full((rows,), -3.0)
    sizes: list[int] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found = op(*args, **(kwargs or {}))
            if isinstance(found, torch.Tensor) and found.untyped_storage().nbytes() >= 4 * rows * vocab:
                sizes.append(found.untyped_storage().data_ptr())
            return found

    with Watch():
        kl_tv(*outcomes(logits, top.indices, top.values, rest, 0.7)).sum().backward()
    assert logits.grad is not None
    assert set(sizes) <= {logits.untyped_storage().data_ptr(), logits.grad.untyped_storage().data_ptr()}


def test_cross_entropy_is_minus_log_probability_of_the_token() -> None:
    draft, *_ = made(5)
    tokens = torch.arange(ROWS)
    wanted = -draft.softmax(-1)[torch.arange(ROWS), tokens].log()
    torch.testing.assert_close(cross_entropy(draft, tokens), wanted)
