"""``adaptive bench`` on a local pair: every contender answers, and greedy answers are the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import Command, save_random_pair

from adaptive.settings import load_settings
from cli.contenders import repeated
from cli.other_pair import other_settings


@pytest.mark.thorough
def test_bench_lists_every_contender_with_the_same_greedy_answer(adaptive: Command, tmp_path: Path) -> None:
    target, draft = save_random_pair(tmp_path / "pair", "qwen2")
    for model in (target, draft):  # a checkpoint that recommends a penalty, which no contender follows
        config = json.loads((model / "generation_config.json").read_text())
        (model / "generation_config.json").write_text(json.dumps({**config, "repetition_penalty": 5.0}))
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "One and two"}\n{"prompt": "Three"}\n')
    code, out, err = adaptive(
        "bench",
        *("--target", str(target), "--draft", str(draft), "--dtype", "float32", "--prompts", str(prompts)),
        *("--tokens", "24", "--lengths", "2", "--json"),
    )
    assert code == 0, err
    rows = {row["contender"]: row for row in json.loads(out)["rows"]}
    assert list(rows) == [
        "transformers, plain",
        "transformers, assisted",
        "transformers, assisted 2",
        "transformers, prompt lookup",
        "ours, plain",
        "ours, fixed 2",
        "ours, controller",
    ]
    assert all(row["same"] == 1.0 for row in rows.values())
    assert rows["ours, plain"]["tokens_per_round"] == 1.0


@pytest.mark.thorough
def test_another_pair_on_the_same_engine_has_rows_of_its_own(
    adaptive: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = save_random_pair(tmp_path / "pair", "qwen2")
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich then takes every stream for a terminal
    monkeypatch.setenv("TERM", "xterm")
    code, out, err = adaptive(
        "bench",
        *("--target", str(target), "--draft", str(draft), "--other-target", str(target), "--other-draft", str(draft)),
        *("--dtype", "float32", "--count", "1", "--tokens", "8", "--lengths", "2", "--json"),
    )
    assert code == 0, err
    report = json.loads(out)
    names = {"transformers, plain", "ours, plain", "transformers (other), plain", "transformers (other), fixed 2"}
    assert {row["contender"] for row in report["rows"]} >= names
    assert "times as fast here as" in report["advice"]
    assert "measuring before the race" in err


def test_a_wrong_length_is_one_clear_line(adaptive: Command) -> None:
    code, _, err = adaptive("bench", "--lengths", "two")
    assert code == 2
    assert "--lengths" in err
    assert len(err.strip().splitlines()) == 1


def test_repeated_counts_ngrams_that_came_before() -> None:
    assert repeated([1, 2, 3, 1, 2, 3], n=3) == pytest.approx(1 / 4)
    assert repeated(list(range(20))) == 0.0


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "myhost", "myhost:8080", "http://127.0.0.1:many"])
def test_a_peer_that_has_no_address_is_one_line(adaptive: Command, url: str) -> None:
    code, _, err = adaptive("bench", "--count", "1", "--tokens", "2", "--peer", url)
    assert code == 2
    assert f"no llama.cpp server answers at {url} (" in err
    assert len(err.strip().splitlines()) == 1, "before anything is loaded"


def test_another_pair_is_quantised_as_this_one_and_a_gguf_file_as_it_is() -> None:
    here = load_settings({"target": "t", "draft": "d", "quantize": "nf4", "draft_quantize": "int8"})
    other = other_settings(here, "t2", "head")
    assert other is not None
    assert (other.target, other.draft, other.quantize, other.draft_quantize) == ("t2", "head", "nf4", "int8")
    files = other_settings(here, "t.gguf", "d.gguf")
    assert files is not None
    assert (files.quantize, files.draft_quantize, files.draft_checkpoint) == ("none", "none", "d")
