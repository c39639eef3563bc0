"""A model on the hub stays at one commit from the start of a program to its end, also in the training process."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from conftest import BUNDLED

from adaptive.pipe import LAST, Order, Report

FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")

START = """
import json
from adaptive.hub import resolved
from adaptive.pair import load_pair, pair_identity, sources, trained_draft
from adaptive.settings import load_settings
settings = load_settings({"target": "own/target", "draft": "own/draft"})
identity = pair_identity(settings)
pair = load_pair(settings)
assert pair.identity == pair_identity(settings) == identity
print(json.dumps([str(trained_draft(settings).folder), settings.model_dump(mode="json"), resolved(), identity.id]))
"""


class Hub(ThreadingHTTPServer):
    """The endpoints that ``huggingface_hub`` uses, over the bundled pair. ``commit`` is the commit of ``main``."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.commit = "a" * 40
        self.asked: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    @property
    def revisions(self) -> list[str]:
        """Requests for the commit of a revision."""
        return [path for path in self.asked if "/revision/" in path or (path.count("/") == 4 and "/api/" in path)]


class Answers(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        self.server.asked.append(path)
        parts = path.strip("/").split("/")
        if len(parts) < 4:
            self.send_error(404)
            return
        if parts[0] == "api":
            folder = BUNDLED / parts[3]
            if parts[4:5] == ["tree"]:
                entries = [self.entry(folder / name) for name in FILES if (folder / name).is_file()]
                self.send(json.dumps(entries).encode(), "application/json")
            else:
                siblings = [{"rfilename": name} for name in FILES if (folder / name).is_file()]
                about = {"id": f"own/{parts[3]}", "sha": self.server.commit, "siblings": siblings}
                self.send(json.dumps(about).encode(), "application/json")
            return
        file = BUNDLED / parts[1] / parts[4]
        if file.is_file():
            self.send(file.read_bytes(), "application/octet-stream")
        else:
            self.send_error(404)

    def entry(self, file: Path) -> dict[str, object]:
        data = file.read_bytes()
        return {"type": "file", "path": file.name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}

    def send(self, body: bytes, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", f'"{hashlib.sha1(body).hexdigest()}"')
        self.send_header("X-Repo-Commit", self.server.commit)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.mark.thorough
def test_a_revision_that_moves_changes_no_weights_until_the_next_start(hub: Hub, tmp_path: Path) -> None:
    environment = {
        **os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1", "NO_PROXY": "127.0.0.1", "OMP_NUM_THREADS": "1",
    }  # fmt: skip

    def start() -> tuple[str, dict[str, Any], list[tuple[str, str | None, str]], str]:
        ran = subprocess.run(
            [sys.executable, "-c", START], capture_output=True, text=True, env=environment, check=False
        )
        assert ran.returncode == 0, ran.stderr
        folder, settings, models, name = json.loads(ran.stdout)
        return folder, settings, models, name

    folder, settings, models, name = start()
    assert Path(folder).name == "a" * 40
    assert len(hub.revisions) == 2, hub.revisions  # one for each model
    hub.commit, hub.asked = "b" * 40, []
    order = Order(settings, str(tmp_path / name), paused=False, models=models)
    (tmp_path / name).mkdir()
    command = [sys.executable, "-m", "trainers.worker"]
    worker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    assert worker.stdin is not None
    assert worker.stdout is not None
    worker.stdin.write(order.line())
    worker.stdin.flush()
    said = next(report for report in map(Report.of, worker.stdout) if report.stage in LAST)
    worker.communicate()
    assert said.stage == "refused"  # no records yet, found once the draft is loaded
    assert "hub" not in said.message
    assert hub.asked == []
    assert Path(start()[0]).name == "b" * 40
