"""The bundled pair as GGUF files, and llama.cpp's own plain decoding, for the tests of that engine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("llama_cpp", reason="the extra llamacpp is not installed")
pytest.importorskip("gguf", reason="the extra llamacpp is not installed")

from conftest import BUNDLED
from transformers import AutoModelForCausalLM, AutoTokenizer

from adaptive.engines.llamacpp.engine import LlamaCppEngine
from adaptive.engines.llamacpp.model import LlamaModel
from adaptive.engines.llamacpp.tokenizer import GgufTokenizer
from adaptive.engines.llamacpp.write import Encoding, write_model


def write_bundled(part: str, folder: Path, encoding: Encoding) -> Path:
    """Write the bundled ``target`` or ``draft`` as a GGUF file."""
    return write(BUNDLED / part, folder / f"{part}-{encoding}.gguf", encoding)


def write(checkpoint: Path, file: Path, encoding: Encoding) -> Path:
    """Write a checkpoint as a GGUF file."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype="auto")
    write_model(model, AutoTokenizer.from_pretrained(checkpoint), file, encoding, file.stem)
    return file


def engine(file: Path, threads: int = 1) -> LlamaCppEngine:
    """Load the file."""
    model = LlamaModel(file)
    return LlamaCppEngine(model, GgufTokenizer(model).end_tokens, threads)


def decode_alone(
    file: Path, prompt: list[int], count: int, adapter: Path | None = None
) -> tuple[list[int], torch.Tensor]:
    """``count`` greedy tokens of llama.cpp's plain decoding, one token a pass, by the binding's own high-level class,
    and the logits (count, vocab) they were chosen from."""
    import llama_cpp

    llama = llama_cpp.Llama(
        str(file),
        n_ctx=2048,
        n_threads=1,
        n_threads_batch=1,
        logits_all=True,
        verbose=False,
        lora_path=str(adapter) if adapter else None,
    )
    tokens: list[int] = []
    rows = []
    llama.eval(prompt)
    for _ in range(count):
        row = torch.from_numpy(llama.scores[llama.n_tokens - 1].copy())
        rows.append(row)
        tokens.append(int(row.argmax()))
        llama.eval(tokens[-1:])
    return tokens, torch.stack(rows)
