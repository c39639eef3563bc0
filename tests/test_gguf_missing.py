"""GGUF files without the extra that runs them: messages, and export, which does not need it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import gguf
import pytest
from conftest import BUNDLED
from safetensors import safe_open

from adaptive.installation import install_command

# With None in sys.modules, importing a module fails.
WITHOUT = "import sys; sys.modules['llama_cpp'] = None; import cli.main; cli.main.run()"


def without(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run ``adaptive`` as if the extra were not installed."""
    root = str(Path(__file__).resolve().parent.parent)
    return subprocess.run(
        [sys.executable, "-c", WITHOUT, *arguments],
        env={**os.environ, "PYTHONPATH": root},
        capture_output=True,
        check=False,
        text=True,
    )


def test_a_missing_extra_is_one_line_that_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF\x03\x00\x00\x00")
    done = without("generate", "Hello", "--target", str(tmp_path / "model.gguf"))
    assert done.returncode == 2
    (line,) = done.stderr.strip().splitlines()
    assert install_command(extra="llamacpp") in line


@pytest.mark.thorough
def test_a_checkpoint_is_written_as_gguf_without_the_binding(tmp_path: Path) -> None:
    done = without("export", str(tmp_path), "--json")
    assert done.returncode == 0, done.stderr
    for role, file in json.loads(done.stdout).items():
        reader = gguf.GGUFReader(file)
        field = reader.get_field("tokenizer.ggml.pre")
        assert field is not None
        assert field.contents() == "smollm"  # splits digits, then GPT-2's words
        weights = safe_open(BUNDLED / role / "model.safetensors", "np").keys()
        assert len(reader.tensors) == len(list(weights))


@pytest.mark.thorough
def test_doctor_shows_what_to_install() -> None:
    said = "".join(without("doctor").stdout.split())  # a table folds long lines
    assert "".join(install_command(extra="llamacpp").split()) in said
