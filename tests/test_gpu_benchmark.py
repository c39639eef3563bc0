"""The GPU benchmark runs from beginning to end on tiny models, on a machine without a GPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import gpu
import pytest
import torch
from gpu_parts import plan
from gpu_parts.exact import compare, graphs
from gpu_parts.models import Workshop, planned_bytes, read_bytes
from gpu_parts.sampled import exactly, p_value
from gpu_parts.saying import model_of
from gpu_parts.scale import FULL, TINY
from gpu_parts.work import Bench, Budget, Figures, Part, Wrong, read, run

from adaptive.decoding import verifier
from adaptive.decoding.verify import Verdict
from adaptive.sampling import pick

CPU = torch.device("cpu")


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Run the command. Returns its exit status."""
    monkeypatch.setattr(sys, "argv", ["gpu.py", *arguments])
    return gpu.main()


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(TINY, CPU, Workshop(TINY, CPU), Budget(0.5), tmp_path)


@pytest.mark.thorough
def test_every_part_runs_tiny_on_the_cpu_and_is_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    status = call(monkeypatch, "--device", "cpu", "--out", str(out))
    said = capsys.readouterr().out
    results = {one["part"]: one for one in json.loads((out / "gpu.json").read_text())["parts"]}
    assert {part.name: results[part.name]["problem"] for part in plan.PARTS} == dict.fromkeys(results)
    assert status == 0
    assert list(results) == [part.name for part in plan.PARTS]
    assert said.count("done (") == len(plan.PARTS)
    check_exactness({name: one["figures"] for name, one in results.items()})
    check_figures({name: one["figures"] for name, one in results.items()})

    page = (out / "gpu.md").read_text()
    for line in (
        "## Decoding without a draft",
        "| nf4 | eager |",
        "| hybrid | greedy | ours, fixed 2 |",
        "| verification |",
    ):
        assert line in page
    (out / "swap.json").write_text('{"part": "swap"')  # a truncated result
    assert call(monkeypatch, "--device", "cpu", "--out", str(out)) == 0
    said = capsys.readouterr().out
    assert said.count("there already") == len(plan.PARTS) - 1
    assert "swap: done" in said
    assert call(monkeypatch, "--device", "cpu", "--out", str(out), "--only", "bandwidth") == 0
    assert "bandwidth: done" in capsys.readouterr().out


def check_exactness(found: dict[str, Any]) -> None:
    """Check the results of the exactness parts."""
    greedy, half = found["greedy-float32"], found["greedy-bfloat16"]
    assert (greedy["answers"], greedy["ways"], greedy["parted at a tie"]) == (1, 3, 0)
    assert half["answers"] == 1
    assert min(found["sampled"]["p"].values()) > 1e-3
    assert found["graphs"]["recordings"] > 1
    assert found["graphs"]["recorded again"] == 0
    assert found["swap"]["slices"] > 1
    assert found["swap"]["logits changed by"] > 0.01
    assert "there is no memory for the keys and values" in found["short-memory"]["says"]
    accepted = found["architectures"]["accepted"]
    assert set(accepted) == set(TINY.types)
    assert max(accepted.values()) > 0


def check_figures(found: dict[str, Any]) -> None:
    """Check that the timings are present and consistent."""
    assert found["bandwidth"]["bytes a second"] > 1e8
    plain = found["plain"]["eager"]
    share = plain["tokens a second"] * plain["bytes a token"] / found["bandwidth"]["bytes a second"]
    assert plain["share of the limit"] == pytest.approx(share)
    assert set(found["verification"]["target"]) == {"1", "3"}
    assert found["verification"]["target"]["1"]["times one"] == 1
    for name in ("greedy", "temperature 0.7"):
        rounds = found["breakdown"][name]["program"]
        stretches = [rounds[stretch] for stretch in ("propose", "verify", "commit")]
        assert rounds["whole"] == pytest.approx(sum(stretches), rel=0.2)
        assert min(stretches[:2]) > 1e-4
    rows = {row["contender"]: row for row in found["speculation"]["greedy"]}
    assert {"ours, fixed 2", "ours, controller", "transformers, plain", "transformers, assisted 2"} <= set(rows)
    assert rows["ours, fixed 2"]["share of that"] > 0
    assert 1 <= rows["ours, fixed 2"]["tokens a round"] <= 3
    assert rows["transformers, plain"]["same answers as plain"] == 1
    # The hybrid's draft computes the same function as its target, so every token is accepted.
    hybrid = {row["contender"]: row for row in found["hybrid"]["speculation"]["greedy"]}
    assert hybrid["ours, fixed 2"]["tokens a round"] > 2
    training = found["training"]
    assert training["steps"] >= 1
    assert training["tokens a second, training"] > 0
    assert training["acceptance after"] > 0
    assert found["first-token"]["prompt"] == TINY.first
    assert found["nf4"]["eager"]["bytes a token"] < 0.3 * plain["bytes a token"]
    assert found["int8"]["eager"]["weights"] == "bitsandbytes-int8"


@pytest.mark.thorough
def test_a_part_that_fails_is_noted_and_the_others_are_run(tmp_path: Path) -> None:
    ran: list[str] = []

    def fails(bench: Bench) -> Figures:
        ran.append("fails")
        return {"x": torch.empty(1 << 62)}

    def works(bench: Bench) -> Figures:
        ran.append("works")
        return {"x": 1.5}

    parts = [Part("fails", "", 1, (), fails), Part("works", "", 1, (), works)]
    for _ in range(2):
        assert len(list(run(parts, TINY, CPU, tmp_path, 1.0, False, lambda part: 0))) == 2
        failed, worked = (read(tmp_path / f"{name}.json") for name in ("fails", "works"))
        assert failed is not None
        assert worked is not None
        assert failed.problem is not None
        assert failed.problem.startswith("RuntimeError")
        assert "Traceback" in (tmp_path / "fails.log").read_text()
        assert (worked.problem, worked.figures) == (None, {"x": 1.5})
    assert ran == ["fails", "works", "fails"], "what failed is tried again, what worked is not"


@pytest.mark.thorough
def test_the_plan_says_what_every_part_takes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, "--plan") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("`")[1] for line in lines[2:-1]] == [part.name for part in plan.PARTS]
    assert lines[-1].startswith("| all | | 480 | at most ")
    gigabytes = {line.split("`")[1]: float(line.split("|")[4]) for line in lines[2:-1]}
    assert 16 < gigabytes["plain"] < 20
    assert gigabytes["first-token"] > gigabytes["plain"] + 4
    assert call(monkeypatch, "--plan", "--minutes", "4") == 0
    assert "| all | | 240 |" in capsys.readouterr().out


@pytest.mark.thorough
def test_planned_bytes_are_those_of_the_models() -> None:
    workshop = Workshop(TINY, CPU)
    for kind in ("bundled float32", "large", "mixture", "hybrid"):
        pair = workshop.pair(kind)
        models = [model_of(engine).model for engine in (pair.target, pair.draft)]
        there = sum(parameter.nbytes for model in models for parameter in model.parameters())
        assert planned_bytes(TINY, kind) == (there, there)
        if kind == "mixture":  # a token uses two experts of four
            assert read_bytes(models[0]) < 0.9 * sum(parameter.nbytes for parameter in models[0].parameters())
    large, most = planned_bytes(FULL, "nf4")
    assert most == planned_bytes(FULL, "large")[0] > 16e9
    assert large < 0.4 * most


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--only", "plane", "--out", "x"), "--only plane: there is no such part; the parts are bandwidth, greedy"),
        ((), "--out is missing"),
        (("--minutes", "0", "--plan"), "--minutes is 0.0; it must be above 0"),
        (("--scale", "full", "--device", "cpu", "--out", "x"), "--scale full needs a CUDA device"),
        (("--device", "cuda:99", "--out", "x"), "device cuda:99 cannot be used here"),
    ],
)
def test_what_is_asked_wrongly_is_one_line(
    arguments: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, *arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith(said)
    assert error.count("\n") == 1


def test_another_answer_is_wrong_and_not_a_tie(bench: Bench) -> None:
    pair = bench.workshop.pair("bundled float32")
    prompt = list(range(10, 30))
    logits = pair.target.sequence().extend(prompt, 1)[0]
    best, second, worst = int(logits.argmax()), int(logits.topk(2).indices[1]), int(logits.argmin())
    assert compare(pair.target, prompt, [best, 3], [best, 3], "it") == 0
    for other in (second, worst):
        with pytest.raises(Wrong, match="it says another token"):
            compare(pair.target, prompt, [best, 3], [other, 3], "it")


@pytest.mark.thorough
def test_passes_that_are_recorded_wrongly_are_found(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    from adaptive.engines.cuda.texts import Texts
    from adaptive.engines.hf.cache import Recording

    places, aim = Recording.places, Texts.aim

    def off_by_one(self: Texts, caches: Any) -> None:
        aim(self, caches)
        self.start += 1

    monkeypatch.setattr(Recording, "places", lambda self: places(self) + 1)  # of the models' own forward
    monkeypatch.setattr(Texts, "aim", off_by_one)  # of ours
    with pytest.raises(Wrong, match="passes of the target stay eager"):
        graphs(bench, "bundled float32")


@pytest.mark.thorough
def test_a_rule_that_accepts_everything_fails_the_chi_square(monkeypatch: pytest.MonkeyPatch) -> None:
    from collections import Counter

    from gpu_parts.sampled import UNDER, drawn, tiny_pair

    from adaptive.control.policy import FixedLength

    def accepts(logits: Any, transform: Any, drafted: Any, q: Any, uniform: Any, *others: Any) -> Verdict:
        p, tokens = transform(logits), torch.as_tensor(drafted).tolist()
        extra = pick(p[-1].numpy(), uniform.next())
        assert extra is not None
        return Verdict(len(tokens), [*tokens, extra], [0.0] * (len(tokens) + 1))

    pair, params = tiny_pair(CPU), UNDER["top-p"]
    exact = exactly(pair[0], params)
    assert sum(exact.values()) == pytest.approx(1, abs=1e-4)
    assert p_value(Counter(drawn(pair, params, FixedLength(2), 150)), exact) > 1e-3
    monkeypatch.setattr(verifier, "verify_logits", accepts)
    assert p_value(Counter(drawn(pair, params, FixedLength(2), 150)), exact) < 1e-3
