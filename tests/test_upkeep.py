"""The costs of a round are measured again in a program that runs for weeks."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from adaptive import machine, upkeep
from adaptive.control.acceptance import Acceptance
from adaptive.control.confidence import Calibration
from adaptive.control.costs import LONGEST, CostTable
from adaptive.control.memory import DAY, Memory, load
from adaptive.machine import identity
from adaptive.measure import where_it_runs
from adaptive.pair import Pair, load_pair
from adaptive.settings import load_settings
from adaptive.types import SamplingParams
from adaptive.upkeep import LOOK_S, Upkeep

COSTS = CostTable(0.0, 0.001, 0.0, tuple(0.004 + 0.001 * k for k in range(LONGEST + 1)), 1e-4, 1e-5, 0.0, 0)
Clock = Callable[[float], None]


@pytest.fixture(scope="module")
def pair() -> Pair:
    return load_pair(load_settings({"dtype": "float32", "device": "cpu", "threads": 1}))


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Let this many seconds pass, on both clocks."""
    wall, steady, ahead = time.time, time.monotonic, [0.0]

    def pass_by(seconds: float) -> None:
        ahead[0] += seconds

    class Later:
        time = staticmethod(lambda: wall() + ahead[0])
        monotonic = staticmethod(lambda: steady() + ahead[0])

    monkeypatch.setattr(upkeep, "time", Later)
    return pass_by


@pytest.fixture
def quota(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that limits the cores of this process, which is part of the machine's identity."""
    monkeypatch.setattr(machine, "MEMBERSHIP", tmp_path / "membership")
    monkeypatch.setattr(machine, "CGROUPS", tmp_path / "fs")
    (tmp_path / "membership").write_text("0::/app\n")
    (tmp_path / "fs" / "app").mkdir(parents=True)
    (tmp_path / "fs" / "app" / "cpu.max").write_text("max 100000\n")
    return tmp_path / "fs" / "app" / "cpu.max"


def measured_just_now(pair: Pair) -> Upkeep:
    known = COSTS, Acceptance(), Calibration()
    memory = Memory(where_it_runs(pair), identity(), time.time(), None, *known)
    return Upkeep(pair, memory.policy(attentive=True), memory, SamplingParams())


def no_time() -> bool:
    """A request waits, so that only what is due is noted."""
    return True


def test_costs_that_grow_a_day_old_while_the_program_runs_become_due(pair: Pair, later: Clock) -> None:
    kept = measured_just_now(pair)
    for _ in range(int(DAY // LOOK_S) - 1):
        later(LOOK_S)
        kept.idle(no_time)
        assert not kept.due
    later(2 * LOOK_S)
    kept.idle(no_time)
    assert kept.due


def test_after_a_failed_measurement_the_next_one_comes_a_day_later(pair: Pair, later: Clock) -> None:
    kept = measured_just_now(pair)
    later(DAY + 1)

    def fails() -> bool:
        raise MemoryError

    kept.idle(fails)
    assert not kept.due
    later(2 * LOOK_S)
    kept.idle(no_time)
    assert not kept.due
    later(DAY)
    kept.idle(no_time)
    assert kept.due


def test_costs_are_saved_with_the_way_the_machine_is_run_when_they_are_measured(
    pair: Pair, later: Clock, quota: Path, tmp_path: Path
) -> None:
    kept, file, before = measured_just_now(pair), tmp_path / "controller.json", identity()
    quota.write_text("50000 100000\n")
    assert identity() != before
    kept.idle(no_time)
    assert not kept.due, "it is not looked at in every idle moment"
    later(LOOK_S)
    kept.idle(no_time)
    assert kept.due
    kept.save(file, None)
    saved = load(file, where_it_runs(pair))
    assert saved.machine == identity()
    assert saved.stale(identity()), "a killed program measures at its next start"
    kept.idle(lambda: False)
    if kept.due:  # other programs run beside the test
        assert kept.measured == 0.0
    kept.save(file, None)
    saved = load(file, where_it_runs(pair))
    assert (saved.machine, saved.measured) == (identity(), kept.measured)


@pytest.mark.thorough
def test_costs_during_which_the_power_supply_changed_are_measured_again(pair: Pair, quota: Path) -> None:
    kept = measured_just_now(pair)
    kept.swapped()
    rounds = iter(range(200))
    kept.idle(lambda: next(rounds) >= 50)
    quota.write_text("50000 100000\n")
    kept.idle(lambda: False)
    assert kept.due
    assert (kept.machine, kept.measured) == (identity(), 0.0)
