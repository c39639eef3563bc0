"""The gate's records: as many prompts and positions as it needs to judge by, or no run at all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import count, islice
from pathlib import Path

import numpy as np
import pytest
from store_factory import NEW, write
from test_trainer import BASE, SHORT, VOCAB, generation, small_draft, write_log

from adaptive.errors import AdaptiveError
from adaptive.types import Generation, SamplingParams
from checkpoints.manifest import Manifest, TrainedOn
from checkpoints.store import AdapterStore
from trainers.dataset import fold
from trainers.gate import MIN_GENERATIONS, MIN_POSITIONS
from trainers.run import distill
from trainers.sets import MOST_OF_ONE, MOST_RECENT, Sets, gather


def questions(number: int, within: Callable[[float], bool], name: str = "task") -> list[str]:
    """Questions whose fold is ``within`` a part of the split."""
    return list(islice((f"{name} {n}" for n in count() if within(fold(f"{name} {n}"))), number))


def gate(number: int, name: str = "task") -> list[str]:
    return questions(number, lambda at: at < 0.2, name)


# Enough to train on and to choose weights by, none of it for the gate.
OTHERS = [*questions(2, lambda at: 0.2 <= at < 0.3), *questions(20, lambda at: at >= 0.5)]


def answers(asked: list[str], steps: int, tokens: int, seed: int = 0) -> list[Generation]:
    """``steps`` answers of ``tokens`` random tokens to each question, as the steps of an agent's task."""
    rng = np.random.default_rng(seed)
    params = SamplingParams(temperature=0.0)
    return [
        generation(question, np.arange(9), rng.integers(0, VOCAB, tokens), params)
        for question in asked
        for _ in range(steps)
    ]


def gathered(folder: Path, said: list[Generation], in_use: Manifest | None = None) -> Sets:
    return gather(write_log(folder / "records.db", said), None, in_use, SHORT, BASE, 128, None)[0]


def test_too_few_positions_to_judge_by_are_said_before_training(tmp_path: Path) -> None:
    said = answers(OTHERS, 1, 40) + answers(gate(20), 1, 6)
    log, store = write_log(tmp_path / "records.db", said), AdapterStore(tmp_path / "adapters")
    trained: list[object] = []
    with pytest.raises(AdaptiveError, match=r"of 20 prompts and with 100 positions .* 300 positions\); about \d+ more"):
        distill(log, store, BASE, small_draft(), SHORT, trained.append)
    assert not trained
    write_log(log, answers(gate(20), 1, 12, seed=1))
    assert sum(len(e.output) - 1 for e in gather(log, None, None, SHORT, BASE, 128, None)[0].recent) >= MIN_POSITIONS


def test_a_few_tasks_with_many_steps_are_too_few_prompts_to_judge_by(tmp_path: Path) -> None:
    few = gate(MIN_GENERATIONS - 1)
    with pytest.raises(AdaptiveError, match=r"of 5 prompts .*about \d+ more"):
        gathered(tmp_path, answers(OTHERS, 1, 40) + answers(few, 20, 40))
    one_more = gate(MIN_GENERATIONS)[-1:]
    sets = gathered(tmp_path, answers(one_more, 1, 40))
    assert {e.fold for e in sets.recent} == {fold(question) for question in gate(MIN_GENERATIONS)}


def test_the_gate_sees_many_tasks_and_of_each_the_newest_steps(tmp_path: Path) -> None:
    sets = gathered(tmp_path, answers(OTHERS, 1, 40) + answers(gate(MOST_RECENT // MOST_OF_ONE), 40, 40))
    assert set(Counter(e.fold for e in sets.recent).values()) == {MOST_OF_ONE}
    assert len(sets.recent) == MOST_RECENT
    assert [e.id for e in sets.recent] == sorted(e.id for e in sets.recent)
    assert all((e.id - len(OTHERS) - 1) % 40 >= 40 - MOST_OF_ONE for e in sets.recent)


@pytest.mark.parametrize(("tasks", "apart"), [(2, False), (12, True)])
def test_new_answers_of_few_tasks_are_judged_together_with_the_old(tmp_path: Path, tasks: int, apart: bool) -> None:
    old = answers(OTHERS, 1, 40) + answers(gate(20), 1, 40)
    new = replace(NEW, base=BASE, trained_on=TrainedOn(1, len(old), len(old), 1))
    in_use = AdapterStore(tmp_path / "adapters").publish(write, new)
    sets = gathered(tmp_path, old + answers(gate(tasks, "new task"), MOST_OF_ONE, 40, seed=1), in_use)
    assert bool(sets.older) == apart
    assert len(sets.gate) == 20 + tasks * MOST_OF_ONE
