"""``adaptive adapters`` on real stores of a real pair: output, changes and refusals."""

from __future__ import annotations

import json
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import BUNDLED
from peft import LoraConfig, PeftModel, get_peft_model
from store_factory import NEW, published, write
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner

from adaptive.errors import AdaptiveError
from adaptive.pair import pair_identity
from adaptive.settings import Settings
from checkpoints.manifest import HeldOut, Interval
from checkpoints.store import AdapterStore
from cli.main import app

runner = CliRunner()


def run(*arguments: str) -> str:
    """Run a command that must succeed. Returns its standard output."""
    done = runner.invoke(app, ["adapters", *arguments])
    if isinstance(done.exception, AdaptiveError):
        raise done.exception
    assert done.exit_code == 0, (done.stdout, done.stderr, done.exception)
    return done.stdout


@pytest.fixture
def store(own_home: Path) -> AdapterStore:
    """A store of three adapters: the first two were promoted in turn, the third has measured figures."""
    store = published(own_home / "target--draft-00000000" / "adapters", 2, promote=2)
    held = HeldOut(
        12, 900, 4, Interval(0.30, 0.28, 0.32), Interval(0.44, 0.41, 0.47), Interval(0.14, 0.1, 0.18),
        Interval(1.5, 1.4, 1.6), Interval(2.1, 2.0, 2.2),
    )  # fmt: skip
    store.publish(write, replace(NEW, recent=held, parent="0002", hyperparameters={"r": 32}))
    return store


def test_list_shows_acceptance_before_and_after_and_what_is_in_use(store: AdapterStore) -> None:
    shown = run("list")
    for figure in ("0.300 → 0.440", "+0.100 to +0.180", "1.50 → 2.10", "in use", "promoted", "candidate"):
        assert figure in shown
    shown = " ".join(run("show", "3").split())
    assert "0.300 → 0.440 (0.410 to 0.470)" in shown
    assert "tokens a round 1.50 → 2.10 at draft length 4" in shown
    objects = json.loads(run("list", "--json"))
    assert [one["id"] for one in objects] == ["0001", "0002", "0003"]
    assert [one["current"] for one in objects] == [False, True, False]
    assert objects[2]["recent"]["acceptance_after"]["mean"] == 0.44


def test_list_of_an_empty_store_says_how_to_fill_it(own_home: Path) -> None:
    (own_home / "pair" / "adapters").mkdir(parents=True)
    assert "adaptive distill" in run("list")
    assert json.loads(run("list", "--json")) == []


def test_list_says_that_prune_deletes_a_damaged_adapter_only_where_it_does(store: AdapterStore) -> None:
    def said(names: set[str]) -> dict[str, bool]:
        lines = [line for line in run("list").splitlines() if "is damaged and not used" in line]
        assert {line.split()[0] for line in lines} == names
        return {line.split()[0]: "`adaptive adapters prune` deletes it" in line for line in lines}

    (store.path("0003") / "manifest.json").write_text("{")
    assert said({"0003"}) == {"0003": False}
    (store.root / "0003").rename(store.root / "0003.damaged")
    assert said({"0003.damaged"}) == {"0003.damaged": False}
    for _ in range(6):
        store.publish(write, NEW)
    for name in ("0001", "0004", "0005"):
        (store.path(name) / "manifest.json").write_text("{")
    damaged = said({"0001", "0003.damaged", "0004", "0005"})
    assert damaged == {"0001": True, "0003.damaged": True, "0004": True, "0005": False}
    objects = json.loads(run("list", "--json"))
    assert {one["id"] for one in objects if one["damaged"]} == damaged.keys()
    assert not any(one["current"] for one in objects if one["damaged"])
    assert len(objects) == len(store.list()) + len(damaged)
    run("prune")
    assert set(store.damaged()) == {name for name, deleted in damaged.items() if not deleted}


def test_prune_keeps_as_many_as_training_runs_do(store: AdapterStore, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(5):
        store.publish(write, NEW)
    (store.path("0001") / "manifest.json").write_text("{")
    monkeypatch.setenv("ADAPTIVE_KEEP_ADAPTERS", "8")
    assert "`adaptive adapters prune`" not in run("list")
    assert "nothing to delete" in run("prune")
    monkeypatch.setenv("ADAPTIVE_KEEP_ADAPTERS", "7")
    assert "`adaptive adapters prune` deletes it" in " ".join(run("list").split())
    assert "deleted 0001\n" in run("prune")


def test_show_tells_whether_the_files_are_whole(store: AdapterStore) -> None:
    assert "2, whole" in run("show", "3")
    whole = json.loads(run("show", "current", "--json"))
    assert (whole["id"], whole["files_whole"], whole["damage"]) == ("0002", True, None)
    (store.path("0003") / "adapter_config.json").write_text("{}")
    assert "damaged" in run("show", "3")
    found = json.loads(run("show", "3", "--json"))
    assert (found["id"], found["files_whole"]) == ("0003", False)
    assert "adapter_config.json" in found["damage"]


def test_show_says_what_a_head_drafts_among(store: AdapterStore) -> None:
    assert "drafts among" not in run("show", "3")
    noted = {"loss": "auto", "vocabulary": 8192, "vocabulary_of": 151_936, "vocabulary_coverage": 0.987}
    store.publish(write, replace(NEW, hyperparameters=noted))
    shown = " ".join(run("show", "4").split())
    assert "drafts among 8,192 of 151,936 tokens: 98.7% of what was said" in shown
    assert "recipe loss auto" in shown
    assert "vocabulary_of" not in shown


def test_promote_rollback_and_prune(store: AdapterStore) -> None:
    assert "adapter 0003 is in use" in run("promote", "3", "--reason", "mine")
    assert store.show("3").reason == "mine"
    assert "adapter 0002 is in use again" in run("rollback")
    assert "nothing to delete" in run("prune")
    run("rollback")
    assert "the draft without an adapter is in use again" in run("rollback")
    assert "deleted 0001, 0002" in run("prune", "--keep", "1")
    assert "current is the one in use" not in " ".join(run("promote", "--help").split())


def test_unknown_ids_and_nothing_in_use_are_one_clear_line(store: AdapterStore) -> None:
    with pytest.raises(AdaptiveError, match=r"no adapter '9'.*0001, 0002, 0003"):
        run("show", "9")
    for _ in range(2):
        run("rollback")
    with pytest.raises(AdaptiveError, match="nothing to roll back"):
        run("rollback")
    with pytest.raises(AdaptiveError, match="no adapter is in use"):
        run("show", "current")


def test_no_state_at_all_says_what_to_try(own_home: Path) -> None:
    with pytest.raises(AdaptiveError, match="has no log or adapter of any pair"):
        run("list")


def test_export_copies_the_peft_folder(store: AdapterStore, tmp_path: Path) -> None:
    run("export", "3", str(tmp_path / "out"))
    assert (tmp_path / "out" / "adapter_model.safetensors").is_file()
    with pytest.raises(AdaptiveError, match="not empty"):
        run("export", "3", str(tmp_path / "out"))
    run("export", "3", str(tmp_path / "out"), "--force")
    with pytest.raises(AdaptiveError, match="name one folder"):
        run("export", "3")


def test_an_encoding_is_refused_where_nothing_is_encoded(store: AdapterStore, tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    for how in ([out], ["--merged", out], [out, "--format", "gguf"], [out, "--format", "speculators"]):
        with pytest.raises(AdaptiveError, match="--encoding is only for"):
            run("export", "3", *how, "--encoding", "q8_0")
    assert not (tmp_path / "out").exists()


def test_merged_export_is_the_draft_with_the_adapter_as_a_checkpoint(
    own_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "vocab_size": 8}
    words = Tokenizer(WordLevel({f"w{number}": number for number in range(8)}, unk_token="w0"))
    for name in ("target", "draft"):
        LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, **sizes)).save_pretrained(tmp_path / name)
        PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(tmp_path / name)
    settings = Settings(target=str(tmp_path / "target"), draft=str(tmp_path / "draft"))
    pair = ["--target", str(settings.target), "--draft", str(settings.draft)]
    identity = pair_identity(settings)
    trained = get_peft_model(
        LlamaForCausalLM.from_pretrained(tmp_path / "draft"), LoraConfig(r=2, target_modules="all-linear")
    )
    for name, parameter in trained.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, 0, 0.2)
    store = AdapterStore(own_home / identity.id / "adapters")
    store.publish(lambda folder: trained.save_pretrained(str(folder)), replace(NEW, base=identity.base))

    folder = tmp_path / "merged draft"
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich then takes every stream for a terminal
    monkeypatch.setenv("TERM", "xterm")
    done = runner.invoke(app, ["adapters", "export", "1", "--merged", str(folder), *pair])
    assert done.exit_code == 0, done.stderr
    assert "writing the draft" in done.stderr
    assert done.stdout.endswith(f"use it with --draft {shlex.quote(str(folder))}\n")
    tokens = torch.arange(8)[None]
    with torch.no_grad():
        merged = AutoModelForCausalLM.from_pretrained(folder)(tokens).logits
        base = AutoModelForCausalLM.from_pretrained(tmp_path / "draft")
        expected = PeftModel.from_pretrained(base, str(store.path("1")))(tokens).logits
    torch.testing.assert_close(merged, expected, rtol=1e-4, atol=1e-5)
    assert AutoTokenizer.from_pretrained(folder).get_vocab() == words.get_vocab()

    with pytest.raises(AdaptiveError, match="no log or adapter of this pair"):
        run("list", "--target", str(folder), "--draft", str(tmp_path / "draft"))
    torch.manual_seed(1)
    LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, **sizes)).save_pretrained(tmp_path / "draft")
    with pytest.raises(AdaptiveError, match="holds other weights than adapter 0001"):
        run("export", "1", "--merged", str(tmp_path / "again"))


def test_a_draft_that_cannot_be_loaded_is_one_clear_line(own_home: Path, tmp_path: Path) -> None:
    draft = tmp_path / "draft"
    shutil.copytree(BUNDLED / "draft", draft)
    weights = draft / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100_000])
    pair = ("--target", str(BUNDLED / "target"), "--draft", str(draft))
    identity = pair_identity(Settings(target=pair[1], draft=pair[3]))
    AdapterStore(own_home / identity.id / "adapters").publish(write, replace(NEW, base=identity.base))
    with pytest.raises(AdaptiveError, match=r"model .*draft cannot be loaded"):
        run("export", "1", "--merged", str(tmp_path / "merged"), *pair)
