"""Finds the command of a server's program in the file that starts it: a shell script, systemd unit or Dockerfile."""

from __future__ import annotations

import re

from adaptive.upstream.kinds import ADAPTIVE, LLAMA_SERVER, SGLANG, VLLM, Kind

COMMENT = r"(?:(?<=\s)|^)#[^\n]*"
QUOTED = r"""'[^']*'|"(?:[^"\\]|\\.)*\""""
SPACE = r"[^\S\n]+"
FOLDER = r"(?:[^\s;&|()<>=]*[/\\])?"
PYTHON = rf"python[\d.]*(?:\.exe)?(?:{SPACE}-(?!m\b)\S+)*{SPACE}-m{SPACE}"
# The words behind which options are put.
PROGRAMS = {
    LLAMA_SERVER.name: r"llama-server(?:\.exe)?",
    VLLM.name: rf"vllm{SPACE}serve|{PYTHON}vllm\.entrypoints\.openai\.api_server",
    SGLANG.name: rf"sglang{SPACE}serve|{PYTHON}sglang\.launch_server",
    ADAPTIVE.name: rf"adaptive{SPACE}serve|{PYTHON}cli\.main{SPACE}serve",
}
# Where a command begins: at the begin of a line, behind a separator or a word of the shell. "$(llama-server --version)"
# starts no server.
SHELL = rf"(?:^|(?<=[;&|{{])|(?<=\()(?<!\$\())[^\S\n]*(?:(?:if|then|else|while|until|do|!){SPACE})*"
DOCKERFILE = rf"(?:(?:CMD|ENTRYPOINT){SPACE})?"
UNIT = r"^ExecStart=[-@:+!]*[^\S\n]*"
# Programs that run the command behind them, and their arguments. Not "command", which with -v only looks for one.
RUNS = (
    r"exec|nohup|setsid|time|sudo|doas|env|nice|ionice|taskset|numactl|stdbuf|chrt|caffeinate|uvx"
    rf"|(?:uv|poetry|pipenv){SPACE}run"
)
SET = r"[A-Za-z_]\w*=\S*"
BEFORE = rf"(?:{SET}{SPACE}|{FOLDER}(?:{RUNS}){SPACE}(?:(?:-[ug]{SPACE}[\w.-]+|-\S+|\d\S*|{SET}){SPACE})*)*"
END = r"(?=[\s;&|<>]|$)"


def program_ends(start: str, kind: Kind) -> list[int]:
    """Where options can be put into ``start``: behind the program's name in each of its commands.

    Those in a JSON or YAML value are none: what is put there has to be written in another way.
    """
    shown = _shown(start)
    begin = UNIT if re.search("^ExecStart=", shown, re.MULTILINE) else SHELL + DOCKERFILE
    command = rf"""{begin}{BEFORE}["']?{FOLDER}(?:{PROGRAMS[kind.name]})["']?{END}"""
    found = re.finditer(command, shown, re.MULTILINE)
    # A line behind one that ends with a colon is the value of a YAML key.
    return [one.end() for one in found if not shown[: one.start()].rstrip().endswith(":")]


def _shown(start: str) -> str:
    """``start`` with the same length, without comments and continued lines, and each quoted text as a single word."""

    def shown(match: re.Match[str]) -> str:
        if match["quoted"] is not None:
            return re.sub(r"[\s;&|(){}<>]", "_", match[0])
        return ("_" if match["escaped"] is not None else " ") * len(match[0])

    return re.sub(rf"(?P<quoted>{QUOTED})|(?P<escaped>\\[\"'])|{COMMENT}|\\\r?\n", shown, start, flags=re.DOTALL)
