"""Errors are reported on one line, even if the original exception has no message."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import BUNDLED, Command
from safetensors.torch import load_file

from adaptive.errors import AdaptiveError, first_line
from adaptive.pair import load_tokenizer
from adaptive.settings import load_settings
from checkpoints.folder import filling

MUTE = """
from transformers import PreTrainedTokenizer


class Mute(PreTrainedTokenizer):
    def __init__(self, **options):
        assert False
"""


def test_an_error_without_a_message_is_reported_by_its_kind(tmp_path: Path) -> None:
    model = tmp_path / "mute"
    shutil.copytree(BUNDLED / "target", model, ignore=shutil.ignore_patterns("tokenizer.json"))
    config = json.loads((model / "tokenizer_config.json").read_text())
    config |= {"tokenizer_class": "Mute", "auto_map": {"AutoTokenizer": ["mute.Mute", None]}}
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    (model / "mute.py").write_text(MUTE)
    with pytest.raises(AdaptiveError, match="cannot be read: AssertionError"):
        load_tokenizer(load_settings({"target": str(model), "trust_remote_code": True}))


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux")
def test_a_file_that_cannot_be_opened_now_is_not_said_to_be_missing(tmp_path: Path) -> None:
    from shortages import short_of_files

    weights = BUNDLED / "draft" / "model.safetensors"
    with short_of_files(0):
        with pytest.raises(FileNotFoundError) as found:  # safetensors says so
            load_file(weights)
        assert "Too many open files" in first_line(found.value)
        assert str(weights) in first_line(found.value)
    assert "temporarily unavailable" in first_line(found.value)
    with pytest.raises(FileNotFoundError) as found:
        load_file(tmp_path / "none.safetensors")
    assert first_line(found.value) == f"No such file or directory: {tmp_path / 'none.safetensors'}"


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="root may look at every folder")
def test_a_folder_that_may_not_be_entered_is_one_line(adaptive: Command, tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o000)
    status, _, errors = adaptive("history", "--config", str(closed / "adaptive.toml"))
    assert (status, errors.count("\n")) == (2, 1), errors
    assert str(closed) in errors


@pytest.mark.parametrize(("text", "why"), [(None, "No such file or directory"), (b"\xff", "it is not UTF-8 text")])
@pytest.mark.parametrize(
    "command",
    [
        ("serve", "--api-key-file"),
        ("generate", "Hello", "--draft", "http://127.0.0.1:1", "--draft-key-file"),
        ("generate", "--prompts"),
        ("generate", "Hello", "--grammar"),
        ("distill", "--data"),
        ("publish", "--engine", "llama-server", "--start"),
    ],
    ids=" ".join,
)
def test_a_file_that_cannot_be_read_is_named_once_with_the_reason(
    adaptive: Command, tmp_path: Path, command: tuple[str, ...], text: bytes | None, why: str
) -> None:
    (tmp_path / "home" / "pair" / "adapters").mkdir(parents=True)  # for publish
    file = tmp_path / "given"
    if text is not None:
        file.write_bytes(text)
    status, out, errors = adaptive(*command, str(file))
    assert (status, out) == (2, "")
    assert errors.splitlines()[-1].endswith(f"{file} cannot be read: {why}"), errors
    assert errors.count(str(file)) == 1


@pytest.mark.parametrize(
    "command", [("bench", "--target", "x" * 5000), ("history", "--config", "x" * 5000), ("export", "x" * 5000)]
)
def test_a_name_that_no_file_can_have_is_one_line(adaptive: Command, command: tuple[str, ...]) -> None:
    status, out, errors = adaptive(*command)
    assert (status, out, errors.count("\n")) == (2, "", 1), errors
    assert "File name too long" in errors


def test_a_name_with_a_line_break_is_one_line(adaptive: Command) -> None:
    status, out, errors = adaptive("config", "show", "--config", "no\nadaptive: file")
    assert (status, out, errors.count("\n")) == (2, "", 1), errors


def test_a_current_folder_that_is_gone_is_one_line(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    script = (
        f"import os, sys; os.chdir({str(gone)!r}); os.rmdir({str(gone)!r}); sys.argv = ['adaptive', 'config', 'show']"
    )
    begin = f"{script}; sys.path.insert(0, {str(BUNDLED.parent.parent)!r}); from cli.main import run; run()"
    done = subprocess.run([sys.executable, "-c", begin], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert "No such file or directory" in done.stderr


def test_no_part_of_a_folder_stays_that_could_not_be_written(tmp_path: Path) -> None:
    new, empty, mine = (tmp_path / name for name in ("new", "empty", "mine"))
    empty.mkdir()
    mine.mkdir()
    (mine / "text").write_text("mine")

    def write(folder: Path) -> None:
        with filling(folder):
            (folder / "part").mkdir(parents=True)
            (folder / "part" / "weights").write_bytes(b"x")
            raise KeyboardInterrupt

    for folder in (new, empty, mine):
        with pytest.raises(KeyboardInterrupt):
            write(folder)
    assert not new.exists()
    assert list(empty.iterdir()) == []
    assert (mine / "text").read_text() == "mine"


@pytest.mark.parametrize("closed", [">&-", "2>&-"])
def test_a_closed_output_is_no_traceback(closed: str) -> None:
    command = f'"$0" -m cli.main config show {closed}'
    ran = subprocess.run(["/bin/sh", "-c", command, sys.executable], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")


@pytest.mark.parametrize(("value", "shows"), [("0", False), ("1", True)])
def test_debugging_is_switched_on_by_a_value_that_says_so_and_changes_no_status(value: str, shows: bool) -> None:
    environment = {**os.environ, "ADAPTIVE_DEBUG": value}
    command = [sys.executable, "-m", "cli.main", "config", "show", "--config", "nowhere"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert ("Traceback" in ran.stderr) is shows
    assert ran.returncode == 2
    assert ran.stderr.splitlines()[-1] == "adaptive: settings file nowhere does not exist"
