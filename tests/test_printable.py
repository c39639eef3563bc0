"""Model output reaches the terminal as text, never as control sequences."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import save_model_that_says
from forked import run, run_on_a_terminal
from records_factory import generation
from rich.console import Console

from adaptive.printable import per_second, printable, printable_line
from adaptive.records.writer import LogWriter
from adaptive.upstream.measure import Measured
from cli.doctor import _print as print_findings
from cli.finding import Finding
from cli.publish import _say_tried
from cli.publish_trial import Tried

HOSTILE = "\x1b]0;owned\x07"


@pytest.fixture(scope="module")
def hostile_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model_that_says(HOSTILE, tmp_path_factory.mktemp("hostile"))


@pytest.mark.thorough(but="chat")
@pytest.mark.parametrize("command", ["chat", "generate"])
def test_escape_sequences_of_the_model_do_not_reach_a_terminal(hostile_model: Path, command: str) -> None:
    arguments = ["--target", str(hostile_model), "--dtype", "float32", "--no-record"]
    if command == "chat":
        said = run_on_a_terminal("chat", *arguments, "--distill", "off", typed="hello\n")
    else:
        said = run_on_a_terminal("generate", "hello", *arguments)
    assert b"\x1b]0;" not in said
    assert b"\x07" not in said
    assert "␛]0;owned␇".encode() in said


@pytest.mark.parametrize(
    "command", [("records", "stats", "--json"), ("history", "--json", "--by", "session"), ("history", "--csv")]
)
def test_names_in_the_log_reach_a_terminal_without_controls(own_home: Path, command: tuple[str, ...]) -> None:
    hostile = "\x9b31m\x7f\x9d0;owned"
    with LogWriter(own_home / "big--small-1234" / "records.db") as writer:
        writer.write(generation(session=hostile, domain=hostile, adapter=hostile))
    said = run_on_a_terminal(*command)
    assert "\ufffd31m␡\ufffd0;owned".encode() in said
    assert not any(control in said.decode() for control in "\x9b\x7f\x9d")


@pytest.mark.thorough
def test_a_file_gets_the_answer_as_it_is(hostile_model: Path) -> None:
    done = run("generate", "hello", "--target", str(hostile_model), "--no-record", "--dtype", "float32")
    assert (done.returncode, done.stdout) == (0, HOSTILE + "\n")


def test_what_a_server_says_reaches_a_terminal_without_controls(capsys: pytest.CaptureFixture[str]) -> None:
    hostile = "draft\x9b31m\x7f"
    print_findings([Finding("used", "draft", "note", hostile, hostile)])
    _say_tried(Console(), Measured((), None, None, None), Tried(4, None, hostile), None)
    assert capsys.readouterr().out.count("draft\ufffd31m␡") == 3


def test_control_characters_are_made_visible() -> None:
    assert printable("a\x1b[2Jb\x07\x7f\x9b1m\r\nc\td") == "a␛[2Jb␇␡\ufffd1m\nc\td"
    assert printable("ünï \u2067עברית\u2069 🙂") == "ünï \u2067עברית\u2069 🙂"
    assert printable("half \ud83d").encode() == "half \ufffd".encode()


def test_a_name_stays_on_its_line() -> None:
    forged = "me\n2026-01-01 INFO adapter 9 is promoted\r\u2028\u202etxt"
    assert printable_line(forged) == "me␊2026-01-01 INFO adapter 9 is promoted␍\ufffd\ufffdtxt"
    assert printable_line("Zoë 山田") == "Zoë 山田"


@pytest.mark.parametrize(
    ("speed", "said"), [(0.0, "0"), (0.262, "0.26"), (0.996, "1.0"), (1.26, "1.3"), (9.97, "10"), (234.4, "234")]
)
def test_a_slow_speed_has_digits(speed: float, said: str) -> None:
    assert per_second(speed) == said
