"""A round beside others: adapters promoted meanwhile, drafts judged before, texts repeated or long."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from test_trainer import BASE, SHORT, config, log, small_draft, speak, spoken, target, write_log  # noqa: F401
from transformers import LlamaConfig, LlamaForCausalLM

from adaptive.types import SamplingParams
from checkpoints.store import AdapterStore
from trainers.batches import PASS_LOGITS, PASS_TOKENS, collate, longest_output, longest_text
from trainers.dataset import Example, TooLittleError
from trainers.fit import fit
from trainers.run import _streak, distill
from trainers.sets import gather


@pytest.mark.thorough
def test_a_verdict_on_a_draft_that_is_no_longer_in_use_promotes_nothing(tmp_path: Path, log: Path) -> None:  # noqa: F811
    store = AdapterStore(tmp_path / "adapters")
    first = distill(log, store, BASE, small_draft(), SHORT, promotion="never")
    assert first.manifest is not None

    def somebody_decides(progress: object) -> None:
        if store.current_id() is None:
            store.promote("0001", "by hand, meanwhile")

    second = distill(log, store, BASE, small_draft(), SHORT, on_progress=somebody_decides)
    assert second.verdict is not None
    assert second.verdict.promote, "it is better than what it was compared with"
    assert second.manifest is not None
    assert second.manifest.status == "rejected"
    assert "another draft has come into use" in second.message
    assert store.current_id() == "0001"


@pytest.mark.thorough
def test_a_candidate_that_was_not_judged_makes_the_next_no_harder(tmp_path: Path, log: Path) -> None:  # noqa: F811
    store, asked = AdapterStore(tmp_path / "adapters"), 0

    def stop_late() -> bool:
        nonlocal asked
        asked += 1
        return asked > 60

    stopped = distill(log, store, BASE, small_draft(), SHORT, should_stop=stop_late)
    assert stopped.manifest is not None
    assert stopped.manifest.recent is None
    outcome = distill(log, store, BASE, small_draft(), SHORT, promotion="never")
    assert outcome.manifest is not None
    assert outcome.manifest.judged, "it is kept as asked"
    assert _streak(store, outcome.manifest) == 1


@pytest.mark.thorough
def test_an_answer_that_was_said_twice_is_judged_once(tmp_path: Path) -> None:
    said = speak(target(), 80, SamplingParams())
    sets = [
        gather(write_log(tmp_path / f"{times}.db", said * times), None, None, SHORT, BASE, 64, None)[0]
        for times in (3, 6)
    ]
    assert len(sets[0].gate) == len(sets[1].gate) > 5
    assert len(sets[1].train) == 2 * len(sets[0].train)


def test_memory_does_not_grow_with_what_was_said() -> None:
    wide = LlamaConfig(**{**config(1).to_dict(), "vocab_size": 2**17, "max_position_embeddings": 2**15})
    with torch.device("meta"):
        model = LlamaForCausalLM(wide)
    assert longest_text(model) == PASS_TOKENS
    assert longest_output(model) * 2**17 <= 4 * PASS_LOGITS
    example = Example(
        1, "", np.zeros(9000, np.int32), np.zeros(longest_output(model), np.int32), SamplingParams(), False, None
    )
    assert collate([example], longest_text(model), torch.device("cpu")).ids.shape == (1, PASS_TOKENS)


def test_without_a_record_nothing_is_trained() -> None:
    with pytest.raises(TooLittleError, match="no record to train on"):
        fit(small_draft(), [], lambda step: 1.0, SHORT)
