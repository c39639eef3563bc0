"""Errors are reported on one line, even if the original exception has no message."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from conftest import BUNDLED

from adaptive.errors import AdaptiveError
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
