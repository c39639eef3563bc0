"""Training waits for requests to other processes on the same state folder."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from test_worker import Taught, let_it_look, taught, training, until, worker_of

from adaptive.service.presence import Presence
from adaptive.service.trainer import LOOK_S, QUIET_S, SELDOM_S, Trainer
from adaptive.settings import Settings
from adaptive.state import open_state

__all__ = ["taught"]  # a fixture


@pytest.mark.thorough
def test_no_run_begins_or_goes_on_while_another_process_answers(taught: Taught) -> None:
    """A server and a chat on one pair, say: each hears of its own requests only."""
    with training(taught, distill="off") as chat, training(taught, distill_idle_seconds=1.5) as server:
        chat.busy()
        server.idle()
        time.sleep(1.5)
        let_it_look(server)
        assert server.status.activity == "waiting"
        assert "in use" in server.status.reason
        chat.idle()
        worker_of(server)
        chat.busy()
        until(lambda: server.status.activity == "paused", server)
        time.sleep(1.5)
        let_it_look(server)
        assert server.status.activity == "paused"
        chat.idle()
        until(lambda: server.status.activity != "paused", server)


def test_who_was_answered_here_is_no_other_process(tmp_path: Path) -> None:
    here, beside = Presence(tmp_path / "in-use"), Presence(tmp_path / "in-use")
    assert not here.others(60)
    here.tell()
    assert not here.others(60)
    assert beside.others(60)
    for seconds_ago in (90, -90):  # or the clock was set back
        at = time.time() - seconds_ago
        os.utime(tmp_path / "in-use", (at, at))
        assert not beside.others(60)
    Presence(tmp_path / "missing" / "in-use").tell()


def test_a_trainer_that_nobody_has_work_for_seldom_looks(tmp_path: Path) -> None:
    """At the log and the clock, which would take up to a hundredth of a processor day and night."""
    trainer = Trainer(Settings(distill_idle_seconds=0.2), open_state(tmp_path, "pair"), 1)

    def nothing_happens() -> None:
        trainer._quiet_since -= QUIET_S
        trainer._happened -= QUIET_S

    assert trainer._until_next_look() == LOOK_S
    nothing_happens()
    assert trainer._until_next_look() == SELDOM_S
    trainer.busy()
    assert trainer._until_next_look() == LOOK_S
    trainer.idle()
    assert trainer._until_next_look() == LOOK_S
    nothing_happens()
    assert trainer._until_next_look() == SELDOM_S
    Presence(trainer.state.in_use).tell()  # by another process
    assert trainer._until_next_look() == LOOK_S
