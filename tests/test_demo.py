"""``adaptive demo``, shortened: its text and its JSON output."""

from __future__ import annotations

import io
import json
import os
import shlex
import signal
import sys
from pathlib import Path

import pexpect
import pytest
from conftest import BUNDLED, Command
from rich.console import Console
from test_service_learning import publish_random_adapter

from adaptive.opened import opened
from adaptive.pair import load_pair
from adaptive.records.features import FeatureSpool
from adaptive.records.log import Log
from adaptive.settings import Settings
from adaptive.types import Message, SamplingParams, StopParams
from cli import demo
from cli.demo_head import hidden_states
from cli.demo_ways import Way

# Few and short answers, but enough for the first training of a head.
SHORT = {"JUDGED": 2, "LEARNED": 56, "TOKENS": 32, "HEAD_SECONDS": 3.0, "COMPARED": 2}
# The shortened demo in a process of its own.
PLAY = f"""
import sys
from cli import demo
vars(demo).update({SHORT!r})
from cli.main import run
sys.argv[1:] = ["demo", "--dtype", "float32", "--seed", "1"]
run()
"""


@pytest.mark.thorough
def test_the_demo_says_what_it_came_to_as_one_object_and_keeps_what_it_made(
    adaptive: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value in SHORT.items():
        monkeypatch.setattr(demo, name, value)
    kept = tmp_path / "kept [v2]"
    status, out, err = adaptive("demo", "--json", "--dtype", "float32", "--seed", "1", "--keep", str(kept))
    assert status == 0, err
    for step in ("1. Before.", "2. Use it.", "3. Distil.", "4. Or grow a draft.", "5. After."):
        assert step in err
    (line,) = out.splitlines()
    found = json.loads(line)
    assert found["prompts"] == {"judged": 2, "learned": 56}
    plain, drafted = found["before"]
    assert (plain["draft_length"], plain["against_plain"], plain["acceptance"]) == (0, 1.0, None)
    assert drafted["tokens_per_round"] >= 1
    # So few answers teach a draft hardly anything, so the gate may refuse it; the report must agree with its decision.
    assert found["training"]["promoted"] == (found["adapter"] is not None)
    assert found["head_training"]["promoted"]
    assert {row["tokens"] for row in found["before"] + found["after"]} == {plain["tokens"]}  # the seed fixes the text
    assert found["seconds"] > 0
    assert found["head"] == "0001", found["head_training"]
    rows = {row["decoding"]: row for row in found["after"]}
    head = rows["head from nothing, 56 answers"]
    assert (head["drafter"], head["draft_length"], head["adapter"]) == ("head", 4, "0001")
    assert head["acceptance"] > 0.1  # only a trained head that was in use reaches this
    assert rows["head from nothing, 56 answers, length auto"]["draft_length"] is None
    assert found["greedy"] == {"answers": 2, "same": 2}
    assert "More answers teach a head more" in " ".join(err.split())
    assert f"What it made is kept: adaptive history --state-dir {shlex.quote(str(kept))}\n" in err
    (alone,) = kept.glob("target--none-*")
    assert len(FeatureSpool(alone / "features", 0).ids()) == 56
    status, out, err = adaptive("adapters", "list", "--target", str(BUNDLED / "target"), "--state-dir", str(kept))
    assert status == 0, err
    assert "0001" in out
    assert "in use" in out


def test_a_pair_without_a_draft_that_runs_here_is_one_clear_line(adaptive: Command) -> None:
    status, _, err = adaptive("demo", "--draft", "none", "--target", str(BUNDLED / "target"))
    assert status == 2
    assert "the demo needs a draft that runs and is trained here" in err.splitlines()[-1]


@pytest.mark.thorough
def test_a_kept_log_holds_no_answers_to_the_prompts_that_the_next_demo_judges_by(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "JUDGED", 2)
    monkeypatch.setattr(demo, "TOKENS", 8)
    shown = io.StringIO()
    settings = Settings(home=tmp_path, draft_length="4", history="off", record=True)
    with opened(settings, load_pair(settings)) as session:
        tour = demo.Tour(settings, Console(file=shown))
        tour.ways["draft"] = Way.of(session, demo.KIND)
        tour._answer("draft", tour.learned[0], 4, record=True)
        tour._plot(session, publish_random_adapter(session.store, tmp_path / "made"))
        tour._answer("draft", tour.learned[1], 4, record=True)  # logged as before
        records = session.state.records
    assert "before and after its adapter 0001" in " ".join(shown.getvalue().split())
    with Log(records) as log:
        assert [logged.generation.messages for logged in log.generations()] == [p.messages for p in tour.learned[:2]]


def heed_interrupts() -> None:
    """Restore the default action of ctrl-C, which background jobs of a shell and their children ignore."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.thorough
@pytest.mark.parametrize("at", ["answering", "growing"])
def test_ctrl_c_ends_the_demo_without_a_traceback_and_leaves_nothing_behind(tmp_path: Path, at: str) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    paths = os.pathsep.join((str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH", "")))
    told = {"TERM": "xterm", "TMPDIR": str(temporary), "PYTHONPATH": paths}
    child = pexpect.spawn(
        sys.executable,
        ["-c", PLAY],
        env={**os.environ, **told},
        dimensions=(60, 80),
        timeout=300,
        encoding="utf-8",
        preexec_fn=heed_interrupts,
    )
    child.expect_exact(at)
    child.sendintr()
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 130
    assert "Traceback" not in child.before
    assert not list(temporary.glob("adaptive-demo-*"))


@pytest.mark.thorough
def test_hidden_states_computed_afterwards_are_those_that_an_answer_left_in_the_cache(tmp_path: Path) -> None:
    """The demo's head therefore learns from the same states that a session on the target alone keeps."""
    settings = Settings(home=tmp_path, dtype="float32", draft="auto", target=str(BUNDLED / "target"), history="off")
    with opened(settings, load_pair(settings)) as session:
        messages, sampling = [Message("user", "Which tool tells the weather?")], SamplingParams(seed=3)
        for _ in session.assistant.chat(messages, sampling, StopParams(24)):
            pass
        answering = session.assistant.latest
        assert answering is not None
        kept = answering.features()
        computed = hidden_states(session.pair, answering.generation("target"))
    assert computed.first == kept.first == 0
    assert computed.values.shape == kept.values.shape
    difference = abs(computed.states() - kept.states()).max()
    assert difference <= 0.02 * abs(kept.states()).max()  # two steps of the 8-bit rounding of both


@pytest.mark.long
def test_the_whole_demo_ends_with_an_adapter_and_a_head_and_what_they_brought(adaptive: Command) -> None:
    status, out, err = adaptive("demo", "--json")
    assert status == 0, err
    found = json.loads(out)
    assert (found["adapter"], found["head"]) == ("0001", "0001")
    rows = {row["decoding"]: row for row in found["after"]}
    for made in ("draft distilled", "head from nothing, 280 answers"):
        assert rows[made]["tokens_per_round"] > rows[demo.UNTRAINED]["tokens_per_round"]
    assert "Speed against plain, at length auto:" in " ".join(err.split())
