"""The adaptation benchmark runs real rounds on streams of prompts and reports correct counts."""

from __future__ import annotations

import json
import random
import sys
from dataclasses import asdict
from pathlib import Path

import adaptation
import no_learning
import pytest
from streams import Answers, answers_of, stream
from test_trainer import small_draft, target
from test_trainer_command import WORDS, tokenizer

from adaptive.control.costs import UNMEASURED
from adaptive.errors import AdaptiveError
from adaptive.settings import Settings


@pytest.fixture
def pair(tmp_path: Path) -> Settings:
    """A tiny pair and 60 prompts of each of two kinds."""
    for name, model in (("target", target()), ("draft", small_draft())):
        model.save_pretrained(tmp_path / name)
        tokenizer().save_pretrained(tmp_path / name)
    for kind, words in (("a", WORDS[:20]), ("b", WORDS[20:])):
        rng = random.Random(kind)
        lines = [json.dumps({"prompt": " ".join(rng.choices(words, k=4))}) for _ in range(60)]
        (tmp_path / f"{kind}.jsonl").write_text("\n".join(lines))
    return Settings(target=str(tmp_path / "target"), draft=str(tmp_path / "draft"), device="cpu", max_new_tokens=20)


def answered(pair: Settings, folder: Path, each: int = 1) -> dict[str, Answers]:
    return {kind: answers_of(kind, pair, folder, folder / "cache", 0.7, each) for kind in ("a", "b")}


@pytest.mark.thorough
def test_answers_are_made_once_and_more_are_added(pair: Settings, tmp_path: Path) -> None:
    once = answered(pair, tmp_path)["a"]
    twice = answered(pair, tmp_path, each=2)["a"]
    assert [len(made) for made in twice.by_prompt] == [2] * 60
    first, again = ([made[0].output.tolist() for made in answers.by_prompt] for answers in (once, twice))
    assert first == again
    assert any(two[0].output.tolist() != two[1].output.tolist() for two in twice.by_prompt)
    assert all(len(g.supervision.rest) == len(g.output) for made in twice.by_prompt for g in made if g.supervision)


@pytest.mark.thorough
def test_answers_of_another_length_target_or_file_are_not_taken_from_the_cache(pair: Settings, tmp_path: Path) -> None:
    def made(given: Settings) -> list[list[int]]:
        answers = answers_of("a", given, tmp_path, tmp_path / "cache", 0.7, 1)
        return [generations[0].output.tolist() for generations in answers.by_prompt]

    first = made(pair)
    assert max(map(len, made(pair.model_copy(update={"max_new_tokens": 7})))) <= 7
    assert made(pair.model_copy(update={"target": pair.draft})) != first
    assert made(pair) == first
    lines = (tmp_path / "a.jsonl").read_text().splitlines()
    (tmp_path / "a.jsonl").write_text("\n".join(lines[:30]))
    assert len(made(pair)) == 30


def test_streams_have_their_shape_and_never_show_what_is_set_aside(pair: Settings, tmp_path: Path) -> None:
    answers = answered(pair, tmp_path)
    for spec, kinds in (
        ("stationary:a", "a" * 40),
        ("change:a,b", "a" * 20 + "b" * 20),
        ("turns:a,b", "a" * 20 + "b" * 20),
        ("mixture:a,b", None),
    ):
        made = stream(spec, answers, 40, 10, seed=0)
        order = "".join(g.domain or "" for g in made.generations)
        assert kinds is None or order == kinds
        assert sorted(order) == sorted(kinds or "a" * 20 + "b" * 20)
        said = {g.prompt.tobytes() for g in made.generations}
        assert not said & {g.prompt.tobytes() for held in made.held_out.values() for g in held}
    with pytest.raises(AdaptiveError, match="has 50 generations"):
        stream("stationary:a", answers, 51, 10, seed=0)
    with pytest.raises(AdaptiveError, match="shape"):
        stream("zigzag:a", answers, 10, 10, seed=0)


@pytest.mark.thorough
def test_it_reports_gain_retention_and_break_even(
    pair: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "costs.json").write_text(json.dumps(asdict(UNMEASURED)))
    arguments = [
        "adaptation.py", "--target", str(pair.target), "--draft", str(pair.draft), "--prompts", str(tmp_path),
        "--cache", str(tmp_path / "cache"), "--costs", str(tmp_path / "costs.json"), "--json", str(tmp_path / "r.json"),
        "--stream", "change:a,b", "--stream", "stationary:b", "--rounds", "75,150", "--answers", "3",
        "--set-aside", "10", "--max-new-tokens", "40", "--seeds", "2", "--recipe", "rank=4,epochs=8,learning_rate=0.02",
        "--recipe", "full=all,epochs=2,learning_rate=0.005", "--plot",
    ]  # fmt: skip
    monkeypatch.setattr(sys, "argv", arguments)
    adaptation.main()
    said = capsys.readouterr().out
    for line in ("a keeps", "b gains", "Break-even", "Recipes on change:a,b", "over generations seen"):
        assert line in said
    results = json.loads((tmp_path / "r.json").read_text())
    assert len(results) == 8
    full = [r["points"] for r in results.values() if r["recipe"].startswith("full")]
    assert all(points[-1]["all"]["acceptance"] > points[0]["all"]["acceptance"] for points in full)
    adaptation.main()
    again = capsys.readouterr().out
    assert "s of training" in said
    assert "s of training" not in again  # nothing was run again
    for watched in ("", "a"):
        one = ["--stream", "stationary:b", "--rounds", "75", "--seeds", "1", "--recipe", "rank=4,epochs=1"]
        one += ["--answers", "3", "--set-aside", "10", "--max-new-tokens", "40", "--watch", watched]
        monkeypatch.setattr(sys, "argv", [*arguments[:13], *one])
        adaptation.main()
        assert capsys.readouterr().out.count("s of training") == 1  # what else is watched is part of a result


def test_shuffled_supervision_is_the_same_rows_elsewhere(pair: Settings, tmp_path: Path) -> None:
    given = [g for made in answered(pair, tmp_path)["a"].by_prompt for g in made]
    mixed = no_learning.shuffled(given, seed=1)
    rests = [[float(x) for g in side if g.supervision for x in g.supervision.rest] for side in (given, mixed)]
    assert rests[0] != rests[1]
    assert sorted(rests[0]) == sorted(rests[1])
    assert all(one.output is two.output for one, two in zip(given, mixed, strict=True))
