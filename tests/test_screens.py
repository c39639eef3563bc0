"""Screens as a user sees them, kept as text: the main commands and the chat, at three widths, in a dumb terminal and
through a pipe.

Figures that depend on the machine are masked. After an intended change run ``UPDATE_SCREENS=1 pytest -n 0
tests/test_screens.py``, then read the difference.
"""

from __future__ import annotations

import io
import itertools
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pexpect
import pytest
from conftest import save_model_that_says
from records_factory import generation
from rich.console import Console

from adaptive.records.writer import LogWriter
from adaptive.types import Message, Round
from cli.chat_talk import Talk
from cli.demo import UNTRAINED
from cli.demo_figures import Tally, figures_table

SCREENS = Path(__file__).parent / "screens"
WIDTHS = (60, 80, 200)
TMUX = shutil.which("tmux")
# Lines of a terminal; more than any screen needs.
HEIGHT, TALL = 60, 120
# Seconds until a chat must be ready on a busy machine.
START_S = 120
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]|\x1b[()][A-Z0-9]|\x1b[=>]|\r")
MASKED = (
    (r"\d+(\.\d+)? (kB|MB)", "# kB"), (r"(?<![\d.])\d+ tokens/s", "# tokens/s"),
    (r"\d+ prompt tokens from", "# prompt tokens from"),
    (r"session(\s)[0-9a-f]{12}", r"session\1############"), (r"says--none-[0-9a-f]+", "says--none-#"),
    (r"([\u2801-\u28ff] [a-z ]+)+\n", ""),  # a status line, which the terminal has erased
)  # fmt: skip
COMMANDS = (
    ("history",),
    ("history", "--by", "session"),
    ("history", "--by", "position"),
    ("adapters", "list"),
    ("records", "stats"),
    ("records", "check"),
    ("adapters", "show", "7"),
    ("records", "purge"),
)
# Runs the commands one after another as the console script does, in one process, since starting one is slow.
PLAY = f"""
import sys
from cli.main import run
for words in {COMMANDS!r}:
    print("$ adaptive", *words, flush=True)
    sys.argv = ["adaptive", *words]
    try:
        run()
    except SystemExit as end:
        sys.stdout.flush()
        sys.stderr.flush()
        print("status", end.code or 0, flush=True)
"""


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a log in ``home``."""
    folder = tmp_path_factory.mktemp("screens")
    with LogWriter(folder / "home" / "big--small-1234" / "records.db") as writer:
        for number in range(24):
            rounds = tuple(Round("model", 4, (number // 4 + i) % 5, 0.01, 0.02) for i in range(6))
            said = {"session": f"talk-{number // 8}", "adapter": None if number < 12 else "0001", "rounds": rounds}
            writer.write(generation(number, created=1_700_000_000.0 + 7200 * number, tokens=18, **said))  # type: ignore[arg-type]
    return folder


def environment(term: str) -> dict[str, str]:
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG", "LD_LIBRARY_PATH") if name in os.environ}
    paths = os.pathsep.join((str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH", "")))
    fixed = {"TERM": term, "TZ": "UTC", "ADAPTIVE_HOME": "home", "PYTHONPATH": paths, "PYTHONIOENCODING": "utf-8"}
    return {"LC_ALL": "C.UTF-8", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **kept, **fixed}


def plain(text: str) -> str:
    """``text`` without colours and trailing spaces; sizes, speeds and random names are masked."""
    screen = "\n".join(line.rstrip() for line in ESCAPES.sub("", text).splitlines()).strip() + "\n"
    for figure, masked in MASKED:
        screen = re.sub(figure, masked, screen)
    # The line break depends on the length of the speed, and the drafter on the time that lookups took.
    return re.sub(r"# tokens/s[^›]*?\d\s+tokens\s+a\s+round,[^›]*?(?:nothing\s+drafted|accepted)", _decoded, screen)


# History may draft a round now and then.
PLAIN = r"plain(, but for \d+ of \d+ rounds)?: no draft model"


def _decoded(said: re.Match[str]) -> str:
    line = " ".join(said[0].split())
    return re.sub(f"({PLAIN}|drafting [0-9.]+ tokens ahead.* as fast as plain) · .*", "HOW IT WAS DECODED", line)


def compare(name: str, screen: str) -> None:
    """Compare a screen with the kept one, or keep it under UPDATE_SCREENS."""
    file = SCREENS / f"{name}.txt"
    if os.environ.get("UPDATE_SCREENS"):
        SCREENS.mkdir(exist_ok=True)
        file.write_text(screen, encoding="utf-8")
    assert screen == file.read_text(encoding="utf-8")


@pytest.mark.thorough(but="80-xterm-256color")
@pytest.mark.parametrize(("width", "term"), [*((width, "xterm-256color") for width in WIDTHS), (80, "dumb")])
def test_the_main_commands_in_a_terminal(here: Path, width: int, term: str) -> None:
    command = [sys.executable, "-c", PLAY]
    spawned = pexpect.spawn(
        command[0], command[1:], cwd=str(here), env=environment(term), dimensions=(HEIGHT, width), timeout=START_S
    )
    spawned.expect(pexpect.EOF)
    said = spawned.before.decode("utf-8")
    if term == "dumb":
        assert "\x1b" not in said
    screen = plain(said)
    # An error is one line at any width, and so is the command.
    drawn = [line for line in screen.splitlines() if not line.startswith(("adaptive: ", "$ "))]
    assert max(map(len, drawn)) <= width
    assert not re.search(r"\bnan\b|\bNone\b|\b1 (generations|answers|adapters)\b", screen)
    compare(f"commands-{'dumb' if term == 'dumb' else width}", screen)


@pytest.mark.thorough
def test_the_main_commands_through_a_pipe(here: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PLAY], cwd=here, env=environment("xterm-256color"), stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=True,
    )  # fmt: skip
    said = done.stdout.decode("utf-8")
    assert "\x1b" not in said
    compare("commands-pipe", plain(said))


@pytest.mark.parametrize("width", WIDTHS)
def test_the_last_table_of_the_demo(width: int) -> None:
    """Its labels are complete at any width, each on one line from 80 columns on."""
    rounds = [Round("model", 4, kept, 0.01, 0.02) for kept in (0, 1, 4, 2)]
    counted = {"tokens": 11_000, "seconds": 4.0, "rounds": rounds}
    made = (("draft distilled", "draft", "0001"), ("head from nothing, 280 answers", "head", "0001"))
    ways = [Tally("plain", 0, tokens=9_876, seconds=4.0), Tally(UNTRAINED, 4, **counted)]  # type: ignore[arg-type]
    for label, drafter, adapter in made:
        ways += [Tally(label, length, drafter, adapter, **counted) for length in (4, None)]  # type: ignore[arg-type]
    said = io.StringIO()
    Console(file=said, width=width, force_terminal=False).print(figures_table(ways, ""))
    screen = said.getvalue()
    assert "…" not in screen
    assert max(map(len, screen.splitlines())) <= width
    assert width < 80 or len(screen.splitlines()) == 4 + len(ways) + 1
    compare(f"demo-{width}", screen)


class Terminal:
    """A program in a terminal that tmux draws."""

    def __init__(self, folder: Path, *command: str) -> None:
        assert TMUX is not None
        self._tmux = [TMUX, "-S", str(folder / "tmux"), "-f", os.devnull]
        self._folder = folder
        self._run("new-session", "-d", "-x", str(WIDTHS[0]), "-y", str(TALL), *command)

    def _run(self, *words: str) -> str:
        done = subprocess.run(
            [*self._tmux, *words], cwd=self._folder, env=environment("xterm-256color"), capture_output=True, check=True
        )
        return done.stdout.decode("utf-8")

    def resize(self, width: int) -> None:
        self._run("resize-window", "-x", str(width), "-y", str(TALL))
        name = self._run("display-message", "-p", "#{pane_tty}").strip()
        with open(name, "rb", buffering=0) as tty:  # tmux informs the program only later
            deadline = time.monotonic() + START_S
            while os.get_terminal_size(tty.fileno()).columns != width:
                assert time.monotonic() < deadline, "the terminal keeps its width"
                time.sleep(0.02)

    def press(self, *keys: str) -> None:
        self._run("send-keys", *keys)

    @property
    def screen(self) -> str:
        return plain(self._run("capture-pane", "-p"))

    def until(self, there: Callable[[str], bool]) -> None:
        """Wait for a screen for which ``there`` is true."""
        deadline = time.monotonic() + START_S
        while not there(screen := self.screen):
            assert time.monotonic() < deadline, screen
            time.sleep(0.05)

    def close(self) -> None:
        subprocess.run([*self._tmux, "kill-server"], capture_output=True, check=False)


# The answer of the chats' model to any question.
SAID = (
    "## A plan\nBegin with **one** small `step` that you could finish before lunch, since many hours go into what "
    "nobody asked for."
)
OPTIONS = ("--draft", "none", "--dtype", "float32", "--temperature", "0", "--no-record")
# Typed lines, each with a text that must then stand above the next prompt.
SCENES = {
    "questions": (
        ("What now?", "# tokens/s"),
        ("One line,\\", None),
        ("and another.", "# tokens/s"),
        ('"""Three', None),
        ("of", None),
        ('them"""', "# tokens/s"),
        ("/etc/hosts what is this?", "# tokens/s"),
        ("/retry", "# tokens/s"),
        ("/undo", "taken out of the conversation: "),
    ),
    "an answer that is cut": (
        ("/set max_tokens 5", "max_tokens 5"),
        ("And now?", "/more goes on"),
        ("/set max_tokens 100", "max_tokens 100"),
        ("/more", "# tokens/s"),
    ),
    "settings": (
        ("/set temperature 0.2", "temperature 0.2"),
        ("/set temperature warm", "number"),
        ("/set colour 1", "max_tokens"),
        ("/system Be short.", "Be short"),
        ("/system off", "none"),
        ("/nothing", "lists what there is"),
    ),
    "files": (
        ("/save", "talk.json"),
        ("/save talk-WIDTH.json", "back"),
        ("/save talk-WIDTH.json", "another name"),
        ("/reset", "new session"),
        ("/load talk-WIDTH.json", "asked for"),
        ("/load nowhere.json", "nowhere.json"),
    ),
    "a full context": (
        ("/load long.json", "Yes"),
        ("What now?", "Y/n"),
        ("n", "n"),
        ("/reset", "new session"),
    ),
    "help": (("/help", "Several lines"),),
}  # fmt: skip


def started(folder: Path) -> Path:
    """Save the files of the chats in ``folder``: the model, and a conversation that fills its context."""
    save_model_that_says(SAID, folder / "says")
    long = Talk("Be brief.")
    for number in range(100):
        long.messages += [Message("user", f"{number}? " + "word " * 20), Message("assistant", "Yes.")]
    long.save(folder / "long.json")
    return folder


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Terminal]:
    """``adaptive chat``, ready for a question."""
    folder = started(tmp_path_factory.mktemp("chat"))
    one = Terminal(folder, sys.executable, "-m", "cli.main", "chat", "--target", "says", *OPTIONS)
    try:
        one.until(lambda screen: screen.endswith("\n›\n"))
        yield one
    finally:
        one.close()


def answered(screen: str, shown: str | None) -> bool:
    """Whether ``shown`` is on the screen with a prompt for the next input after it."""
    if shown is None:
        return screen.endswith("\n…\n")
    return shown in " ".join(screen.split()) and screen.rstrip().endswith(("\n›", "[Y/n]"))


@pytest.mark.skipif(TMUX is None, reason="tmux is not here")
@pytest.mark.xdist_group("screens")  # one xdist worker, since it starts one chat
@pytest.mark.parametrize("width", WIDTHS)
def test_the_chat_in_a_terminal(chat: Terminal, width: int) -> None:
    chat.resize(width)
    screens = []
    for name, lines in SCENES.items():
        chat.press("C-l")
        chat.until(lambda screen: screen == "›\n")
        for typed, shown in lines:
            text = typed.replace("WIDTH", str(width))
            before = len(chat.screen)
            chat.press("-l", text)
            chat.press("Enter")
            chat.until(lambda screen: answered(screen[before:], shown))  # noqa: B023
        screens.append(f"== {name}\n{chat.screen}")
    compare(f"chat-{width}", "".join(screens).replace(f"talk-{width}", "talk"))


@pytest.mark.thorough
def test_the_chat_in_a_dumb_terminal(tmp_path: Path) -> None:
    command = ["-m", "cli.main", "chat", "--target", "says", *OPTIONS]
    said = io.StringIO()
    spawned = pexpect.spawn(
        sys.executable, command, cwd=str(started(tmp_path)), env=environment("dumb"), dimensions=(HEIGHT, 80),
        timeout=START_S, encoding="utf-8",
    )  # fmt: skip
    spawned.logfile_read = said
    for typed, _ in (*itertools.chain(*SCENES.values()), ("/exit", None)):
        asked = spawned.expect([r"› \Z", r"… \Z", r"\[Y/n\] \Z"])
        # The prompt stands there before the terminal stops to echo; what is typed meanwhile would stand there twice.
        assert asked == 2 or spawned.waitnoecho(START_S)
        spawned.sendline(typed.replace("WIDTH", "dumb"))
    spawned.expect(pexpect.EOF)
    assert "\x1b" not in said.getvalue()
    compare("chat-dumb", plain(said.getvalue()))


@pytest.mark.thorough
def test_the_chat_through_a_pipe(tmp_path: Path) -> None:
    def chat(text: str, *given: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "cli.main", "chat", *given, "--target", "says", *OPTIONS], cwd=tmp_path,
            env=environment("xterm-256color"), input=text, capture_output=True, text=True, check=False,
        )  # fmt: skip
        said = f"{done.stdout}== on standard error, and status {done.returncode}\n{done.stderr}"
        assert "\x1b" not in said
        return said

    started(tmp_path)
    answered = chat("line one\n/help\nline three\n", "Explain this:")
    assert answered.startswith(SAID + "\n== ")
    cut, empty, long = chat("Go on.", "--max-new-tokens", "5"), chat(""), chat("word " * 3000)
    compare("chat-pipe", plain("\n".join((answered, cut, empty, long))))
