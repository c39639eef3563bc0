"""``adaptive calibrate`` predicts a bounded speed-up with an interval that covers the machine, or none at all."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
from conftest import Command, save_random_pair
from spinning import spinning

from adaptive.assistant import Assistant
from adaptive.control.costs import UNMEASURED, CostModel, CostTable
from adaptive.control.policy import FixedLength
from adaptive.pair import load_pair
from adaptive.settings import load_settings
from adaptive.types import SamplingParams
from cli import repeats
from cli.calibrate import answer_plainly, read_sample
from cli.forecast import predict, speed_up_interval
from cli.prompts import bare_prompt
from cli.repeats import typical, uncertainty
from trainers.dataset import read_log, split

DECODED, ROUNDS = np.array([60.0, 76.0, 49.0, 96.0]), np.array([20.0, 24.0, 18.0, 30.0])
TOKENS = DECODED.sum() / ROUNDS.sum()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    target, draft = save_random_pair(tmp_path_factory.mktemp("pair"), "qwen2")
    return "--target", str(target), "--draft", str(draft), "--dtype", "float32"


@pytest.mark.thorough
def test_beside_other_programs_nothing_is_promised_and_nothing_kept(
    pair: tuple[str, ...],
    own_home: Path,
    monkeypatch: pytest.MonkeyPatch,
    adaptive: Command,
) -> None:
    monkeypatch.setattr(repeats, "PATIENCE_S", 1.0)
    with spinning(3):
        code, out, err = adaptive("calibrate", *pair, "--answers", "2")
    assert code == 1
    assert "this machine is busy (" in err
    assert "again when it is quiet, or with --busy" in err
    assert "x plain" not in out
    assert not list(own_home.rglob("controller.json"))


@pytest.mark.thorough
def test_two_pairs_on_the_same_engine_are_compared(pair: tuple[str, ...], adaptive: Command) -> None:
    other = ("--other-target", pair[1], "--other-draft", pair[3])
    code, out, err = adaptive("calibrate", *pair, *other, "--answers", "2", "--busy", "--json")
    assert code == 0, err
    assert "times as fast here as" in json.loads(out)["other"]["advice"]


@pytest.mark.thorough
@pytest.mark.usefixtures("whole_measurement")
def test_figures_beside_other_programs_are_bounded_marked_and_not_kept(
    pair: tuple[str, ...], own_home: Path, adaptive: Command
) -> None:
    with spinning(3):
        code, out, err = adaptive("calibrate", *pair, "--answers", "2", "--busy", "--json")
    assert code == 0, err
    report = json.loads(out)
    assert report["busy"] is True
    assert report["other_programs_cores"] > 0.3
    assert report["measurements"] >= 3
    assert report["break_even_acceptance"] > 0
    best = report["recommended_draft_length"]
    assert 1 <= report["predicted_speed_up"] <= report["tokens_per_round"][best]
    low, high = report["predicted_speed_up_interval"]
    assert low <= report["predicted_speed_up"] <= high <= max(report["tokens_per_round"]) + 1
    # At acceptance a, a round brings at most 1 / (1 - a) tokens: at 0.1, a ninth more than plain decoding.
    assert all(row["speed_up"] <= 1 / (1 - row["acceptance"]) for row in report["by_acceptance"])
    assert not list(own_home.rglob("controller.json"))


def slower(by: float) -> CostTable:
    """A machine on which verifying drafted tokens takes ``by`` times as long, and a plain step the same time."""
    return dataclasses.replace(UNMEASURED, verify_s=(1.0, *(by * seconds for seconds in UNMEASURED.verify_s[1:])))


def interval(*tables: CostTable) -> tuple[float, float]:
    models, middle = [CostModel(table) for table in tables], CostModel(typical(tables))
    predicted = middle.with_tokens(TOKENS / middle.round(3)) / middle.with_tokens(1 / middle.round(0))
    return speed_up_interval(models, DECODED, ROUNDS, 3, predicted)


def test_the_interval_covers_the_machine_and_the_texts() -> None:
    texts = interval(UNMEASURED)
    steady = interval(UNMEASURED, slower(1.001), slower(0.999))
    changing = interval(UNMEASURED, slower(1.15), slower(1.3))
    assert steady == pytest.approx(texts, rel=0.02)
    assert changing[1] - changing[0] > 1.5 * (texts[1] - texts[0])
    # The interval contains the speed-up of each measured machine on the measured texts.
    for table in (UNMEASURED, slower(1.15), slower(1.3)):
        model = CostModel(table)
        seen = model.with_tokens(TOKENS / model.round(3)) / model.with_tokens(1 / model.round(0))
        assert changing[0] < seen < changing[1]


def test_no_speed_up_is_above_the_tokens_of_a_round() -> None:
    free = dataclasses.replace(UNMEASURED, verify_s=(1.0,) * 17, start_s=0.0, draft_s=1e-6, token_s=1e-9)
    low, high = interval(free, dataclasses.replace(free, plain_s=4.0, verify_s=(4.0,) * 17), free)
    best = max(decoded / rounds for decoded, rounds in zip(DECODED, ROUNDS, strict=True))
    assert low <= high <= best


def test_an_answer_is_predicted_whole_with_its_last_round_and_the_prompt_that_the_draft_reads(tmp_path: Path) -> None:
    target, _ = save_random_pair(tmp_path, "qwen2")
    # The draft is the target itself, so that every token is accepted, and only the answers' ends are lost.
    names = {"target": str(target), "draft": str(target), "dtype": "float32", "temperature": "0"}
    settings = load_settings(names)
    own = load_pair(settings)
    prompts, log = [bare_prompt("one"), bare_prompt("two words")], tmp_path / "log.db"
    answer_plainly(Assistant(own, FixedLength(0), None), SamplingParams(temperature=0.0), prompts, log, 20)
    sample = read_sample(own, log)
    forecast = predict([UNMEASURED], sample, own)
    decoded = [len(example.output) - 1 for example in sample]
    assert forecast.acceptance == pytest.approx(1.0, abs=1e-4)
    for k in (1, 4, 16):
        rounds = sum(math.ceil(number / (k + 1)) for number in decoded)
        assert forecast.tokens_per_round[k] == pytest.approx(sum(decoded) / rounds, rel=1e-3)
        model = CostModel(UNMEASURED)
        seconds = rounds * model.round(k) + sum(len(example.prompt) for example in sample) * model.catch_up_s
        seconds += sum(decoded) * model.token_s
        assert forecast.tokens_per_second[k] == pytest.approx(sum(decoded) / seconds, rel=1e-3)


def test_another_target_alone_is_refused_before_anything_is_measured(adaptive: Command, own_home: Path) -> None:
    status, _, err = adaptive("calibrate", "--other-target", "another")
    assert (status, err) == (2, "adaptive: --other-target is given without --other-draft; name both\n")
    assert not own_home.exists()


def test_measurements_are_repeated_while_they_disagree() -> None:
    assert uncertainty([UNMEASURED, UNMEASURED, UNMEASURED]) == 0
    assert uncertainty([UNMEASURED, slower(1.2), slower(0.9)]) > repeats.CERTAIN
    # One outlier among the measurements does not change the prediction.
    assert typical([UNMEASURED, slower(3.2), UNMEASURED]) == dataclasses.replace(UNMEASURED, plain_s=1.0)


def test_a_trained_draft_is_judged_by_answers_on_which_it_was_not_trained(tmp_path: Path) -> None:
    target, draft = save_random_pair(tmp_path, "qwen2")
    own = load_pair(load_settings({"target": str(target), "draft": str(draft), "dtype": "float32"}))
    prompts, log = [bare_prompt(f"question {number}") for number in range(24)], tmp_path / "log.db"
    answer_plainly(Assistant(own, FixedLength(0), None), SamplingParams(), prompts, log, 12)
    everything = read_sample(own, log)
    held = {example.id for example in read_sample(own, log, trained=True)}
    parts = split(read_log(log, 100))
    assert {example.id for example in everything} > held
    assert held <= {int(number) for part in (parts.gate, parts.validation) for number in part["id"]}
