"""The best draft for what is said now is in use: replay takes an adapter out of use and brings it back."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from test_trainer import BASE, SHORT, small_draft, speak, target, write_log
from test_worker import Taught, let_it_look, live, taught, training, until
from transformers import PreTrainedModel

from adaptive.errors import AdaptiveError
from adaptive.pair import pair_identity
from adaptive.service.doubts import REVIEWED, Doubt, Doubts, end_doubt
from adaptive.state import open_state
from adaptive.types import Generation, SamplingParams
from checkpoints.manifest import BaseDraft, TrainedOn
from checkpoints.store import AdapterStore, NewAdapter
from trainers import lora
from trainers.dataset import Stopped
from trainers.recipe import Recipe
from trainers.replay import Replay
from trainers.review import FEW, MANY, better, review
from trainers.run import distill

__all__ = ["taught"]

SAMPLED = SamplingParams(temperature=0.7)


def said_under(adapter: str, seed: int, count: int = 40) -> list[Generation]:
    """Answers that began while ``adapter`` was in use."""
    return [dataclasses.replace(one, adapter=adapter) for one in speak(target(), count, SAMPLED, seed)]


def publish_noise(store: AdapterStore, draft: PreTrainedModel | None = None, base: BaseDraft = BASE) -> str:
    """Publish an adapter that makes the draft (None: the small one) guess worse."""
    model = lora.attach(draft or small_draft(), Recipe())
    torch.manual_seed(1)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight.data, std=0.5)
    state = lora.snapshot(model)
    new = NewAdapter(base, TrainedOn(None, None, 0, 0))
    return store.publish(lambda folder: lora.write(model, state, folder), new).id


def replays(*rates: float) -> list[Replay]:
    """One replay of 30 positions for each acceptance, which varies a little from one to the next."""
    varied = np.random.default_rng(0).normal(0, 0.03, len(rates))
    return [
        Replay(number, np.full((1, 30), rate + noise, np.float32), False)
        for number, (rate, noise) in enumerate(zip(rates, varied, strict=True))
    ]


def test_the_newest_answers_decide_between_drafts() -> None:
    maths, code = MANY - FEW, FEW
    adapter = replays(*[0.5] * maths, *[0.38] * code)
    plain = replays(*[0.28] * maths, *[0.7] * code)
    found = better(adapter, plain)  # though over all answers the adapter is better
    assert found is not None
    assert found.generations == FEW
    assert better(plain, adapter) is None
    assert better(plain[:maths], adapter[:maths]) is not None


def test_a_small_gain_needs_many_answers_and_a_tiny_one_is_no_reason_to_swap() -> None:
    def apart(by: float, count: int) -> tuple[list[Replay], list[Replay]]:
        rng = np.random.default_rng(1)
        before, after = rng.normal(0.5, 0.05, count), rng.normal(0.5 + by, 0.05, count)
        return replays(*before), replays(*after)

    assert better(*apart(0.03, FEW)) is None
    assert better(*apart(0.03, MANY)) is not None
    assert better(*apart(0.01, MANY)) is None
    assert better(*apart(-0.1, MANY)) is None


@pytest.mark.thorough
def test_the_better_draft_is_named_and_nothing_is_changed(tmp_path: Path) -> None:
    store = AdapterStore(tmp_path / "adapters")
    log = write_log(tmp_path / "records.db", speak(target(), 100, SAMPLED))
    learned = distill(log, store, BASE, small_draft(), SHORT).manifest
    assert learned is not None
    assert learned.status == "promoted"
    with pytest.raises(AdaptiveError, match="too little was said since the last training"):
        review(log, store, BASE, small_draft(), None)
    write_log(log, said_under(learned.id, seed=7))
    found = review(log, store, BASE, small_draft(), None)
    assert found.best == learned.id
    assert "stays in use" in found.message

    store.rollback("live acceptance fell")
    with pytest.raises(AdaptiveError, match="no other draft"):
        review(log, store, BASE, small_draft(), None)
    found = review(log, store, BASE, small_draft(), learned.id)
    assert found.best == learned.id
    assert f"adapter {learned.id} has an acceptance of" in found.message
    assert store.current_id() is None

    bad = publish_noise(store)
    store.promote(bad, "forced")
    assert review(log, store, BASE, small_draft(), learned.id).best == learned.id
    assert store.current_id() == bad


@pytest.mark.thorough
def test_the_plain_draft_is_named_where_an_adapter_is_worse_than_none(tmp_path: Path) -> None:
    store = AdapterStore(tmp_path / "adapters")
    log = write_log(tmp_path / "records.db", speak(target(), 40, SAMPLED))
    store.promote(publish_noise(store, target()), "forced")
    found = review(log, store, BASE, target(), None)  # the draft is the target itself
    assert found.best is None
    assert "the draft without an adapter has an acceptance of 1.00" in found.message


@pytest.mark.thorough
def test_an_answer_that_is_repeated_counts_once(tmp_path: Path) -> None:
    store = AdapterStore(tmp_path / "adapters")
    log = write_log(tmp_path / "records.db", said_under(publish_noise(store), seed=7, count=1) * 40)
    store.promote("0001", "forced")
    with pytest.raises(AdaptiveError, match="1 answer"):
        review(log, store, BASE, small_draft(), None)


def test_the_newest_answers_are_read_no_further_than_wanted(tmp_path: Path) -> None:
    store = AdapterStore(tmp_path / "adapters")
    log = write_log(tmp_path / "records.db", said_under(publish_noise(store), seed=7, count=1))
    store.promote("0001", "forced")
    with pytest.raises(AdaptiveError, match="1 answer"):
        review(log, store, BASE, small_draft(), None, lambda: False)
    with pytest.raises(Stopped):  # before the answers are counted
        review(log, store, BASE, small_draft(), None, lambda: True)


@pytest.mark.thorough
def test_a_trainer_takes_an_adapter_out_of_use_that_is_worse_than_no_adapter(taught: Taught) -> None:
    target().save_pretrained(str(taught.settings.draft))  # a draft that needs no adapter
    state = open_state(taught.settings.state_dir, pair_identity(taught.settings).id)
    write_log(state.records, speak(target(), 80, SAMPLED))
    taught = Taught(taught.settings, state)
    store = AdapterStore(state.adapters)
    for _ in range(2):  # the plain draft is better than what a rollback would return to, too
        store.promote(publish_noise(store, target(), pair_identity(taught.settings).base), "forced")
    with training(taught, distill_after=10**6) as trainer:
        trainer.idle()
        until(lambda: store.current_id() is None, trainer)
        until(lambda: "adapter 0002 is out of use" in trainer.status.watch, trainer)
        assert "the draft without an adapter has an acceptance of 1.00" in trainer.status.watch
        assert trainer.runs == 0
        until(lambda: trainer.status.activity == "waiting", trainer)
    assert Doubt.load(taught.state.doubts) == Doubt("0002", settled=80, reviewed=80)


@pytest.mark.thorough
def test_a_trainer_brings_back_what_it_had_rolled_back(taught: Taught) -> None:
    store = AdapterStore(taught.state.adapters)
    base = pair_identity(taught.settings).base
    learned = distill(taught.state.records, store, base, small_draft(), SHORT).manifest
    assert learned is not None
    store.rollback("the test begins without it")
    with training(taught, distill_after=10**6) as trainer:
        live(trainer, None, 0.6, 400, seed=1)
        store.promote(learned.id, "better on held-out records")
        # Another kind of text: live acceptance falls with any draft.
        write_log(taught.state.records, said_under(learned.id, seed=9, count=REVIEWED - 4))
        live(trainer, learned.id, 0.3, 300, seed=2)
        until(lambda: store.current_id() is None, trainer)
        live(trainer, None, 0.3, 60, seed=4)
        trainer.idle()
        write_log(taught.state.records, speak(target(), 20, SAMPLED, seed=10))
        until(lambda: store.current_id() == learned.id, trainer)
        assert trainer.runs == 0
        assert "back in use" in store.show(learned.id).reason
        # Acceptance from before the change of subject is no measure any more.
        live(trainer, learned.id, 0.3, 300, seed=3)
        let_it_look(trainer)
        assert store.current_id() == learned.id


def test_drafts_are_compared_after_enough_answers_and_never_without_another(tmp_path: Path) -> None:
    store = AdapterStore(tmp_path / "adapters")
    doubts = Doubts(store, tmp_path / "doubts.json", pytest.fail)
    doubts.remember(0)
    assert not doubts.due(1000)  # no adapter at all
    store.promote(publish_noise(store), "forced")
    assert not doubts.due(REVIEWED - 1)
    assert doubts.due(REVIEWED)
    doubts.reviewed(REVIEWED, newest=REVIEWED)
    assert not doubts.due(2 * REVIEWED - 1)
    assert doubts.due(2 * REVIEWED)
    assert doubts.exchange(None, "0001", "on the newest answers the plain draft is better")
    assert doubts.now == Doubt("0001", settled=REVIEWED, reviewed=REVIEWED)
    assert doubts.text == "adapter 0001 is out of use: on the newest answers the plain draft is better"
    assert doubts.due(2 * REVIEWED)  # it may come back
    assert doubts.exchange("0001", None, "it is better again")
    assert (store.current_id(), doubts.now.adapter) == ("0001", None)
    assert doubts.exchange(None, "0001", "worse again")
    doubts.promoted()
    assert not doubts.due(1000)


def test_a_review_says_nothing_of_an_adapter_that_came_into_use_while_it_ran(tmp_path: Path) -> None:
    store = AdapterStore(tmp_path / "adapters")
    doubts = Doubts(store, tmp_path / "doubts.json", pytest.fail)
    first, second = publish_noise(store), publish_noise(store)
    store.promote(first, "forced")
    store.promote(second, "forced")
    assert doubts.roll_back(second, "live acceptance fell", lambda: 50)
    noted = doubts.now
    assert not doubts.exchange(None, second, "the plain draft is better")  # compared with the second one
    assert (store.current_id(), doubts.now) == (first, noted)
    assert doubts.exchange(None, first, "the plain draft is better")
    assert (store.current_id(), doubts.now.adapter) == (None, first)


def test_a_training_run_by_hand_ends_the_doubt_too(tmp_path: Path) -> None:
    store, file = AdapterStore(tmp_path / "adapters"), tmp_path / "doubts.json"
    Doubt(publish_noise(store), settled=7).save(file)
    end_doubt(store, file, pytest.fail)
    assert Doubt.load(file) == Doubt(None, settled=7)


def test_how_far_training_has_read_is_kept_through_an_exchange_and_a_restart(tmp_path: Path) -> None:
    store = AdapterStore(tmp_path / "adapters")
    store.promote(publish_noise(store), "forced")
    doubts = Doubts(store, tmp_path / "doubts.json", pytest.fail)
    doubts.trained(500, newest=500)
    assert doubts.exchange(None, "0001", "the plain draft is better")
    again = Doubts(store, tmp_path / "doubts.json", pytest.fail)
    assert again.trained_until(newest=600) == 500
    assert again.trained_until(newest=90) == 0, "the log was deleted, and its ids begin anew"


def test_an_adapter_in_doubt_that_is_deleted_stops_no_comparison(tmp_path: Path) -> None:
    store = AdapterStore(tmp_path / "adapters")
    doubts = Doubts(store, tmp_path / "doubts.json", pytest.fail)
    store.promote(publish_noise(store), "forced")
    Doubt(publish_noise(store)).save(tmp_path / "doubts.json")
    doubts.refresh()
    publish_noise(store)
    assert store.prune(1) == ("0002",)
    assert doubts.due(REVIEWED)


@pytest.mark.thorough
def test_a_damaged_adapter_in_doubt_is_left_out(tmp_path: Path) -> None:
    store = AdapterStore(tmp_path / "adapters")
    log = write_log(tmp_path / "records.db", speak(target(), 40, SAMPLED))
    store.promote(publish_noise(store, target()), "forced")
    doubted = publish_noise(store, target())
    (store.path(doubted) / "adapter_model.safetensors").write_bytes(b"nothing")
    assert review(log, store, BASE, target(), doubted).best is None


def test_an_exchange_for_a_damaged_adapter_changes_nothing(tmp_path: Path) -> None:
    store, said = AdapterStore(tmp_path / "adapters"), list[str]()
    doubts = Doubts(store, tmp_path / "doubts.json", said.append)
    store.promote(publish_noise(store), "forced")
    bad = publish_noise(store)
    Doubt(bad).save(tmp_path / "doubts.json")
    (store.path(bad) / "adapter_model.safetensors").write_bytes(b"nothing")
    assert not doubts.exchange(bad, "0001", "better")
    assert (store.current_id(), doubts.now) == ("0001", Doubt(bad))
    assert "adapter_model.safetensors" in said[0]
