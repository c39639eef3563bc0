"""Every example in a command's help runs unchanged; those of LONG and CHATS only with ``-m long``, which ``.ci/run``
leaves out. They run in a folder that holds everything they name."""

from __future__ import annotations

import io
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import BUNDLED, Command
from foreign_heads import save_eagle
from records_factory import generation
from test_cli_help import ALL
from test_service_learning import publish_random_adapter

from adaptive.pair import pair_identity
from adaptive.records.writer import LogWriter
from adaptive.settings import load_settings
from checkpoints.store import AdapterStore
from cli import service

EXAMPLES = [
    line.strip().removeprefix("Example: ")
    for command in ALL.values()
    for line in command.help.splitlines()
    if line.strip().startswith("Example: ")
]
# Commands that train or measure for a minute or more, or load a pair in their own process; other tests run them with
# options that take less time.
LONG = (
    "adaptive demo", "adaptive bench", "adaptive calibrate", "adaptive distill", "adaptive head", "adaptive serve",
    "adaptive learn", "adaptive draft-server",
)  # fmt: skip
CHATS = ("adaptive chat", "git diff | adaptive chat", "adaptive generate --prompts")
# Commands that run until they are stopped, and what they print once they serve.
SERVERS = {"adaptive serve": "ready: ", "adaptive learn": "listening on ", "adaptive draft-server": "listening on "}
# Exit statuses that are not failures: no service is installed.
STATUS = {"adaptive service status": (0, 1)}
# The start of examples that need another server, which does not exist here: they must fail only at that point.
ELSEWHERE = "adaptive publish"
# Models that examples name, and the bundled model that replaces each.
MODELS = {
    "my-target": "target", "target": "target", "my-14b": "target", "DIR": "target",
    "my-draft": "draft", "my-0.5b": "draft", "draft": "draft",
    "Qwen/Qwen2.5-14B-Instruct": "target", "Qwen/Qwen2.5-0.5B-Instruct": "draft",
}  # fmt: skip
PROMPTS = [{"prompt": f"What is {n} plus {n}?"} for n in range(3)]
CONVERSATIONS = [
    {
        "messages": [
            {"role": "user", "content": f"Count to {n}."},
            {"role": "assistant", "content": f"1, and so on, {n}."},
        ]
    }
    for n in range(80)
]
# Answers in the log: somewhat more than a training run needs.
ANSWERS = 80
FRUIT = {"type": "object", "properties": {"name": {"enum": ["plum"]}}, "required": ["name"]}
# Seconds until a server must be ready on a busy machine.
START_S = 120


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with everything that examples name: models, files, a log, seven adapters, a repository with a change."""
    here = tmp_path_factory.mktemp("examples")
    for name, part in MODELS.items():
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        (here / name).symlink_to(BUNDLED / part)
    for name in ("prompts.jsonl", "mine.jsonl"):
        (here / name).write_text("".join(json.dumps(line) + "\n" for line in PROMPTS))
    (here / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in CONVERSATIONS))
    (here / "fruit.json").write_text(json.dumps(FRUIT))
    (here / "server.toml").write_text("port = 8081\n")
    state = here / "home" / pair_identity(load_settings({})).id
    with LogWriter(state / "records.db") as writer:
        for number in range(ANSWERS):
            session = "holiday-plans" if number % 2 else "other"
            writer.write(generation(number, session=session, asked=f"What is {number}?"))
    store = AdapterStore(state / "adapters")
    publish_random_adapter(store, here / "random")
    for number in range(2, 8):
        shutil.copytree(state / "adapters" / "0001", state / "adapters" / f"{number:04}")
        manifest = state / "adapters" / f"{number:04}" / "manifest.json"
        manifest.write_text(manifest.read_text().replace('"0001"', f'"{number:04}"'))
    store.promote("5", "for the example")
    (here / "bin").mkdir()
    for tool in ("systemctl", "launchctl"):
        (here / "bin" / tool).write_text("#!/bin/sh\n")
        (here / "bin" / tool).chmod(0o755)
    return here


@pytest.fixture
def here(template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of ``template`` as the current folder."""
    folder = tmp_path / "here"
    shutil.copytree(template, folder, symlinks=True)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("ADAPTIVE_HOME", str(folder / "home"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(folder / "config"))
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.setattr(service, "LOOKED_AFTER_S", 0.0)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv(
        "PATH", os.pathsep.join((str(folder / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]))
    )
    return folder


def marked(example: str) -> object:
    long = example.startswith((*LONG, *CHATS))
    return pytest.param(example, marks=pytest.mark.long if long else ())


@pytest.mark.parametrize("example", [marked(example) for example in EXAMPLES])
def test_an_example_works_as_it_stands(
    example: str, here: Path, adaptive: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    if ".gguf" in example or "gguf" in example.split():
        pytest.importorskip("gguf", reason="the extra llamacpp is not installed")
    if "--other-target" in example:
        from gguf_pair import write_bundled

        for part, name in (("target", "T.gguf"), ("draft", "D.gguf")):
            write_bundled(part, here, "bf16").rename(here / name)
    words = shlex.split(example)
    if "./eagle3-head" in words:
        save_eagle(BUNDLED / "target", here / "eagle3-head", "specforge")
    if "laptop/records.db" in words:
        for name in ("laptop", "desktop"):
            assert adaptive("generate", name, "--max-new-tokens", "4", "--state-dir", str(here / name))[0] == 0
            next((here / name).glob("*/records.db")).rename(here / name / "records.db")
    if "--merged my-draft" in example:  # the example writes this file
        (here / "my-draft").unlink()
    if example == "adaptive service remove":
        assert adaptive("service", "install", "--no-start")[0] == 0
    command = " ".join(words[:2])
    if command in SERVERS:
        comes_up(example, SERVERS[command])
    elif words[0] != "adaptive":  # a shell command
        subprocess.run(["git", "init", "-q"], check=True)
        subprocess.run(["git", "add", "-N", "fruit.json"], check=True)
        done = subprocess.run(["bash", "-c", example], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip()
    else:
        if command == "adaptive chat" or example == "adaptive records purge --older-than 30d":
            monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))  # serves as a question and as a confirmation
        status, out, err = adaptive(*words[1:])
        if example.startswith(ELSEWHERE):
            assert (status, "does not answer" in err) == (2, True), err
            return
        if command == "adaptive calibrate" and "this machine is busy" in err:
            pytest.skip("this machine is busy")
        assert status in STATUS.get(example, (0,)), err
        assert out or err


def comes_up(example: str, said: str) -> None:
    """Check that a server starts, and ends on SIGTERM."""
    words = [*shlex.split(example), "--port", "0"]
    with Path("server.log").open("w") as log:
        server = subprocess.Popen(words, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + START_S
        while said not in Path("server.log").read_text():
            assert server.poll() is None, Path("server.log").read_text()
            assert time.monotonic() < deadline, Path("server.log").read_text()
            time.sleep(0.1)
        server.send_signal(signal.SIGTERM)
        # A server that does not serve yet is ended by the signal itself.
        assert server.wait(START_S) in (0, -signal.SIGTERM)
    finally:
        server.kill()
        server.wait()
