"""A training run that is stopped goes on from its file of state, and a file that cannot be read does no harm."""

from __future__ import annotations

import itertools
import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_trainer import BASE, SHORT, log, small_draft, spoken

from adaptive.types import SamplingParams
from checkpoints.store import AdapterStore, training_seconds
from trainers.dataset import Example
from trainers.fit import DEFAULT_STEPS, Progress, _steps
from trainers.recipe import Recipe
from trainers.resume import Standing, TrainingState
from trainers.run import DistillOutcome, distill

__all__ = ["log", "spoken"]  # fixtures


@pytest.mark.thorough
def test_a_run_that_goes_on_and_is_stopped_again_keeps_no_second_copy_of_what_the_first_had_found(
    tmp_path: Path, log: Path
) -> None:
    store, state, seen = AdapterStore(tmp_path / "adapters"), tmp_path / "state", [0]

    def until(step: int) -> DistillOutcome:
        seen[:] = [0]
        told, stop = (lambda at: seen.append(at.step)), (lambda: seen[-1] >= step)
        return distill(log, store, BASE, small_draft(), SHORT, told, stop, state=state)

    first = until(30)
    assert first.manifest is not None
    again = until(1)  # after its first step
    assert again.stopped
    assert seen[1] > 1, "it begins after the last evaluation of the first"
    assert again.manifest is None
    assert [m.id for m in store.list()] == [first.manifest.id]
    last = distill(log, store, BASE, small_draft(), SHORT, state=state)
    assert any("going on with the run that was interrupted" in note for note in last.notes)
    assert last.manifest is not None
    assert training_seconds(store) == last.manifest.train_seconds > first.manifest.train_seconds


@pytest.mark.thorough
def test_a_run_that_is_stopped_again_and_again_while_the_gate_judges_it_leaves_one_candidate(
    tmp_path: Path, log: Path
) -> None:
    store, state, replays = AdapterStore(tmp_path / "adapters"), tmp_path / "state", tmp_path / "state.replays.json"
    recipe = replace(SHORT, epochs=1.0, evaluations=2)

    def judging() -> bool:
        return replays.exists() and "in use, gate" in replays.read_text()

    first = distill(log, store, BASE, small_draft(), recipe, should_stop=judging, state=state)
    assert first.stopped
    assert first.manifest is not None
    for file in (state, replays):
        shutil.copy(file, tmp_path / f"copy{''.join(file.suffixes)}")
    asked = itertools.count()
    whole = distill(
        log, AdapterStore(tmp_path / "whole"), BASE, small_draft(), recipe, None, lambda: next(asked) < 0,
        promotion="never", state=tmp_path / "copy",
    )  # fmt: skip
    assert whole.manifest is not None
    last = next(asked) - 1  # the question before the last pass of the gate's replay
    left = itertools.count(-last)
    again = distill(log, store, BASE, small_draft(), recipe, None, lambda: next(left) >= 0, state=state)
    assert again.stopped
    assert again.gate_generations == whole.gate_generations
    assert again.manifest is None
    assert [m.id for m in store.list()] == [first.manifest.id]
    judged = distill(log, store, BASE, small_draft(), recipe, state=state)
    assert judged.verdict is not None
    assert len(store.list()) == 2


@pytest.mark.thorough
def test_a_run_that_is_stopped_before_anything_was_judged_goes_on_where_it_stood(tmp_path: Path, log: Path) -> None:
    recipe = replace(SHORT, evaluations=1)
    whole = distill(log, AdapterStore(tmp_path / "whole"), BASE, small_draft(), recipe, promotion="never")
    store, state, seen = AdapterStore(tmp_path / "adapters"), tmp_path / "state", [0]
    told, stop = (lambda at: seen.append(at.step)), (lambda: seen[-1] >= 7)
    first = distill(log, store, BASE, small_draft(), recipe, told, stop, state=state)
    assert first.stopped
    assert first.manifest is None
    seen.clear()
    last = distill(log, store, BASE, small_draft(), recipe, told, promotion="never", state=state)
    assert seen[0] == 8
    assert whole.manifest is not None
    assert last.manifest is not None
    one, other = (load_file(s.path(m.id) / "adapter_model.safetensors") for s, m in (
        (AdapterStore(tmp_path / "whole"), whole.manifest), (store, last.manifest)
    ))  # fmt: skip
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.thorough
@pytest.mark.parametrize("passes", [1, 3])
def test_a_run_of_many_short_sessions_ends_as_one_that_is_never_stopped(
    tmp_path: Path, log: Path, monkeypatch: pytest.MonkeyPatch, passes: int
) -> None:
    """No session is long enough for the replays before training, for an evaluation, or for the gate."""
    monkeypatch.setattr("trainers.replayed.AT_ONCE", 2)
    recipe = replace(SHORT, epochs=1.0, evaluations=2)
    whole = distill(log, AdapterStore(tmp_path / "whole"), BASE, small_draft(), recipe, promotion="never")
    assert whole.manifest is not None
    store, state = AdapterStore(tmp_path / "adapters"), tmp_path / "state"
    sessions, last = 0, None
    while last is None or last.stopped:
        sessions += 1
        asked = itertools.count(-5)  # so often while the log is read
        last = distill(
            log, store, BASE, small_draft(), recipe, None, lambda n=asked: next(n) >= passes, promotion="never",
            state=state,
        )  # fmt: skip
        assert sessions < 200
    assert sessions > 3
    assert last.manifest is not None
    assert last.manifest.recent == whole.manifest.recent
    one, other = (load_file(s.path(m.id) / "adapter_model.safetensors") for s, m in (
        (AdapterStore(tmp_path / "whole"), whole.manifest), (store, last.manifest)
    ))  # fmt: skip
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert not list(tmp_path.glob("state*"))


@pytest.mark.parametrize(("writing_s", "steps"), [(0.0, 5), (50.0, 1)])
def test_a_killed_run_keeps_its_first_step_and_later_ones_as_writing_allows(
    tmp_path: Path, log: Path, writing_s: float, steps: int
) -> None:
    class KilledError(Exception):
        pass

    def told(at: Progress) -> None:
        if at.step == 6:
            raise KilledError

    seconds = itertools.count(0.0, writing_s)  # each look at the clock finds it so much later
    state = tmp_path / "state"
    with pytest.raises(KilledError):
        distill(
            log, AdapterStore(tmp_path / "adapters"), BASE, small_draft(), replace(SHORT, evaluations=1), told,
            state=state, clock=lambda: next(seconds),
        )  # fmt: skip
    with safe_open(state, "pt") as file:
        assert json.loads(file.metadata()["round"])["standing"]["step"] >= steps


@pytest.mark.parametrize("damage", ["names", "shapes", "standing", "key"])
def test_a_state_that_cannot_be_read_begins_anew_and_changes_nothing(tmp_path: Path, damage: str) -> None:
    def opened(wide: int = 3) -> tuple[TrainingState, list[torch.nn.Parameter], torch.optim.Optimizer]:
        weights = [torch.nn.Parameter(torch.ones(2, wide)), torch.nn.Parameter(torch.ones(4))]
        optimizer = torch.optim.AdamW(weights)
        sum(weight.sum() for weight in weights).backward()  # type: ignore[union-attr]
        optimizer.step()
        state = TrainingState(tmp_path / "state")
        state.begin(["a run"], 7)
        return state, weights, optimizer

    state, weights, optimizer = opened()
    state.save(Standing(step=5, best={"w": torch.ones(1)}), weights, optimizer)
    again, fresh, other = opened(3 if damage != "shapes" else 5)
    if damage == "shapes":
        assert again.load(fresh, other) is None
    else:
        standing = again.load(fresh, other)
        assert standing is not None
        assert standing.step == 5
        assert torch.equal(fresh[0], weights[0])
        with safe_open(tmp_path / "state", "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
            meta = json.loads(file.metadata()["round"])
        if damage == "names":
            tensors["weigit/0"] = tensors.pop("weight/0")
        else:
            held = meta if damage == "key" else meta["standing"]
            held["kex" if damage == "key" else "stfp"] = held.pop("key" if damage == "key" else "step")
        save_file(tensors, tmp_path / "state", metadata={"round": json.dumps(meta)})
        again, fresh, other = opened()
        assert again.load(fresh, other) is None
        assert again.last_id() == (None if damage == "key" else 7)
    assert not torch.equal(fresh[0], torch.zeros_like(fresh[0]))
    assert len({round(value, 6) for value in fresh[0].detach().flatten().tolist()}) == 1


@pytest.mark.parametrize(
    ("generations", "tokens", "epochs", "steps"),
    [
        (400, 200, None, 12 * 50),
        (400, 50, None, 24 * 50),
        (400, 10, None, 36 * 50),  # as often as it gets
        (8, 10, None, DEFAULT_STEPS),
        (400, 10, 2.0, 2 * 50),
    ],
)
def test_short_answers_are_passed_over_more_often(
    generations: int, tokens: int, epochs: float | None, steps: int
) -> None:
    some = np.zeros(tokens, np.int32)
    train = [Example(n, "", some, some, SamplingParams(), False, None) for n in range(generations)]
    assert _steps(train, Recipe(epochs=epochs)) == steps
