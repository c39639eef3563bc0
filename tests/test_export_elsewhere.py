"""The exported merged draft works elsewhere: transformers accepts its tokens as often as our loop does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_trainer import SHORT, small_draft, speak, target, write_log
from test_trainer_command import tokenizer
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from adaptive.answering import Question
from adaptive.assistant import Assistant
from adaptive.control.policy import FixedLength
from adaptive.pair import load_draft_for_training, load_pair, pair_identity
from adaptive.settings import Settings
from adaptive.state import open_state
from adaptive.types import SamplingParams, StopParams
from checkpoints.store import AdapterStore
from cli.main import app
from trainers.run import distill

LENGTH, TOKENS = 4, 60


def accepted_by_transformers(model: Any, draft: Any, prompt: list[int], output: list[int]) -> tuple[int, int]:
    """Accepted and drafted tokens of transformers' assisted generation after the first output token.

    Our loop drafts nothing before that token either. Each call of the target verifies one draft.
    """
    drafted: list[int] = []
    given = torch.tensor([prompt + output[:1]])
    forward = model.forward

    def counted(*args: Any, **kwargs: Any) -> Any:
        ids = kwargs.get("input_ids", args[0] if args else None)
        drafted.append(ids.shape[1] - (1 if drafted else given.shape[1]))
        return forward(*args, **kwargs)

    model.forward = counted
    try:
        made = model.generate(
            given, attention_mask=torch.ones_like(given), assistant_model=draft, max_new_tokens=len(output) - 1,
            do_sample=False, eos_token_id=None,
        )[0].tolist()  # fmt: skip
    finally:
        model.forward = forward
    assert made[len(prompt) :] == output
    return len(output) - 1 - len(drafted), sum(drafted)


@pytest.mark.thorough
def test_transformers_accepts_the_merged_draft_as_often_as_our_loop(tmp_path: Path, own_home: Path) -> None:
    for name, model in (("target", target()), ("draft", small_draft())):
        model.save_pretrained(tmp_path / name)
        tokenizer().save_pretrained(tmp_path / name)
    names = {"target": str(tmp_path / "target"), "draft": str(tmp_path / "draft")}
    settings = Settings(**names, home=own_home, device="cpu", dtype="float32")
    identity = pair_identity(settings)
    state = open_state(own_home, identity.id)
    write_log(state.records, speak(target(), 80, SamplingParams()))
    store = AdapterStore(state.adapters)
    outcome = distill(state.records, store, identity.base, load_draft_for_training(settings), SHORT, promotion="force")
    assert outcome.manifest is not None
    flags = [part for name, value in names.items() for part in (f"--{name}", value)]
    done = CliRunner().invoke(app, ["adapters", "export", "current", "--merged", str(tmp_path / "merged"), *flags])
    assert done.exit_code == 0, done.output

    pair = load_pair(settings)
    assistant = Assistant(pair, FixedLength(LENGTH), None)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    merged.generation_config.num_assistant_tokens = LENGTH
    merged.generation_config.num_assistant_tokens_schedule = "constant"
    merged.generation_config.assistant_confidence_threshold = 0.0
    theirs_model = AutoModelForCausalLM.from_pretrained(tmp_path / "target", dtype=torch.float32)

    prompts = torch.randint(8, 48, (12, 6), generator=torch.Generator().manual_seed(3)).tolist()
    rates = []
    for adapter in (None, store.path(outcome.manifest.id)):
        assistant.use_adapter(None if adapter is None else outcome.manifest.id, adapter)
        ours, theirs = [], []
        for prompt in prompts:
            for _ in assistant.answer(Question(prompt, (), "", SamplingParams(), StopParams(TOKENS, ignore_eos=True))):
                pass
            assert assistant.last is not None
            rounds = assistant.last.rounds
            ours.append((sum(r.accepted for r in rounds), sum(r.drafted for r in rounds)))
            if adapter is not None:
                theirs.append(accepted_by_transformers(theirs_model, merged, prompt, assistant.last.output))
        for counts in filter(None, (ours, theirs)):
            rates.append(sum(a for a, _ in counts) / sum(d for _, d in counts))
    before, here, elsewhere = rates
    assert here > before + 0.05  # the exported draft is the distilled one
    assert abs(here - elsewhere) < 0.01
