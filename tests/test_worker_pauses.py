"""Pauses of the training process: they are no time of training, and keep nothing from ending."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from shortages import replaced_by_a_folder
from store_factory import published
from test_worker import (
    ANSWERS,
    PATIENCE_S,
    Taught,
    frozen,
    let_it_look,
    live,
    taught,
    training,
    until,
    worker_of,
)

from adaptive.pipe import BUSY, IDLE, STOP, Order
from adaptive.records.log import Log
from adaptive.service.doubts import Doubt
from checkpoints.store import AdapterStore
from trainers.worker import Brake

__all__ = ["taught"]  # a fixture

# Shortest time in seconds of a pass that sleeps for 10 ms, on any clock.
PASS_S = 0.009


# Trains in passes of 10 ms until it is told to stop. Says how long that took by the brake's clock and by the program's,
# and how many passes there were.
PASSES = """
import sys, time
from trainers.worker import Brake
brake, passes = Brake(sys.stdin, paused=False, freezes=True), 0
brake.should_stop()  # imports torch
began, real = brake.clock(), time.perf_counter()
print("begins", flush=True)
while not brake.should_stop():
    time.sleep(0.01)
    passes += 1
print(brake.clock() - began, time.perf_counter() - real, passes, flush=True)
"""


def standing(brake: Brake) -> float:
    """The brake's clock, once it stands still."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        found = brake.clock()
        time.sleep(0.02)
        if brake.clock() == found:
            return found
    raise AssertionError("the clock goes on")


def test_waiting_is_no_time_of_training() -> None:
    reading, writing = os.pipe()
    with os.fdopen(reading) as commands, os.fdopen(writing, "w", buffering=1) as orders:
        brake, paused = Brake(commands, paused=False), 0.0
        passes: list[int] = []

        def trains() -> None:
            while not brake.should_stop():
                time.sleep(0.01)
                passes.append(1)

        began, real = brake.clock(), time.perf_counter()
        thread = threading.Thread(target=trains, daemon=True)
        thread.start()
        for _ in range(2):
            orders.write(f"{BUSY}\n")
            stood = standing(brake)
            since = time.perf_counter()
            time.sleep(0.3)
            assert brake.clock() == stood
            paused += time.perf_counter() - since
            orders.write(f"{IDLE}\n")
            while brake.clock() == stood:
                time.sleep(0.02)
        orders.write(f"{STOP}\n")
        thread.join()
        trained, real = brake.clock() - began, time.perf_counter() - real
    assert real - trained >= paused
    assert trained >= PASS_S * len(passes)


# A worker with a slow disk: reading a page of the log takes seconds. It says when it begins to read.
SLOW_READS = """
import sqlite3, sys, time
from adaptive.records import schema

class Slow(sqlite3.Connection):
    said = False

    def __init__(self, *args, **named):
        super().__init__(*args, **named)
        self.set_progress_handler(self.wait, 100)

    def wait(self):
        if self.in_transaction:
            if not Slow.said:
                print("reads", file=sys.stderr, flush=True)
            Slow.said = True
            time.sleep(0.02)

connect = sqlite3.connect
sqlite3.connect = lambda *args, **named: connect(*args, factory=Slow, **named)
from trainers.worker import main
main()
"""


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux stops the process at once")
def test_a_worker_that_stands_still_reads_no_log_so_a_purge_succeeds(taught: Taught) -> None:
    command = [sys.executable, "-c", SLOW_READS]
    piped = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, bufsize=1, **piped) as process:
        assert process.stdin is not None
        assert process.stderr is not None
        process.stdin.write(Order(taught.settings.for_worker(), str(taught.state.root), paused=False).line())
        assert "reads\n" in iter(process.stderr.readline, "")
        process.stdin.write(f"{BUSY}\n")
        while not frozen(process.pid):
            assert process.poll() is None
            time.sleep(0.02)
        try:
            with Log(taught.state.records) as log:
                assert log.purge(ids=[1]) == 1
        finally:
            process.kill()


@pytest.mark.thorough
@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="this system cannot stop a process")
def test_being_frozen_is_no_time_of_training() -> None:
    command, paused = [sys.executable, "-c", PASSES], 0.0
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "begins\n"
        for _ in range(2):
            process.stdin.write(f"{BUSY}\n")
            while not frozen(process.pid):
                assert process.poll() is None
                time.sleep(0.02)
            since = time.perf_counter()
            time.sleep(0.3)
            paused += time.perf_counter() - since
            process.stdin.write(f"{IDLE}\n")
            process.send_signal(signal.SIGCONT)
            time.sleep(0.1)
        process.stdin.write(f"{STOP}\n")
        trained, real, passes = map(float, process.stdout.readline().split())
    assert real - trained >= paused
    assert trained >= PASS_S * (passes - 2)  # each pause may be within a pass


@pytest.mark.thorough
def test_a_run_that_was_paused_for_longer_than_it_may_train_is_trained_to_the_end(taught: Taught) -> None:
    with training(taught, distill_seconds=3.0) as trainer:
        began = time.monotonic()
        trainer.idle()
        until(lambda: bool(trainer.status.share), trainer)
        worker = worker_of(trainer)
        trainer.busy()
        if sys.platform == "linux":
            until(lambda: frozen(worker) or trainer.runs == 1, trainer)
        else:
            time.sleep(0.3)  # until the current pass ends
        since = time.monotonic()
        time.sleep(6.0)
        paused = time.monotonic() - since
        trainer.idle()
        until(lambda: trainer.runs == 1, trainer)
        took = time.monotonic() - began
    (manifest,) = AdapterStore(taught.state.adapters).list()
    assert manifest.train_seconds <= took - paused
    assert manifest.recent is not None, "the gate judged it"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
def test_a_worker_that_stands_still_ends_with_its_parent(taught: Taught, tmp_path: Path) -> None:
    settings = taught.settings.model_dump(mode="json", exclude={"api_key", "api_key_file"})
    order = tmp_path / "order"
    order.write_text(Order(settings, str(taught.state.root), paused=False).line() + f"{BUSY}\n", encoding="utf-8")
    parent = """
import subprocess, sys, time
worker = subprocess.Popen([sys.executable, "-m", "trainers.worker"], stdin=subprocess.PIPE)
worker.stdin.write(open(sys.argv[1], "rb").read())
worker.stdin.flush()
print(worker.pid, flush=True)
time.sleep(600)
"""
    process = subprocess.Popen([sys.executable, "-c", parent, str(order)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    worker = psutil.Process(int(process.stdout.readline()))
    deadline = time.monotonic() + PATIENCE_S
    while worker.status() != psutil.STATUS_STOPPED:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.kill()
    process.wait()
    while worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.thorough
@pytest.mark.parametrize("fails", ["rollback", "log"])
def test_a_paused_worker_goes_on_and_ends_whatever_else_fails(taught: Taught, fails: str) -> None:
    """The store cannot be written, or the log cannot be read."""
    store = published(taught.state.adapters, 2, promote=2)
    Doubt(reviewed=ANSWERS).save(taught.state.doubts)
    with training(taught, distill_seconds=0.5) as trainer:
        trainer.idle()
        worker = worker_of(trainer)
        until(lambda: trainer._report is not None, trainer)
        trainer.busy()
        live(trainer, "0001", 0.6, 400, seed=1)
        with replaced_by_a_folder(store.root / ".lock" if fails == "rollback" else taught.state.records):
            if fails == "rollback":
                live(trainer, "0002", 0.1, 300, seed=2)
            let_it_look(trainer)
            assert trainer.status.activity == "paused"
            trainer.idle()
            until(lambda: trainer.status.activity != "paused", trainer)
            until(lambda: not frozen(worker), trainer)
            until(lambda: trainer.status.last_run is not None, trainer)
            assert store.current_id() == "0002"
        if fails == "rollback":
            until(lambda: store.current_id() == "0001", trainer)
    assert Doubt.load(taught.state.doubts).adapter == ("0002" if fails == "rollback" else None)
