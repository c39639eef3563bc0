"""Sampled output has the target's distribution: the acceptance rule alone, and the whole loop.

A deliberately broken rule fails the same test, so the test can fail.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from transformers import LlamaConfig, LlamaForCausalLM

from adaptive.control.policy import Adviser, FixedLength
from adaptive.decoding import verifier
from adaptive.decoding.loop import Decoding, Request
from adaptive.decoding.verifier import Verifier
from adaptive.decoding.verify import Verdict, verify_logits, verify_on_device, verify_sampled
from adaptive.drafting.model import ModelDrafter
from adaptive.drafting.proposal import Proposal
from adaptive.engines.cpu import kernels
from adaptive.engines.hf.engine import TransformersEngine, TransformersSequence
from adaptive.engines.protocol import Engine, sequences
from adaptive.errors import AdaptiveError
from adaptive.sampling import (
    BLOCK,
    LARGE,
    MOST,
    LogitsProcessor,
    Transform,
    Uniform,
    draw_on_device,
    pick,
    transform_logits,
)
from adaptive.tokens import Distributions
from adaptive.types import SamplingParams, StopParams

VOCAB = 8
PROMPT = [1, 5, 2]
RUNS = 4000
PARAMS = [
    SamplingParams(temperature=0.7),
    SamplingParams(temperature=1.3),
    SamplingParams(temperature=0.7, top_p=0.9),
    SamplingParams(temperature=1.3, top_p=0.9),
    SamplingParams(temperature=1.0, top_k=5, min_p=0.02, repetition_penalty=1.3, presence_penalty=0.4),
]
IDS = ["t0.7", "t1.3", "t0.7-top_p", "t1.3-top_p", "top_k-min_p-penalties"]


def p_value(counts: Counter[tuple[int, ...]], exact: dict[tuple[int, ...], float]) -> float:
    """p-value of a chi-square test of observed counts against exact probabilities; outcomes expected under 5 times are
    pooled."""
    total = sum(counts.values())
    assert all(exact.get(outcome, 0.0) > 0 for outcome in counts), "an impossible outcome came up"
    common = [outcome for outcome, p in exact.items() if p * total >= 5]
    observed = np.array([counts[o] for o in common] + [total - sum(counts[o] for o in common)], dtype=float)
    expected = np.array([exact[o] * total for o in common] + [0.0])
    expected[-1] = total - expected[:-1].sum()
    if expected[-1] < 5:
        observed, expected = observed[:-1], expected[:-1]
        expected *= observed.sum() / expected.sum()
    return float(chisquare(observed, expected).pvalue)


@pytest.fixture(scope="module")
def models() -> tuple[TransformersEngine, TransformersEngine]:
    """Two tiny models over eight tokens that disagree in some places; large enough for the kernels' one-call path."""
    engines = []
    for seed in (3, 4):
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=2,
            max_position_embeddings=64,
        )
        model = LlamaForCausalLM(config)
        with torch.no_grad():
            model.lm_head.weight.mul_(20)
        engines.append(TransformersEngine(model))
        assert (engines[-1].sequence().fused is None) == (kernels.library() is None)
    return engines[0], engines[1]


def exact_distribution(target: Engine, params: SamplingParams) -> dict[tuple[int, ...], float]:
    """Probability of every continuation of three tokens, from the target alone."""
    distribution = {}
    for continuation in product(range(VOCAB), repeat=3):
        probability = 1.0
        for place, token in enumerate(continuation):
            penalties = LogitsProcessor(params, VOCAB, torch.device("cpu"))
            penalties.start(torch.tensor(PROMPT))
            penalties.commit(list(continuation[:place]))
            context = torch.tensor([*PROMPT, *continuation[:place]])
            logits = penalties.apply(target.sequence().extend(context, 1), context[:0])
            probability *= float(transform_logits(logits, params).softmax(-1)[0, token])
        distribution[continuation] = probability
    return distribution


class Certain:
    """A deterministic drafter: its tokens depend only on the last committed one. ``probs`` are the distributions that
    it reports for them."""

    name = "certain"

    def __init__(self, probs: torch.Tensor | None = None) -> None:
        self.probs = probs

    def limit(self, committed: int) -> int:
        return 8

    def unseen(self, committed: int) -> int:
        return 0

    def propose(self, committed: list[int], length: int, advise: Adviser | None = None) -> Proposal:
        tokens = [(3 * committed[-1] + place) % VOCAB for place in range(length)]
        return Proposal(self.name, tokens, None if self.probs is None else self.probs[:length])

    def reserve(self, length: int) -> None:
        pass

    def rollback(self, length: int) -> None:
        pass


def run_loop(
    models: tuple[Engine, Engine],
    params: SamplingParams,
    length: int,
    runs: int = RUNS,
    certain: Certain | None = None,
    seeded: bool = False,
    seed: int = 11,
) -> Counter[tuple[int, ...]]:
    """The first three of four tokens of ``runs`` generations by the whole loop (so that two are drafted at once), all
    drawn under one ``seed``. With ``seeded`` each generation has its own."""
    target, draft = models
    one, other = sequences(target, draft)
    assert other is not None
    generator = torch.Generator().manual_seed(seed)
    counts: Counter[tuple[int, ...]] = Counter()
    for number in range(runs):
        one.rollback(len(PROMPT) - 1)
        other.rollback(len(PROMPT) - 1)
        under = replace(params, seed=number) if seeded else params
        penalties = LogitsProcessor(under, VOCAB, torch.device("cpu"))
        request = Request(PROMPT, under, StopParams(max_new_tokens=4), frozenset(), record=False)
        drafter = certain or ModelDrafter(other, draft, VOCAB, under, penalties, generator)
        verifier = Verifier(under, penalties, generator)
        decoding = Decoding(request, one, 64, drafter, verifier, FixedLength(length), NoText())  # type: ignore[arg-type]
        for _ in decoding.steps():
            pass
        counts[tuple(decoding.output[:3])] += 1
    return counts


class NoText:
    """A text stream for tokens that have no text."""

    stopped = False

    def push(self, token: int) -> str:
        return ""

    def finish(self) -> str:
        return ""


@pytest.mark.thorough(but="t0.7-in-one-call")
@pytest.mark.parametrize(
    ("params", "fused"),
    [*((params, True) for params in PARAMS[:4]), (PARAMS[0], False), (PARAMS[3], False), (PARAMS[4], False)],
    ids=[*(f"{one}-in-one-call" for one in IDS[:4]), f"{IDS[0]}-from-logits", f"{IDS[3]}-from-logits", IDS[4]],
)
def test_the_whole_loop_samples_from_the_target(
    models: tuple[TransformersEngine, TransformersEngine],
    params: SamplingParams,
    fused: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not fused:
        monkeypatch.setattr(TransformersSequence, "fused", None)
    assert p_value(run_loop(models, params, length=2), exact_distribution(models[0], params)) > 0.001


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("params", "fused"),
    [(PARAMS[1], True), (PARAMS[1], False), (PARAMS[2], True), (PARAMS[4], False)],
    ids=[f"{IDS[1]}-in-one-call", f"{IDS[1]}-from-logits", f"{IDS[2]}-in-one-call", IDS[4]],
)
def test_tokens_proposed_without_chance_leave_the_target_its_distribution(
    models: tuple[TransformersEngine, TransformersEngine],
    params: SamplingParams,
    fused: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not fused:
        monkeypatch.setattr(TransformersSequence, "fused", None)
    exact = exact_distribution(models[0], params)
    assert p_value(run_loop(models, params, length=2, certain=Certain()), exact) > 0.001


@pytest.mark.thorough
def test_tokens_proposed_without_chance_and_verified_as_drawn_fail_the_same_test(
    models: tuple[TransformersEngine, TransformersEngine],
) -> None:
    params = PARAMS[1]
    drawn = Certain(torch.full((2, VOCAB), 1 / VOCAB))
    counts = run_loop(models, params, length=2, certain=drawn)
    assert p_value(counts, exact_distribution(models[0], params)) < 0.001


def always_accept(p: torch.Tensor, drafted: list[int], q: Distributions, uniform: Uniform) -> Verdict:
    """Broken: keeps every drafted token."""
    extra = pick(p[-1].numpy(), uniform.next())
    assert extra is not None
    return Verdict(len(drafted), [*drafted, extra], p.new_zeros(len(drafted) + 1))


def resample_from_p(p: torch.Tensor, drafted: list[int], q: Distributions, uniform: Uniform) -> Verdict:
    """Broken: after a rejection it draws from p instead of max(p - q, 0)."""
    verdict = verify_sampled(p, drafted, q, uniform)
    if verdict.accepted == len(drafted):
        return verdict
    extra = pick(p[verdict.accepted].numpy(), uniform.next())
    assert extra is not None
    return Verdict(verdict.accepted, [*verdict.tokens[:-1], extra], verdict.chosen)


def in_one_call(p: torch.Tensor, drafted: torch.Tensor, q: torch.Tensor, uniform: Uniform) -> Verdict:
    """The rule as the loop calls it, from logits."""
    return verify_logits(p.log(), Transform(SamplingParams(temperature=1.0)), drafted, q, uniform, 0)


@pytest.mark.thorough(but="always_accept")
@pytest.mark.parametrize("broken", [always_accept, resample_from_p])
def test_a_broken_acceptance_rule_fails_the_same_test(
    models: tuple[TransformersEngine, TransformersEngine],
    broken: Callable[..., Verdict],
    monkeypatch: pytest.MonkeyPatch,
) -> None:

    def instead(
        logits: torch.Tensor, transform: Transform, drafted: list[int], q: Any, uniform: Uniform, *others: Any
    ) -> Verdict:
        return broken(transform(logits), drafted, [] if q is None else q, uniform)

    monkeypatch.setattr(verifier, "verify_logits", instead)
    monkeypatch.setattr(TransformersSequence, "fused", None)  # it would bypass the broken rule
    params = SamplingParams(temperature=1.3)
    assert p_value(run_loop(models, params, length=2), exact_distribution(models[0], params)) < 0.001


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("rule", "params"),
    [*((verify_sampled, params) for params in PARAMS[:4]), (verify_on_device, PARAMS[1]), (in_one_call, PARAMS[1])],
    ids=[*IDS[:4], f"{IDS[1]}-on-device", f"{IDS[1]}-in-one-call"],
)
def test_a_million_draws_of_the_acceptance_rule_follow_the_target(
    rule: Callable[..., Verdict], params: SamplingParams
) -> None:
    """A million committed tokens of positions that all have the same p and q.

    One call verifies a chain of 64 such positions and is cut at the first rejection, so q is kept
    near p (still, some 30,000 tokens are corrections).
    """
    generator = torch.Generator().manual_seed(5)
    uniform = Uniform(generator)
    torch.manual_seed(6)
    p = transform_logits(torch.randn(1, VOCAB) * 2, params).softmax(-1)
    other = transform_logits(torch.randn(1, VOCAB) * 2, params).softmax(-1)
    q = 0.95 * p + 0.05 * other
    counts = torch.zeros(VOCAB)
    chain = 64
    drafts = torch.multinomial(q[0], 1_100_000, replacement=True, generator=generator)
    used = committed = 0
    while committed < 1_000_000:
        block = drafts[used : used + chain]
        verdict = rule(p.expand(chain + 1, VOCAB), block, q.expand(chain, VOCAB), uniform)
        counts += torch.bincount(torch.tensor(verdict.tokens), minlength=VOCAB)
        committed += len(verdict.tokens)
        used += verdict.accepted + 1
    assert len(drafts) - used > chain, "the drafts ran out"
    exact = {(token,): float(p[0, token]) for token in range(VOCAB) if p[0, token] > 0}
    observed = Counter({(token,): int(n) for token, n in enumerate(counts) if n > 0})
    assert p_value(observed, exact) > 0.001


@pytest.mark.parametrize("rule", [verify_sampled, verify_on_device, in_one_call], ids=["host", "device", "call"])
def test_where_nothing_is_left_of_p_minus_q_the_draw_is_from_p(rule: Callable[..., Verdict]) -> None:
    uniform = Uniform(torch.Generator().manual_seed(4))
    p, q = torch.tensor([[0.5, 0.5, 0.0]] * 2), torch.tensor([[1.0, 0.5, 0.0]])  # as by rounding, exaggerated
    verdicts = [rule(p, torch.tensor([0]), q, uniform) for _ in range(400)]
    drawn = Counter(verdict.tokens[0] for verdict in verdicts if not verdict.accepted)
    assert drawn[0] + drawn[1] == sum(drawn.values()) > 100
    assert min(drawn[0], drawn[1]) > sum(drawn.values()) / 4


@pytest.mark.parametrize("rule", [verify_sampled, verify_on_device, in_one_call], ids=["host", "device", "call"])
def test_chosen_is_the_log_probability_under_the_drawn_distribution(rule: Callable[..., Verdict]) -> None:
    uniform = Uniform(torch.Generator().manual_seed(1))
    p = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.1, 0.8]])
    verdict = rule(p, torch.tensor([0]), torch.tensor([[0.9, 0.05, 0.05]]), uniform)
    expected = [p[i, token].log() for i, token in enumerate(verdict.tokens)]
    assert torch.allclose(torch.as_tensor(verdict.chosen), torch.stack(expected))


def test_a_large_vocabulary_is_drawn_from_as_a_small_one_is() -> None:
    """Drawing by blocks finds the same token at a share of the mass as adding up token by token."""
    rng = np.random.default_rng(3)
    probs = rng.random(5 * LARGE + 77).astype(np.float32) ** 20
    probs[rng.random(len(probs)) < 0.5] = 0  # as after top-k
    probs[3 * BLOCK : 6 * BLOCK] = probs[-BLOCK:] = 0
    mass = probs.cumsum(dtype=np.float64)
    for share in [0.0, MOST, *rng.random(2000)]:
        token = pick(probs, share)
        assert token is not None
        assert probs[token] > 0
        before = mass[token] - probs[token]
        assert before - 1e-9 * mass[-1] <= share * mass[-1] <= mass[token] + 1e-9 * mass[-1]
    assert pick(np.zeros(LARGE + 1, np.float32), 0.5) is pick(np.zeros(3, np.float32), 0.5) is None


def test_a_draft_of_a_smaller_vocabulary_is_verified_as_one_that_gives_the_rest_nothing() -> None:
    p = torch.tensor([[0.4, 0.1, 0.5], [0.2, 0.3, 0.5]])
    short, whole = np.array([0.8, 0.2], np.float32), np.array([0.8, 0.2, 0.0], np.float32)
    one, other = (Uniform(torch.Generator().manual_seed(2)) for _ in range(2))
    verdicts = [(verify_sampled(p, [0], [short], one), verify_sampled(p, [0], [whole], other)) for _ in range(200)]
    assert all(a == b for a, b in verdicts)
    assert {a.tokens[0] for a, _ in verdicts} == {0, 2}
    assert abs(sum(a.accepted for a, _ in verdicts) / 200 - 0.4 / 0.8) < 0.15


def test_a_draft_that_gives_no_numbers_costs_guesses_and_nothing_else() -> None:
    p = torch.tensor([[0.25, 0.75, 0.0]] * 2)
    uniform = Uniform(torch.Generator().manual_seed(2))
    nothing = np.full((1, 3), np.nan, np.float32)
    for verdicts in (
        [verify_sampled(p, [2], list(nothing), uniform) for _ in range(2000)],
        [verify_on_device(p, torch.tensor([2]), torch.from_numpy(nothing), uniform) for _ in range(2000)],
    ):
        assert all(verdict.accepted == 0 for verdict in verdicts)
        ones = sum(verdict.tokens[0] for verdict in verdicts)
        assert abs(ones / 2000 - 0.75) < 0.04


def test_a_target_that_gives_no_numbers_is_said_to_be_broken() -> None:
    uniform = Uniform(torch.Generator().manual_seed(2))
    with pytest.raises(AdaptiveError, match="not numbers"):
        verify_sampled(torch.full((1, 3), torch.nan), [], [], uniform)


def test_logits_that_are_no_numbers_are_said_on_a_device_too() -> None:
    p = torch.full((3, VOCAB), 1 / VOCAB)
    q, drafted = p[:2].clone(), torch.tensor([1, 2])
    uniform = Uniform(torch.Generator().manual_seed(1))
    for rows in ([0], [0, 1, 2]):
        broken = p.clone()
        broken[rows] = torch.nan
        with pytest.raises(AdaptiveError, match="not numbers"):
            verify_on_device(broken, drafted, q, uniform)
    with pytest.raises(AdaptiveError, match="not numbers"):
        verify_on_device(p[:1] * torch.nan, drafted[:0], q[:0], uniform)
    assert int(draw_on_device(p[:1] * torch.nan, uniform)) < VOCAB
    assert SamplingParams(temperature=1e-8).greedy
