"""GGUF files without the extra that runs them: messages, and export, which does not need it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import pytest
from conftest import BUNDLED, save_random_adapter
from safetensors import safe_open
from transformers import AutoConfig, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from adaptive.engines.llamacpp.files import find_gguf
from adaptive.engines.llamacpp.names import Base
from adaptive.engines.load import Source, weight_bytes
from adaptive.errors import AdaptiveError
from adaptive.hub import adopt
from adaptive.installation import install_command
from adaptive.pair import base_of
from cli.export import next_command

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
def test_of_a_model_that_is_written_one_tensor_at_a_time_is_held_encoded(tmp_path: Path) -> None:
    from adaptive.engines.llamacpp.write import write_model

    sizes = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 32, "num_attention_heads": 4}
    model: Any = LlamaForCausalLM(LlamaConfig(vocab_size=4096, tie_word_embeddings=True, **sizes))
    tracemalloc.start()
    try:
        write_model(model, AutoTokenizer.from_pretrained(BUNDLED / "draft"), tmp_path / "a.gguf", "bf16", "a")
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert most < (tmp_path / "a.gguf").stat().st_size / 2
    (norm,) = (one for one in gguf.GGUFReader(tmp_path / "a.gguf").tensors if one.name == "output_norm.weight")
    assert norm.data.tolist() == [1.0] * 256


def test_the_command_that_uses_the_files_can_be_pasted() -> None:
    assert next_command({"target": Path("my models/t.gguf")}, None) == "adaptive chat --target 'my models/t.gguf'"
    draft, both = Source("owner/draft", Path(), "none"), {"target": Path("t.gguf"), "draft": Path("d.gguf")}
    assert next_command(both, draft, "v1").endswith("--draft-checkpoint owner/draft --draft-revision v1")


def test_an_adapter_is_written_whole_or_said_in_one_line(tmp_path: Path) -> None:
    from adaptive.engines.llamacpp.lora import write_adapter

    adapter = save_random_adapter(BUNDLED / "draft", tmp_path / "adapter")
    base = Base.of_config(AutoConfig.from_pretrained(BUNDLED / "draft"))
    write_adapter(adapter, base, tmp_path / "missing" / "a.gguf")
    assert len(gguf.GGUFReader(tmp_path / "missing" / "a.gguf").tensors) > 0
    (tmp_path / "file").touch()
    with pytest.raises(AdaptiveError, match=r"a\.gguf cannot be written \("):
        write_adapter(adapter, base, tmp_path / "file" / "a.gguf")


def test_a_file_in_parts_is_all_of_them(tmp_path: Path) -> None:
    first, second = (tmp_path / f"a[1]-0000{number}-of-00002.gguf" for number in (1, 2))
    first.write_bytes(b"x" * 10)
    second.write_bytes(b"x" * 20)
    source = Source("a", tmp_path, "none", first)
    assert weight_bytes(source) == 30
    (tmp_path / "b.gguf").write_bytes(b"x" * 10)
    assert weight_bytes(Source("b", tmp_path, "none", tmp_path / "b.gguf")) == 10
    before = base_of(source)
    second.write_bytes(b"y" * 20)
    assert base_of(source) != before
    first.write_bytes(b"GGUF")
    second.unlink()
    with pytest.raises(AdaptiveError, match=r"a\[1\]-00002-of-00002\.gguf is not beside it"):
        find_gguf(str(first), None)
    name = "nobody/nothing/a-0000{}-of-00002.gguf"
    adopt([(name.format(1), None, str(first))])
    with pytest.raises(AdaptiveError, match=name.format(2)):
        find_gguf(name.format(1), None)


@pytest.mark.thorough
def test_doctor_shows_what_to_install() -> None:
    said = "".join(without("doctor").stdout.split())  # a table folds long lines
    assert "".join(install_command(extra="llamacpp").split()) in said
