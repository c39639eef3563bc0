"""Adapters for the tests of the store: tiny but complete PEFT folders."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from checkpoints.manifest import BaseDraft, TrainedOn
from checkpoints.store import AdapterStore, NewAdapter

BASE = BaseDraft("some/draft", "0123abcd")
NEW = NewAdapter(base=BASE, trained_on=TrainedOn(1, 40, 40, 5000, {"chat": 30, "code": 10}))


def write(folder: Path) -> None:
    save_file({"base_model.model.x.lora_A.weight": np.ones((4, 64), np.float32)}, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')


def published(root: Path, count: int, promote: int = 0) -> AdapterStore:
    """A store of ``count`` adapters, of which the first ``promote`` have been promoted in turn."""
    store = AdapterStore(root)
    parent = None
    for _ in range(count):
        parent = store.publish(write, replace(NEW, parent=parent)).id
    for number in range(1, promote + 1):
        store.promote(f"{number:04d}", "better on held-out records")
    return store


@contextmanager
def folder_in_memory() -> Iterator[Path]:
    """A temporary folder in memory if the system has one, so that flushing takes no time. Its contents survive a kill,
    though not a power cut."""
    memory = Path("/dev/shm")
    usable = memory.is_dir() and os.access(memory, os.W_OK)
    with tempfile.TemporaryDirectory(dir=memory if usable else None) as folder:
        yield Path(folder)
