"""A killed round resumes where it stopped, and several processes train as one."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.torch import load_file
from test_records_damage import damage_column
from test_trainer import BASE, SHORT, small_draft, speak, target, write_log
from test_trainer_command import distill as command
from test_trainer_command import tokenizer

from adaptive.pair import pair_identity
from adaptive.settings import Settings
from adaptive.state import PairState, open_state
from adaptive.types import Generation, SamplingParams
from checkpoints.store import AdapterStore
from trainers.recipe import Recipe
from trainers.run import DistillOutcome, distill

# Timeout in seconds of work that takes a few on an idle machine.
PATIENCE_S = 180.0
ROOT = Path(__file__).resolve().parent.parent
LONGER = Recipe(**{**SHORT.to_json(), "epochs": 10, "patience": 100})

# Arguments before those of `adaptive`, for one process and for two.
ONE = ["-m", "cli.main"]
TWO = ["-m", "torch.distributed.run", "--nproc-per-node", "2", *ONE]

# `adaptive` as on a processor without bfloat16: with bfloat16 each process rounds its part of a gradient separately,
# which moves the weights by some percent of their size.
FLOAT32 = """
import torch
torch.cpu._is_avx512_bf16_supported = torch.cpu._is_amx_tile_supported = lambda: False
from cli.main import run
run()
"""

TRAIN = """
import sys, torch
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_processes import LONGER, round_in
torch.set_num_threads(1)
round_in(Path(sys.argv[1]), LONGER)
"""

ONE_IS_STOPPED = """
import json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_trainer import BASE, SHORT, small_draft
from checkpoints.store import AdapterStore
from trainers import processes
from trainers.run import distill
processes.join("cpu")
folder = Path(sys.argv[1])
store = AdapterStore(folder / "adapters")
outcome = distill(folder / "records.db", store, BASE, small_draft(), SHORT, should_stop=lambda: not processes.first())
if processes.first():
    print(json.dumps({"stopped": outcome.stopped, "steps": outcome.steps}))
processes.leave()
"""


def round_in(folder: Path, recipe: Recipe) -> DistillOutcome:
    """Run one resumable round on the log in ``folder``."""
    state = PairState(folder)
    return distill(
        state.records, AdapterStore(state.adapters), BASE, small_draft(), recipe,
        promotion="never", state=state.training,
    )  # fmt: skip


def weights(folder: Path, outcome: DistillOutcome) -> dict[str, Any]:
    assert outcome.manifest is not None
    return load_file(AdapterStore(folder / "adapters").path(outcome.manifest.id) / "adapter_model.safetensors")


def wait_for(file: Path, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not file.exists():
        assert time.monotonic() < deadline
        assert process.poll() is None, "it ended by itself"
        time.sleep(0.005)


def killed(arguments: list[str], until: Path) -> None:
    """Start a command, and kill it and all its children once the file ``until`` exists."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([sys.executable, *arguments], env=environment)
    try:
        wait_for(until, process)
    finally:
        started = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        for one in started:
            one.send_signal(signal.SIGKILL)
        process.wait()
        psutil.wait_procs(started, timeout=PATIENCE_S)


def ran(arguments: list[str]) -> Any:
    """Run a command to its end; returns the JSON that it printed."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 0, done.stderr.decode()
    return json.loads(done.stdout)


def saved_pair(folder: Path, home: Path) -> tuple[list[str], PairState]:
    """A tiny pair in ``folder``, the options that name it, and its state."""
    for name, model in (("target", target()), ("draft", small_draft())):
        model.save_pretrained(folder / name)
        tokenizer().save_pretrained(folder / name)
    pair = ["--target", str(folder / "target"), "--draft", str(folder / "draft"), "--device", "cpu"]
    return pair, open_state(home, pair_identity(Settings(target=pair[1], draft=pair[3], home=home)).id)


@pytest.fixture(scope="module")
def spoken() -> list[Generation]:
    return speak(target(), 80, SamplingParams(temperature=0.7))


@pytest.mark.thorough
def test_a_killed_round_goes_on_to_the_very_adapter_it_would_have_made(
    tmp_path: Path, spoken: list[Generation]
) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    for folder in (whole, broken):
        folder.mkdir()
        write_log(folder / "records.db", spoken)
    undisturbed = round_in(whole, LONGER)
    killed(["-c", TRAIN, str(broken), str(Path(__file__).parent)], broken / "training.safetensors")
    # Records written in between wait for the next round: this one ends on the records it began with.
    write_log(broken / "records.db", speak(target(), 8, SamplingParams(temperature=0.7), seed=5))
    resumed = round_in(broken, LONGER)
    assert "interrupted" in " ".join(resumed.notes)
    assert (undisturbed.until, resumed.until) == (80, 80)  # a trainer learns from this that 8 answers are new
    assert resumed.steps == undisturbed.steps
    assert resumed.train_generations == undisturbed.train_generations
    expected, made = weights(whole, undisturbed), weights(broken, resumed)
    assert all(made[name].equal(expected[name]) for name in expected)
    assert not (broken / "training.safetensors").exists()
    assert not undisturbed.notes


@pytest.mark.thorough
def test_another_recipe_or_a_purged_record_starts_afresh(tmp_path: Path, spoken: list[Generation]) -> None:
    write_log(tmp_path / "records.db", spoken)
    killed(["-c", TRAIN, str(tmp_path), str(Path(__file__).parent)], tmp_path / "training.safetensors")
    kept = (tmp_path / "training.safetensors").read_bytes()
    brief = Recipe(**{**SHORT.to_json(), "epochs": 1})
    assert not round_in(tmp_path, brief).notes
    (tmp_path / "training.safetensors").write_bytes(kept)
    (tmp_path / "records.db").unlink()
    write_log(tmp_path / "records.db", spoken[1:])
    assert not round_in(tmp_path, LONGER).notes


def test_a_damaged_checkpoint_starts_afresh(tmp_path: Path, spoken: list[Generation]) -> None:
    write_log(tmp_path / "records.db", spoken)
    (tmp_path / "training.safetensors").write_bytes(b"\x10\x00")
    outcome = round_in(tmp_path, Recipe(**{**SHORT.to_json(), "epochs": 1}))
    assert outcome.steps > 0
    assert not outcome.notes


@pytest.mark.thorough
def test_two_processes_are_as_good_as_one_also_after_a_kill(tmp_path: Path, own_home: Path) -> None:
    pair, state = saved_pair(tmp_path, own_home)
    write_log(state.records, speak(target(), 80, SamplingParams(temperature=0.7)))
    training = ["--no-promote", "--json", "--epochs", "20", "--lr", "0.005", "--rank", "8"]
    alone = json.loads(command(pair, *training).stdout)

    launched = [*TWO, "distill", *pair, *training]
    killed(launched, state.training)
    together = ran(launched)
    assert "interrupted" in " ".join(together["notes"])
    assert together["train_generations"] == alone["train_generations"]
    interval = alone["recent"]["acceptance_after"]
    assert interval["low"] <= together["recent"]["acceptance_after"]["mean"] <= interval["high"]
    # Only one process writes: the two runs left one adapter each.
    assert len(AdapterStore(state.adapters).list()) == 2


@pytest.mark.thorough
def test_one_process_that_is_stopped_while_it_reads_stops_all(tmp_path: Path, spoken: list[Generation]) -> None:
    write_log(tmp_path / "records.db", spoken)
    (tmp_path / "stopped.py").write_text(ONE_IS_STOPPED)
    arguments = [str(tmp_path / "stopped.py"), str(tmp_path), str(Path(__file__).parent)]
    assert ran([*TWO[:-2], *arguments]) == {"stopped": True, "steps": 0}


@pytest.mark.thorough
def test_three_logs_of_a_team_give_the_same_adapter_in_two_processes_as_in_one(tmp_path: Path, own_home: Path) -> None:
    pair, state = saved_pair(tmp_path, own_home)
    said = [
        dataclasses.replace(one, text=str(tokenizer().decode(one.output)))
        for one in speak(target(), 90, SamplingParams(temperature=0.7))
    ]
    logs = []
    for number, name in enumerate(("first", "second", "third")):
        (tmp_path / name).mkdir()
        logs.append(str(write_log(tmp_path / name / "records.db", said[number::3] + said[:5])))
    imported = ran([*ONE, "records", "import", *logs, *pair[:4], "--json"])
    assert (imported["taken"], imported["known"]) == (90, 15)
    # The default loss mixes by the mean acceptance of a pass, and two processes split a batch into two passes.
    training = ["--no-promote", "--json", "--epochs", "2", "--lr", "0.005", "--rank", "8", "--loss", "forward-kl"]
    (tmp_path / "float32.py").write_text(FLOAT32)
    starts = [[*start[:-2], str(tmp_path / "float32.py")] for start in (ONE, TWO)]
    made = [ran([*start, "distill", *pair, *training]) for start in starts]
    assert made[0]["train_generations"] == made[1]["train_generations"] > 40
    store = AdapterStore(state.adapters)
    alone, together = (
        load_file(store.path(one.id) / "adapter_model.safetensors")
        for one in sorted(store.list(), key=lambda one: one.id)
    )
    for name, weight in alone.items():
        assert weight.norm() > 0
        assert (together[name] - weight).norm() < 1e-5 * weight.norm()
    after = [one["recent"]["acceptance_after"]["mean"] for one in made]
    assert after[0] == pytest.approx(after[1], abs=0.01)


@pytest.mark.thorough
def test_a_damaged_record_does_not_end_training_and_is_counted(tmp_path: Path) -> None:
    state = PairState(tmp_path)
    log = write_log(state.records, speak(target(), 80, SamplingParams(temperature=0.7)))
    for number, column in ((3, "supervision"), (40, "output")):
        damage_column(log, number, column)
    outcome = round_in(tmp_path, SHORT)
    assert outcome.manifest is not None
    assert [note for note in outcome.notes if "damaged" in note] == [
        "2 damaged records are left out; `adaptive records check` names what is damaged"
    ]
