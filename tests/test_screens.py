"""What a person sees, kept as text: the main commands at three widths, in a dumb terminal and through a pipe, and the
chat's own screens in a real terminal.

Figures that depend on the machine are masked. After a change that is meant: ``UPDATE_SCREENS=1 pytest -n 0
tests/test_screens.py``, then read the difference.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pexpect
import pytest
from records_factory import generation

from adaptive.records.writer import LogWriter
from adaptive.types import Round

SCREENS = Path(__file__).parent / "screens"
WIDTHS = (60, 80, 200)
TMUX = shutil.which("tmux")
# Lines of a terminal; more than any screen has.
HEIGHT = 60
# Seconds for a chat to be there on a busy machine.
START_S = 120
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]|\x1b[()][A-Z0-9]|\x1b[=>]|\r")
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
# Runs them one after the other as the console script does, in one process, since starting one takes most of the time.
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
    """As lines without colours and without spaces at their ends; sizes masked."""
    lines = (line.rstrip() for line in ESCAPES.sub("", text).splitlines())
    return re.sub(r"\d+(\.\d+)? (kB|MB)", "# kB", "\n".join(lines)).strip() + "\n"


def compare(name: str, screen: str) -> None:
    """A screen as it was kept, or keep it."""
    file = SCREENS / f"{name}.txt"
    if os.environ.get("UPDATE_SCREENS"):
        SCREENS.mkdir(exist_ok=True)
        file.write_text(screen, encoding="utf-8")
    assert screen == file.read_text(encoding="utf-8")


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
    # An error is one line, whatever the width, and so is what was typed here.
    drawn = [line for line in screen.splitlines() if not line.startswith(("adaptive: ", "$ "))]
    assert max(map(len, drawn)) <= width
    assert not re.search(r"\bnan\b|\bNone\b|\b1 (generations|answers|adapters)\b", screen)
    compare(f"commands-{'dumb' if term == 'dumb' else width}", screen)


def test_the_main_commands_through_a_pipe(here: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PLAY], cwd=here, env=environment("xterm-256color"), stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=True,
    )  # fmt: skip
    said = done.stdout.decode("utf-8")
    assert "\x1b" not in said
    compare("commands-pipe", plain(said))


class Terminal:
    """A program in a terminal that tmux draws."""

    def __init__(self, folder: Path, *command: str) -> None:
        assert TMUX is not None
        self._tmux = [TMUX, "-S", str(folder / "tmux"), "-f", os.devnull]
        self._folder = folder
        self._run("new-session", "-d", "-x", str(WIDTHS[0]), "-y", str(HEIGHT), *command)

    def _run(self, *words: str) -> str:
        done = subprocess.run(
            [*self._tmux, *words], cwd=self._folder, env=environment("xterm-256color"), capture_output=True, check=True
        )
        return done.stdout.decode("utf-8")

    def resize(self, width: int) -> None:
        self._run("resize-window", "-x", str(width), "-y", str(HEIGHT))
        name = self._run("display-message", "-p", "#{pane_tty}").strip()
        with open(name, "rb", buffering=0) as tty:  # tmux tells the program only a while later
            deadline = time.monotonic() + START_S
            while os.get_terminal_size(tty.fileno()).columns != width:
                assert time.monotonic() < deadline, "the terminal keeps its width"
                time.sleep(0.02)

    def press(self, *keys: str) -> None:
        self._run("send-keys", *keys)

    @property
    def screen(self) -> str:
        return plain(self._run("capture-pane", "-p"))

    def until(self, pattern: str) -> str:
        """The screen, when this stands on it."""
        deadline = time.monotonic() + START_S
        while not re.search(pattern, screen := self.screen, re.MULTILINE):
            assert time.monotonic() < deadline, f"no {pattern!r} on\n{screen}"
            time.sleep(0.1)
        return screen

    def close(self) -> None:
        subprocess.run([*self._tmux, "kill-server"], capture_output=True, check=False)


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Terminal]:
    """``adaptive chat`` on the bundled pair, ready for a question."""
    folder = tmp_path_factory.mktemp("chat")
    options = ("--dtype", "float32", "--temperature", "0", "--no-record", "--draft-length", "2")
    one = Terminal(folder, sys.executable, "-m", "cli.main", "chat", *options)
    try:
        one.until(r"^> ?$|^› ?$|^❯ ?$")
        yield one
    finally:
        one.close()


@pytest.mark.skipif(TMUX is None, reason="tmux is not here")
@pytest.mark.xdist_group("screens")  # by one process, which starts one chat
@pytest.mark.parametrize("width", WIDTHS)
def test_the_chat_in_a_terminal(chat: Terminal, width: int) -> None:
    chat.resize(width)
    chat.press("C-l")
    chat.press("/set", "Enter")
    chat.until("max_tokens")
    chat.press("/nothing", "Enter")
    chat.until("there is no /nothing")
    chat.press("/help", "Enter")
    screen = chat.until(r"Several lines stand between.*\n›$")  # with the prompt for what comes next
    assert max(map(len, screen.splitlines())) <= width
    compare(f"chat-{width}", screen)
