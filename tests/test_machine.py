"""Other load on the machine is seen, tested with processes that really spin."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from accounts import Accounts
from spinning import spinning, taken

from adaptive import machine
from adaptive.machine import CALM_S, MOMENT_S, PAUSE_S, Load, LoadMeter, LoadWatch, _governor, identity, quota


def test_what_other_programs_take_is_seen() -> None:
    with spinning(2) as processes:
        meter, before = LoadMeter(), taken(processes)
        time.sleep(1.0)
        load, took = meter.read(), taken(processes) - before
    assert load is not None
    assert load.others >= took / load.seconds - 0.15
    assert load.busy
    assert load.others <= load.cores


def test_own_threads_are_never_others() -> None:
    """Whatever else runs, our load and the others' together do not exceed the number of cores."""
    stop = threading.Event()

    def spin() -> None:
        import hashlib

        while not stop.is_set():
            hashlib.sha256(bytes(2**20)).digest()

    threads = [threading.Thread(target=spin) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        meter, before = LoadMeter(), time.process_time()
        time.sleep(1.0)
        load, own = meter.read(), time.process_time() - before
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert load is not None
    assert load.ours == pytest.approx(own / load.seconds, abs=0.05)
    assert load.ours > 0.1
    assert load.ours + load.others <= load.cores + 0.15


def test_too_short_a_time_says_nothing_and_loses_nothing() -> None:
    with spinning(1) as processes:
        meter, before = LoadMeter(), taken(processes)
        assert meter.read() is None
        for _ in range(20):
            time.sleep(0.02)
            load = meter.read()
            if load is not None:
                break
        took = taken(processes) - before
    assert load is not None
    assert load.seconds >= 0.1
    assert load.others * load.seconds >= took - 0.05


def test_a_moment_does_not_count() -> None:
    assert not Load(seconds=0.12, others=MOMENT_S / 0.12 - 0.01, ours=1.0, cores=2).busy
    assert not Load(seconds=5.0, others=0.2, ours=1.0, cores=2).busy
    assert Load(seconds=1.0, others=0.9, ours=1.0, cores=2).busy
    assert Load(seconds=1.0, others=0.9, ours=1.0, cores=64).busy


def test_a_look_costs_little_more_than_reading_the_accounts() -> None:
    """Both in turn, in processor time, and the least of many: other programs change neither much."""
    meter = LoadMeter()
    looking, reading = [], []
    for _ in range(300):
        began = time.thread_time()
        meter.read()
        between = time.thread_time()
        psutil.cpu_times(percpu=meter._mine is not None)
        looking.append(between - began)
        reading.append(time.thread_time() - between)
    assert min(looking) <= 2.5 * min(reading)


def test_a_load_is_believed_when_it_is_seen_twice_and_forgotten_when_it_is_over() -> None:
    accounts = Accounts()
    watch = LoadWatch(accounts)

    def seen(seconds: float, others: float) -> tuple[bool, bool]:
        accounts.passed(seconds, 1.0, others)
        watch.look()
        return watch.busy, watch.crowded

    assert seen(0.2, 0.5) == (False, False)
    assert seen(0.2, 0.5) == (True, False)
    assert seen(0.2, 1.0) == (True, True)
    assert seen(CALM_S / 2, 0.0) == (True, True)
    assert seen(0.05, 1.0) == (True, True)  # too soon for a reading, but the time is not lost
    assert seen(0.1, 1.0) == (True, True)
    assert seen(0.6 * CALM_S, 0.0) == (True, True)
    assert seen(0.6 * CALM_S, 0.5) == (True, False)  # no longer crowded, but busy
    assert seen(CALM_S, 0.0) == (False, False)


def test_a_long_pause_says_nothing_of_what_comes_after_it() -> None:
    accounts = Accounts()
    watch = LoadWatch(accounts)
    for _ in range(3):
        accounts.passed(0.2, 1.0, 1.0)
        assert watch.look()
    accounts.passed(PAUSE_S + 1.0, 0.0, 2.0)  # a trainer ran meanwhile
    assert watch.look(0.0)
    assert (watch.busy, watch.crowded) == (True, False)
    accounts.passed(PAUSE_S + 1.0, 1.0, 1.0)  # this was a pass, not a pause
    assert watch.look(PAUSE_S + 1.0)
    assert watch.crowded


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="cores cannot be chosen here")
def test_only_cores_that_may_be_used_count() -> None:
    code = (
        "import os, time; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "from adaptive.machine import LoadMeter; meter = LoadMeter(); time.sleep(0.5); load = meter.read()\n"
        "assert load.cores == 1 and load.others <= 1, load"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_quota_is_found_at_every_level(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    membership, root = tmp_path / "membership", tmp_path / "fs"
    monkeypatch.setattr(machine, "MEMBERSHIP", membership)
    monkeypatch.setattr(machine, "CGROUPS", root)
    membership.write_text("0::/user/app\n")
    (root / "user" / "app").mkdir(parents=True)
    assert quota() == float("inf")
    (root / "user" / "app" / "cpu.max").write_text("max 100000\n")
    (root / "user" / "cpu.max").write_text("150000 100000\n")
    assert quota() == 1.5
    membership.write_text("4:memory:/x\n1:cpu,cpuacct:/x\n")
    (root / "cpu,cpuacct" / "x").mkdir(parents=True)
    (root / "cpu,cpuacct" / "x" / "cpu.cfs_quota_us").write_text("-1\n")
    (root / "cpu,cpuacct" / "x" / "cpu.cfs_period_us").write_text("100000\n")
    assert quota() == float("inf")
    (root / "cpu,cpuacct" / "x" / "cpu.cfs_quota_us").write_text("50000\n")
    assert quota() == 0.5


def test_the_machine_and_how_it_is_run_have_a_name(tmp_path: Path) -> None:
    assert identity() == identity()
    assert "cores; " in identity()
    (tmp_path / "scaling_governor").write_text("powersave\n")
    assert _governor(tmp_path) == "; powersave"
