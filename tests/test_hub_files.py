"""From a checkpoint on the hub only the files that transformers needs are fetched, and each weight once."""

from __future__ import annotations

import pytest
from huggingface_hub.utils import filter_repo_objects

from adaptive.hub import FETCHED, NOT_FETCHED

COMMON = [
    "config.json", "generation_config.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors",
    "model.safetensors.index.json", "special_tokens_map.json", "tokenizer.json", "tokenizer_config.json",
]  # fmt: skip
NEEDED = {
    "mistral": [*COMMON, "tokenizer.model"],
    "qwen": [*COMMON, "merges.txt", "vocab.json"],
    "gpt-oss": [*COMMON, "chat_template.jinja"],
    "with code": [*COMMON, "configuration_own.py", "modeling_own.py", "own.tiktoken"],
}
AGAIN = {
    "mistral": ["consolidated.safetensors", "consolidated.safetensors.index.json", "params.json.bin"],
    "qwen": ["pytorch_model.bin", "model.gguf"],
    "gpt-oss": ["original/model.safetensors", "original/dtypes.json", "metal/model.bin"],
    "with code": ["onnx/model.onnx", "onnx/model_q4.onnx", "onnx/config.json", "openvino/openvino_model.bin", "a.png"],
}


@pytest.mark.parametrize("name", NEEDED)
def test_each_weight_is_fetched_once_and_all_that_is_needed_is(name: str) -> None:
    held = [*NEEDED[name], *AGAIN[name]]
    fetched = list(filter_repo_objects(held, allow_patterns=FETCHED, ignore_patterns=NOT_FETCHED))
    assert fetched == NEEDED[name]
