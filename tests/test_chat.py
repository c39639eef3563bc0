"""``adaptive chat``: display, the commands that change a conversation, and its terminal."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
import termios
from collections.abc import Callable, Iterator
from pathlib import Path

import pexpect
import pytest
from conftest import save_model_that_says, save_random_pair
from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput
from rich.console import Console
from slow_disk import until

from adaptive.errors import AdaptiveError
from adaptive.opened import OpenedPair
from adaptive.records.erase import erase_beside
from adaptive.records.log import Log
from adaptive.service.trainer import Trainer
from adaptive.settings import load_settings
from adaptive.types import Message
from cli.chat import converse
from cli.chat_session import Chat
from cli.chat_talk import Talk
from cli.opened import open_pair


def test_a_conversation_is_saved_taken_back_and_forgotten(tmp_path: Path) -> None:
    talk = Talk("Be short.")
    for number in (1, 2, 3):
        talk.messages += [Message("user", f"q{number}"), Message("assistant", f"a{number}\u2028")]
    file = tmp_path / "talk.json"
    talk.save(file)
    with pytest.raises(AdaptiveError, match="is there already"):
        talk.save(file)
    assert talk.take_back() == "q3"
    assert talk.forget_oldest()
    assert [m.content for m in talk.messages] == ["Be short.", "q2", "a2\u2028"]
    assert not talk.forget_oldest()
    assert talk.take_back() == "q2"
    assert talk.take_back() is None
    assert talk.system == "Be short."
    assert talk.load(file) == 1
    assert len(talk.turns) == 6
    talk.system = ""
    assert len(talk.messages) == 6
    with pytest.raises(AdaptiveError, match=r"conversation file .*nowhere\.json cannot be read"):
        talk.load(tmp_path / "nowhere.json")
    for use in (talk.save, talk.load):
        with pytest.raises(AdaptiveError, match="home folder"):
            use(Path("~nosuchuser/talk.json"))


@pytest.mark.parametrize(
    "line", ["[" * 100_000, '{"prompt": "one", "seed": ' + "1" * 5000 + "}"], ids=["levels", "digits"]
)
def test_a_line_that_python_cannot_read_is_named(line: str, tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    file.write_text('{"prompt": "zero"}\n' + line)
    with pytest.raises(AdaptiveError, match=r"talk\.json line 2 has too many"):
        Talk(None).load(file)


def test_an_empty_system_message_of_a_loaded_chat_is_no_turn(tmp_path: Path) -> None:
    messages = [{"role": role, "content": text} for role, text in (("system", ""), ("user", "q1"), ("assistant", "a1"))]
    (tmp_path / "talk.json").write_text(json.dumps({"messages": messages}))
    talk = Talk(None)
    talk.load(tmp_path / "talk.json")
    assert [m.content for m in talk.turns] == ["q1", "a1"]
    assert not talk.forget_oldest(), "there is one question only"
    talk.system = "Be short."
    assert [m.content for m in talk.messages] == ["Be short.", "q1", "a1"]


def test_half_of_a_surrogate_pair_is_saved_as_a_question_mark(tmp_path: Path) -> None:
    (tmp_path / "loaded.json").write_text('{"prompt": "half \\ud83d"}')
    talk = Talk(None)
    talk.load(tmp_path / "loaded.json")
    talk.save(tmp_path / "saved.json")
    talk.load(tmp_path / "saved.json")
    assert [m.content for m in talk.messages] == ["half ?"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    target, draft = save_random_pair(tmp_path_factory.mktemp("pair"), "qwen2")
    return str(target), str(draft)


@pytest.fixture
def opened(pair: tuple[str, str]) -> Iterator[OpenedPair]:
    given = {"target": pair[0], "draft": pair[1], "dtype": "float32", "draft_length": "2", "temperature": 0.0}
    with open_pair(load_settings(given), Console(file=io.StringIO())) as opened:
        yield opened


def played(opened: OpenedPair, keys: str, out: io.StringIO | None = None, **given: object) -> tuple[Chat, str]:
    """Run a chat with these keys. Returns the chat and its output other than answers, which ``out`` takes."""
    settings, out = load_settings({"max_new_tokens": 6, "temperature": 0.0, **given}), out or io.StringIO()
    console = Console(file=out, width=200)
    with create_pipe_input() as typing, create_app_session(input=typing, output=DummyOutput()):
        typing.send_text(keys + "\x04")
        chat = Chat(settings, opened, console, None, None, Trainer(settings, opened.state, 0))
        converse(chat)
    return chat, out.getvalue()


def test_commands_change_what_they_say(opened: OpenedPair, tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    keys = (
        "/system Be short.\r/undo\r/more\r/retry\rWhat?\r/more\r/set temperature 0.5\r/set max_tokens 3\r/set seed 4\r"
        f"/set top_k x\r/set colour red\r/retry\r/save {file}\r/nonsense\r/stat\r/reset\r/load {file}\r/stats\r"
    )
    chat, said = played(opened, keys)
    assert chat.sampling.temperature == 0.5
    assert chat.sampling.seed == 4
    assert chat.limits.max_new_tokens == 3
    assert [m.role for m in chat.talk.messages] == ["system", "user", "assistant"]
    for expected in (
        "nothing has been asked yet",
        "/more continues the last answer of this run",
        "memory of this conversation: keys and values ",
        "cut at the limit: /more goes on",
        "'x' is no whole number",
        "there is no colour to set; there are temperature, top_k,",
        "again: What?",
        "saved 3 messages to",
        "there is no /nonsense; /help lists",
        "there is no /stat; did you mean /stats? /help lists",
        "new session",
        "goes on after 2 messages",
        "› What?",
        "last answer: ",
    ):
        assert expected in said, said
    assert opened.state.typed.exists()
    assert "typed.txt" in erase_beside(opened.state, everything=True)
    assert not opened.state.typed.exists()


def test_what_leaves_the_conversation_is_not_said_to_leave_the_log(opened: OpenedPair) -> None:
    _, said = played(opened, "What?\r/undo\rOne?\rTwo?\r/forget\r")
    assert "taken out of the conversation (the log keeps it): What?" in said
    assert "taken out of the conversation (the log keeps it): the oldest question and its answer" in said
    assert "forgot" not in said
    assert Log(opened.state.records).count() == 3


def test_of_a_file_of_conversations_the_first_is_said_to_be_taken(opened: OpenedPair, tmp_path: Path) -> None:
    file = tmp_path / "many.jsonl"
    file.write_text('{"prompt": "one"}\n{"prompt": "two"}\n')
    chat, said = played(opened, f"/load {file}\r")
    assert f"{file} holds 2 conversations; this is the first" in said
    assert [message.content for message in chat.talk.messages] == ["one"]


@pytest.mark.parametrize(("history", "said"), [("auto", "drafted from earlier text only"), ("off", "plain decoding")])
def test_the_chat_begins_with_who_drafts(history: str, said: str, pair: tuple[str, str]) -> None:
    out = io.StringIO()
    for draft, words in (("none", f"no draft model: {said} ·"), ("auto", f"{said}, until a head has been trained on")):
        given = {"target": pair[0], "draft": draft, "dtype": "float32", "draft_length": "2", "history": history}
        settings = load_settings(given)
        with open_pair(settings, Console(file=io.StringIO())) as opened:
            console = Console(file=out, width=200)
            Chat(settings, opened, console, None, None, Trainer(settings, opened.state, 0)).greet()
        assert words in out.getvalue()


def test_a_command_may_go_on_after_a_line_break(opened: OpenedPair) -> None:
    chat, _ = played(opened, '"""/set\rtemperature 0.5"""\r')
    assert chat.sampling.temperature == 0.5


def test_statistics_stay_out_of_the_answers(opened: OpenedPair, capsys: pytest.CaptureFixture[str]) -> None:
    """Standard output may be a file for the answers while the conversation is on a terminal."""
    _, said = played(opened, "What?\rAnd?\rWhy?\r/stats\r")
    assert "tokens drafted a round" in said
    assert "tokens drafted a round" not in capsys.readouterr().out


@pytest.mark.thorough
def test_a_conversation_that_no_longer_fits_forgets_its_oldest_turns_if_that_is_wanted(
    opened: OpenedPair, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(opened.pair.target, "context_length", 120)
    long, file = Talk("Be short."), tmp_path / "long.json"
    for number in range(9):
        long.messages += [Message("user", f"Question {number}, which is rather long?"), Message("assistant", "Yes.")]
    long.save(file)
    chat, said = played(opened, f"/load {file}\rNext?\ry\r")
    assert "; shorten it" in said
    assert chat.talk.system == "Be short."
    assert [m.content for m in chat.talk.turns][-2] == "Next?"
    assert 4 <= len(chat.talk.turns) < 18
    chat, said = played(opened, f"/load {file}\rNext?\rn\r")
    assert "/forget takes the oldest question and its answer out of the conversation" in said
    assert len(chat.talk.turns) == 18
    chat, said = played(opened, f"/load {file}\r/retry\rn\r")
    assert "again: Question 8" in said
    assert len(chat.talk.turns) == 18
    chat, said = played(opened, "word " * 300 + "\r")
    assert "; shorten it" in said
    assert not chat.talk.messages


def test_a_long_conversation_without_a_question_is_not_shortened_for_ever(
    opened: OpenedPair, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(opened.pair.target, "context_length", 120)
    file = tmp_path / "said.json"
    file.write_text(json.dumps({"messages": [{"role": "assistant", "content": "word " * 200}]}))
    chat, said = played(opened, f"/load {file}\rNext?\r")
    assert "; shorten it" in said
    assert "/reset begins anew" in said
    assert len(chat.talk.turns) == 1


class PressesCtrlC(io.StringIO):
    """A terminal whose user presses ctrl-C each time that a ``text`` is shown."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text, self.pressed = text, 0

    def write(self, text: str) -> int:
        written = super().write(text)
        if self.text in text:
            self.pressed += 1
            signal.raise_signal(signal.SIGINT)
        return written


# In the figures below an answer, in /stats, in /sessions, and in /retry.
@pytest.mark.parametrize("text", ["tokens/s", "memory of this conversation", "1 answer", "again: "])
def test_ctrl_c_ends_what_is_under_way_and_not_the_chat(opened: OpenedPair, text: str) -> None:
    out, before = PressesCtrlC(text), signal.getsignal(signal.SIGINT)
    try:
        chat, _ = played(opened, "What?\r/stats\r/sessions\r/retry\r\x03And?\r", out)
    except KeyboardInterrupt:
        pytest.fail("the chat has ended")
    assert out.pressed
    assert [m.content for m in chat.talk.messages][::2] == ["What?", "And?"]
    assert signal.getsignal(signal.SIGINT) is before


def test_a_pipe_is_one_question_and_only_the_answer_is_written(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from cli.main import run

    model = save_model_that_says("four **words**", tmp_path_factory.mktemp("says"))
    monkeypatch.setattr(sys, "stdin", io.StringIO("line one\n\n/help\nline three\n"))
    arguments = ["chat", "Explain this:", "--target", str(model), "--dtype", "float32", "--distill", "off"]
    monkeypatch.setattr(sys, "argv", ["adaptive", *arguments])
    run_and_exit(run)
    out, err = capsys.readouterr()
    assert out == "four **words**\n"
    assert "tokens/s" in err
    monkeypatch.setattr(sys, "stdin", io.StringIO(" \n"))
    monkeypatch.setattr(sys, "argv", ["adaptive", "chat", " ", *arguments[2:]])
    assert run_and_exit(run) == 2
    assert "nothing is asked" in capsys.readouterr().err
    monkeypatch.setattr(sys, "stdin", io.StringIO("word " * 3000))
    assert run_and_exit(run) == 2
    assert "shorten" in capsys.readouterr().err


def test_a_pipe_that_is_interrupted_ends_with_that_status(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cli.main import run

    class Interrupting(io.StringIO):
        def write(self, text: str) -> int:
            if text.strip():
                signal.raise_signal(signal.SIGINT)
            return super().write(text)

    model = save_model_that_says("four words of it", tmp_path_factory.mktemp("says"))
    monkeypatch.setattr(sys, "stdin", io.StringIO("Explain this"))
    monkeypatch.setattr(sys, "stdout", Interrupting())
    arguments = ["chat", "--target", str(model), "--dtype", "float32", "--distill", "off"]
    monkeypatch.setattr(sys, "argv", ["adaptive", *arguments])
    assert run_and_exit(run) == 130
    assert sys.stdout.getvalue().strip() in "four words of it"  # type: ignore[attr-defined]


def run_and_exit(run: Callable[[], None]) -> int:
    """The exit status of the command line."""
    try:
        run()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


@pytest.mark.thorough
def test_a_chat_on_a_terminal(tmp_path_factory: pytest.TempPathFactory) -> None:
    model = save_model_that_says("## words here", tmp_path_factory.mktemp("says"))
    command = ["-m", "cli.main", "chat", "hello", "--target", str(model), "--dtype", "float32", "--distill", "off"]
    environment = {**os.environ, "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"}
    terminal = pexpect.spawn(
        sys.executable, [*command, "--no-record"], timeout=300, dimensions=(24, 60), env=environment, encoding="utf-8"
    )
    terminal.expect("until")  # a head has been trained: lines end where the length of the path has them end
    terminal.expect("tokens/s")
    assert "##" not in terminal.before
    assert "words here" in terminal.before
    terminal.expect("›")
    terminal.send("/help\r")
    terminal.expect("take the last question")
    terminal.send("/exit\r")
    terminal.expect(pexpect.EOF)
    assert "leaked" not in terminal.before  # nanobind reports objects that are still alive when the process ends
    terminal.close()
    assert terminal.exitstatus == 0


@pytest.mark.thorough
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_chat_that_is_ended_from_outside_leaves_the_terminal_as_it_was(
    tmp_path: Path, number: signal.Signals
) -> None:
    model = save_model_that_says("words", tmp_path / "says")
    command = ["-m", "cli.main", "chat", "--target", str(model), "--dtype", "float32", "--distill", "off"]
    environment = {**os.environ, "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"}
    terminal = pexpect.spawn(sys.executable, command, timeout=60, env=environment, encoding="utf-8")
    before = termios.tcgetattr(terminal.child_fd)
    terminal.expect("›")
    until(lambda: termios.tcgetattr(terminal.child_fd) != before)
    terminal.kill(number)
    terminal.expect(pexpect.EOF)
    assert "Traceback" not in terminal.before
    assert termios.tcgetattr(terminal.child_fd) == before
    terminal.close()
    assert terminal.exitstatus == 128 + number
    assert list(tmp_path.rglob("controller.json"))


# A thread of the chat that warns once there is a file, and then deletes that.
WARNS = """
import logging, pathlib, threading, time, cli.main

def warn(sign):
    while not sign.exists():
        time.sleep(0.02)
    logging.getLogger("adaptive.trainer").warning("the training has failed")
    sign.unlink()
threading.Thread(target=warn, args=(pathlib.Path(%r),), daemon=True).start()
cli.main.run()
"""


@pytest.mark.thorough
def test_a_warning_waits_until_a_line_has_been_typed(tmp_path: Path) -> None:
    model, sign = save_model_that_says("words", tmp_path / "says"), tmp_path / "sign"
    command = ["-c", WARNS % str(sign), "chat", "--target", str(model), "--dtype", "float32", "--distill", "off"]
    environment = {**os.environ, "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"}
    terminal = pexpect.spawn(
        sys.executable, [*command, "--no-record"], timeout=300, dimensions=(40, 90), env=environment, encoding="utf-8"
    )
    terminal.expect("›")
    terminal.send("/he")
    terminal.expect("/.*h.*e")
    sign.touch()
    until(lambda: not sign.exists())
    terminal.send("lp\r")
    terminal.expect("this list")
    assert "failed" not in terminal.before
    terminal.expect("the training has failed")
    terminal.send("/exit\r")
    terminal.expect(pexpect.EOF)
    terminal.close()


@pytest.mark.thorough
def test_the_chat_says_what_it_does_before_it_imports_torch(tmp_path: Path) -> None:
    """Importing torch takes a second or more. If torch is missing, one line names the command that installs it."""
    without = "import sys; sys.modules['torch'] = None; import cli.main; cli.main.run()"
    environment = {**os.environ, "TERM": "xterm", "ADAPTIVE_HOME": str(tmp_path)}
    terminal = pexpect.spawn(
        sys.executable, ["-c", without, "chat"], timeout=60, dimensions=(24, 200), env=environment, encoding="utf-8"
    )
    terminal.expect("loading models")
    terminal.expect(r"the package torch is not installed; .*install 'torch>=")
    terminal.expect(pexpect.EOF)
    terminal.close()
    assert terminal.exitstatus == 2
