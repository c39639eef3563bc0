"""Replay undoes a rollback that a change of subject caused; a rollback that a bad draft caused stays."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from test_trainer import BASE, SHORT, small_draft, speak, target, write_log
from test_worker import Taught, let_it_look, live, taught, training, until

from adaptive.errors import AdaptiveError
from adaptive.pair import pair_identity
from adaptive.types import Generation, SamplingParams
from checkpoints.manifest import TrainedOn
from checkpoints.store import AdapterStore, NewAdapter
from trainers import lora
from trainers.recipe import Recipe
from trainers.reconsider import reconsider
from trainers.run import distill

__all__ = ["taught"]

SAMPLED = SamplingParams(temperature=0.7)


def said_under(adapter: str, seed: int, count: int = 40) -> list[Generation]:
    """Answers that began while ``adapter`` was in use."""
    return [dataclasses.replace(one, adapter=adapter) for one in speak(target(), count, SAMPLED, seed)]


def publish_noise(store: AdapterStore) -> str:
    """Publish an adapter that makes the draft guess worse."""
    model = lora.attach(small_draft(), Recipe())
    torch.manual_seed(1)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight.data, std=0.5)
    state = lora.snapshot(model)
    new = NewAdapter(BASE, TrainedOn(None, None, 0, 0))
    return store.publish(lambda folder: lora.write(model, state, folder), new).id


@pytest.mark.thorough
def test_the_better_draft_comes_back_and_the_worse_one_does_not(tmp_path: Path) -> None:
    store = AdapterStore(tmp_path / "adapters")
    log = write_log(tmp_path / "records.db", speak(target(), 100, SAMPLED))
    learned = distill(log, store, BASE, small_draft(), SHORT).manifest
    assert learned is not None
    assert learned.status == "promoted"
    with pytest.raises(AdaptiveError, match="in use again"):
        reconsider(log, store, BASE, small_draft(), learned.id)
    store.rollback("live acceptance fell")
    with pytest.raises(AdaptiveError, match="nothing was said"):
        reconsider(log, store, BASE, small_draft(), learned.id)
    write_log(log, said_under(learned.id, seed=7))
    manifest, message = reconsider(log, store, BASE, small_draft(), learned.id)
    assert manifest.status == "promoted"
    assert "back in use" in message
    assert store.current_id() == learned.id

    bad = publish_noise(store)
    store.promote(bad, "forced")
    write_log(log, said_under(bad, seed=8))
    store.rollback("live acceptance fell")
    manifest, message = reconsider(log, store, BASE, small_draft(), bad)
    assert manifest.status == "rolled_back"
    assert "stays rolled back" in message
    assert store.current_id() == learned.id


@pytest.mark.thorough
def test_a_trainer_judges_what_it_rolled_back_once_more_when_enough_was_said(taught: Taught) -> None:
    store = AdapterStore(taught.state.adapters)
    base = pair_identity(taught.settings).base
    learned = distill(taught.state.records, store, base, small_draft(), SHORT).manifest
    assert learned is not None
    store.rollback("the test begins without it")
    with training(taught, distill_after=10**6) as trainer:
        live(trainer, None, 0.6, 400, seed=1)
        store.promote(learned.id, "better on held-out records")
        # Another kind of text: live acceptance falls with any draft.
        write_log(taught.state.records, said_under(learned.id, seed=9, count=20))
        live(trainer, learned.id, 0.3, 300, seed=2)
        until(lambda: store.current_id() is None, trainer)
        trainer.idle()
        write_log(taught.state.records, speak(target(), 20, SAMPLED, seed=10))
        until(lambda: store.current_id() == learned.id, trainer)
        until(lambda: "back in use" in str(trainer.status.last_run), trainer)
        assert trainer.runs == 0
        # Acceptance from before the change of subject is no measure any more.
        live(trainer, learned.id, 0.3, 300, seed=3)
        let_it_look(trainer)
        assert store.current_id() == learned.id
