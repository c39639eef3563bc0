"""The commands on a pair of GGUF files: serve, distill, bench, calibrate, doctor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import BUNDLED
from gguf_pair import write_bundled
from service_server import Server
from typer.testing import CliRunner

from cli.main import app

DRAFT = str(BUNDLED / "draft")


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    folder = tmp_path_factory.mktemp("gguf")
    target, draft = (str(write_bundled(part, folder, "bf16")) for part in ("target", "draft"))
    return ("--target", target, "--draft", draft, "--draft-checkpoint", DRAFT)


def run(*arguments: str) -> Any:
    done = CliRunner().invoke(app, list(arguments))
    assert done.exit_code == 0, f"{done.output}\n{done.exception!r}"
    return done


def test_a_server_answers_from_gguf_files(names: tuple[str, ...], own_home: Path) -> None:
    server = Server(own_home, *names, "--temperature", "0").wait_until_ready()
    try:
        with server.http() as http:
            body = {"messages": [{"role": "user", "content": "What is a dog?"}], "max_tokens": 16}
            answer = http.post("/v1/chat/completions", json=body).json()
            ids = http.post("/tokenize", json={"content": "What is a dog?"}).json()["tokens"]
            text = http.post("/detokenize", json={"tokens": ids}).json()["content"]
        assert answer["usage"]["completion_tokens"] > 0
        assert answer["timings"]["draft_n"] > 0
        assert text == "What is a dog?"
    finally:
        assert server.stop() == 0


@pytest.mark.thorough
def test_a_draft_file_learns_through_its_checkpoint(names: tuple[str, ...], tmp_path: Path) -> None:
    lines = (BUNDLED / "prompts" / "tools.jsonl").read_text(encoding="utf-8").splitlines()[:48]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines), encoding="utf-8")
    asked = ("--prompts", str(tmp_path / "prompts.jsonl"), "--temperature", "0", "--max-new-tokens", "40")
    learned = ("--epochs", "2", "--rank", "8", "--force", "--seed", "1")
    outcome = json.loads(run("distill", *asked, *learned, *names, "--json").stdout)
    assert outcome["status"] == "promoted"
    before, after = (outcome["recent"][f"acceptance_{when}"]["mean"] for when in ("before", "after"))
    assert after > before
    prompt = json.loads(lines[0])["prompt"]
    answer = json.loads(run("generate", prompt, "--max-new-tokens", "8", *names, "--json").stdout)
    assert answer["adapter"] == outcome["adapter"]
    assert run("history", *names[:4], "--json").stdout
    raced = run(
        "bench", "--count", "1", "--tokens", "12", "--lengths", "2", *names, "--temperature", "0", "--json",
        "--other-target", str(BUNDLED / "target"), "--other-draft", DRAFT,
    )  # fmt: skip
    assert "transformers' own generation is left out" in " ".join(raced.stderr.split())
    rows = json.loads(raced.stdout)
    assert {row["contender"] for row in rows["rows"]} >= {"ours, fixed 2", "transformers, fixed 2"}
    assert "times as fast here as" in rows["advice"]


@pytest.mark.thorough
def test_calibration_compares_two_engines(names: tuple[str, ...]) -> None:
    report = json.loads(
        run("calibrate", "--busy", "--answers", "2", *names[:4], "--json", "--other-target", str(BUNDLED / "target"),
            "--other-draft", DRAFT).stdout
    )  # fmt: skip
    assert report["tokens_per_second"][0] > 0
    assert report["other"]["engine"] == "transformers"
    assert report["other"]["tokens_per_second"][0] > 0
    assert "use --target" in report["other"]["advice"]


def test_doctor_knows_gguf_files(names: tuple[str, ...], tmp_path: Path) -> None:
    found = json.loads(run("doctor", *names, "--json").stdout)["findings"]
    used = {finding["name"]: finding for finding in found if finding["group"] == "used"}
    assert "by llama.cpp" in used["target"]["value"]
    assert used["pair"]["status"] == "ok"
    (tmp_path / "broken.gguf").write_bytes(b"GGUF\x03")
    broken = CliRunner().invoke(app, ["doctor", "--target", str(tmp_path / "broken.gguf"), "--json"])
    assert broken.exit_code == 1
    assert any(f["name"] == "target" and f["status"] == "broken" for f in json.loads(broken.stdout)["findings"])
