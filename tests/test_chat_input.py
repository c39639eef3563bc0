"""What is typed in ``adaptive chat``: commands, messages of several lines, and the file that keeps them."""

from __future__ import annotations

import os
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
