"""A PEFT LoRA adapter on a GGUF file: written as a GGUF adapter, and swapped in place.

In: a folder that PEFT wrote. Out: the adapter that the contexts of one model use. llama.cpp keeps the two thin
matrices beside each weight, which works with any quantisation.
"""

from __future__ import annotations

import ctypes
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from adaptive.engines.llamacpp.model import LlamaModel, complaint
from adaptive.errors import AdaptiveError


class LlamaAdapter:
    """The adapter beside one model's weights: none at first, then the last one applied."""

    def __init__(self, llama: LlamaModel) -> None:
        self.llama = llama
        self._pointer: Any = None
        self._old: Any = None  # the previous adapter, until ``forget``

    def use(self, context: Any) -> None:
        """Make ``context`` use the active adapter, or none."""
        library = self.llama.library
        count = 0 if self._pointer is None else 1
        adapters = (library.llama_adapter_lora_p_ctypes * 1)(self._pointer)
        library.llama_set_adapters_lora(context, adapters, count, (ctypes.c_float * 1)(1.0))

    def steps(self, folder: Path | None) -> Iterator[None]:
        """Switch to the adapter in ``folder``, or to none, in steps. The adapter is read and checked before the first
        step. After the last step the caller must run ``use`` for every context, then ``forget``.

        Raises AdaptiveError, with nothing changed, if the adapter does not fit.
        """
        fresh = None if folder is None else self._load(folder)
        try:
            yield
        except BaseException:  # the caller closed the iterator, or was interrupted
            self._free(fresh)
            raise
        self._old, self._pointer = self._pointer, fresh

    def forget(self) -> None:
        """Free the previous adapter."""
        self._free(self._old)
        self._old = None

    def _free(self, pointer: Any) -> None:
        if pointer is not None:
            self.llama.library.llama_adapter_lora_free(pointer)

    def _load(self, folder: Path) -> Any:
        from adaptive.engines.llamacpp.lora import write_adapter

        with tempfile.TemporaryDirectory() as scratch:
            file = Path(scratch) / "adapter.gguf"
            write_adapter(folder, self.llama, file)
            pointer = self.llama.library.llama_adapter_lora_init(self.llama.pointer, str(file).encode())
        if not pointer:
            raise AdaptiveError(f"adapter {folder} cannot be used on {self.llama.path}: {complaint()}")
        return pointer
