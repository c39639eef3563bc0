"""After a training run the store keeps what is needed and a few others: it does not grow with every run."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest
from store_factory import NEW, folder_in_memory, write
from test_worker import Taught, taught

from adaptive.pipe import Order, Report
from adaptive.service.doubts import Doubt
from adaptive.service.trainer import Trainer
from adaptive.settings import Settings
from adaptive.state import PairState
from checkpoints.files import replace_text
from checkpoints.manifest import HeldOut, Interval, Manifest
from checkpoints.store import AdapterStore, training_seconds
from trainers.run import ASKED_FOR_S, _streak, tidy

__all__ = ["taught"]

JUDGED = HeldOut(10, 900, 4, *[Interval(0.5, 0.4, 0.6)] * 5)


@pytest.fixture
def state() -> Iterator[PairState]:
    """In memory, since these tests flush many small files."""
    with folder_in_memory() as folder:
        yield PairState(folder)


def after_runs(store: AdapterStore, ends: str) -> list[Manifest]:
    """Publish an adapter for each letter: promoted, rejected, stopped before it was judged, or asked to be kept."""
    made = []
    for end in ends:
        recent = None if end == "s" else JUDGED
        one = store.publish(write, replace(NEW, recent=recent, train_seconds=3.0, reason="made by the test"))
        if end == "p":
            one = store.promote(one.id, "better")
        if end == "r":
            one = store.reject(one.id, "no gain")
        made.append(one)
    return made


def ids(store: AdapterStore) -> list[str]:
    return [manifest.id for manifest in store.list()]


def make_older(store: AdapterStore, name: str, seconds: float) -> None:
    """Let an adapter have been made that long ago."""
    file = store.path(name) / "manifest.json"
    said = json.loads(file.read_text())
    file.write_text(json.dumps(said | {"created": said["created"] - seconds}))


def test_the_store_stops_growing_and_keeps_what_is_needed(state: PairState) -> None:
    store = AdapterStore(state.adapters)
    after_runs(store, "ppprrsr")
    assert tidy(store, state, 5) == ["deleted old adapters: 0001 (keep_adapters is 5)"]
    for _ in range(20):
        after_runs(store, "rs")
        tidy(store, state, 2)
        assert len(store.list()) <= 5
    # In use, its fallback, and the two newest, of which one was judged.
    assert ids(store) == ["0002", "0003", "0046", "0047"]
    assert store.fallback() == "0002"
    assert tidy(store, state, 2) == []


def test_an_adapter_in_doubt_stays_until_it_has_been_judged_again(state: PairState) -> None:
    store = AdapterStore(state.adapters)
    after_runs(store, "pp")
    Doubt("0002", 30).save(state.doubts)
    store.rollback("live acceptance fell")
    after_runs(store, "rrrr")
    tidy(store, state, 1)
    assert ids(store) == ["0001", "0002", "0006"]
    Doubt(None, 30).save(state.doubts)
    tidy(store, state, 1)
    assert ids(store) == ["0001", "0006"]


def test_a_candidate_that_a_person_asked_to_keep_stays_until_it_is_old(state: PairState) -> None:
    store = AdapterStore(state.adapters)
    after_runs(store, "ccrrr")
    tidy(store, state, 1)
    assert ids(store) == ["0001", "0002", "0005"]
    make_older(store, "0001", ASKED_FOR_S + 60)
    tidy(store, state, 1)
    assert ids(store) == ["0002", "0005"]


def test_the_newest_records_trained_on_are_known_after_many_stopped_runs(state: PairState) -> None:
    """By a server that is started anew: those of stopped runs are to be trained on again, those of judged ones not."""
    store = AdapterStore(state.adapters)
    after_runs(store, "rr")
    judged = store.trained()[-1].last_record
    later = replace(NEW, trained_on=replace(NEW.trained_on, last_id=judged + 100))
    for _ in range(4):
        store.publish(write, later)
    tidy(store, state, 2)
    assert ids(store) == ["0005", "0006"]
    assert Trainer(Settings(), state, 0)._trained_until() == judged > 0


def test_an_adapter_whose_run_was_killed_before_its_end_is_not_trained_on_and_not_spared(state: PairState) -> None:
    """Between the moments at which it is published and promoted, or in the middle of its promotion."""
    store = AdapterStore(state.adapters)
    after_runs(store, "r")
    until = store.last_record()
    new = replace(NEW, recent=JUDGED, trained_on=replace(NEW.trained_on, last_id=until + 100), train_seconds=3.0)
    store.publish(write, new)
    half = store.publish(write, new)
    replace_text(store.root, store.path(half.id) / "manifest.json", half.with_status("promoted", "better").to_json())
    store = AdapterStore(state.adapters)
    assert [one.status for one in store.list()] == ["rejected", "candidate", "candidate"]
    assert Trainer(Settings(), state, 0)._trained_until() == until
    assert training_seconds(store) == 6.0
    (finished,) = after_runs(store, "r")
    assert _streak(store, finished) == 2
    tidy(store, state, 1)
    assert ids(store) == [finished.id]


def test_pruning_makes_the_next_candidate_no_harder_and_loses_no_training_time(state: PairState) -> None:
    store = AdapterStore(state.adapters)
    after_runs(store, "psrssrr")
    (candidate,) = after_runs(store, "c")
    streak, seconds = _streak(store, candidate), training_seconds(store)
    assert streak == 4
    tidy(store, state, 1)
    assert ids(store) == ["0001", "0008"]
    assert _streak(store, candidate) == streak
    assert training_seconds(store) == seconds


def test_a_promotion_that_was_taken_back_begins_a_new_series_of_candidates(state: PairState) -> None:
    store = AdapterStore(state.adapters)
    after_runs(store, "prrrp")
    store.rollback("live acceptance fell")
    assert store.current_id() == "0001"
    (first,) = after_runs(store, "c")
    assert _streak(store, first) == 1
    after_runs(store, "rr")
    (later,) = after_runs(store, "c")
    assert _streak(store, later) == 4
    tidy(store, state, 1)  # what is deleted was promoted all the same
    assert ids(store) == ["0001", "0006", "0009"]
    assert _streak(store, later) == 4


@pytest.mark.thorough
def test_a_background_run_deletes_old_adapters(taught: Taught) -> None:
    store = AdapterStore(taught.state.adapters)
    after_runs(store, "rcrrrr")
    settings = taught.settings.model_copy(update={"keep_adapters": 2, "distill_seconds": 4.0})
    with subprocess.Popen(
        [sys.executable, "-m", "trainers.worker"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as worker:
        assert worker.stdin is not None
        assert worker.stdout is not None
        worker.stdin.write(Order(settings.for_worker(), str(taught.state.root), paused=False).line())
        worker.stdin.flush()
        last = Report.of(list(worker.stdout)[-1])
    assert last.stage == "done", last.message
    assert "deleted old adapters: 0001, 0003, 0004" in last.message
    made = [last.adapter] if last.adapter else []
    assert ids(store) == ["0002", *["0005", "0006", *made][-2:]]
