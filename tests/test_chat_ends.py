"""``adaptive chat``: what follows an answer that was cut, stopped, or ended without memory."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch
from test_chat import opened, pair, played

from adaptive.control.policy import FixedLength, Scope
from adaptive.errors import NoMemoryError
from adaptive.opened import OpenedPair
from adaptive.records.log import Log

__all__ = ["opened", "pair"]


def test_an_answer_that_was_cut_goes_on_as_if_it_had_not_been(opened: OpenedPair) -> None:
    cut, _ = played(opened, "What?\r/more\r/more\r")
    whole, _ = played(opened, "What?\r", max_new_tokens=18)
    assert cut.talk.messages == whole.talk.messages
    assert opened.assistant.log is not None
    assert opened.assistant.log.flush()
    with Log(opened.state.records) as log:
        assert log.session_messages(cut.name) == tuple(cut.talk.messages)


class Interrupting(FixedLength):
    """A policy that presses ctrl-C when the second answer begins."""

    begun = 0

    def begin(self, scope: Scope) -> None:
        self.begun += 1
        if self.begun == 2:
            signal.raise_signal(signal.SIGINT)


def test_ctrl_c_while_a_long_question_is_read_leaves_the_conversation_as_it_was(opened: OpenedPair) -> None:
    opened.assistant.policy = Interrupting(2)
    long = "word " * 700 + "\r"
    chat, said = played(opened, "What?\r" + long + "And then?\r")
    assert "stopped before the answer began" in said
    assert [m.content for m in chat.talk.messages][::2] == ["What?", "And then?"]
    fresh, _ = played(opened, "What?\rAnd then?\r")
    assert chat.talk.messages == fresh.talk.messages


@pytest.mark.thorough
def test_an_answer_that_was_cut_goes_on_after_a_question_that_was_stopped(opened: OpenedPair) -> None:
    opened.assistant.policy = Interrupting(2)
    cut, _ = played(opened, "What?\r" + "word " * 700 + "\r/more\r")
    opened.assistant.policy = FixedLength(2)
    whole, _ = played(opened, "What?\r", max_new_tokens=12)
    assert cut.talk.messages == whole.talk.messages


class Stopping(FixedLength):
    """A policy that presses ctrl-C after an answer's first token."""

    def next_length(self, limit: int, waiting: int = 0, context: int = 0) -> int:
        signal.raise_signal(signal.SIGINT)
        return 0


def test_only_an_answer_of_this_run_that_was_cut_goes_on(opened: OpenedPair, tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    chat, said = played(opened, f"What?\r/save {file}\r/load {file}\r/more\rAnd?\r/undo\r/more\r")
    assert said.count("/more continues the last answer of this run") == 2
    assert len(chat.talk.messages) == 2
    opened.assistant.policy = Stopping(2)
    assert "the last answer was not cut" in played(opened, "What?\r/more\r")[1]


class Short(FixedLength):
    """A policy whose second answer finds no memory when it has begun."""

    begun, lacks = 0, Exception()

    def begin(self, scope: Scope) -> None:
        self.begun += 1

    def next_length(self, limit: int, waiting: int = 0, context: int = 0) -> int:
        if self.begun == 2:
            raise self.lacks
        return super().next_length(limit, waiting, context)


@pytest.mark.parametrize("again", ["And then?", "/more", "/retry"])
@pytest.mark.parametrize("lacks", [MemoryError(), torch.OutOfMemoryError("CUDA out of memory"), NoMemoryError("none")])
def test_a_chat_goes_on_after_memory_has_run_out(opened: OpenedPair, again: str, lacks: Exception) -> None:
    opened.assistant.policy = policy = Short(2)
    policy.lacks = lacks
    chat, said = played(opened, f"What?\r{again}\r/stats\r{again}\r")
    assert said.count("memory has run out (") == 1
    assert "memory of this conversation: none yet" in said
    opened.assistant.policy = FixedLength(2)
    fresh, _ = played(opened, f"What?\r{again}\r")
    assert chat.talk.messages == fresh.talk.messages
