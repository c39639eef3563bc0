"""A tree of proposed tokens leaves the target's output unchanged: the rule alone, and in the loop.

A deliberately broken rule fails the same tests, so they can fail.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from conftest import BUNDLED
from test_joint import native
from test_lossless_sampled import PROMPT, VOCAB, exact_distribution, models, p_value  # noqa: F401
from transformers import AutoModelForCausalLM

from adaptive.control.policy import Adviser
from adaptive.decoding import trees
from adaptive.decoding.round import speculative_round
from adaptive.decoding.trees import verify_tree
from adaptive.decoding.verifier import Verifier
from adaptive.drafting.proposal import Proposal
from adaptive.engines.hf.engine import TransformersEngine
from adaptive.errors import AdaptiveError
from adaptive.sampling import LogitsProcessor, Transform, Uniform
from adaptive.types import SamplingParams

TRIALS = 4000
ROUNDS = 1000


class Branching:
    """A drafter of trees, from distributions that depend on the last token alone. ``widths`` gives for each level the
    tokens drawn without replacement after every node; ``certain`` adds one fixed token before them."""

    name = "branching"

    def __init__(self, vocab: int, widths: tuple[int, ...], certain: bool = False, seed: int = 0) -> None:
        dice = np.random.default_rng(3)
        self.table = dice.dirichlet(np.ones(vocab), vocab).astype(np.float32)
        self.widths, self.certain = widths, certain
        self.dice = np.random.default_rng(seed)

    def propose(self, committed: list[int], length: int, advise: Adviser | None = None) -> Proposal:
        tokens: list[int] = []
        parents: list[int] = []
        probs: list[Any] = []
        level = [(-1, committed[-1])]
        for width in self.widths:
            below = []
            for parent, last in level:
                q = self.table[last % len(self.table)]
                drawn = [int(t) for t in self.dice.choice(len(q), width, replace=False, p=q / q.sum(dtype=np.float64))]
                for number, token in enumerate([(last + 1) % len(q)] * self.certain + drawn):
                    below.append((len(tokens), token))
                    tokens.append(token)
                    parents.append(parent)
                    probs.append(None if self.certain and number == 0 else q)
            level = below
        return Proposal(self.name, tokens, probs, parents)

    def rollback(self, length: int) -> None:
        """Nothing to do: it has no state."""


def verifier(params: SamplingParams, vocab: int, seed: int) -> Verifier:
    return Verifier(params, LogitsProcessor(params, vocab, torch.device("cpu")), torch.Generator().manual_seed(seed))


def without_replacement_forgotten(proposal: Proposal, node: int, drawn: list[int], vocab: int) -> Any:
    """Broken: the draft's distribution as if every token had been drawn from all of it."""
    return np.asarray(proposal.probs[node], dtype=np.float64)  # type: ignore[index]


@pytest.mark.thorough(but="widths0-True")
@pytest.mark.parametrize("certain", [False, True])
@pytest.mark.parametrize("widths", [(1,), (2,), (5,), (8,), (3, 2)])
def test_what_the_rule_commits_has_the_targets_law(widths: tuple[int, ...], certain: bool) -> None:
    assert rule_alone(widths, certain) > 1e-4


def rule_alone(widths: tuple[int, ...], certain: bool = False, trials: int = TRIALS) -> float:
    """p-value of the committed tokens, up to two of each round, against the target's distribution."""
    params = SamplingParams(temperature=1.0)
    drafter, transform = Branching(VOCAB, widths, certain), Transform(params)
    uniform = Uniform(torch.Generator().manual_seed(1))
    targets = np.random.default_rng(9).dirichlet(np.ones(VOCAB), VOCAB + 1)
    first, later = targets[VOCAB], targets[:VOCAB]
    ends = Uniform(torch.Generator().manual_seed(2))
    counts: Counter[tuple[int, ...]] = Counter()
    for _ in range(trials):
        proposal = drafter.propose([3], 1)
        rows = torch.tensor(np.stack([first, *(later[token] for token in proposal.tokens)])).log().float()
        verdict, path = verify_tree(rows, proposal, transform, uniform, 0)
        assert [proposal.tokens[node] for node in path] == verdict.tokens[:-1]
        tokens = verdict.tokens[:2]
        if len(tokens) < 2:  # the next round adds the second
            tokens.append(int(np.searchsorted(later[tokens[0]].cumsum(), ends.next())))
        counts[tuple(tokens)] += 1
    return p_value(counts, {(a, b): first[a] * later[a][b] for a in range(VOCAB) for b in range(VOCAB)})


def test_a_rule_that_forgets_what_was_drawn_before_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trees, "_without", without_replacement_forgotten)
    assert rule_alone((5,)) < 1e-6


@pytest.mark.thorough
@native
@pytest.mark.parametrize("certain", [False, True])
def test_sampled_rounds_have_the_targets_law(models: Any, certain: bool) -> None:  # noqa: F811
    params = SamplingParams(temperature=1.3, top_p=0.9)
    exact = exact_distribution(models[0], params)
    drafter, judge = Branching(VOCAB, (3, 2, 1), certain, seed=4), verifier(params, VOCAB, 5)
    sequence, counts, depths = models[0].sequence(), Counter[tuple[int, ...]](), set()
    for _ in range(ROUNDS):
        sequence.rollback(0)
        committed = list(PROMPT)
        while len(committed) < len(PROMPT) + 3:
            outcome = speculative_round(sequence, drafter, judge, committed, 8)[0]  # type: ignore[arg-type]
            depths.add(outcome.accepted)
        counts[tuple(committed[len(PROMPT) :][:3])] += 1
    assert depths == {0, 1, 2, 3}
    assert p_value(counts, exact) > 1e-4


@pytest.fixture(scope="module")
def target() -> TransformersEngine:
    return TransformersEngine(AutoModelForCausalLM.from_pretrained(BUNDLED / "target", dtype=torch.float32))


class Knowing(Branching):
    """Proposes the target's next tokens among others."""

    def __init__(self, said: list[int], vocab: int) -> None:
        super().__init__(vocab, (2, 2))
        self.said = said

    def propose(self, committed: list[int], length: int, advise: Adviser | None = None) -> Proposal:
        wrong = [int(t) for t in self.dice.integers(0, len(self.table), 6)]
        right = self.said[len(committed) :][:3]
        tokens = [*wrong[:2], *right, *wrong[2:]]
        parents = [-1, 0, *([-1, *range(2, 1 + len(right))] if right else []), 0, 1, 1, -1]
        return Proposal(self.name, tokens, None, parents)


@pytest.mark.parametrize("params", [SamplingParams(temperature=0.0), SamplingParams(temperature=0.8, seed=11)])
def test_greedy_and_seeded_output_is_the_targets_alone(target: TransformersEngine, params: SamplingParams) -> None:
    prompt, vocab = list(range(40, 60)), target.vocab_size
    alone, judge, sequence = list(prompt), verifier(params, vocab, 0), target.sequence()
    while len(alone) < 120:
        speculative_round(sequence, None, judge, alone, 0)
    sequence, committed, accepted = target.sequence(), list(prompt), Counter[int]()
    drafter = Knowing(alone, vocab)
    while len(committed) < 110:
        outcome, verdict, logits = speculative_round(sequence, drafter, judge, committed, 8)  # type: ignore[arg-type]
        accepted[outcome.accepted] += 1
        assert len(logits) == len(verdict.tokens) == outcome.accepted + 1
        assert sequence.length == len(committed) - 1
    assert committed == alone[: len(committed)]
    assert accepted[3] > 20


def test_with_penalties_a_tree_leaves_the_text_as_it_is(target: TransformersEngine) -> None:
    params = SamplingParams(temperature=0.0, repetition_penalty=1.3)
    tokens: list[list[int]] = []
    for drafted in (False, True):
        judge, sequence, committed = verifier(params, target.vocab_size, 0), target.sequence(), list(range(40, 60))
        judge.processor.start(torch.tensor(committed))
        drafter = Knowing(tokens[0], target.vocab_size) if drafted else None
        while len(committed) < 80:
            speculative_round(sequence, drafter, judge, committed, 8)  # type: ignore[arg-type]
        tokens.append(committed[:80])
    assert tokens[0] == tokens[1]


def test_a_tree_is_cut_at_a_depth() -> None:
    rows = [np.full(5, 0.2, np.float32), None, np.full(5, 0.2, np.float32), None, None]
    tree = Proposal("x", [3, 4, 1, 2, 0], rows, [-1, 0, 1, -1, 3])  # type: ignore[arg-type]
    assert tree.within(3) == tree
    assert tree.within(2) == Proposal("x", [3, 4, 2, 0], [rows[0], None, None, None], [-1, 0, -1, 2])  # type: ignore[arg-type]
    assert tree.within(1) == Proposal("x", [3, 2], [rows[0], None], [-1, -1])  # type: ignore[arg-type]
    assert tree.within(0) is None


@pytest.mark.parametrize("params", [SamplingParams(temperature=0.0), SamplingParams(temperature=1.0)])
def test_logits_that_are_not_numbers_are_said_to_be_none(params: SamplingParams) -> None:
    rows = torch.full((2, VOCAB), torch.nan)
    proposal = Proposal("x", [3], None, [-1])
    with pytest.raises(AdaptiveError, match="not numbers"):
        verify_tree(rows, proposal, Transform(params), Uniform(torch.Generator().manual_seed(1)), 0)
