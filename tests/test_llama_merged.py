"""An adapter is merged into the weights of a GGUF file while the file is in use."""

from __future__ import annotations

import logging
import math
import re
import tempfile
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import BUNDLED, save_random_adapter
from gguf_pair import engine, write_bundled
from small_disks import small_disk

from adaptive.engines.llamacpp import merged as llama_merged
from adaptive.engines.llamacpp.engine import LlamaCppEngine
from adaptive.engines.llamacpp.lora import Low
from adaptive.engines.llamacpp.merged import PASSES, merged
from adaptive.errors import AdaptiveError

TOKENS = [5 + (37 * i) % 900 for i in range(300)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("merged")


@pytest.fixture(scope="module")
def adapters(folder: Path) -> list[Path]:
    return [save_random_adapter(BUNDLED / "draft", folder / f"adapter{seed}", seed) for seed in (0, 1)]


@pytest.fixture
def busy() -> Iterator[None]:
    """Some model runs all the time."""
    PASSES.last = math.inf
    yield
    PASSES.last = -math.inf


def beside(draft: LlamaCppEngine, adapter: Path | None) -> None:
    """Apply the adapter as llama.cpp does, with nothing merged."""
    for _ in draft.swap_adapter(adapter):
        pass
    draft.merging.give_up()
    draft.merging.wait()


def logits(draft: LlamaCppEngine) -> torch.Tensor:
    return draft.sequence().extend(TOKENS, len(TOKENS)).clone()


@pytest.mark.parametrize(
    ("encoding", "same", "apart"),
    [("f32", 0.99, 1e-3), ("f16", 0.98, 3e-3), ("bf16", 0.97, 0.02), ("q8_0", 0.95, 0.06)],
)
def test_merged_weights_predict_as_the_adapter_beside_them(
    folder: Path, adapters: list[Path], encoding: str, same: float, apart: float
) -> None:
    draft = engine(write_bundled("draft", folder, encoding))  # type: ignore[arg-type]
    pristine = logits(draft)
    beside(draft, adapters[0])
    assert draft.running is draft.llama
    expected = logits(draft)
    draft.apply_adapter(adapters[0])
    assert draft.running is not draft.llama
    found = logits(draft)
    assert (found.argmax(-1) == expected.argmax(-1)).float().mean() >= same
    assert (found - expected).abs().mean() < apart
    assert (pristine.argmax(-1) == expected.argmax(-1)).float().mean() < 0.9  # else the adapter proves nothing
    draft.apply_adapter(None)
    assert torch.equal(logits(draft), pristine)


def test_a_sequence_goes_over_to_merged_weights_with_what_it_holds(folder: Path, adapters: list[Path]) -> None:
    draft = engine(write_bundled("draft", folder, "f32"))
    sequence = draft.sequence()
    beside(draft, adapters[0])
    sequence.extend(TOKENS[:200], 0)
    draft.apply_adapter(adapters[0])
    found = sequence.extend(TOKENS[200:], 100).clone()
    assert sequence._context is not None
    assert sequence._context.model is draft.running is not draft.llama
    torch.testing.assert_close(found, logits(draft)[200:], atol=0.02, rtol=0)
    beside(draft, adapters[1])  # back to the file's weights, with another adapter
    sequence.rollback(0)
    torch.testing.assert_close(sequence.extend(TOKENS, 300), logits(draft), atol=0, rtol=0)
    assert sequence._context.model is draft.llama


@pytest.mark.usefixtures("busy")
def test_nothing_is_merged_while_a_model_is_at_work(
    folder: Path, adapters: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "adaptive.engines")
    draft = engine(write_bundled("draft", folder, "f32"))
    began = time.perf_counter()
    for adapter in adapters:  # the second one is applied before the first is merged
        for _ in draft.swap_adapter(adapter):
            pass
    since = time.perf_counter()
    time.sleep(1.0)  # three times the delay before a merge, and many times what merging takes
    assert draft.running is draft.llama
    waited = time.perf_counter() - since
    PASSES.last = -math.inf
    draft.merging.wait()
    at_most = time.perf_counter() - began - waited
    assert draft.running is not draft.llama
    (took,) = re.findall(r"is merged into the weights \((.+) s\)", caplog.text)
    assert float(took) <= at_most + 0.05, "without the time that it waited"  # it is said to a tenth of a second
    found = logits(draft)
    beside(draft, adapters[1])
    torch.testing.assert_close(found, logits(draft), atol=0.01, rtol=0)


@pytest.mark.parametrize("lacking", ["disk", "memory"])
def test_where_it_cannot_be_merged_the_adapter_stays_beside_the_weights(
    lacking: str,
    folder: Path,
    adapters: list[Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "adaptive.engines")
    draft = engine(write_bundled("draft", folder, "f32"))
    beside(draft, adapters[0])
    expected = logits(draft)
    with small_disk(tmp_path / "small", "3m") if lacking == "disk" else nullcontext(tmp_path) as temporary:
        monkeypatch.setattr(tempfile, "tempdir", str(temporary))
        monkeypatch.setattr(llama_merged, "OWN_SHARE", llama_merged.OWN_SHARE if lacking == "disk" else 0.0)
        draft.apply_adapter(adapters[0])
    assert {"disk": "No space left on device", "memory": "no memory to merge it"}[lacking] in caplog.text
    assert draft.running is draft.llama
    assert torch.equal(logits(draft), expected)


def test_few_bits_would_round_an_adapter_away() -> None:
    from gguf import GGMLQuantizationType

    low = Low(torch.ones(1, 32), torch.ones(2, 1))
    with pytest.raises(AdaptiveError, match="is in Q4_0"):
        llama_merged._added(np.zeros(36, np.uint8), GGMLQuantizationType.Q4_0, low, "blk.0")


def test_giving_up_ends_a_merge(folder: Path, adapters: list[Path]) -> None:
    draft = engine(write_bundled("draft", folder, "f32"))
    seen = []

    def proceed() -> None:
        seen.append(1)
        if len(seen) == 3:
            raise llama_merged.GivenUpError

    with pytest.raises(llama_merged.GivenUpError):
        merged(draft.llama, adapters[0], proceed)
    assert len(seen) == 3
