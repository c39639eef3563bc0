"""What is typed in ``adaptive chat``: commands, messages of several lines, and the file that keeps them."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from cli.chat_input import Keyboard, is_command


@pytest.mark.parametrize(
    ("text", "command"),
    [
        ("/help", True),
        ("/set temperature 0.2", True),
        ("/nonsense", True),
        ("/etc/hosts what is this?", False),
        ("/", False),
        ("// a comment", False),
        ("/system Be short.\nBe kind.", True),
        ("what is /help?", False),
        ("", False),
        (" ", False),
    ],
)
def test_a_command_is_a_slash_and_a_word(text: str, command: bool) -> None:
    assert is_command(text) is command


def typed(text: str, kept: Path | None = None) -> list[str]:
    """The messages that result from typing this text."""
    with create_pipe_input() as keys, create_app_session(input=keys, output=DummyOutput()):
        keys.send_text(text + "\x04")
        return list(Keyboard([], kept).messages())


@pytest.mark.parametrize(
    ("keys", "messages"),
    [
        ("one\rtwo\r", ["one", "two"]),
        ("one\\\rtwo\\\rthree\rfour\r", ["one\ntwo\nthree", "four"]),
        ('"""one\r\rtwo"""\rthree\r', ["one\n\ntwo", "three"]),
        ('"""one"""\r', ["one"]),
        ("  \r one \r", ["one"]),
        ("dropped\x03one\r", ["one"]),
    ],
)
def test_a_message_may_have_several_lines(keys: str, messages: list[str]) -> None:
    assert typed(keys) == messages


ANSWERING = """
import sys
from cli.chat_input import Keyboard, unseen
with unseen():
    print("answering", flush=True)
    sys.stdin.readline()
    print("answered", flush=True)
    print("said", next(Keyboard([], None).messages()), flush=True)
"""


@pytest.mark.thorough
@pytest.mark.skipif(os.name != "posix", reason="Windows has no pseudo-terminals")
def test_what_is_typed_during_an_answer_is_shown_at_the_next_prompt_and_not_before() -> None:
    import termios

    terminal, other = os.openpty()
    echoes = termios.tcgetattr(other)[3] & termios.ECHO
    running = subprocess.Popen(
        [sys.executable, "-c", ANSWERING], stdin=other, stdout=other, env={**os.environ, "TERM": "xterm"}
    )

    def shown(end: str) -> str:
        text = ""
        while end not in text:
            text += os.read(terminal, 4096).decode()
        return text

    try:
        shown("answering")
        os.write(terminal, b"typed\nahead")
        assert "typed" not in shown("answered")
        assert "ahead" in shown("ahead")
        os.write(terminal, b"\r")
        assert "said ahead" in shown("said ahead")
        assert running.wait(10) == 0
        assert termios.tcgetattr(other)[3] & termios.ECHO == echoes != 0
    finally:
        running.kill()
        running.wait()
        os.close(terminal)
        os.close(other)


def test_what_was_typed_is_found_again_in_the_next_run(tmp_path: Path) -> None:
    kept, up = tmp_path / "typed.txt", "\x1b[A"
    assert typed("first\rsecond\r", kept) == ["first", "second"]
    assert kept.stat().st_mode & 0o777 == 0o600
    assert typed(up + up + "\r", kept) == ["first"]
    assert typed(up + "\r") == []


def test_a_typed_byte_that_is_not_utf_8_is_kept_as_a_question_mark(tmp_path: Path) -> None:
    kept = tmp_path / "typed.txt"
    with create_pipe_input() as keys, create_app_session(input=keys, output=DummyOutput()):
        keys.send_bytes(b"half \xff\r\x04")
        assert list(Keyboard([], kept).messages()) == ["half \udcff"]
    assert "half ?" in kept.read_text()
    assert typed("\x1b[A\r", kept) == ["half ?"]


def test_what_cannot_be_written_or_read_is_typed_all_the_same(tmp_path: Path) -> None:
    assert typed("first\rsecond\r", tmp_path / "no folder" / "typed.txt") == ["first", "second"]
    with create_pipe_input() as keys, create_app_session(input=keys, output=DummyOutput()):
        messages = Keyboard([], tmp_path).messages()  # a folder is in place of the file
        for text in ("first", "\x1b[A"):
            keys.send_text(f"{text}\r")
            assert next(messages) == "first"


def test_a_file_that_was_deleted_meanwhile_is_again_for_the_user_alone(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    kept = tmp_path / "typed.txt"
    request.addfinalizer(partial(os.umask, os.umask(0o022)))
    with create_pipe_input() as keys, create_app_session(input=keys, output=DummyOutput()):
        messages = Keyboard([], kept).messages()
        for text in ("first", "second"):
            keys.send_text(f"{text}\r")
            assert next(messages) == text
            assert kept.stat().st_mode & 0o777 == 0o600
            kept.unlink()
