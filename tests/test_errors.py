"""Errors are reported on one line, even if the original exception has no message."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from conftest import BUNDLED
from safetensors.torch import load_file

from adaptive.errors import AdaptiveError, first_line
from adaptive.pair import load_tokenizer
from adaptive.settings import load_settings

MUTE = """
from transformers import PreTrainedTokenizer


class Mute(PreTrainedTokenizer):
    def __init__(self, **options):
        assert False
"""


def test_an_error_without_a_message_is_reported_by_its_kind(tmp_path: Path) -> None:
    model = tmp_path / "mute"
    shutil.copytree(BUNDLED / "target", model, ignore=shutil.ignore_patterns("tokenizer.json"))
    config = json.loads((model / "tokenizer_config.json").read_text())
    config |= {"tokenizer_class": "Mute", "auto_map": {"AutoTokenizer": ["mute.Mute", None]}}
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    (model / "mute.py").write_text(MUTE)
    with pytest.raises(AdaptiveError, match="cannot be read: AssertionError"):
        load_tokenizer(load_settings({"target": str(model), "trust_remote_code": True}))


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux")
def test_a_file_that_cannot_be_opened_now_is_not_said_to_be_missing(tmp_path: Path) -> None:
    from shortages import short_of_files

    weights = BUNDLED / "draft" / "model.safetensors"
    with short_of_files(0):
        with pytest.raises(FileNotFoundError) as found:  # safetensors says so
            load_file(weights)
        assert "Too many open files" in first_line(found.value)
        assert str(weights) in first_line(found.value)
    assert "temporarily unavailable" in first_line(found.value)
    with pytest.raises(FileNotFoundError) as found:
        load_file(tmp_path / "none.safetensors")
    assert first_line(found.value) == f"No such file or directory: {tmp_path / 'none.safetensors'}"
