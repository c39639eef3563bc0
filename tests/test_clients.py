"""Popular client programs against a real server, with the settings of docs/clients.md."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from conftest import DIALECTS_KEY, TALKATIVE, save_model_that_says
from service_server import Server

from adaptive.records.log import Log
from adaptive.types import Generation

# By one process, which starts one server.
pytestmark = pytest.mark.xdist_group("dialects")
PAGE = Path(__file__).resolve().parent.parent / "docs" / "clients.md"
QUESTION = "What swims in the sea?"
# Seconds for Open WebUI to import its packages and create its database, on a busy machine.
START_S = 300
# The packages of the two clients below do not support every Python.
FOR_PYTHON = pytest.mark.skipif(sys.version_info[:2] not in ((3, 11), (3, 12)), reason="needs Python 3.11 or 3.12")


def written(section: str, language: str) -> str:
    """The first block of a section of the page in this language."""
    found = re.search(rf"##+ {section}\n.*?```{language}\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    return found[1]


def last(server: Server) -> Generation:
    """The server's latest answer, from its log."""
    with Log(server.records) as log:
        return list(log.generations(with_supervision=False))[-1].generation


@pytest.mark.skipif(importlib.util.find_spec("llm") is None, reason="llm is not installed")
def test_llm_asks_the_server_by_the_settings_of_its_page(dialects: Server, tmp_path: Path) -> None:
    settings = written("llm", "yaml").replace("http://127.0.0.1:8080", dialects.url) + "  api_key_name: adaptive\n"
    (tmp_path / "extra-openai-models.yaml").write_text(settings + "  supports_schema: true\n", encoding="utf-8")
    (tmp_path / "keys.json").write_text(json.dumps({"adaptive": DIALECTS_KEY}), encoding="utf-8")
    environment = {**os.environ, "LLM_USER_PATH": str(tmp_path)}

    def llm(*arguments: str) -> str:
        command = [sys.executable, "-m", "llm", *arguments]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    schema = {"type": "object", "properties": {"warm": {"type": "boolean"}}, "required": ["warm"]}
    closed = json.dumps({**schema, "additionalProperties": False})
    said = llm("-m", "adaptive", QUESTION, "--schema", closed, "-o", "max_tokens", "60")
    assert last(dialects).messages[-1].content == QUESTION
    assert json.loads(said) == json.loads(last(dialects).text)
    assert isinstance(json.loads(said)["warm"], bool)


def test_a_wrong_base_url_is_said(dialects: Server) -> None:
    asked: Any = {"model": "any", "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 4}
    with pytest.raises(openai.NotFoundError, match="the server's address with /v1"):
        openai.OpenAI(base_url=dialects.url, api_key=DIALECTS_KEY).chat.completions.create(**asked)
    with dialects.http() as http:
        for path, said in (("/v1/v1/messages", "address without /v1"), ("/api/chat", "Ollama's API is not served")):
            answer = http.post(path, json=asked)
            assert answer.status_code == 404
            assert said in answer.json()["error"]["message"]
        assert http.post("/elsewhere", json=asked).json()["error"]["message"] == "POST /elsewhere: Not Found"


def environment_of(folder: Path, package: str) -> Path:
    """Install the package into a new environment, with these tests' torch build. Returns its folder of programs."""
    venv.create(folder / "env", with_pip=True)
    programs = folder / "env" / "bin"
    (folder / "constraints.txt").write_text(f"torch=={torch.__version__}\n", encoding="utf-8")
    command = [str(programs / "pip"), "install", "-q", "-c", str(folder / "constraints.txt"), package]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    print(subprocess.check_output([str(programs / "pip"), "show", package], text=True).splitlines()[1], package)
    return programs


@pytest.mark.long
@FOR_PYTHON
def test_aider_asks_the_server_by_the_settings_of_its_page(dialects: Server, tmp_path: Path) -> None:
    programs = environment_of(tmp_path, "aider-chat")
    exported, typed = written("aider", "sh").replace("http://127.0.0.1:8080", dialects.url).splitlines()
    name, *settings = shlex.split(exported)
    assert name == "export"
    environment = {**os.environ, **dict(one.split("=", 1) for one in settings), "OPENAI_API_KEY": DIALECTS_KEY}
    quiet = ["--no-git", "--yes-always", "--no-check-update", "--analytics-disable", "--no-show-release-notes"]
    # In its default mode aider asks again if an answer contains no edit.
    quiet += ["--edit-format", "ask", "--no-pretty", "--no-show-model-warnings"]
    command = [str(programs / shlex.split(typed)[0]), *shlex.split(typed)[1:], *quiet, "--message", QUESTION]
    done = subprocess.run(
        command, cwd=tmp_path, env={**environment, "HOME": str(tmp_path)}, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=START_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert QUESTION in last(dialects).messages[-1].content
    answer, shown = " ".join(last(dialects).text.split()), " ".join(done.stdout.split())
    assert answer
    assert answer[:40] in shown


@contextlib.contextmanager
def open_webui(program: Path, folder: Path, server: Server) -> Iterator[httpx.Client]:
    """Open WebUI with this server as its only backend. Yields a client that is logged in."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = {
        "DATA_DIR": str(folder / "data"), "HOME": str(folder), "WEBUI_AUTH": "False", "WEBUI_SECRET_KEY": "any",
        "OFFLINE_MODE": "True", "BYPASS_EMBEDDING_AND_RETRIEVAL": "True", "ENABLE_OLLAMA_API": "False",
        "OPENAI_API_BASE_URL": f"{server.url}/v1", "OPENAI_API_KEY": DIALECTS_KEY,
    }  # fmt: skip
    with (folder / "said").open("wb") as said:
        process = subprocess.Popen(
            [str(program), "serve", "--host", "127.0.0.1", "--port", str(port)], cwd=folder,
            env={**os.environ, **settings}, stdin=subprocess.DEVNULL, stdout=said, stderr=said,
        )  # fmt: skip
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=START_S) as client:
            deadline = time.monotonic() + START_S
            while True:
                with contextlib.suppress(httpx.TransportError):
                    if client.get("/health").status_code == 200:
                        break
                assert process.poll() is None, (folder / "said").read_text()
                assert time.monotonic() < deadline, (folder / "said").read_text()
                time.sleep(0.5)
            token = client.post("/api/v1/auths/signin", json={"email": "", "password": ""}).json()["token"]
            client.headers["Authorization"] = f"Bearer {token}"
            yield client
    finally:
        process.terminate()
        process.wait()


@pytest.mark.long
@FOR_PYTHON
def test_open_webui_lists_the_model_and_streams_its_answer(dialects: Server, tmp_path: Path) -> None:
    programs = environment_of(tmp_path, "open-webui")
    served = dialects.http().get("/v1/models").json()["data"][0]["id"]
    with open_webui(programs / "open-webui", tmp_path, dialects) as client:
        assert [model["id"] for model in client.get("/api/models").json()["data"]] == [served]
        question = [{"role": "user", "content": QUESTION}]
        answer = ""
        asked = {"model": served, "messages": question, "stream": True, "max_tokens": 20}
        with client.stream("POST", "/api/chat/completions", json=asked) as response:
            assert response.status_code == 200
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    choices = json.loads(line.removeprefix("data: ")).get("choices") or [{}]
                    answer += choices[0].get("delta", {}).get("content") or ""
    assert last(dialects).messages[-1].content == QUESTION
    assert answer.strip() == last(dialects).text.strip() != ""


NPM = pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed")
SAID = "It swims far."


@pytest.fixture
def says(tmp_path: Path) -> Iterator[Server]:
    """A server whose model says the same to every prompt, without thinking, and whose context holds those of agents."""
    template = TALKATIVE.partition("{% if enable_thinking %}")[0]
    model = save_model_that_says(SAID, tmp_path / "says", template=template, context=100_000)
    one = Server(tmp_path / "home", "--target", str(model), "--distill", "off")
    try:
        yield one.wait_until_ready()
    finally:
        one.stop()


def npm_program(folder: Path, package: str, name: str) -> Path:
    """Install the package from npm into a new folder. Returns its program."""
    (folder / "npm").mkdir()
    (folder / "npm" / "package.json").write_text("{}", encoding="utf-8")
    command = [str(shutil.which("npm")), "install", "--no-audit", "--no-fund", package]
    done = subprocess.run(command, cwd=folder / "npm", capture_output=True, text=True, timeout=START_S, check=False)
    assert done.returncode == 0, done.stderr
    installed = folder / "npm" / "node_modules" / package / "package.json"
    print(package, json.loads(installed.read_text(encoding="utf-8"))["version"])
    return folder / "npm" / "node_modules" / ".bin" / name


def two_turns(server: Server, folder: Path, first: list[str], second: list[str], **variables: str) -> None:
    """Ask an agent a question, and then, in the same session, another. Both are answered and recorded, and the second
    prompt's beginning is not computed again."""
    (folder / "project").mkdir()
    for asked, command in ((QUESTION, first), ("And then?", second)):
        done = subprocess.run(
            command, cwd=folder / "project", env={**os.environ, "HOME": str(folder), **variables},
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=START_S, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.strip() == SAID
        answer = last(server)
        assert answer.text == SAID
        assert any(asked in message.content for message in answer.messages)
    assert answer.timings.cached_n > 10 * answer.timings.prompt_n


@pytest.mark.long
@NPM
def test_claude_code_asks_the_server_by_the_settings_of_its_page(says: Server, tmp_path: Path) -> None:
    program = str(npm_program(tmp_path, "@anthropic-ai/claude-code", "claude"))
    exported = shlex.split(written("Claude Code", "sh").replace("http://127.0.0.1:8080", says.url))
    settings = dict(one.split("=", 1) for one in exported if "=" in one)
    settings["DISABLE_AUTOUPDATER"] = "1"
    two_turns(says, tmp_path, [program, "-p", QUESTION], [program, "-p", "--continue", "And then?"], **settings)


@pytest.mark.long
@NPM
def test_codex_asks_the_server_by_the_settings_of_its_page(says: Server, tmp_path: Path) -> None:
    program = str(npm_program(tmp_path, "@openai/codex", "codex"))
    (tmp_path / ".codex").mkdir()
    settings = "check_for_update_on_startup = false\n" + written("Codex", "toml")
    settings = settings.replace("http://127.0.0.1:8080", says.url) + "[analytics]\nenabled = false\n"
    (tmp_path / ".codex" / "config.toml").write_text(settings, encoding="utf-8")
    command = [program, "exec", "--skip-git-repo-check"]
    again = [*command, "resume", "--last", "And then?"]
    two_turns(says, tmp_path, [*command, QUESTION], again, CODEX_HOME=str(tmp_path / ".codex"))
