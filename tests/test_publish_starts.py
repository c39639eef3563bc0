"""Options are put into a start file behind the command that starts the server, or nothing is changed."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from adaptive.errors import AdaptiveError
from adaptive.upstream.kinds import ADAPTIVE, LLAMA_SERVER, SGLANG, VLLM, Kind
from adaptive.upstream.publishing import edited, options

UNIT = """[Unit]
Description=The llama-server for chat
[Service]
ExecStartPre=/bin/echo llama-server
ExecStart=-/usr/bin/env A=b /opt/x/llama-server -m t
ExecStop=pkill -x llama-server
"""


@pytest.mark.parametrize(
    ("kind", "start", "behind"),
    [
        (LLAMA_SERVER, UNIT, "A=b /opt/x/llama-server"),
        (LLAMA_SERVER, "echo starting llama-server\nllama-server -m t\n", "llama-server\nllama-server"),
        (
            LLAMA_SERVER,
            "pkill -x llama-server\nsleep 1 && nohup llama-server -m t > log 2>&1 &\n",
            "nohup llama-server",
        ),
        (LLAMA_SERVER, "cd /opt/llama-server\nsudo -u ai taskset -c 0-3 ./llama-server -m t\n", "./llama-server"),
        (LLAMA_SERVER, 'docker stop llama-server; "/a b/llama-server" -m t # ; llama-server\n', '"/a b/llama-server"'),
        (LLAMA_SERVER, "LLAMA=/opt/llama-server\nexec \\\n  $DIR/llama-server -m t\n", "$DIR/llama-server"),
        (
            LLAMA_SERVER,
            "command -v llama-server || exit\nV=$(llama-server --version)\nllama-server -m t",
            "\nllama-server",
        ),
        (LLAMA_SERVER, "FROM x\nCMD llama-server -m t\n", "CMD llama-server"),
        (LLAMA_SERVER, "command: |\n  llama-server -m t\n", "|\n  llama-server"),
        (LLAMA_SERVER, "(llama-server -m t &)\n", "(llama-server"),
        (LLAMA_SERVER, "@echo off\r\nC:\\llama\\llama-server.exe -m t\r\n", "\\llama-server.exe"),
        (VLLM, "A='b c' uv run vllm serve m\n", "vllm serve"),
        (VLLM, "/v/python3.12 -u -m vllm.entrypoints.openai.api_server --model m\n", "openai.api_server"),
        (SGLANG, "if true; then A=1 python -m sglang.launch_server --model-path m; fi\n", "launch_server"),
        (ADAPTIVE, "exec /x/python -m cli.main serve --target t\n", "cli.main serve"),
    ],
)
def test_options_are_put_behind_the_command_only(kind: Kind, start: str, behind: str) -> None:
    wanted = options(kind, Path("/d"), 3)
    told = edited(start, kind, wanted)
    at = told.index(behind) + len(behind)
    written = "".join(f" {name} {shlex.quote(value)}" for name, value in wanted.items())
    assert told == start[:at] + written + start[at:]
    assert edited(told, kind, wanted) == told


@pytest.mark.parametrize(
    ("kind", "start"),
    [
        (LLAMA_SERVER, "Description=llama-server for chat\n"),
        (LLAMA_SERVER, "echo starting llama-server\nexec $RUN"),
        (LLAMA_SERVER, "echo 'first; llama-server -m t'"),
        (LLAMA_SERVER, "sudo systemctl stop llama-server"),
        (LLAMA_SERVER, "sudo -n pkill llama-server"),
        (LLAMA_SERVER, "LLAMA=/opt/llama-server\n$LLAMA -m t"),
        (LLAMA_SERVER, 'command="/usr/bin/llama-server"'),
        (LLAMA_SERVER, 'CMD ["llama-server", "-m", "t"]'),
        (LLAMA_SERVER, '{"command": [\n  "llama-server",\n  "-m", "t"\n]}'),
        (LLAMA_SERVER, "command:\n  - llama-server\n  - -m\n"),
        (LLAMA_SERVER, "bash -c 'llama-server -m t'"),
        (VLLM, "services:\n  one:\n    command: vllm serve m\n"),
        (VLLM, "services:\n  one:\n    command:\n      vllm serve m\n"),
        (LLAMA_SERVER, "llama-server -m one &\nllama-server -m other &\n"),
    ],
)
def test_where_that_is_not_certain_the_options_are_said(kind: Kind, start: str) -> None:
    wanted = options(kind, Path("/d"), 3)
    with pytest.raises(AdaptiveError, match=r"by hand$") as refused:
        edited(start, kind, wanted)
    for name, value in wanted.items():
        assert f"{name} {shlex.quote(value)}" in str(refused.value)


def test_a_new_value_leaves_yaml_as_it_was() -> None:
    yaml = pytest.importorskip("yaml")
    start = 'command: vllm serve m --speculative-config \'{"model":"old"}\'\n'
    command = yaml.safe_load(edited(start, VLLM, options(VLLM, Path("/d"), 3)))["command"]
    assert json.loads(shlex.split(command)[-1])["model"] == "/d"
