"""Options are put into a start file behind the command that starts the server, or nothing is changed."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from adaptive.errors import AdaptiveError
from adaptive.upstream.kinds import ADAPTIVE, LLAMA_SERVER, SGLANG, UNKNOWN, VLLM, Kind
from adaptive.upstream.publishing import StartFile, edited, options

STARTS = {
    LLAMA_SERVER: "#!/bin/sh\n# llama-server\nexec ./bin/llama-server -m t.gguf \\\n  --port 8080\n",
    VLLM: "vllm serve owner/target --port 8000\n",
    SGLANG: "python -m sglang.launch_server --model-path owner/target\n",
    ADAPTIVE: "adaptive serve --target t\n",
}

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


@pytest.mark.parametrize("kind", STARTS, ids=lambda kind: kind.name)
def test_options_come_into_the_start_command_and_are_replaced_there(kind: Kind) -> None:
    first = edited(STARTS[kind], kind, options(kind, Path("/a folder/one"), 3))
    second = edited(first, kind, options(kind, Path("/two"), 5))
    assert edited(second, kind, options(kind, Path("/two"), 5)) == second
    assert "one" not in second
    words = shlex.split(second, comments=True)
    for name, value in options(kind, Path("/two"), 5).items():
        assert words.count(name) == 1
        assert words[words.index(name) + 1] == value
    kept = [word for word in shlex.split(STARTS[kind], comments=True) if word.strip()]
    rest = iter(words)
    assert all(word in rest for word in kept)  # in the same order


def test_what_vllm_is_told_is_json() -> None:
    (said,) = options(VLLM, Path("/d"), 4).values()
    assert json.loads(said) == {"method": "draft_model", "model": "/d", "num_speculative_tokens": 4}


def test_a_start_command_of_something_else_is_refused() -> None:
    with pytest.raises(AdaptiveError, match="--spec-draft-model"):
        edited("docker start box", LLAMA_SERVER, options(LLAMA_SERVER, Path("/d"), 4))
    with pytest.raises(AdaptiveError, match="by hand"):
        options(UNKNOWN, Path("/d"), 4)


def test_an_option_that_only_begins_the_same_stays() -> None:
    start = "llama-server --spec-draft-model-path x --spec-draft-n-max=3"
    told = edited(start, LLAMA_SERVER, {"--spec-draft-n-max": "7", "--spec-draft-model": "y"})
    assert told == "llama-server --spec-draft-model y --spec-draft-model-path x --spec-draft-n-max=7"


@pytest.mark.parametrize(
    ("kind", "start", "kept"),
    [
        (LLAMA_SERVER, "llama-server -md old.gguf --draft-max 16 -ngld 9", " -ngld 9"),
        (LLAMA_SERVER, "llama-server --spec_draft_model \\\n  old.gguf -m t; echo", " -m t; echo"),
        (LLAMA_SERVER, """llama-server -hfd 'old/draft:q8' --model-draft 'old'\\ "\\"old\\"".gguf -m t""", " -m t"),
        (LLAMA_SERVER, "# llama-server --spec-draft-model a\nllama-server", "# llama-server --spec-draft-model a\n"),
        (LLAMA_SERVER, "llama-server -m t # -md it's b", " # -md it's b"),
        (LLAMA_SERVER, "curl -md x http://y\nllama-server -m t", "curl -md x http://y\n"),
        (VLLM, """vllm serve m -sc '{\n "model": "old"\n}' --port 1""", " --port 1"),
        (VLLM, 'vllm serve m --speculative-config {\\"model\\":\\"old\\"} --port 1', " --port 1"),
        (VLLM, 'vllm serve m --speculative_config="{\\"model\\": \\"old one\\"}" --port 1', " --port 1"),
        (VLLM, "vllm serve m --spec-model old --spec-tokens=3 --port 1", " --port 1"),
        (SGLANG, "sglang serve --speculative-algo EAGLE3 --speculative-draft-model old --port 1", " --port 1"),
    ],
)
def test_no_old_draft_is_left_under_any_name(kind: Kind, start: str, kept: str) -> None:
    wanted = options(kind, Path("/new"), 3)
    told = edited(start, kind, wanted)
    assert "old" not in told
    words = shlex.split(told.replace("\\\n", " "), comments=True)
    for name, value in wanted.items():
        values = [words[i + 1] for i, word in enumerate(words) if word == name]
        values += [word.removeprefix(f"{name}=") for word in words if word.startswith(f"{name}=")]
        assert set(values) == {value}
    assert kept in told
    assert edited(told, kind, wanted) == told


@pytest.mark.parametrize(
    ("kind", "start", "said"),
    [
        (LLAMA_SERVER, 'MORE="--spec-draft-model old.gguf"\nllama-server $MORE', "--spec-draft-model"),
        (LLAMA_SERVER, 'command: "llama-server -md old.gguf"\nname: "a b"', "-md"),
        (LLAMA_SERVER, "- llama-server\n- --spec-draft-model\n- old.gguf", "--spec-draft-model"),
        (LLAMA_SERVER, '["llama-server", "--model-draft", "old.gguf"]', "--model-draft"),
        (VLLM, "vllm serve m -sc.model old -sc.num_speculative_tokens 3", "-sc"),
        (VLLM, "vllm serve m --speculative-config $(cat config.json)", "--speculative-config"),
    ],
)
def test_an_option_that_is_not_understood_is_said(kind: Kind, start: str, said: str) -> None:
    with pytest.raises(AdaptiveError, match=rf"^{said} is in .* by hand$"):
        edited(start, kind, options(kind, Path("/new"), 3))


@pytest.mark.parametrize("name", ["--spec-draft-n-min", "--draft-min", "--draft-n-min"])
def test_a_shortest_draft_that_keeps_the_draft_from_being_used_is_said(name: str) -> None:
    start = f"llama-server {name} 4 -m t"
    with pytest.raises(AdaptiveError, match=r"--spec-draft-n-min 4 .* take it out$"):
        edited(start, LLAMA_SERVER, options(LLAMA_SERVER, Path("/d"), 3))
    with pytest.raises(AdaptiveError, match=r"take it out$"):
        edited(f"llama-server {name}", LLAMA_SERVER, options(LLAMA_SERVER, Path("/d"), 4))
    told = edited(start, LLAMA_SERVER, options(LLAMA_SERVER, Path("/d"), 4))
    assert "--spec-draft-n-min 4 -m t" in told


def test_a_start_file_with_windows_ends_of_lines_gets_them_back(tmp_path: Path) -> None:
    file, before = tmp_path / "start.bat", b"rem start\r\nllama-server -m t.gguf\r\n"
    file.write_bytes(before)
    start = StartFile.read(file)
    start.write(edited(start.before, LLAMA_SERVER, options(LLAMA_SERVER, Path("d.gguf"), 3)))
    assert start.edited
    assert b"--spec-draft-n-max 3 -m t.gguf\r\n" in file.read_bytes()
    start.write(start.before)
    assert not start.edited
    assert file.read_bytes() == before
