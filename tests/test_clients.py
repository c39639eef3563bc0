"""Programs that people use, against a real server, with the settings of docs/clients.md."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import DIALECTS_KEY
from service_server import Server

from adaptive.records.log import Log

# By one process, which starts one server.
pytestmark = pytest.mark.xdist_group("dialects")
PAGE = Path(__file__).resolve().parent.parent / "docs" / "clients.md"


@pytest.mark.skipif(importlib.util.find_spec("llm") is None, reason="llm is not installed")
def test_llm_asks_the_server_by_the_settings_of_its_page(dialects: Server, tmp_path: Path) -> None:
    written = re.search(r"## llm\n.*?```yaml\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert written is not None
    settings = written[1].replace("http://127.0.0.1:8080", dialects.url) + "  api_key_name: adaptive\n"
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
    said = llm("-m", "adaptive", "What swims in the sea?", "--schema", closed, "-o", "max_tokens", "60")
    with Log(dialects.records) as log:
        last = list(log.generations(with_supervision=False))[-1].generation
    assert last.messages[-1].content == "What swims in the sea?"
    assert json.loads(said) == json.loads(last.text)
    assert isinstance(json.loads(said)["warm"], bool)
