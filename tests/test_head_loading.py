"""``--draft`` accepts a head's folder, and rejects an unusable one with a one-line reason."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from conftest import BUNDLED, save_head, save_random_pair
from test_head_lossless import settings_of

from adaptive.engines.load import Forward, choose_forward, forward_of
from adaptive.engines.load_head import load_head
from adaptive.errors import AdaptiveError
from adaptive.pair import load_pair, load_tokenizer, pair_identity, sources
from adaptive.records.log import Log
from adaptive.settings import load_settings
from cli.main import run

TARGET = BUNDLED / "target"


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A head on the bundled target."""
    return save_head(TARGET, tmp_path_factory.mktemp("heads") / "head")


def test_answers_drafted_by_a_head_are_recorded_so(
    head: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    models = ["--target", str(TARGET), "--draft", str(head), "--dtype", "float32", "--state-dir", str(tmp_path / "s")]
    asked = ["--draft-length", "4", "--max-new-tokens", "24", "--temperature", "0", "--history", "off", "--json"]
    monkeypatch.setattr(
        "sys.argv", ["adaptive", "generate", "Write a function that adds two numbers.", *models, *asked]
    )
    with pytest.raises(SystemExit) as end:
        run()
    assert not end.value.code
    said = json.loads(capsys.readouterr().out)
    assert said["timings"]["draft_n"] > 0
    folder = tmp_path / "s" / pair_identity(settings_of(TARGET, head)).id
    with Log(folder / "records.db") as log:
        (logged,) = log.generations()
    # The last round drafts nothing if only one token is left.
    assert {outcome.drafter for outcome in logged.generation.rounds} <= {"head", "none"}
    assert logged.generation.output.tolist() == said["tokens"]


def test_which_forward_it_will_be_is_known_before_it_is_loaded(head: Path) -> None:
    for dtype in ("float32", "float64"):
        settings = settings_of(TARGET, head).model_copy(update={"dtype": dtype})
        source = sources(settings)[1]
        assert source is not None
        assert source.head
        chosen = choose_forward(source, settings, "cpu", draft=True)
        pair = load_pair(settings)
        assert pair.draft is not None
        assert chosen.forward is forward_of(pair.draft)
        assert chosen.weights == pair.draft.weights
        assert (chosen.forward is Forward.TRANSFORMERS) >= (dtype == "float64")


def test_it_has_its_targets_tokenizer(head: Path) -> None:
    assert len(load_tokenizer(settings_of(TARGET, head))) == len(load_tokenizer(load_settings({"target": str(TARGET)})))


def test_a_head_is_no_target(head: Path) -> None:
    with pytest.raises(AdaptiveError, match="is a head, which only drafts"):
        sources(load_settings({"target": str(head), "draft": str(BUNDLED / "draft")}))


def test_a_head_of_another_target_is_refused(head: Path, tmp_path: Path) -> None:
    target, _ = save_random_pair(tmp_path, "qwen2")
    with pytest.raises(AdaptiveError, match="is for a target with model_type llama, and this one has qwen2"):
        load_pair(settings_of(target, head))


def test_a_target_that_gives_no_hidden_states_is_refused(head: Path, tmp_path: Path) -> None:
    settings = settings_of(TARGET, head)
    pair = load_pair(settings)
    assert pair.draft is not None
    with pytest.raises(AdaptiveError, match="a head reads the target's hidden states, and this target, run by head"):
        load_head(None, settings, pair.draft)
    pytest.importorskip("llama_cpp")
    (tmp_path / "target.gguf").write_bytes(b"GGUF")
    with pytest.raises(AdaptiveError, match=r"and llama\.cpp gives none; name the target's Hugging Face checkpoint"):
        sources(settings_of(tmp_path / "target.gguf", head))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"device": "cpu", "draft_device": "meta"}, "a head runs where its target does, on cpu"),
        ({"draft_quantize": "nf4"}, "--draft-quantize nf4 is for models"),
    ],
)
def test_a_setting_that_no_head_works_with_is_refused_before_anything_is_loaded(
    options: dict[str, str], said: str, head: Path
) -> None:
    loaded: list[str] = []
    with pytest.raises(AdaptiveError, match=said):
        load_pair(settings_of(TARGET, head, **options), lambda what, _: loaded.append(what))
    assert loaded == ["tokenizers"]


def test_a_damaged_head_is_refused(head: Path, tmp_path: Path) -> None:
    shutil.copytree(head, tmp_path / "head")
    weights = tmp_path / "head" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-40])
    with pytest.raises(AdaptiveError, match="cannot be read"):
        load_pair(settings_of(TARGET, tmp_path / "head"))
