"""``adaptive distill`` as a user meets it: one clear line for a mistake, otherwise figures and a next step."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from test_trainer import small_draft, speak, target, write_log
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner, Result

from adaptive.control.acceptance import Acceptance
from adaptive.control.confidence import Calibration
from adaptive.control.costs import UNMEASURED
from adaptive.control.memory import Memory, save
from adaptive.errors import AdaptiveError
from adaptive.pair import pair_identity
from adaptive.settings import Settings, load_settings
from adaptive.state import open_state
from adaptive.types import SamplingParams
from checkpoints.store import AdapterStore
from cli.distill import as_object, chats_of
from cli.main import app
from cli.options import PAIR, as_typed
from trainers.chats import read_chats
from trainers.dataset import examples
from trainers.fit import Fit
from trainers.lock import only_trainer
from trainers.recipe import Recipe
from trainers.run import Attempt, DistillOutcome

WORDS = [f"w{i}" for i in range(40)]
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }} <end> {% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)


def tokenizer() -> PreTrainedTokenizerFast:
    special = ["<unk>", "<end>", "<pad>", "<system>", "<user>", "<assistant>", "x", "y"]
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(special + WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", eos_token="<end>", pad_token="<pad>")
    fast.chat_template = TEMPLATE
    return fast


@pytest.fixture
def pair(tmp_path: Path) -> list[str]:
    """The flags that name a tiny pair."""
    folder = tmp_path / "[v2]"  # what rich would take for a tag
    for name, model in (("target", target()), ("draft", small_draft())):
        model.save_pretrained(folder / name)
        tokenizer().save_pretrained(folder / name)
    return ["--target", str(folder / "target"), "--draft", str(folder / "draft")]


def distill(pair: list[str], *arguments: str) -> Result:
    return CliRunner().invoke(app, ["distill", *pair, *arguments])


def refusal(result: Result) -> str:
    """The one line that a user would see."""
    assert isinstance(result.exception, AdaptiveError), result.output
    line = str(result.exception)
    assert "\n" not in line
    return line


@pytest.mark.thorough
def test_it_reports_figures_and_the_next_command(
    pair: list[str], own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(target=pair[1], draft=pair[3], home=own_home)
    state = open_state(own_home, pair_identity(settings).id)
    write_log(state.records, speak(target(), 80, SamplingParams(temperature=0.7)))
    training = ("--rank", "8", "--lr", "0.02")
    found = distill(pair, "--json", *training, "--epochs", "1")
    assert found.exit_code == 0, found.output
    outcome = json.loads(found.stdout)
    assert outcome["status"] == "promoted", outcome["message"]
    assert outcome["recent"]["acceptance_after"]["mean"] > outcome["recent"]["acceptance_before"]["mean"]
    assert AdapterStore(state.adapters).current_id() == outcome["adapter"]
    longer = (*training, "--epochs", "6", "--no-promote")  # so that it finds better weights than those in use
    spoken = distill(pair, *longer)
    assert spoken.exit_code == 0, spoken.output
    AdapterStore(state.adapters).reject("0002", "the test says so")
    monkeypatch.setenv("ADAPTIVE_KEEP_ADAPTERS", "1")
    spoken = distill(pair, *longer)
    assert "deleted old adapters: 0002" in spoken.output
    assert f"Next: adaptive adapters promote 0003 {shlex.join(pair)}" in spoken.output


def test_an_acceptance_that_was_not_measured_is_null() -> None:
    attempt = Attempt(Recipe(), Fit(None, -1.0, 0, 0, 0.0, stopped=True))
    outcome = DistillOutcome(None, None, "", True, 1, 1, 1, 0, 0, 0.0, 0.0, attempts=(attempt,))
    assert as_object(outcome)["attempts"][0]["validation_acceptance"] is None


@pytest.mark.thorough
def test_it_says_when_the_training_is_paid_back(pair: list[str], own_home: Path) -> None:
    state = open_state(own_home, pair_identity(Settings(target=pair[1], draft=pair[3], home=own_home)).id)
    write_log(state.records, speak(target(), 80, SamplingParams(temperature=0.7)))
    training = ("--rank", "8", "--lr", "0.02", "--epochs", "4", "--no-promote")
    unmeasured = distill(pair, *training)
    assert unmeasured.exit_code == 0, unmeasured.output
    assert "saved again" not in unmeasured.output
    cheap = replace(UNMEASURED, draft_s=0.01)
    save(state.controller, Memory("cpu", "", 0.0, None, cheap, Acceptance(), Calibration()))
    for length in ("4", "64"):  # costs of length 64 are not measured: those of the longest measured length are used
        found = distill(pair, *training, "--draft-length", length)
        assert found.exit_code == 0, found.output
        assert "At the costs of the last session" in " ".join(found.output.split())
        if length == "4":
            assert "of training are saved again after" in " ".join(found.output.split())


@pytest.mark.thorough
def test_compare_trains_rivals_and_shows_the_gate_the_best(pair: list[str], own_home: Path) -> None:
    state = open_state(own_home, pair_identity(Settings(target=pair[1], draft=pair[3], home=own_home)).id)
    write_log(state.records, speak(target(), 80, SamplingParams(temperature=0.7)))
    found = distill(pair, "--compare", "--json", "--rank", "4", "--lr", "0.02", "--epochs", "2")
    outcome = json.loads(found.stdout)
    tried = {json.dumps(one["recipe"]): one["validation_acceptance"] for one in outcome["attempts"]}
    assert len(tried) == 3
    chosen = AdapterStore(state.adapters).show(outcome["adapter"]).hyperparameters
    best = json.loads(max(tried, key=lambda recipe: tried[recipe]))
    assert {name: chosen[name] for name in best} == best
    assert outcome["verdict"] is not None


@pytest.mark.thorough
def test_how_much_of_the_log_is_learned_from_can_be_said(pair: list[str], own_home: Path) -> None:
    state = open_state(own_home, pair_identity(Settings(target=pair[1], draft=pair[3], home=own_home)).id)
    write_log(state.records, speak(target(), 80, SamplingParams(temperature=0.7)))
    quick = ("--json", "--no-promote", "--rank", "4", "--epochs", "0.2")
    outcome = json.loads(distill(pair, *quick, "--records", "60").stdout)
    assert sum(outcome[f"{part}_generations"] for part in ("train", "validation", "gate")) == 60
    assert AdapterStore(state.adapters).show(outcome["adapter"]).trained_on.first_id > 20
    assert "records is 0" in refusal(distill(pair, "--records", "0"))


@pytest.mark.thorough
def test_all_that_was_asked_for_is_learned_from(pair: list[str], tmp_path: Path, own_home: Path) -> None:
    lines = [json.dumps({"prompt": f"w{i % 40} w{i // 40}"}) for i in range(2050)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines), encoding="utf-8")
    quick = ("--json", "--no-promote", "--rank", "4", "--max-seconds", "1", "--max-new-tokens", "4")
    found = distill(pair, *quick, "--prompts", str(tmp_path / "prompts.jsonl"))
    assert found.exit_code == 0, found.output
    outcome = json.loads(found.stdout)
    state = open_state(own_home, pair_identity(Settings(target=pair[1], draft=pair[3], home=own_home)).id)
    assert AdapterStore(state.adapters).show(outcome["adapter"]).trained_on.first_id <= 50  # not the newest 2,000


def test_an_empty_log_says_what_to_do(pair: list[str]) -> None:
    assert "nothing has been recorded" in refusal(distill(pair))


def test_options_that_cannot_be_are_refused(pair: list[str]) -> None:
    assert "rank" in refusal(distill(pair, "--rank", "0"))
    assert "forward-kl" in refusal(distill(pair, "--loss", "mse"))
    assert "--force" in refusal(distill(pair, "--force", "--no-promote"))
    for options in (["--temperature", "0.7"], ["--no-record"], ["--max-new-tokens", "9"], ["--history", "off"]):
        assert f"{options[0]}: nothing is answered" in (refusal(distill(pair, *options)))
    for length in ("0", "tree:8"):
        assert f"--draft-length is {length}" in refusal(distill(pair, "--draft-length", length))


@pytest.mark.parametrize(
    "broken",
    [
        "{",
        "[]",
        '{"messages": []}',
        '{"messages": [{"role": "user"}]}',
        '{"messages": [{"role": "user", "content": "w1"}]}',
    ],
)
def test_a_broken_line_is_named_and_nothing_is_done(
    pair: list[str], tmp_path: Path, own_home: Path, broken: str
) -> None:
    good = json.dumps({"messages": [{"role": "user", "content": "w1"}, {"role": "assistant", "content": "w2 w3"}]})
    (tmp_path / "chats.jsonl").write_text(f"{good}\n\n{broken}\n", encoding="utf-8")
    assert "line 3" in refusal(distill(pair, "--data", str(tmp_path / "chats.jsonl")))
    assert not list(own_home.rglob("adapters"))


def test_chat_files_become_one_example_for_each_assistant_turn(tmp_path: Path) -> None:
    turns = [("system", "x"), ("user", "w1 w2"), ("assistant", "w3 w4"), ("user", "w5"), ("assistant", "w6 w7 w8")]
    file = tmp_path / "chats.jsonl"
    file.write_text(json.dumps({"messages": [{"role": r, "content": c} for r, c in turns]}) + "\n", encoding="utf-8")
    words = tokenizer()
    found = examples(read_chats(file, words), 100)
    assert [words.decode(e.output) for e in found] == ["w3 w4 <end>", "w6 w7 w8 <end>"]
    assert (
        words.decode(found[1].prompt)
        == "<system> x <end> <user> w1 w2 <end> <assistant> w3 w4 <end> <user> w5 <end> <assistant>"
    )
    assert all(e.id == -1 and e.domain == "chats" and e.supervision is None for e in found)


@pytest.mark.parametrize("opens", ["<assistant>", "<assistant> x"])
@pytest.mark.parametrize("ends", ["generation_config.json", "config.json"])
def test_a_turn_ends_with_the_token_at_which_the_target_ends_it(
    pair: list[str], tmp_path: Path, opens: str, ends: str
) -> None:
    """As Gemma's: a turn ends with another token than a text, and the template adds a line break (here: y). Where the
    generation prompt says more than a finished turn begins with (x), the end is found in the finished turn."""
    words = tokenizer()
    words.eos_token = "<pad>"
    words.chat_template = TEMPLATE.replace("<end>", "<end> y").replace("<assistant>", opens)
    for folder in (Path(pair[1]), Path(pair[3])):
        words.save_pretrained(folder)
    for file in ("generation_config.json", "config.json"):
        said = json.loads((Path(pair[1]) / file).read_text())
        said["eos_token_id"] = words.convert_tokens_to_ids(["<pad>", "<end>"]) if file == ends else None
        (Path(pair[1]) / file).write_text(json.dumps(said))
    chat = [{"role": "user", "content": "w1"}, {"role": "assistant", "content": "w3 w4"}]
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": chat}), encoding="utf-8")
    (found,) = examples(
        chats_of(Settings(target=pair[1], draft=pair[3]), tmp_path / "chats.jsonl", Console(stderr=True)), 100
    )
    assert words.decode(found.prompt) == f"<user> w1 <end> y {opens}"
    assert words.decode(found.output) == "w3 w4 <end>"


@pytest.mark.thorough
def test_it_learns_from_a_chat_file_alone(pair: list[str], tmp_path: Path) -> None:
    torch.manual_seed(0)
    lines = []
    for number in range(80):
        start = number % 40
        answer = " ".join(WORDS[(start + i) % 40] for i in range(1, 25))
        messages = [{"role": "user", "content": f"{WORDS[start]} x {number}"}, {"role": "assistant", "content": answer}]
        lines.append(json.dumps({"messages": messages}))
    (tmp_path / "chats.jsonl").write_text("\n".join(lines), encoding="utf-8")
    training = ("--rank", "8", "--lr", "0.02", "--epochs", "8")
    found = distill(pair, "--json", "--data", str(tmp_path / "chats.jsonl"), *training)
    assert found.exit_code == 0, found.output
    assert json.loads(found.stdout)["recent"]["gain"]["mean"] > 0.1


def test_the_next_command_names_all_that_this_one_was_told(tmp_path: Path) -> None:
    options = {"target": "a target.gguf", "draft": "d.gguf", "draft_checkpoint": "owner/draft", "home": tmp_path}
    typed = shlex.split(as_typed(load_settings(options), *PAIR, "home"))
    assert typed == [
        *("--target", "a target.gguf", "--draft", "d.gguf"),
        *("--draft-checkpoint", "owner/draft", "--state-dir", str(tmp_path)),
    ]


@pytest.mark.thorough
def test_one_trainer_a_pair(pair: list[str], own_home: Path) -> None:
    state = open_state(own_home, pair_identity(Settings(target=pair[1], draft=pair[3], home=own_home)).id)
    write_log(state.records, speak(target(), 80, SamplingParams(temperature=0.7)))
    with only_trainer(state):
        assert "another process is distilling this pair" in refusal(distill(pair))
    assert distill(pair, "--epochs", "0.2", "--no-promote").exit_code == 0


def test_prompts_are_not_logged_where_nothing_may_be(pair: list[str], tmp_path: Path, own_home: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "w1"}', encoding="utf-8")
    assert "recording is off" in refusal(distill(pair, "--no-record", "--prompts", str(tmp_path / "prompts.jsonl")))
    assert not list(own_home.rglob("records.db"))


def test_half_of_a_character_in_a_chat_file_is_named(tmp_path: Path) -> None:
    half = {"messages": [{"role": "user", "content": "w1"}, {"role": "assistant", "content": "w2 \ud83d"}]}
    (tmp_path / "chats.jsonl").write_text(json.dumps(half), encoding="utf-8")
    with pytest.raises(AdaptiveError, match=r"line 1 is not valid Unicode"):
        read_chats(tmp_path / "chats.jsonl", tokenizer())
