"""ctrl-C while the modules load; and a file of prompts whose answers were interrupted: the second command goes on where
the first one stood."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Command, save_random_pair
from forked import start

from adaptive.records.log import Log

posix = pytest.mark.skipif(os.name != "posix", reason="Windows has no SIGINT for another process")
PROMPTS = 120
PATIENCE_S = 120.0


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    target, draft = save_random_pair(tmp_path_factory.mktemp("pair"), "qwen2")
    return ("--target", str(target), "--draft", str(draft), "--dtype", "float32", "--draft-length", "2")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file of prompts, of which the first two are the same."""
    file = tmp_path / "prompts.jsonl"
    lines = [json.dumps({"prompt": f"Question {max(1, number)}"}) for number in range(PROMPTS)]
    file.write_text("\n".join(lines), encoding="utf-8")
    return file


def answers(home: Path) -> Counter[str]:
    """How often each prompt was answered as a whole."""
    found: Counter[str] = Counter()
    for records in home.rglob("records.db"):
        with Log(records) as log:
            for one in log.generations(with_supervision=False):
                found[one.generation.messages[-1].content] += one.generation.finish_reason != "cancelled"
    return found


def interrupt(
    command: list[str], out: Path, enough: Callable[[], bool], number: signal.Signals = signal.SIGINT
) -> tuple[int, str]:
    """Start the command, and send it the signal when there is ``enough``. Returns the exit status and its messages."""
    with out.open("wb") as stream, (out.parent / "messages").open("w+b") as messages:
        running = start(*command, stdout=stream, stderr=messages)
        deadline = time.monotonic() + PATIENCE_S
        while not enough():
            assert running.poll() is None, "it ended before it was interrupted"
            assert time.monotonic() < deadline
            time.sleep(0.01)
        running.send_signal(number)
        status = running.wait(PATIENCE_S)
        messages.seek(0)
        return status, " ".join(messages.read().decode().split())


WHILE_LOADING = """
class Interrupting:
    def find_spec(self, name, path, target=None):
        if name == "typer":
            signal.raise_signal(signal.SIGINT)
sys.meta_path.insert(0, Interrupting())
"""
WHILE_COMMANDS_ARE_MADE = """
import typer
typer.main.get_command = lambda app: signal.raise_signal(signal.SIGINT)
"""


@posix
@pytest.mark.parametrize(("when", "status"), [(WHILE_LOADING, -signal.SIGINT), (WHILE_COMMANDS_ARE_MADE, 130)])
def test_ctrl_c_before_a_command_runs_ends_without_a_traceback(when: str, status: int) -> None:
    script = f"import signal, sys\n{when}\nsys.argv = ['adaptive', '--version']\nfrom cli.start import start\nstart()"
    done = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (status, "", "")


@pytest.mark.thorough(but="2")
@posix
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_generate_says_how_many_are_answered_and_skips_them(
    models: tuple[str, ...], file: Path, tmp_path: Path, adaptive: Command, number: signal.Signals
) -> None:
    command = ("generate", *models, "--prompts", str(file), "--json", "--max-new-tokens", "24")
    out = tmp_path / "answers.jsonl"
    status, said = interrupt(list(command), out, lambda: out.read_bytes().count(b"\n") >= 3, number)
    assert status == 128 + number
    found = re.search(rf"interrupted: (\d+) of {PROMPTS} prompts are answered; --skip \1 answers the others", said)
    assert found is not None, said
    first = [json.loads(line)["prompt"] for line in out.read_text(encoding="utf-8").splitlines()]
    assert len(first) == int(found[1])
    code, rest, err = adaptive(*command, "--skip", found[1])
    assert code == 0, err
    asked = [json.loads(line)["prompt"] for line in file.read_text(encoding="utf-8").splitlines()]
    assert first + [json.loads(line)["prompt"] for line in rest.splitlines()] == asked


def test_an_answer_that_fails_is_named_with_how_to_go_on(
    models: tuple[str, ...], file: Path, adaptive: Command
) -> None:
    code, _, err = adaptive("generate", *models, "--prompts", str(file), "--skip", "7", "--regex", "(")
    assert code == 2
    assert f"7 of {PROMPTS} prompts are answered; --skip 7 answers the others" in " ".join(err.split())
    assert f"adaptive: {file} line 8: " in err


def test_a_skip_that_leaves_nothing_is_refused(models: tuple[str, ...], file: Path, adaptive: Command) -> None:
    code, _, err = adaptive("generate", *models, "--prompts", str(file), "--skip", str(PROMPTS))
    assert (code, f"leaves nothing of the {PROMPTS} prompts" in err) == (2, True)
    code, _, err = adaptive("generate", *models, "Hello", "--skip", "1")
    assert (code, "--prompts" in err) == (2, True)


@posix
@pytest.mark.thorough
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_distill_asks_only_what_has_no_answer_yet(
    models: tuple[str, ...], file: Path, tmp_path: Path, own_home: Path, adaptive: Command, number: signal.Signals
) -> None:
    command = ("distill", *models, "--prompts", str(file), "--max-new-tokens", "24", "--temperature", "0.7")
    command += ("--epochs", "0.1", "--no-promote", "--rank", "2")
    status, said = interrupt(list(command), tmp_path / "out", lambda: answers(own_home).total() >= 5, number)
    before = answers(own_home).total()
    assert 5 <= before < PROMPTS
    if number == signal.SIGINT:
        assert status == 130
        assert f"interrupted: {before} of {PROMPTS} prompts" in said
    code, _, err = adaptive(*command)
    assert code == 0, err
    assert f"going on: {before} of {PROMPTS} prompts were answered before" in " ".join(err.split())
    once = Counter({f"Question {max(1, n)}": 1 for n in range(PROMPTS)}) + Counter({"Question 1": 1})
    assert answers(own_home) == once
    assert not list(own_home.rglob("answering.json"))
    if number == signal.SIGINT:  # the run has ended, so that the same command is a new one
        assert adaptive(*command)[0] == 0
        assert answers(own_home) == once + once


@posix
@pytest.mark.thorough
def test_a_training_run_that_was_interrupted_does_not_have_its_prompts_answered_again(
    models: tuple[str, ...], file: Path, tmp_path: Path, own_home: Path, adaptive: Command
) -> None:
    command = ("distill", *models, "--prompts", str(file), "--max-new-tokens", "24", "--temperature", "0.7")
    command += ("--no-promote", "--rank", "2")

    def trained() -> bool:
        return any(own_home.rglob("training.safetensors"))

    status, _ = interrupt([*command, "--epochs", "500"], tmp_path / "out", trained)
    assert status == 130
    code, _, err = adaptive(*command, "--epochs", "0.1")
    assert code == 0, err
    assert f"going on: {PROMPTS} of {PROMPTS} prompts were answered before" in " ".join(err.split())
    assert answers(own_home).total() == PROMPTS
