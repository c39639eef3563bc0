"""Background training: a real worker process on a tiny pair, which is paused, killed, starved and left alone."""

from __future__ import annotations

import io
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import psutil
import pytest
from conftest import save_random_pair
from shortages import replaced_by_a_folder
from store_factory import NEW, published, write
from test_trainer import small_draft, speak, target, write_log
from test_trainer_command import tokenizer

from adaptive.pair import pair_identity
from adaptive.pipe import Order, Report, Stage
from adaptive.records.log import Log
from adaptive.service.doubts import Doubt
from adaptive.service.trainer import Trainer, background
from adaptive.settings import Settings
from adaptive.state import PairState, open_state
from adaptive.types import Round, SamplingParams
from checkpoints.manifest import HeldOut, Interval, TrainedOn
from checkpoints.store import AdapterStore
from trainers.worker import Brake, train

# Timeout in seconds of work that takes a few on an idle machine.
PATIENCE_S = 300.0
ANSWERS = 80


@dataclass(frozen=True)
class Taught:
    """A pair whose log holds ANSWERS answers."""

    settings: Settings
    state: PairState


@pytest.fixture
def taught(tmp_path: Path) -> Taught:
    for name, model in (("target", target()), ("draft", small_draft())):
        model.save_pretrained(tmp_path / name)
        tokenizer().save_pretrained(tmp_path / name)
    settings = Settings(
        target=str(tmp_path / "target"),
        draft=str(tmp_path / "draft"),
        home=tmp_path / "home",
        device="cpu",
        distill_after=50,
        distill_idle_seconds=0.2,
        distill_nice=0,
        distill_seconds=8.0,
    )
    state = open_state(settings.state_dir, pair_identity(settings).id)
    write_log(state.records, speak(target(), ANSWERS, SamplingParams(temperature=0.7)))
    return Taught(settings, state)


@contextmanager
def training(taught: Taught, draft_bytes: int = 1, **changes: object) -> Iterator[Trainer]:
    trainer = Trainer(taught.settings.model_copy(update=changes), taught.state, draft_bytes)
    trainer.start()
    try:
        yield trainer
    finally:
        trainer.close()


def until(what: Callable[[], bool], trainer: Trainer) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not what():
        assert time.monotonic() < deadline, trainer.status
        time.sleep(0.02)


def let_it_look(trainer: Trainer) -> None:
    """Wait until the trainer has looked twice at the log, counted from now."""
    looks, look = [], trainer._look

    def counted(log: Log) -> None:
        look(log)
        looks.append(log)

    trainer._look = counted  # type: ignore[method-assign]
    until(lambda: len(looks) >= 2, trainer)


def ends(trainer: Trainer, report: Report, reviewing: bool = False) -> None:
    """Let a run, or a review, of this trainer have ended with this report."""
    with subprocess.Popen([sys.executable, "-c", ""], text=True) as process:
        process.wait()
        trainer._process, trainer._report, trainer._reviewing = process, report, reviewing
        trainer._conclude(process)


def carried_out(taught: Taught, review: bool = False) -> Report:
    """The last report of a run in this process."""
    order = Order(taught.settings.for_worker(), str(taught.state.root), paused=False, review=review)
    reading, writing = os.pipe()
    with os.fdopen(reading) as commands, os.fdopen(writing, "w"):
        return train(order, Brake(commands, paused=False), io.StringIO())


def worker_of(trainer: Trainer) -> int:
    until(lambda: trainer.status.activity in ("training", "paused"), trainer)
    assert trainer._process is not None
    return trainer._process.pid


def frozen(process: int) -> bool:
    try:
        return bool(psutil.Process(process).status() == psutil.STATUS_STOPPED)
    except psutil.NoSuchProcess:
        return False


@pytest.mark.thorough
def test_a_round_waits_until_nobody_asks_pauses_for_a_request_and_is_judged(taught: Taught) -> None:
    with training(taught) as trainer:
        until(lambda: "in use" in trainer.status.reason, trainer)
        trainer.idle()
        until(lambda: trainer.status.acceptance is not None, trainer)
        assert math.isfinite(trainer.status.acceptance or 0.0)  # None, not nan, before the first evaluation
        worker = worker_of(trainer)
        trainer.busy()
        assert trainer.status.activity == "paused"
        if sys.platform == "linux":
            until(lambda: frozen(worker), trainer)
        else:
            time.sleep(0.3)  # until the current pass ends
        paused_at = trainer.status.share
        time.sleep(0.7)
        assert trainer.status.share == paused_at
        trainer.idle()
        until(lambda: trainer.runs == 1, trainer)
        assert trainer.status.last_run
        until(lambda: "0 new answers" in trainer.status.reason, trainer)
    manifests = AdapterStore(taught.state.adapters).list()
    assert [manifest.status for manifest in manifests] in (["promoted"], ["rejected"])


def test_answers_that_another_process_has_trained_on_are_not_new(taught: Taught) -> None:
    """`adaptive distill` beside a server, say, or a chat and a server on one pair."""
    with training(taught) as trainer:
        until(lambda: f"{ANSWERS} new answers; the assistant is in use" in trainer.status.reason, trainer)
        judged = HeldOut(10, 900, 4, *[Interval(0.5, 0.4, 0.6)] * 5)
        new = replace(NEW, recent=judged, trained_on=TrainedOn(1, ANSWERS, ANSWERS, 5000, {}), reason="kept, as asked")
        AdapterStore(taught.state.adapters).publish(write, new)
        trainer.idle()
        until(lambda: "0 new answers" in trainer.status.reason, trainer)
        assert trainer.runs == 0


@pytest.mark.thorough
def test_a_killed_worker_is_seen_and_nothing_is_lost(taught: Taught) -> None:
    with training(taught) as trainer:
        trainer.idle()
        pid = worker_of(trainer)
        score = Path(f"/proc/{pid}/oom_score_adj")
        if score.exists():  # the kernel kills the worker before the server
            until(lambda: score.read_text() == "500\n", trainer)
        os.kill(pid, signal.SIGKILL)
        until(lambda: trainer.status.activity == "backing off", trainer)
        assert "signal 9" in trainer.status.reason
        assert trainer.crashes == 1
    with Log(taught.state.records) as log:
        assert log.count() == ANSWERS
    assert AdapterStore(taught.state.adapters).current_id() is None


@pytest.mark.parametrize("stage", ["memory", "failed"])
def test_what_may_pass_is_tried_again_later_and_later_and_is_not_taken_for_training(
    taught: Taught, stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    trainer, pauses = Trainer(taught.settings, taught.state, 1), []
    trainer._newest = trainer._read_until = ANSWERS
    for _ in range(3):
        ends(trainer, Report(stage, "the disk or the memory is full"))
        pauses.append(trainer._not_before - time.monotonic())
    assert pauses == pytest.approx([30.0, 60.0, 120.0], abs=5.0)
    assert trainer.status.new_generations == ANSWERS
    warnings = [one for one in caplog.records if one.levelname == "WARNING"]
    assert "the disk or the memory is full; next try in 30 s" in warnings[0].getMessage()
    ends(trainer, Report("refused", "too little to distil from"))
    assert trainer.status.new_generations == 0
    ends(trainer, Report(stage, "full again"))
    assert trainer._not_before - time.monotonic() == pytest.approx(30.0, abs=5.0)


def test_a_review_that_fails_does_not_keep_training_from_its_turn(taught: Taught) -> None:
    published(taught.state.adapters, 1, promote=1)
    trainer = Trainer(taught.settings, taught.state, 1)
    trainer._newest = ANSWERS
    for _ in range(2):
        assert trainer._review_is_next()
        ends(trainer, Report("memory", "the machine is short of memory"), reviewing=True)
        assert not trainer._review_is_next()
        ends(trainer, Report("memory", "the machine is short of memory"))
    trainer._seen = ANSWERS  # nothing to train on
    ends(trainer, Report("failed", "the log cannot be read now"), reviewing=True)
    assert trainer._review_is_next()


def test_a_run_that_kept_nothing_is_not_repeated_at_the_next_start(taught: Taught) -> None:
    trainer = Trainer(taught.settings, taught.state, 1)
    ends(trainer, Report("done", "No state of training was as good as the draft in use", until=ANSWERS - 10))
    with training(taught) as again:
        again.idle()
        until(lambda: "10 new answers of the 50" in again.status.reason, again)
    assert again.runs == 0


@pytest.mark.parametrize(
    ("more", "needed"),
    [
        (15, "10 new answers of the 15 "),
        (60, "10 new answers of the 50 "),
        (None, "10 new answers of the 50 "),
        (7, "10 new answers; the assistant is in use"),
    ],
)
def test_a_run_that_was_refused_is_tried_again_after_as_many_answers_as_it_lacked(
    taught: Taught, more: int | None, needed: str
) -> None:
    trainer = Trainer(taught.settings, taught.state, 1)
    trainer._newest = trainer._read_until = ANSWERS - 10
    ends(trainer, Report("refused", "too little to distil from", more=more))
    with training(taught) as again:
        until(lambda: needed in again.status.reason, again)
    ends(trainer, Report("done", "No state of training was as good as the draft in use", until=ANSWERS))
    with training(taught) as again:
        until(lambda: "0 new answers of the 50 " in again.status.reason, again)


def test_an_answer_too_few_is_told_by_number(taught: Taught) -> None:
    with Log(taught.state.records) as log:
        log.purge(ids=range(6, ANSWERS + 1))
    report = carried_out(taught)
    assert report.stage == "refused"
    assert report.more
    assert f"about {report.more} more will do" in report.message


@pytest.mark.thorough
def test_a_run_whose_adapter_could_not_be_published_is_gone_on_with(taught: Taught) -> None:
    lock = taught.state.adapters / ".lock"
    lock.mkdir(parents=True)  # an error that even the superuser gets
    last = carried_out(taught)
    assert last.stage == "failed"
    assert "cannot be written" in last.message
    lock.rmdir()
    last = carried_out(taught)
    assert last.stage == "done", last.message
    assert "going on with the run that was interrupted" in last.message


@pytest.mark.parametrize("review", [False, True])
def test_after_the_models_files_were_replaced_nothing_is_trained_or_judged_under_their_name(
    taught: Taught, review: bool
) -> None:
    store = published(taught.state.adapters, 2, promote=1)
    small_draft().save_pretrained(str(taught.settings.target))
    last = carried_out(taught, review)
    assert last.stage == "failed"
    assert "the models' files have changed since this program started" in last.message
    assert (store.current_id(), len(store.list())) == ("0001", 2)


@pytest.mark.parametrize("review", [False, True])
def test_while_the_adapter_in_use_cannot_be_read_nothing_is_trained_or_judged(taught: Taught, review: bool) -> None:
    store = published(taught.state.adapters, 2, promote=2)
    with replaced_by_a_folder(store.path("0002") / "adapter_model.safetensors"):
        last = carried_out(taught, review)
    assert last.stage == "failed"
    assert "adapter 0002: adapter_model.safetensors" in last.message
    assert (store.current_id(), len(store.list())) == ("0002", 2)


def test_why_no_head_is_trained_on_a_target_is_said(tmp_path: Path) -> None:
    settings = Settings(target=str(save_random_pair(tmp_path, "gpt_neox")[0]), home=tmp_path / "home", device="cpu")
    state = open_state(settings.state_dir, pair_identity(settings).id)
    with background(settings, state) as trainer:
        until(lambda: "no head can be grown on a GPTNeoXForCausalLM" in trainer.status.reason, trainer)
        assert trainer.status.activity == "off"


@pytest.mark.thorough
def test_a_worker_that_fails_says_why(taught: Taught) -> None:
    assert taught.settings.draft is not None
    (Path(taught.settings.draft) / "model.safetensors").write_bytes(b"broken")
    with training(taught) as trainer:
        trainer.idle()
        until(lambda: trainer.status.last_run is not None, trainer)
        assert "model" in str(trainer.status.last_run)


@pytest.mark.parametrize(
    ("changes", "draft_bytes", "reason"),
    [
        ({"distill": "off"}, 1, "switched off"),
        ({}, 0, "no draft"),
        ({}, 10**15, "memory"),
        ({"distill_after": ANSWERS + 1}, 1, "80 new answers of the 81"),
        ({"distill": "closed"}, 1, "only"),
    ],
)
def test_what_training_waits_for_is_said(
    taught: Taught, changes: dict[str, object], draft_bytes: int, reason: str
) -> None:
    if changes.get("distill") == "closed":
        hour = time.localtime(time.time() + 6 * 3600).tm_hour
        changes = {"distill": f"{hour:02d}:00-{hour:02d}:30"}
    with training(taught, draft_bytes, **changes) as trainer:
        trainer.idle()
        until(lambda: reason in trainer.status.reason, trainer)
        assert trainer.status.activity in ("off", "waiting")


def test_a_worker_whose_parent_is_gone_ends(taught: Taught) -> None:
    worker = subprocess.Popen(
        [sys.executable, "-m", "trainers.worker"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    settings = taught.settings.model_dump(mode="json", exclude={"api_key", "api_key_file"})
    order = Order(settings, str(taught.state.root), paused=True)
    out, _ = worker.communicate(order.line(), timeout=PATIENCE_S)
    assert worker.returncode == 0
    assert Report.of(out.splitlines()[-1]).stage == "stopped"


def test_a_manifest_damaged_while_it_is_in_use_is_said_and_training_goes_on(
    taught: Taught, caplog: pytest.LogCaptureFixture
) -> None:
    store = published(taught.state.adapters, 2, promote=2)
    Doubt(reviewed=ANSWERS).save(taught.state.doubts)
    with training(taught, distill_after=ANSWERS + 1) as trainer:
        trainer.idle()
        let_it_look(trainer)
        (store.path("0002") / "manifest.json").write_text("{", encoding="utf-8")
        until(lambda: store.current_id() == "0001", trainer)
        let_it_look(trainer)
        assert "80 new answers of the 81" in trainer.status.reason
    said = [record.getMessage() for record in caplog.records if "0002" in record.getMessage()]
    assert len(said) == 1
    assert "set aside as 0002.damaged" in said[0]


def test_what_could_not_be_read_at_the_start_is_read_later(taught: Taught) -> None:
    store = published(taught.state.adapters, 1, promote=1)
    store.rollback("live acceptance fell")
    Doubt("0001", settled=70, reviewed=ANSWERS, trained=70).save(taught.state.doubts)
    with replaced_by_a_folder(taught.state.records), training(taught, distill="off") as trainer:
        until(lambda: "adapter 0001 is out of use" in trainer.status.watch, trainer)
        assert trainer.status.new_generations == 0
    with replaced_by_a_folder(taught.state.doubts):
        trainer = Trainer(taught.settings, taught.state, 1)
        trainer.start()
        until(lambda: trainer.status.new_generations == ANSWERS, trainer)
    try:
        until(lambda: "adapter 0001 is out of use" in trainer.status.watch, trainer)
    finally:
        trainer.close()
    ends(trainer, Report("refused", "too little to distil from"))
    found = Doubt.load(taught.state.doubts)
    assert (found.adapter, found.settled, found.reviewed) == ("0001", 70, ANSWERS)


def live(trainer: Trainer, adapter: str | None, rate: float, rounds: int, seed: int) -> None:
    """Report answers of 20 rounds with four drafted tokens, each accepted with probability ``rate`` until a
    rejection."""
    rng = np.random.default_rng(seed)
    for _ in range(rounds // 20):
        accepted = [int(min(4, rng.geometric(1 - rate) - 1)) for _ in range(20)]
        trainer.answered(adapter, tuple(Round("model", 4, n, 0.01, 0.02) for n in accepted))


@pytest.mark.thorough
def test_a_draft_that_got_worse_goes_back_by_itself_and_a_good_one_stays(taught: Taught) -> None:
    store = published(taught.state.adapters, 2)
    with training(taught, distill="off") as trainer:
        live(trainer, None, 0.6, 400, seed=1)
        store.promote("0001", "better on held-out records")
        live(trainer, "0001", 0.6, 300, seed=2)
        let_it_look(trainer)
        assert store.current_id() == "0001"
        store.promote("0002", "forced")
        live(trainer, "0002", 0.3, 300, seed=3)
        until(lambda: store.current_id() == "0001", trainer)
    assert store.show("0002").status == "rolled_back"
    assert "live acceptance fell" in store.show("0002").reason


def test_a_run_ends_if_memory_gets_short(taught: Taught, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainers.worker.memory_is_short", lambda: True)
    report = carried_out(taught)
    assert (report.stage, report.adapter) == ("memory", None)
    assert "short of memory" in report.message
    assert not AdapterStore(taught.state.adapters).list()


@pytest.mark.parametrize(
    ("window", "inside", "outside"),
    [
        ("22:00-06:00", [(22, 0), (23, 30), (0, 0), (5, 59)], [(21, 59), (6, 0), (12, 0)]),
        ("09:30-17:00", [(9, 30), (16, 59)], [(9, 29), (17, 0), (0, 0)]),
    ],
)
def test_training_keeps_to_its_hours_of_the_day(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    window: str,
    inside: list[tuple[int, int]],
    outside: list[tuple[int, int]],
) -> None:
    trainer = Trainer(Settings(distill=window), open_state(tmp_path, "pair"), 1)
    for hour, minute in inside + outside:
        now = time.struct_time((2026, 11, 28, hour, minute, 0, 5, 332, 0))
        monkeypatch.setattr("adaptive.service.trainer.time.localtime", lambda *_, now=now: now)
        assert trainer._in_window() is ((hour, minute) in inside)
