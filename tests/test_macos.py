"""Nothing needs what only Linux has: by the sources, and by commands that are run without it (``as_on_macos.py``).

Neither is a Mac: what Apple's compiler, libraries, kernel and graphics do is not tested.
"""

from __future__ import annotations

import ast
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import as_on_macos
import httpx
import pytest
from conftest import Command

from adaptive.engines.cpu import kernels
from adaptive.installation import build_advice

ROOT = Path(__file__).resolve().parent.parent
SIMULATED = Path(as_on_macos.__file__).resolve()
# A library of this processor that stands for those of a Mac's, or none, as without a compiler.
BUILT = next((name for name in kernels.X86 if name in kernels.runnable() and kernels.built(name)), None)
KERNELS = [pytest.param("", id="no kernels")] + [pytest.param(BUILT, id="kernels")] * (BUILT is not None)


def start(home: Path, *arguments: str, library: str = "") -> subprocess.Popen[str]:
    """Start ``adaptive`` for a user of macOS, whose state is in the platform's own folder."""
    ours = ("ADAPTIVE_", "XDG_", "OMP_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    environment |= {"HOME": str(home), "PYTHONPATH": str(ROOT), "KERNELS": library, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(SIMULATED), "-m", "cli.main", *arguments]
    return subprocess.Popen(
        command, cwd=home, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip


def unguarded(source: str) -> list[str]:
    """The names of ``as_on_macos.MISSING`` that the source uses without asking whether they are there."""
    missing = {module.__name__: set(names) for module, names in as_on_macos.MISSING.items()}
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            module, name = node.value.id, node.attr
            if name in missing.get(module, ()) and f'hasattr({module}, "{name}")' not in source:
                found.append(f"{module}.{name}")
        elif isinstance(node, ast.ImportFrom) and node.module in missing:
            found += [f"{node.module}.{one.name}" for one in node.names if one.name in missing[node.module]]
    return found


@pytest.mark.thorough
def test_no_source_uses_what_only_linux_has_without_asking() -> None:
    assert unguarded("import os\nos.sched_getaffinity(0)\nfrom mmap import MADV_HUGEPAGE\n") != []
    files = [path for part in ("adaptive", "trainers", "cli", "checkpoints") for path in (ROOT / part).rglob("*.py")]
    assert len(files) > 100
    assert {str(path): found for path in files if (found := unguarded(path.read_text(encoding="utf-8")))} == {}


def test_windows_is_refused_in_one_line(adaptive: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    from adaptive.api import Assistant
    from adaptive.errors import AdaptiveError

    monkeypatch.setattr(sys, "platform", "win32")
    status, out, err = adaptive("chat")
    assert (status, out, len(err.splitlines())) == (2, "", 1)
    assert "WSL" in err
    with pytest.raises(AdaptiveError, match="WSL"):
        Assistant()


def test_a_mac_without_a_compiler_is_told_how_to_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert "`xcode-select --install`" in build_advice()


@pytest.mark.thorough
def test_doctor_finds_nothing_broken_on_a_mac(tmp_path: Path) -> None:
    process = start(tmp_path, "doctor", "--json")
    out, err = process.communicate(timeout=300)
    assert (process.returncode, err) == (0, "")
    found = {one["name"]: one["value"] for one in json.loads(out)["findings"]}
    assert "Darwin arm64" in found["python"]
    assert f"{tmp_path}/Library/Application Support/adaptive" in found["state folder"]
    assert found["device"] == "cpu"


@pytest.mark.thorough
@pytest.mark.parametrize("library", KERNELS)
def test_a_server_answers_trains_and_ends_on_a_mac(library: str, tmp_path: Path) -> None:
    settings = tmp_path / "Library" / "Application Support" / "adaptive" / "adaptive.toml"
    settings.parent.mkdir(parents=True)
    settings.write_text("distill_after = 1\ndistill_idle_seconds = 0\ndraft_length = '4'\n")
    server = start(tmp_path, "serve", "--port", "0", library=library)
    assert server.stderr is not None
    said = ""
    try:
        while not (found := re.search(r"listening on (http://\S+)", said)):
            line = server.stderr.readline()
            assert line, said
            said += line
        with httpx.Client(base_url=found.group(1), timeout=300) as client:
            while client.get("/health").status_code != 200:
                assert server.poll() is None
                time.sleep(0.1)
            asked = {"messages": [{"role": "user", "content": "What is a river?"}], "max_tokens": 20}
            answer = client.post("/v1/chat/completions", json=asked).json()
            assert answer["usage"]["completion_tokens"] > 0
            assert answer["timings"]["draft_n"] > 0
            # One answer is too little to train on, which the training process finds out, not the server.
            until = time.monotonic() + 300
            while "too little" not in ((trainer := client.get("/adaptive/trainer").json())["last_run"] or ""):
                assert time.monotonic() < until, trainer
                assert trainer["crashes"] == 0, trainer
                time.sleep(0.1)
            assert client.get("/adaptive/history").status_code == 200
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0
    finally:
        server.kill()
        said += server.communicate()[1]
    assert "Traceback" not in said
    assert list((tmp_path / "Library" / "Application Support" / "adaptive").glob("*/records.db"))
