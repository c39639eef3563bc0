"""Measures how long ``adaptive chat`` takes to show its first output, to be ready and to exit, in a real terminal.

Each start is a separate process in a pseudo-terminal: seconds to the first visible character, to the prompt, and from
ctrl-D at that prompt to the end of the process. The first start in a folder also measures the costs of a round, so
it is reported separately from the median of the others.

    python benchmarks/chat_start.py --starts 9
    python benchmarks/chat_start.py --starts 5 -- --target DIR --draft DIR
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass

import pexpect

from cli.chat_input import PROMPT

# Output that a terminal does not show: control sequences and window titles.
UNSEEN = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]|\x1b\][^\x07]*\x07|\x1b[()][A-Z0-9]|\x1b[=>]|\s")
# prompt-toolkit asks the terminal for the cursor position; this is the question and our answer.
ASKED, ANSWER = "\x1b[6n", "\x1b[1;1R"
# Seconds allowed for one step on a busy machine.
TIMEOUT_S = 120.0
CTRL_D = "\x04"


@dataclass(frozen=True)
class Start:
    """Seconds of one start: to the first visible character, to the prompt, and to leave."""

    word: float
    prompt: float
    leave: float


def start(options: list[str]) -> Start:
    """Start ``adaptive chat`` once with these options. Raises TimeoutError if no prompt appears."""
    began = time.perf_counter()
    chat = pexpect.spawn(
        sys.executable, ["-m", "cli.main", "chat", *options], dimensions=(40, 100), encoding="utf-8", timeout=TIMEOUT_S
    )
    screen, word = "", 0.0
    while PROMPT.strip() not in screen:
        if time.perf_counter() - began > TIMEOUT_S:
            raise TimeoutError(f"no prompt, but: {screen}")
        said = chat.read_nonblocking(4096, TIMEOUT_S)
        if ASKED in said:
            chat.send(ANSWER)
        screen += UNSEEN.sub("", said)
        word = word or (time.perf_counter() - began if screen else 0.0)
    prompt = time.perf_counter() - began
    left = time.perf_counter()
    chat.send(CTRL_D)
    chat.expect(pexpect.EOF)
    chat.wait()
    return Start(word, prompt, time.perf_counter() - left)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--starts", type=int, default=9, help="Starts after the first.")
    parser.add_argument("--json", action="store_true", help="Print JSON.")
    parser.add_argument("options", nargs="*", help="Options of adaptive chat, after --.")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        first, *later = (start([*arguments.options, "--state-dir", home]) for _ in range(1 + arguments.starts))
    names = [*asdict(first)]
    median = {name: statistics.median(getattr(one, name) for one in later) for name in names}
    worst = {name: max(getattr(one, name) for one in later) for name in names}
    if arguments.json:
        print(json.dumps({"first": asdict(first), "median": median, "worst": worst, "starts": len(later)}))
        return
    print(f"{'seconds':<24}{'first word':>12}{'prompt':>12}{'leave':>12}")
    rows = {"the first in a folder": asdict(first), f"median of {len(later)} more": median, "worst of them": worst}
    for name, row in rows.items():
        print(f"{name:<24}" + "".join(f"{row[part]:12.2f}" for part in names))


if __name__ == "__main__":
    main()
