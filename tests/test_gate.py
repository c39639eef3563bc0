"""The gate promotes a real gain but neither noise nor harm, also over many repeated decisions."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from checkpoints.manifest import HeldOut
from trainers.gate import FALSE_PROMOTION, alpha, held_out, judge, student_quantile
from trainers.replay import Replay, acceptance_rate


def replays(rng: np.random.Generator, generations: int, mean: float, skill: np.ndarray | None = None) -> list[Replay]:
    """Generations of unequal length and difficulty, with acceptance 0 or 1 at each position as in greedy records."""
    lengths = rng.integers(30, 200, generations)
    skill = np.clip(rng.normal(mean, 0.15, generations), 0.02, 0.98) if skill is None else skill
    return [
        Replay(i, (rng.random((1, n)) < s).astype(np.float32), False)
        for i, (n, s) in enumerate(zip(lengths, skill, strict=True))
    ]


def changed(rng: np.random.Generator, before: list[Replay], shift: float, spread: float) -> list[Replay]:
    """The same generations with another draft: acceptance shifted by ``shift`` on average, ``spread`` its deviation."""
    after = []
    for one in before:
        wanted = np.clip(one.acceptance.mean() + rng.normal(shift, spread), 0.0, 1.0)
        after.append(Replay(one.id, (rng.random(one.acceptance.shape) < wanted).astype(np.float32), False))
    return after


def figures(rng: np.random.Generator, generations: int, shift: float, spread: float = 0.05) -> HeldOut:
    before = replays(rng, generations, 0.4)
    return held_out(before, changed(rng, before, shift, spread), draft_length=4)


def test_a_real_gain_is_promoted() -> None:
    rng = np.random.default_rng(0)
    verdict = judge(figures(rng, 20, 0.15), figures(rng, 20, 0.02), streak=1)
    assert verdict.promote, verdict.reason
    assert "0." in verdict.reason


def test_harm_is_refused() -> None:
    verdict = judge(figures(np.random.default_rng(0), 30, -0.1), None, streak=1)
    assert not verdict.promote
    assert "no gain" in verdict.reason


def test_a_gain_on_recent_records_that_costs_older_ones_is_refused() -> None:
    rng = np.random.default_rng(0)
    verdict = judge(figures(rng, 30, 0.2), figures(rng, 30, -0.08), streak=1)
    assert not verdict.promote
    assert "older" in verdict.reason


def test_a_new_kind_may_cost_older_ones_a_tenth_of_what_it_brings() -> None:
    rng = np.random.default_rng(0)
    recent, older = figures(rng, 60, 0.25, 0.01), figures(rng, 60, -0.018, 0.01)
    assert -0.025 < older.gain.mean < -0.01
    assert judge(recent, older, streak=1).promote
    assert not judge(figures(rng, 60, 0.08, 0.01), older, streak=1).promote


@pytest.mark.parametrize("generations", [1, 2, 5])
def test_too_little_data_is_no_promotion_and_says_so(generations: int) -> None:
    verdict = judge(figures(np.random.default_rng(0), generations, 0.5), None, streak=1)
    assert not verdict.promote
    assert "too little" in verdict.reason


@pytest.mark.thorough
@pytest.mark.parametrize("generations", [6, 12, 60])
def test_false_promotions_of_first_candidates_stay_near_the_rate_granted(generations: int) -> None:
    """300 candidates that change nothing on average: at most alpha(1) = 1.9% pass, plus three standard errors."""
    rng = np.random.default_rng(generations)
    passed = sum(judge(figures(rng, generations, 0.0), None, streak=1).promote for _ in range(300))
    assert passed <= 300 * alpha(1) + 3 * (300 * alpha(1)) ** 0.5


@pytest.mark.thorough
def test_forty_rounds_with_nothing_to_learn_rarely_promote() -> None:
    """40 rounds on one growing held-out set, 10 times: at most 2 promotions each, and few in total."""
    rng = np.random.default_rng(7)
    promotions = []
    for _ in range(10):
        streak, count = 1, 0
        for round_number in range(40):
            promoted = judge(figures(rng, 8 + round_number, 0.0), None, streak).promote
            count += promoted
            streak = 1 if promoted else streak + 1
        promotions.append(count)
    assert max(promotions) <= 2
    assert np.mean(promotions) <= 3 * FALSE_PROMOTION


def test_the_chances_granted_over_all_rounds_add_up_to_the_budget() -> None:
    assert sum(alpha(r) for r in range(1, 200_000)) == pytest.approx(FALSE_PROMOTION, rel=0.01)


@pytest.mark.thorough
def test_intervals_cover_the_truth_as_often_as_they_say() -> None:
    rng = np.random.default_rng(3)
    covered = [
        abs(f.gain.mean - 0.05) <= f.gain.high - f.gain.mean for f in (figures(rng, 15, 0.05) for _ in range(400))
    ]
    assert 0.92 <= np.mean(covered) <= 0.985


def test_figures_are_those_of_the_replays() -> None:
    rng = np.random.default_rng(0)
    before = replays(rng, 10, 0.4)
    after = changed(rng, before, 0.2, 0.01)
    found = held_out(before, after, draft_length=4)
    assert found.positions == sum(r.positions for r in before)
    assert found.acceptance_before.mean == pytest.approx(acceptance_rate(before))
    assert found.gain.mean == pytest.approx(acceptance_rate(after) - acceptance_rate(before))
    assert found.gain.low < found.gain.mean < found.gain.high
    assert found.mean_acceptance_length_after.mean > found.mean_acceptance_length_before.mean > 1
    assert held_out(before, after, draft_length=4) == found


def test_student_quantiles_are_within_three_percent() -> None:
    for freedom in (5, 8, 20, 100):
        for probability in (0.95, 0.975, 0.999, 0.9999):
            exact = stats.t.ppf(probability, freedom)
            assert student_quantile(probability, freedom) == pytest.approx(exact, rel=0.03)


def tasks(rng: np.random.Generator, count: int, steps: int, spread: float = 0.05) -> HeldOut:
    """Figures of a useless adapter on ``count`` tasks of an agent with ``steps`` answers each: it gains on some tasks
    and loses on others, ``spread`` on average, by about the same on each of a task's steps."""
    before = replays(rng, count, 0.5)
    shifted = [(one, rng.normal(0, spread)) for one in before]
    both = []
    for fold, (one, shift) in enumerate(shifted):
        several = [replace(one, fold=fold / count)] * steps
        both += [(a, replace(b, fold=a.fold)) for a, b in zip(several, changed(rng, several, shift, 0.01), strict=True)]
    return held_out([a for a, _ in both], [b for _, b in both], draft_length=4)


def test_answers_to_one_prompt_are_one_piece_of_evidence() -> None:
    rng = np.random.default_rng(0)
    before = [replace(one, fold=one.id / 10) for one in replays(rng, 10, 0.4)]
    after = [replace(b, fold=a.fold) for a, b in zip(before, changed(rng, before, 0.1, 0.05), strict=True)]
    once, often = held_out(before, after, 4), held_out(before * 20, after * 20, 4)
    assert often.generations == once.generations == 10
    assert often.positions == 20 * once.positions
    for name in ("gain", "acceptance_after", "mean_acceptance_length_after"):
        assert getattr(often, name).low == pytest.approx(getattr(once, name).low)
        assert getattr(often, name).high == pytest.approx(getattr(once, name).high)


def test_many_answers_to_few_prompts_are_too_little_to_judge_by() -> None:
    verdict = judge(tasks(np.random.default_rng(0), 2, 20), None, streak=1)
    assert not verdict.promote
    assert "too little to judge by: answers to 2 held-out prompts" in verdict.reason


@pytest.mark.thorough
def test_the_steps_of_an_agent_lead_to_no_more_false_promotions() -> None:
    rng = np.random.default_rng(0)
    passed = sum(judge(tasks(rng, 8, 10), None, streak=1).promote for _ in range(300))
    assert passed <= 300 * alpha(1) + 3 * (300 * alpha(1)) ** 0.5
