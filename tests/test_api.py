"""``from adaptive import Assistant``: the Python interface to a pair."""

from __future__ import annotations

import inspect
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import BUNDLED, save_random_adapter

import adaptive.api
from adaptive import Assistant
from adaptive.errors import AdaptiveError
from adaptive.pair import pair_identity
from adaptive.records.log import Log
from adaptive.settings import load_settings
from adaptive.state import PairState
from checkpoints.store import AdapterStore

ROOT = Path(__file__).resolve().parent.parent


def test_it_answers_streams_keeps_a_log_and_says_how_it_decoded(own_home: Path) -> None:
    with Assistant(dtype="float32", draft_length="4", temperature=0.0, history="off") as assistant:
        assert assistant.stats().tokens_per_round is None
        whole = assistant.ask("What is 17 * 23?", max_new_tokens=24)
        assert whole
        pieces = list(assistant.stream([{"role": "user", "content": "What is 17 * 23?"}], max_new_tokens=24))
        assert len(pieces) > 1
        assert "".join(pieces) == whole
        stats = assistant.stats()
        assert stats.tokens == 24
        assert stats.acceptance is not None
        assert stats.tokens_per_round == pytest.approx(1 + 4 * stats.acceptance, abs=0.2)
        assert stats.sentence.startswith("drafting")
        colours = ["red", "green"]
        assert json.loads(assistant.ask("Name a colour.", json_schema={"enum": colours})) in colours
        first = next(iter(assistant.stream("Count to a hundred.", session="mine")))  # and abandons the stream
        state = PairState(own_home / pair_identity(load_settings({})).id)
    with Log(state.records) as log:
        kept = [entry.generation for entry in log.generations()]
    assert [g.text for g in kept[:2]] == [whole, whole]
    assert kept[-1].session == "mine"
    assert kept[-1].text.startswith(first)


def test_an_answer_in_a_schema_does_not_begin_in_a_thought(tmp_path: Path, own_home: Path) -> None:
    shutil.copytree(BUNDLED / "target", tmp_path / "target")
    thinks = "{% if enable_thinking is not defined or enable_thinking %}<think>\n{% endif %}"
    template = tmp_path / "target" / "chat_template.jinja"
    template.write_text(template.read_text(encoding="utf-8") + thinks, encoding="utf-8")
    with Assistant(target=str(tmp_path / "target"), draft=str(BUNDLED / "draft"), draft_length="0") as assistant:
        assistant.ask("Name a colour.", max_new_tokens=2)
        assistant.ask("Name a colour.", json_schema={"enum": ["red", "green"]})
        state = assistant._opened.state
    with Log(state.records) as log:
        free, kept = (entry.generation.prompt.tolist() for entry in log.generations())
    assert len(free) > len(kept)
    assert free[: len(kept)] == kept


def test_its_figures_name_the_adapter_of_the_answer(tmp_path: Path) -> None:
    folder = save_random_adapter(BUNDLED / "draft", tmp_path / "adapter")
    with Assistant(dtype="float32", draft_length="4", record=False) as assistant:
        for use, before, after in ((folder, None, "0001"), (None, "0001", None)):
            assistant.ask("What?", max_new_tokens=4)
            assistant._assistant.use_adapter(after, use)
            assert assistant.stats().adapter == before


@pytest.mark.thorough
def test_it_learns_when_it_is_told_to(own_home: Path) -> None:
    lines = (BUNDLED / "prompts" / "math.jsonl").read_text(encoding="utf-8").splitlines()
    stages = []
    with Assistant(distill_seconds=4, draft_length="4") as assistant:
        refused = assistant.distil()
        assert refused.stage == "refused"
        for line in lines[:36]:
            assistant.ask(json.loads(line)["prompt"], max_new_tokens=40, temperature=0.7, seed=1)
        report = assistant.distil(lambda report: stages.append(report.stage))
        assert report.stage == "done", report.message
        assert "training" in stages
        state = PairState(own_home / pair_identity(load_settings({})).id)
        assistant.ask("And now?", max_new_tokens=4)
        assert assistant.stats().adapter == (report.adapter if report.promoted else None)
    assert [manifest.id for manifest in AdapterStore(state.adapters).list()] == [report.adapter]


@pytest.mark.thorough
def test_the_example_of_the_documentation_runs(capsys: pytest.CaptureFixture[str]) -> None:
    code = (ROOT / "docs" / "python.md").read_text(encoding="utf-8").split("```python\n")[1].split("```")[0]
    assert code.strip() in inspect.getdoc(adaptive.api).replace("\n    ", "\n")
    for name, folder in (("models/big", "target"), ("models/small", "draft")):
        code = code.replace(name, str(BUNDLED / folder))
    exec(code, {})
    said = capsys.readouterr().out
    assert "too little to distil from" in said
    assert said.splitlines()[-1].startswith(("drafting", "plain"))


def test_what_cannot_be_is_said_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(AdaptiveError, match="nothing"):
        Assistant(tmp_path / "nothing")
    with pytest.raises(AdaptiveError, match="temprature"):
        Assistant(temprature=0.5)
    with Assistant(record=False, draft="none") as assistant:
        with pytest.raises(AdaptiveError, match="top_kk is no option"):
            assistant.ask("Hello", top_kk=3)
        with pytest.raises(AdaptiveError, match="role and content"):
            assistant.ask([{"content": "Hello"}])
        with pytest.raises(AdaptiveError, match="nothing is logged"):
            assistant.distil()


def test_importing_the_package_imports_no_torch() -> None:
    code = "import sys, adaptive; assert 'torch' not in sys.modules; adaptive.Assistant; assert 'torch' in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
