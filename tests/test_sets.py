"""The gate's records: as many prompts and positions as it needs to judge by, or no run at all."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import count, islice
from pathlib import Path

import numpy as np
import pytest
from datasets import Dataset
from store_factory import NEW, write
from test_trainer import BASE, SHORT, VOCAB, generation, small_draft, write_log

from adaptive.errors import AdaptiveError
from adaptive.types import Generation, SamplingParams
from checkpoints.manifest import Manifest, TrainedOn
from checkpoints.store import AdapterStore
from trainers.dataset import ROWS, Stopped, fold, from_rows, row
from trainers.gate import MIN_GENERATIONS, MIN_POSITIONS
from trainers.run import distill
from trainers.sets import MOST_OF_ONE, MOST_RECENT, MOST_VALIDATION, Sets, _digest, gather


def questions(number: int, within: Callable[[float], bool], name: str = "task") -> list[str]:
    """Questions whose fold is ``within`` a part of the split."""
    return list(islice((f"{name} {n}" for n in count() if within(fold(f"{name} {n}"))), number))


def gate(number: int, name: str = "task") -> list[str]:
    return questions(number, lambda at: at < 0.2, name)


def choosing(number: int, name: str = "task") -> list[str]:
    """Questions whose answers choose the weights."""
    return questions(number, lambda at: 0.2 <= at < 0.3, name)


# Enough to train on and to choose weights by, none of it for the gate.
TRAINED_ON = questions(20, lambda at: at >= 0.5)
OTHERS = [*choosing(2), *TRAINED_ON]


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


@pytest.mark.thorough
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


def test_the_weights_are_chosen_by_many_tasks_and_of_each_the_newest_steps(tmp_path: Path) -> None:
    tasks = choosing(MOST_VALIDATION // MOST_OF_ONE)
    others = answers(TRAINED_ON, 1, 40) + answers(gate(20), 1, 40)
    sets = gathered(tmp_path, others + answers(tasks, MOST_VALIDATION, 40))
    assert Counter(e.fold for e in sets.validation) == {fold(task): MOST_OF_ONE for task in tasks}
    assert [e.id for e in sets.validation] == sorted(e.id for e in sets.validation)
    assert all((e.id - len(others) - 1) % MOST_VALIDATION >= MOST_VALIDATION - MOST_OF_ONE for e in sets.validation)


def test_one_task_with_many_steps_is_too_few_prompts_to_choose_weights_by(tmp_path: Path) -> None:
    others = answers(TRAINED_ON, 1, 40) + answers(gate(20), 1, 40)
    with pytest.raises(AdaptiveError, match=r"8 to choose weights by, of 1 prompt, and .*about \d+ more"):
        gathered(tmp_path, others + answers(choosing(1), 20, 40))
    assert len(gathered(tmp_path, answers(choosing(2)[1:], 1, 40)).validation) == MOST_OF_ONE + 1


def test_an_answer_that_was_said_twice_chooses_the_weights_once(tmp_path: Path) -> None:
    said = answers(OTHERS, 1, 40) + answers(gate(20), 1, 40)
    assert len(gathered(tmp_path, said * 3).validation) == 2


def test_another_split_of_the_same_records_is_another_run() -> None:
    def rows(*numbers: int, key: str = "a") -> Dataset:
        tokens = np.arange(9, dtype=np.int32)
        return from_rows(row(n, f"{key} {n}", "", tokens, tokens, SamplingParams(), None, False) for n in numbers)

    before = _digest(rows(1, 2), rows(3))
    assert before == _digest(rows(1, 2), rows(3))
    assert before != _digest(rows(1), rows(2, 3))
    assert before != _digest(rows(1, 2), rows(3, key="b"))


@pytest.mark.thorough
def test_a_run_that_is_stopped_while_it_reads_ends_at_once(tmp_path: Path) -> None:
    said = answers(OTHERS, 5, 40) + answers(gate(20), 5, 40)
    log = write_log(tmp_path / "records.db", said)
    asked = 0

    def stop_at(number: int) -> bool:
        nonlocal asked
        asked += 1
        return asked == number

    def read(stop: int) -> Sets:
        nonlocal asked
        asked = 0
        return gather(log, None, None, SHORT, BASE, 128, None, should_stop=lambda: stop_at(stop))[0]

    read(stop=0)
    all_asked = asked
    assert all_asked >= 2 * math.ceil(len(said) / ROWS), "once a page from the log, and once as examples"
    for number in range(1, all_asked + 1):
        with pytest.raises(Stopped):
            read(stop=number)
        assert asked == number
    few = write_log(tmp_path / "few.db", answers(gate(1), 1, 40))
    outcome = distill(few, AdapterStore(tmp_path / "adapters"), BASE, small_draft(), SHORT, should_stop=lambda: True)
    assert outcome.stopped, "nothing was read, so nobody knows that it is too little"
    assert outcome.manifest is None
