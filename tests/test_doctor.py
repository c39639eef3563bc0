"""``adaptive doctor`` inspects the machine and fails only if something required is missing."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from tiny_models import tiny_model
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from adaptive.engines.cpu import kernels
from adaptive.engines.hf import guard
from adaptive.engines.load import forward_of, load_engine
from adaptive.pair import sources
from adaptive.settings import load_settings
from cli.main import app

runner = CliRunner()


@pytest.fixture
def pair(tmp_path: Path) -> list[str]:
    """Options for a small local pair. It has no tokenizer, which doctor does not read."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "vocab_size": 64}
    for name in ("target", "draft"):
        LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, **sizes)).save_pretrained(tmp_path / name)
    return ["--target", str(tmp_path / "target"), "--draft", str(tmp_path / "draft")]


def findings(*arguments: str) -> tuple[int, dict[str, dict[str, str]]]:
    done = runner.invoke(app, ["doctor", "--json", *arguments])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    report = json.loads(done.stdout)
    assert report["ok"] == (done.exit_code == 0)
    return done.exit_code, {finding["name"]: finding for finding in report["findings"]}


def test_a_working_machine_is_described_and_passes(pair: list[str]) -> None:
    code, found = findings(*pair)
    assert code == 0, [finding for finding in found.values() if finding["status"] == "broken"]
    assert found["torch"]["value"].startswith(torch.__version__[:4])
    assert "bfloat16" in found["processor arithmetic"]["value"]
    there = importlib.util.find_spec("bitsandbytes") is not None
    assert found["bitsandbytes nf4"]["status"] == ("ok" if there else "note")
    assert found["device"]["value"] in ("cpu", "mps", "cuda:0")
    assert found["dtype"]["value"].split()[0] in ("float32", "bfloat16", "float16")
    assert found["peft"]["group"] == "packages"


@pytest.mark.parametrize("options", [{"dtype": "bfloat16"}, {"dtype": "float64"}, {"quantize": "nf4"}])
def test_the_forward_that_will_serve_each_model_is_told(pair: list[str], options: dict[str, str]) -> None:
    settings = load_settings({"device": "cpu", "target": pair[1], "draft": pair[3], **options})
    given = [part for name, value in options.items() for part in (f"--{name}", value)]
    _, found = findings(*pair, "--device", "cpu", *given)
    for role, source in zip(("target", "draft"), sources(settings), strict=True):
        assert source is not None
        engine = load_engine(source, settings, "cpu", lambda share: None, draft=role == "draft")
        told = found[f"{role} forward"]["value"]
        assert told.startswith(f"{forward_of(engine).value} (")
        assert engine.weights in told


def test_kernels_that_were_not_built_are_a_note(
    pair: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, found = findings(*pair)
    best = kernels.library()
    assert ("our own, for " in found["kernels"]["value"]) == bool(best)
    assert best is None or found["kernels"]["value"].endswith(best.name)
    monkeypatch.setattr(kernels, "NATIVE", tmp_path)
    kernels.library.cache_clear(), kernels.problem.cache_clear()
    try:
        code, found = findings(*pair)
    finally:
        kernels.library.cache_clear(), kernels.problem.cache_clear()
    assert code == 0
    assert found["kernels"]["status"] == ("note" if kernels.runnable() else "ok")
    assert ("C++ compiler" in found["kernels"]["advice"]) == bool(kernels.runnable())


def test_the_graphics_of_a_mac_are_needed_only_where_they_are_named(
    pair: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)  # and nothing can be computed on them
    code, found = findings(*pair)
    assert (code, found["mps arithmetic"]["status"]) == (0, "note")
    code, found = findings(*pair, "--device", "mps")
    assert (code, found["mps arithmetic"]["status"]) == (1, "broken")


def test_what_is_asked_for_is_what_is_reported(pair: list[str]) -> None:
    _, found = findings(*pair, "--device", "cpu", "--dtype", "bfloat16")
    assert found["device"]["value"] == "cpu"
    assert found["dtype"]["value"] == "bfloat16"


def test_a_device_that_is_not_there_is_broken(pair: list[str]) -> None:
    code, found = findings(*pair, "--device", "cuda:99")
    assert code == 1
    assert found["device"]["status"] == "broken"


def test_a_folder_that_cannot_be_written_is_broken(pair: list[str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code, found = findings(*pair, "--state-dir", str(tmp_path / "file" / "home"))
    assert code == 1
    assert "--state-dir" in found["state folder"]["advice"]


def test_a_pair_without_weights_is_broken(pair: list[str], tmp_path: Path) -> None:
    (tmp_path / "draft" / "model.safetensors").unlink()
    code, found = findings(*pair)
    assert code == 1
    assert "no weights" in found["pair"]["value"]


def test_the_report_for_people_says_what_is_missing(pair: list[str]) -> None:
    done = runner.invoke(app, ["doctor", *pair])
    assert done.exit_code == 0, done.stdout
    for title in ("This machine", "Packages", "What will be used"):
        assert title in done.stdout
    assert ("What is missing" in done.stdout) != ("Nothing is missing" in done.stdout)


def layers_of(folder: Path, state: Path) -> dict[str, str]:
    given = ["--device", "cpu", "--dtype", "float32", "--state-dir", str(state)]
    return findings("--target", str(folder), "--draft", "none", *given)[1]["target layers"]


@pytest.mark.thorough
def test_what_was_found_of_a_models_passes_at_loading_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before loading, doctor reports that loading will test the passes; afterwards, the result. A result does not apply
    to another checkpoint in the same folder."""
    folder, state = tmp_path / "target", tmp_path / "state"
    state.mkdir()
    named = {"device": "cpu", "target": str(folder), "draft": "none", "dtype": "float32", "home": state}

    def load() -> str | None:
        settings = load_settings(named)
        source = sources(settings)[0]
        return load_engine(source, settings, "cpu", lambda share: None).undraftable

    tiny_model("falcon_h1", num_hidden_layers=1).save_pretrained(folder)
    assert "is tried when it is loaded" in layers_of(folder, state)["value"]
    assert load() is None
    assert layers_of(folder, state) | {"group": ""} == {
        "group": "",
        "name": "target layers",
        "status": "ok",
        "value": "1 with a recurrent state, 1 of attention; drafting is possible",
        "advice": layers_of(folder, state)["advice"],
    }

    tiny_model("falcon_h1", num_hidden_layers=1, seed=1).save_pretrained(folder)
    assert "is tried when it is loaded" in layers_of(folder, state)["value"]
    monkeypatch.setattr(guard, "NEAR", {torch.float32: -1.0})  # a tolerance that no two passes meet
    problem = load()
    assert problem is not None
    found = layers_of(folder, state)
    assert found["status"] == "note"
    assert found["value"] == f"no drafting: it {problem}"
    assert "plainly" in found["advice"]
    (state / "passes.json").write_text("not json")
    assert "is tried when it is loaded" in layers_of(folder, state)["value"]


def test_a_model_that_our_own_forward_runs_can_be_drafted_for(pair: list[str]) -> None:
    _, found = findings(*pair, "--device", "cpu", "--dtype", "float32")
    for role in ("target", "draft"):
        assert found[f"{role} layers"]["value"].endswith("1 of attention; drafting is possible")
