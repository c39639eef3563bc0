"""The benchmarks compare what they say they compare, and leave nothing behind."""

from __future__ import annotations

import functools
import importlib
import io
import json
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import constrained
import controller
import controller_history
import history
import joint
import joint_history
import limit
import lived_session
import llamacpp_exact
import numpy as np
import psutil
import pytest
import seeded
from conftest import BUNDLED, save_random_pair
from gpu_parts.saying import continued
from paired_server import HeldArchive, PairedEngine
from records_factory import generation
from replay_workloads import DEPTH, Trace
from rich.console import Console
from served import Served
from slow_disk import until

from adaptive.control.costs import LONGEST, CostTable
from adaptive.control.policy import FixedLength, Lead, LengthPolicy
from adaptive.control.sources import GoodputWithHistory
from adaptive.drafting.archive import History
from adaptive.drafting.history import RUNNING
from adaptive.engines.protocol import ProposalCall
from adaptive.opened import OpenedPair
from adaptive.pair import load_pair
from adaptive.records.writer import LogWriter
from adaptive.service.metrics import Metrics
from adaptive.settings import load_settings
from adaptive.types import SamplingParams, StopParams
from cli.contenders import Contender, race
from cli.opened import open_pair
from cli.prompts import PromptLine, bare_prompt

BENCHMARKS = Path(controller.__file__).parent
# A plain step takes 1 ms after another one, and twice as long after a pass of another length.
COSTS = CostTable(0.0, 1e-4, 0.0, (2e-3,) * (LONGEST + 1), 1e-4, 1e-5, 0.0, 0, plain_s=1e-3)


def call(monkeypatch: pytest.MonkeyPatch, main: Callable[[], None], *arguments: str) -> None:
    """Run a benchmark's command line."""
    monkeypatch.setattr(sys, "argv", ["benchmark", *arguments])
    main()


def documented() -> Iterator[tuple[str, str, list[str]]]:
    """Every command of a benchmark or script that the documentation and their own texts have: the name of the program,
    its arguments before the first option, and its options."""
    root = BENCHMARKS.parent
    pages = [root / "README.md", *root.glob("docs/**/*.md"), *BENCHMARKS.glob("*.py"), *root.glob("scripts/*.py")]
    for page in pages:
        text = page.read_text(encoding="utf-8").replace("\\\n", " ")
        command = r"(?P<code>`)?\bpython (?:benchmarks|scripts)/(?P<name>\w+)\.py(?P<rest>(?(code)[^`]*|[^`\n]*))"
        for found in re.finditer(command, text):
            words = re.sub(r"#.*|[\[\]]", "", found["rest"].partition(" -- ")[0]).split()
            options = [word for word in words if word.startswith("--")]
            before = [word.partition("|")[0] for word in words[: words.index(options[0]) if options else 0]]
            yield found["name"], " ".join(before), options


def test_every_benchmark_and_script_says_what_it_is_for_and_has_the_options_that_the_documentation_names(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS.parent / "scripts"))
    monkeypatch.setenv("COLUMNS", "120")

    @functools.cache
    def helped(name: str, before: str) -> str:
        with pytest.raises(SystemExit) as ended:
            call(monkeypatch, importlib.import_module(name).main, *before.split(), "--help")
        said = capsys.readouterr()
        assert ended.value.code == 0, f"{name}: {said.err}"
        return said.out

    files = [*BENCHMARKS.glob("*.py"), *(BENCHMARKS.parent / "scripts").glob("*.py")]
    programs = {file.stem for file in files if "ArgumentParser(" in file.read_text(encoding="utf-8")}
    assert all(helped(name, "") for name in sorted(programs))
    wrong = []
    for name, before, options in documented():
        known = re.findall(r"--[\w-]+", helped(name, before)) if name in programs else options
        wrong += [f"{name} {before}: {option}" for option in options if option not in known]
    assert not wrong


def refused(tokens: int) -> Trace:
    """An answer of which the draft guesses nothing."""
    return Trace(
        prompt=4,
        accepted=np.zeros(tokens, bool),
        confidence=np.full(tokens, 0.5, np.float32),
        beyond=np.full((tokens, DEPTH), 0.5, np.float32),
        limited=False,
        text=np.arange(4 + tokens + 1, dtype=np.int32),
        drafts=np.full(tokens, -1, np.int32),
        after=np.full((tokens, DEPTH), -1, np.int32),
    )


def test_a_replay_charges_plain_decoding_as_plain_steps_in_a_row() -> None:
    workload = [controller.Stretch([refused(50)])]
    expected = 1 / (COSTS.plain_step_s + COSTS.overhead_s + COSTS.token_s)
    assert controller.replay(lambda clock: FixedLength(0), workload, COSTS).rate == pytest.approx(expected)
    assert controller.best_per_round(workload, COSTS) == pytest.approx(expected)


def test_a_replayed_draft_keeps_its_cache_within_a_conversation() -> None:
    before = refused(6)  # a prompt of 4 tokens, and 7 of the answer
    goes_on = replace(before, prompt=14, text=np.array([*before.text, 90, 91, 92, 93, 94], np.int32))
    other = replace(goes_on, text=np.array([0, 1, *range(50, 64)], np.int32))
    assert controller.kept(None, 8, goes_on) == 0
    assert controller.kept(before, 8, goes_on) == 8
    assert controller.kept(before, 11, goes_on) == 10  # the answer's last token was never fed
    assert controller.kept(before, 8, other) == 0
    spelled_anew = replace(goes_on, text=np.array([*before.text[:6], *range(60, 70)], np.int32))
    assert controller.kept(before, 8, spelled_anew) == 6
    drafted = [
        controller.replay(lambda clock: FixedLength(1), [controller.Stretch(traces)], replace(COSTS, catch_up_s=1.0))
        for traces in ([before, goes_on], [before, other])
    ]
    assert drafted[1].seconds[-1] - drafted[0].seconds[-1] == pytest.approx(10.0)


def test_replays_with_history_find_what_repeats_itself_alone_and_in_shared_rounds() -> None:
    workload = [controller.Stretch([refused(60)] * 8)]
    row = controller_history.judge("the same answer", workload, COSTS, 1)
    assert row.best.startswith("history")
    assert row.best_speed_up > 2
    assert row.ways["model"] < 0.5
    assert row.ways[controller_history.TOGETHER] > 0.7

    def together(make: Callable[[controller.Clock], LengthPolicy], looks: bool) -> float:
        return joint_history.replay(make, workload, COSTS, 2, 0, looks)

    plain = together(lambda clock: joint_history.Found(0), False)
    assert together(lambda clock: joint_history.Found(4), True) > 1.5 * plain
    assert together(lambda clock: GoodputWithHistory(COSTS, clock=clock), True) > 1.5 * plain


class Both(FixedLength):
    """One token of history wherever it finds any, and two of the draft behind it."""

    def lead(self, reach: Sequence[float], length: int, limit: int, singly: bool = False, passed: int = 0) -> Lead:
        return Lead(1, 2) if reach and limit > 2 else Lead(0, 0)


def test_a_replayed_draft_continues_behind_history_as_a_models_does() -> None:
    text = refused(60)
    right = replace(text, accepted=np.ones(60, bool), drafts=text.text[5:])  # the draft guesses every token
    found = controller_history.replay(lambda clock: Both(1), [controller.Stretch([right] * 4)], COSTS, 0, True)
    assert found.accepted["model"] == found.drafted["model"] > found.drafted["history"] > 0


def test_no_contender_has_answered_a_prompt_of_the_race_before_it_begins() -> None:
    asked: list[PromptLine] = []

    def answer(prompt: PromptLine, tokens: int) -> tuple[list[int], float | None]:
        asked.append(prompt)
        return [1] * tokens, None

    raced = [bare_prompt("One"), bare_prompt("Two")]
    assert len(list(race([Contender("one", answer)], raced, 4))) == 2
    assert asked[1:] == raced
    assert asked[0] not in raced


def test_a_reference_answer_has_no_penalty_that_the_checkpoint_recommends(tmp_path: Path) -> None:
    target, draft = save_random_pair(tmp_path, "qwen2")
    pair = load_pair(load_settings({"target": str(target), "draft": str(draft), "dtype": "float32"}))
    plain = continued(pair.target, [5, 6, 7], 24)
    pair.target.model.generation_config.repetition_penalty = 5.0  # type: ignore[attr-defined]
    assert continued(pair.target, [5, 6, 7], 24) == plain


def test_the_limit_counts_the_bytes_of_an_int8_draft_and_attention_by_itself_can_be_timed() -> None:
    both = [load_pair(load_settings({"dtype": "bfloat16", "draft_quantize": kind})) for kind in ("none", "int8")]
    plain, rounded = (pair.draft for pair in both)
    assert plain is not None
    assert rounded is not None
    if rounded.weights != "int8":
        pytest.skip("no int8 layers on this processor")
    assert 0.5 < limit.weight_bytes(rounded) / limit.weight_bytes(plain) < 0.6
    assert limit.attention_alone(both[1], 32, 2) > 0


@pytest.mark.parametrize(
    ("gaps", "tie"),
    [
        ([-3.0, -3.001, -3.0], False),  # the reference's token is worse in every pass: ours is another model's
        ([3.0, 3.001, 3.0], False),
        ([0.002, -0.001, 0.001], True),
        ([0.0, 0.0, 0.0], True),
        ([0.001, 0.003, 0.002], True),
    ],
)
def test_a_tie_is_what_the_passes_disagree_about(gaps: list[float], tie: bool) -> None:
    assert llamacpp_exact.is_tie(gaps) is tie


def test_an_engine_that_proposes_token_by_token_makes_its_proposals(tmp_path: Path) -> None:
    target, draft = save_random_pair(tmp_path, "gpt_neox")
    pair = load_pair(load_settings({"target": str(target), "draft": str(draft)}))
    assert pair.draft is not None
    sequences = [pair.draft.sequence() for _ in range(2)]
    assert sequences[0].fused is None
    wanted = ProposalCall([5], 3, pair.draft.vocab_size, SamplingParams(temperature=0.0), [], None)
    joint._propose(sequences[0], wanted)
    assert sequences[0].length == 3
    joint._proposals(pair.draft, sequences, 3)()
    assert [one.length for one in sequences] == [3, 0]


@pytest.mark.thorough
def test_few_prompts_are_at_least_one_of_each_kind(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    call(monkeypatch, seeded.main, "--prompts", "1", "--tokens", "4")
    assert capsys.readouterr().out.count("tokens a round") == 4


def test_a_kept_log_is_reported_with_its_own_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for count in ("3", "5"):
        call(monkeypatch, history.main, "--answers", count, "--rounds", "2", "--keep", str(tmp_path))
        assert capsys.readouterr().out.startswith("3 answers, 6 rounds, ")


@pytest.mark.thorough
def test_formats_are_measured_without_the_users_own_state(own_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constrained, "FORMATS", {name: constrained.FORMATS[name] for name in ("without", "any object")})
    call(monkeypatch, constrained.main, *("--prompts", "1", "--tokens", "8", "--rounds", "1", "--draft-length", "2"))
    assert not own_home.exists()


def test_the_news_of_a_server_are_its_training_runs_and_swaps_and_not_its_answers(tmp_path: Path) -> None:
    news = [
        "INFO now drafting with adapter 0001 (swapped in 28 ms, in 2 parts over 28 ms)",
        "INFO training run: Adapter 0001 is promoted",
        "WARNING adapter 0001 is rolled back: it is worse",
    ]
    answer = "INFO client: 5 prompt tokens, 9 tokens at 80/s; drafting 2.0 tokens ahead; 1.80 tokens a round"
    (tmp_path / "stderr").write_text("\n".join([answer, *news, answer]))
    assert Served("", 0, tmp_path).news == news


def experience(found: History | None) -> Any:
    """What a session has learned about how good its own text is for drafting."""
    assert found is not None
    return bytes(found.matches.of(RUNNING, 0.7).table)


@pytest.mark.thorough
def test_an_answer_by_a_fixed_length_leaves_the_session_as_it_was(
    own_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))

    def answers(session: OpenedPair) -> None:
        for line in (BUNDLED / "prompts" / "tools.jsonl").read_text(encoding="utf-8").splitlines()[:3]:
            asked = bare_prompt(json.loads(line)["prompt"]).messages
            for _ in session.assistant.chat(asked, SamplingParams(0.7, seed=1), StopParams(60, ignore_eos=True)):
                pass

    with open_pair(load_settings({"draft_length": "4"}), Console(file=io.StringIO())) as session:
        engine = PairedEngine(lambda: session, Metrics(), 1)
        engine.session = session
        before, own = experience(session.assistant.history), session.assistant.history
        with engine._apart(session.assistant, 4):
            answers(session)
            assert experience(session.assistant.history) != before  # a fixed length drafts from history, too
        assert session.assistant.history is own
        assert experience(own) == before
        engine.log.close()
        assert engine.log.path.is_relative_to(own_home)
        assert [file.parent for file in own_home.rglob("records.db")] == [session.state.root]
    assert not list(temporary.iterdir())


def test_fixed_lengths_know_the_log_as_it_was_before_the_sessions_answer(tmp_path: Path) -> None:
    with LogWriter(tmp_path / "records.db") as log:
        log.write(generation(1))
        log.flush()
        archive = HeldArchive(tmp_path / "records.db", 1 << 20)
        archive.start()
        archive.loaded.wait()
        held = archive.tokens
        log.write(generation(2))
        log.flush()
        archive.catch_up()
        assert archive.tokens == held > 0
        archive.read()
        assert archive.tokens > held
        archive.close()


def test_a_lived_session_compares_the_requests_after_a_promotion_with_later_ones() -> None:
    def asked(number: int, seconds: float) -> lived_session.Asked:
        taken = {None: seconds, 0: 2.0, 3: 1.0}
        own, plain, fixed = (lived_session.Answer(50, taken[k], 30, 30, 90, 20) for k in (None, 0, 3))
        return lived_session.Asked(number, "math", 0.0, "0001" if number else None, 0.0, own, {0: plain, 3: fixed})

    slow = range(1, 1 + lived_session.SOON)
    verdict = lived_session.judge([asked(n, 1.25 if n in slow else 1.0) for n in range(1 + 2 * len(slow))])
    assert verdict.promotions == 1
    assert verdict.soon == verdict.soon_best == pytest.approx((0.8,))
    assert verdict.soon_fixed == pytest.approx((1.0,))


@pytest.mark.thorough
def test_a_lived_session_that_is_terminated_ends_what_it_has_started() -> None:
    command = [sys.executable, str(BENCHMARKS / "lived_session.py"), "--regime", "busy-start", "--requests", "2"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, cwd=BENCHMARKS.parent) as process:
        own = psutil.Process(process.pid)
        until(lambda: len(own.children()) == 3)  # two that spin, and the server
        children = own.children()
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=120) == 128 + signal.SIGTERM
    assert not [one for one in children if one.is_running()]
