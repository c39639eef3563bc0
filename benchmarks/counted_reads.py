"""Counts the bytes of a checkpoint that loading it reads. Reads are counted where transformers takes tensors out of a
safetensors file; besides these it reads only the header. Used by ``scripts/model_table.py`` and by tests."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any, cast

import torch


class _Slice:
    def __init__(self, whole: Any, name: str, read: Counter[str]) -> None:
        self._whole, self._name, self._read = whole, name, read

    def __getattr__(self, name: str) -> Any:
        return getattr(self._whole, name)

    def __getitem__(self, place: Any) -> torch.Tensor:
        tensor: torch.Tensor = self._whole[place]
        self._read[self._name] += tensor.nbytes
        return tensor


class _File:
    def __init__(self, file: Any, read: Counter[str]) -> None:
        self._file, self._read = file, read

    def __enter__(self) -> _File:
        self._file.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._file.__exit__(*error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def get_tensor(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._file.get_tensor(name)
        self._read[name] += tensor.nbytes
        return tensor

    def get_slice(self, name: str) -> _Slice:
        return _Slice(self._file.get_slice(name), name, self._read)


@contextlib.contextmanager
def counted_reads() -> Iterator[Counter[str]]:
    """Bytes of each tensor that transformers reads within the block. A slice read before the whole tensor is counted
    in addition to it."""
    from transformers import modeling_utils

    read, module = Counter[str](), cast(Any, modeling_utils)
    theirs = module.safe_open
    module.safe_open = lambda *given, **named: _File(theirs(*given, **named), read)
    try:
        yield read
    finally:
        module.safe_open = theirs
