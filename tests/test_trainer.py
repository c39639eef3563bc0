"""Training from a real log into a real store: no leaks between sets, no losses, and the draft gets better."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from adaptive.decoding.supervision import SupervisionBuffer
from adaptive.errors import AdaptiveError
from adaptive.records.log import Log
from adaptive.records.writer import LogWriter
from adaptive.types import Generation, Message, SamplingParams, Timings
from checkpoints.manifest import BaseDraft
from checkpoints.store import AdapterStore, training_seconds
from trainers import lora
from trainers.dataset import examples, read_log, split
from trainers.recipe import LossName, Recipe
from trainers.replay import acceptance_rate, replay
from trainers.run import distill
from trainers.sets import gather

VOCAB = 48
BASE = BaseDraft("tiny", "0123")
SHORT = Recipe(rank=8, epochs=10, evaluations=8, learning_rate=2e-2, b_factor=1.0, batch=8, draft_length=4)


def target() -> PreTrainedModel:
    """Two layers that mostly look at the last token, which one layer can learn."""
    torch.manual_seed(1)
    model = LlamaForCausalLM(config(layers=2)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "self_attn" in name:
                parameter.mul_(0.3)
    return model


def small_draft() -> PreTrainedModel:
    """One untrained layer between the target's own embeddings and head."""
    torch.manual_seed(9)
    draft = LlamaForCausalLM(config(layers=1)).eval()
    draft.load_state_dict(target().state_dict(), strict=False)
    with torch.no_grad():
        for name, parameter in draft.named_parameters():
            if "layers" in name and parameter.ndim == 2:
                parameter.normal_(std=0.05)
    return draft


def config(layers: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.35,
    )


def speak(model: PreTrainedModel, count: int, params: SamplingParams, seed: int = 0) -> list[Generation]:
    """Generations of ``model`` with supervision, on random prompts, made in one batch."""
    generator = torch.Generator().manual_seed(seed)
    prompts = torch.randint(0, VOCAB, (count, 6), generator=generator)
    ids = prompts
    with torch.no_grad():
        for _ in range(40):
            logits = model(input_ids=ids).logits[:, -1].float()
            if params.greedy:
                token = logits.argmax(-1, keepdim=True)
            else:
                token = torch.multinomial((logits / params.temperature).softmax(-1), 1, generator=generator)
            ids = torch.cat([ids, token], dim=1)
        rows = model(input_ids=ids).logits[:, 5:-1].float()
    made = []
    for index in range(count):
        output = ids[index, 6:]
        chosen = torch.zeros(40)
        if not params.greedy:
            chosen = (rows[index] / params.temperature).log_softmax(-1).gather(-1, output[:, None])[:, 0]
        buffer = SupervisionBuffer()
        buffer.append(rows[index], chosen)
        made.append(generation(f"{seed}-{index}", prompts[index].numpy(), output.numpy(), params, buffer))
    return made


def generation(
    question: str,
    prompt: np.ndarray,
    output: np.ndarray,
    params: SamplingParams,
    buffer: SupervisionBuffer | None = None,
) -> Generation:
    return Generation(
        session="s",
        created=time.time(),
        messages=(Message("user", question),),
        prompt_text="",
        text="",
        prompt=prompt.astype(np.int32),
        output=output.astype(np.int32),
        sampling=params,
        adapter=None,
        engine="test",
        domain="kind",
        finish_reason="length",
        rounds=(),
        timings=Timings(len(prompt), 0, 0.1, len(output), 0.1),
        supervision=buffer.take(len(output)) if buffer else None,
    )


def write_log(path: Path, generations: list[Generation]) -> Path:
    with LogWriter(path) as writer:
        for one in generations:
            writer.write(one)
        writer.flush()
    return path


@pytest.fixture(scope="module")
def spoken() -> list[Generation]:
    return speak(target(), 100, SamplingParams(temperature=0.7))


@pytest.fixture
def log(tmp_path: Path, spoken: list[Generation]) -> Path:
    return write_log(tmp_path / "records.db", spoken)


def test_distillation_raises_held_out_acceptance_and_is_promoted(tmp_path: Path, log: Path) -> None:
    store, draft = AdapterStore(tmp_path / "adapters"), small_draft()
    before = {name: tensor.clone() for name, tensor in draft.state_dict().items()}
    outcome = distill(log, store, BASE, draft, SHORT)
    assert outcome.verdict is not None
    assert outcome.verdict.promote, outcome.message
    gain = outcome.verdict.recent.gain
    assert gain.low > 0.05
    assert outcome.manifest == store.current()
    # The figures are those of the adapter in the store, and the draft itself is unchanged.
    assert all(torch.equal(before[name], tensor) for name, tensor in draft.state_dict().items())
    model = lora.load(draft, store.path(str(store.current_id())))
    held_out = [e for e in examples(split(read_log(log, 1000), first=True).gate, 128) if e.replayable]
    assert acceptance_rate(replay(model, held_out)) == pytest.approx(outcome.verdict.recent.acceptance_after.mean)


@pytest.mark.thorough
def test_greedy_records_teach_the_draft_too(tmp_path: Path) -> None:
    log = write_log(tmp_path / "records.db", speak(target(), 100, SamplingParams()))
    outcome = distill(log, AdapterStore(tmp_path / "adapters"), BASE, small_draft(), SHORT)
    assert outcome.verdict is not None
    assert outcome.verdict.recent.gain.mean > 0.05, outcome.message


@pytest.mark.thorough
def test_a_second_round_is_judged_against_the_adapter_in_use(tmp_path: Path, log: Path) -> None:
    store = AdapterStore(tmp_path / "adapters")
    first = distill(log, store, BASE, small_draft(), SHORT)
    write_log(log, speak(target(), 100, SamplingParams(temperature=0.7), seed=1))
    second = distill(log, store, BASE, small_draft(), Recipe(**{**SHORT.to_json(), "start": "parent", "epochs": 4}))
    assert first.verdict is not None
    assert first.verdict.promote
    assert second.verdict is not None, second.message
    assert second.verdict.older is not None
    before = second.verdict.older.acceptance_before.mean
    assert before == pytest.approx(first.verdict.recent.acceptance_after.mean, abs=0.02)


@pytest.mark.thorough
def test_a_better_recipe_on_the_same_records_is_judged_on_all_that_was_held_out(tmp_path: Path, log: Path) -> None:
    store = AdapterStore(tmp_path / "adapters")
    brief = distill(log, store, BASE, small_draft(), Recipe(**{**SHORT.to_json(), "epochs": 1}), promotion="force")
    longer = distill(log, store, BASE, small_draft(), SHORT)
    assert brief.verdict is not None
    assert longer.verdict is not None
    # The first run is judged on more records; the second is judged on records that neither run trained on.
    assert brief.verdict.recent.generations > longer.verdict.recent.generations == len(split(read_log(log, 1000)).gate)
    assert longer.verdict.promote, longer.message


@pytest.mark.thorough
@pytest.mark.parametrize(("tokens", "apart"), [(8, False), (40, True)])
def test_new_answers_too_short_to_judge_by_are_judged_together_with_the_old(
    tmp_path: Path, log: Path, tokens: int, apart: bool
) -> None:
    store = AdapterStore(tmp_path / "adapters")
    distill(log, store, BASE, small_draft(), SHORT, promotion="force")
    in_use = store.show(str(store.current_id()))
    rng = np.random.default_rng(0)
    answers = rng.integers(0, VOCAB, (100, tokens))
    greedy = SamplingParams(temperature=0.0)
    write_log(log, [generation(f"new {i}", np.arange(9), said, greedy) for i, said in enumerate(answers)])
    sets, _ = gather(log, None, in_use, SHORT, BASE, 128, None)
    held_out = len(split(read_log(log, 1000)).gate)
    assert len(sets.recent) + len(sets.older) == held_out
    assert bool(sets.older) == apart


@pytest.mark.thorough
def test_records_with_nothing_to_learn_leave_the_draft_in_use(tmp_path: Path) -> None:
    """A draft that equals the target cannot be improved."""
    draft = target()
    log = write_log(tmp_path / "records.db", speak(draft, 80, SamplingParams(temperature=1.0)))
    store = AdapterStore(tmp_path / "adapters")
    outcome = distill(log, store, BASE, draft, Recipe(rank=4, epochs=1, evaluations=4))
    assert store.current_id() is None, outcome.message


@pytest.mark.thorough(but="auto")
@pytest.mark.parametrize("loss", ["auto", "reverse-kl", "cross-entropy"])
def test_tokens_that_the_draft_lacks_are_never_accepted_and_stop_no_training(
    tmp_path: Path, log: Path, loss: LossName
) -> None:
    draft, known = small_draft(), VOCAB - 6  # as where a target was fine-tuned with added tokens
    draft.resize_token_embeddings(known)
    said = [e for e in examples(read_log(log, 1000), 64) if e.replayable]
    assert any((e.output >= known).any() for e in said)
    assert any((e.prompt >= known).any() for e in said)
    for example, replayed in zip(said, replay(draft, said), strict=True):
        assert not replayed.acceptance[0][example.output[1:] >= known].any()
    outcome = distill(log, AdapterStore(tmp_path / "adapters"), BASE, draft, dataclasses.replace(SHORT, loss=loss))
    assert outcome.verdict is not None
    found = outcome.verdict.recent
    assert found.acceptance_after.mean > found.acceptance_before.mean


def test_too_few_records_say_how_many_there_are_and_how_many_are_needed(
    tmp_path: Path, spoken: list[Generation]
) -> None:
    log = write_log(tmp_path / "records.db", spoken[:9])
    with pytest.raises(AdaptiveError, match=r"9 usable answers.*16, 2 and 6 are needed.*about \d+ more"):
        distill(log, AdapterStore(tmp_path / "adapters"), BASE, small_draft(), SHORT)
    with pytest.raises(AdaptiveError, match="no log"):
        distill(tmp_path / "none.db", AdapterStore(tmp_path / "adapters"), BASE, small_draft(), SHORT)


def test_stopping_early_keeps_the_best_so_far_as_a_candidate(tmp_path: Path, log: Path) -> None:
    store, steps = AdapterStore(tmp_path / "adapters"), []
    outcome = distill(
        log,
        store,
        BASE,
        small_draft(),
        SHORT,
        on_progress=lambda p: steps.append(p.step),
        should_stop=lambda: len(steps) > 30,
    )
    assert outcome.stopped
    assert outcome.verdict is None
    assert outcome.manifest is not None
    assert store.show(outcome.manifest.id).status == "candidate"
    assert "not judged" in outcome.message
    assert store.current_id() is None


def test_stopping_at_once_changes_nothing(tmp_path: Path, log: Path) -> None:
    store = AdapterStore(tmp_path / "adapters")
    outcome = distill(log, store, BASE, small_draft(), SHORT, should_stop=lambda: True)
    assert outcome.stopped
    assert outcome.manifest is None
    assert store.list() == ()


@pytest.mark.thorough
def test_a_run_that_keeps_nothing_is_training_too(tmp_path: Path, log: Path) -> None:
    store = AdapterStore(tmp_path / "adapters")
    store.promote(distill(log, store, BASE, small_draft(), SHORT, promotion="never").manifest.id, "by hand")  # type: ignore[union-attr]
    before = training_seconds(store)
    outcome = distill(log, store, BASE, small_draft(), dataclasses.replace(SHORT, learning_rate=10.0, epochs=1))
    assert (outcome.manifest, outcome.stopped) == (None, False)
    assert training_seconds(AdapterStore(store.root)) == before + outcome.train_seconds > before


@pytest.mark.thorough
def test_equal_seeds_give_equal_adapters(tmp_path: Path, log: Path) -> None:
    found = []
    for name in ("a", "b"):
        store = AdapterStore(tmp_path / name)
        outcome = distill(
            log, store, BASE, small_draft(), Recipe(**{**SHORT.to_json(), "epochs": 4}), promotion="force"
        )
        assert outcome.manifest is not None
        found.append(outcome.manifest.files["adapter_model.safetensors"])
    assert found[0] == found[1]


@pytest.mark.thorough
def test_force_promotes_and_never_leaves_a_candidate(tmp_path: Path, log: Path) -> None:
    store = AdapterStore(tmp_path / "adapters")
    quick = Recipe(**{**SHORT.to_json(), "epochs": 6})
    never = distill(log, store, BASE, small_draft(), quick, promotion="never")
    assert never.manifest is not None
    assert never.manifest.status == "candidate"
    forced = distill(log, store, BASE, small_draft(), quick, promotion="force")
    assert forced.manifest is not None
    assert store.current_id() == forced.manifest.id


TRAIN_FOR_EVER = """
import sys, torch
from pathlib import Path
sys.path.insert(0, sys.argv[3])
from test_trainer import BASE, SHORT, small_draft
from checkpoints.store import AdapterStore, training_seconds
from trainers.recipe import Recipe
from trainers.run import distill
torch.set_num_threads(1)
while True:
    recipe = Recipe(**{**SHORT.to_json(), "epochs": 2})
    distill(Path(sys.argv[1]), AdapterStore(Path(sys.argv[2])), BASE, small_draft(), recipe,
            on_progress=lambda p: print(p.step, flush=True), promotion="force")
    print("published", flush=True)
"""


@pytest.mark.thorough
def test_killed_while_training_log_and_store_stay_valid_and_the_next_run_works(tmp_path: Path, log: Path) -> None:
    root = tmp_path / "adapters"
    arguments = [sys.executable, "-c", TRAIN_FOR_EVER, str(log), str(root), str(Path(__file__).parent)]
    path = os.pathsep.join(str(p) for p in (Path(lora.__file__).parents[1], os.environ.get("PYTHONPATH")) if p)
    environment = {**os.environ, "PYTHONPATH": path}
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        lines = iter(process.stdout.readline, "")
        # Kill in the second round: one adapter is in use, the next is being made.
        assert "published\n" in lines, "the trainer ended by itself"
        for _ in range(random.randint(1, 12)):
            assert next(lines)
        os.kill(process.pid, signal.SIGKILL)
    assert sum(1 for _ in Log(log).generations()) == 100
    store = AdapterStore(root)
    assert store.list()
    for manifest in store.list():
        store.verify(manifest.id)
    outcome = distill(log, store, BASE, small_draft(), Recipe(**{**SHORT.to_json(), "epochs": 4}), promotion="force")
    assert outcome.manifest is not None
    assert store.usable(BASE)[0] == outcome.manifest
    print(
        f"killed while training: {len(store.list())} adapters, all whole; the next run published {outcome.manifest.id}"
    )


@pytest.mark.long
def test_twenty_kills_while_training(tmp_path: Path, log: Path) -> None:
    for turn in range(20):
        (tmp_path / str(turn)).mkdir()
        test_killed_while_training_log_and_store_stay_valid_and_the_next_run_works(tmp_path / str(turn), log)


def test_the_adapter_is_plain_peft_that_others_load(tmp_path: Path, log: Path) -> None:
    from peft import PeftModel

    store, draft = AdapterStore(tmp_path / "adapters"), small_draft()
    outcome = distill(log, store, BASE, draft, Recipe(**{**SHORT.to_json(), "epochs": 3}), promotion="force")
    assert outcome.manifest is not None
    draft.save_pretrained(tmp_path / "draft")
    folder = store.path(outcome.manifest.id)
    assert sorted(p.name for p in folder.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
        "manifest.json",
    ]
    assert json.loads((folder / "adapter_config.json").read_text())["target_modules"]
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "draft", dtype=torch.float32)
    loaded = PeftModel.from_pretrained(plain, str(folder)).merge_and_unload()
    held_out = [e for e in examples(split(read_log(log, 1000), first=True).gate, 128) if e.replayable]
    assert outcome.verdict is not None
    wanted = outcome.verdict.recent.acceptance_after.mean
    assert acceptance_rate(replay(loaded, held_out)) == pytest.approx(wanted, abs=1e-3)


@pytest.mark.parametrize(
    "choice", [{"rank": 0}, {"epochs": -1.0}, {"loss": "mse"}, {"max_seconds": float("nan")}, {"epochs": float("inf")}]
)
def test_a_recipe_that_cannot_work_is_refused_by_name(choice: dict[str, object]) -> None:
    with pytest.raises(AdaptiveError, match=next(iter(choice)).replace("_", "-")):
        Recipe(**choice)  # type: ignore[arg-type]
