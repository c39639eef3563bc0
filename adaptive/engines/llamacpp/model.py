"""Loads llama.cpp's library through ``llama-cpp-python``, and opens GGUF files with it.

In: a path. Out: a ``LlamaModel``, which owns the C object and gives access to the file's metadata. Only the modules of
this package call the library.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import weakref
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from adaptive.errors import AdaptiveError, first_line
from adaptive.installation import install_command, requirement
from adaptive.machine import memory

MAGIC = b"GGUF"
# ggml's log level of errors, whose lines give the reason of a failure.
ERROR = 4
# The most bytes of a metadata value that are read. Chat templates reach some 10 kB.
LONGEST_VALUE = 1 << 20
# Weights up to this share of the free memory are read into our own memory, which makes passes over two to five tokens
# 5 to 10% faster than a mapped file does (docs/notes/2026-11-kernels.md). A larger model stays mapped, so that the
# system can drop its pages and read them again.
OWN_SHARE = 0.5
# Linux's madvise number for huge pages, and the least bytes of a memory range for which they are requested.
HUGE_PAGES, LEAST_HUGE = 14, 1 << 23


def install_line(again: bool = False) -> str:
    """The command that installs the engine, or with ``again`` reinstalls one that does not work."""
    binding = requirement("llama-cpp-python")
    command = install_command(binding, again=True) if again else install_command(extra="llamacpp")
    return f"{command} (it is compiled for this machine, which takes some minutes)"


_complaints: list[str] = []
_listeners: list[Any] = []  # references, because the library keeps only pointers


@cache
def binding() -> Any:
    """The module ``llama_cpp`` with its backend started and without log output.

    Raises AdaptiveError if it is not installed or its library cannot be loaded.
    """
    try:
        import llama_cpp
    except ModuleNotFoundError as error:
        if error.name != "llama_cpp":
            raise AdaptiveError(f"llama-cpp-python lacks {error.name}; {install_line()}") from error
        raise AdaptiveError(
            f"a GGUF file needs the llama.cpp engine, which is not installed; {install_line()}"
        ) from None
    except Exception as error:  # a library built for another machine fails in many ways
        raise AdaptiveError(
            f"llama-cpp-python does not load here ({first_line(error)}); install it anew: {install_line(again=True)}"
        ) from error

    @llama_cpp.llama_log_callback
    def listen(level: int, text: bytes, data: object) -> None:
        if level == ERROR:
            _complaints.append(text.decode("utf-8", "replace").strip())

    llama_cpp.llama_log_set(listen, None)
    _listeners.append(listen)
    llama_cpp.llama_backend_init()
    return llama_cpp


def complaint() -> str:
    """The library's last error message, for the reason of a failure. Clears all messages."""
    said = next((line for line in reversed(_complaints) if "failed to load model" not in line), "")
    reason = said.rpartition(": ")[2] if said else "the library gives no reason"
    _complaints.clear()
    return reason


def is_gguf(path: Path) -> bool:
    """Whether ``path`` is a readable file that begins with GGUF's magic bytes."""
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def parts_of(path: Path) -> list[Path]:
    """The parts of a GGUF file, of which ``path`` is the first one; mostly that is all of it."""
    found = re.fullmatch(r"(.*)-00001-of-(\d{5})\.gguf", path.name)
    if found is None:
        return [path]
    return [path.with_name(f"{found[1]}-{number:05d}-of-{found[2]}.gguf") for number in range(1, int(found[2]) + 1)]


def gguf_bytes(path: Path) -> int:
    """Bytes of a GGUF file, all its parts included."""
    return sum(part.stat().st_size for part in parts_of(path))


def rewrite(path: Path, file: Path, change: Callable[[str, int, np.ndarray], np.ndarray | None]) -> None:
    """Copy the GGUF file ``path`` to ``file`` with other weights in the same places.

    ``change`` maps a tensor's name, its type (ggml's number) and its bytes to new bytes of the same length, or to None
    to keep them. Raises AdaptiveError if the library cannot locate the tensors, OSError if the copy cannot be written.
    """
    ggml = _Ggml(binding())
    header = ggml.open(path)
    if not header:
        raise AdaptiveError(f"{path} cannot be read: {complaint()}")
    try:
        stored = np.memmap(path, np.uint8, "r", offset=ggml.data_offset(header))
        shutil.copyfile(path, file)
        with file.open("r+b") as out:
            for number in range(ggml.count(header)):
                begin, size = ggml.tensor_offset(header, number), ggml.tensor_size(header, number)
                name, kind = ggml.tensor_name(header, number).decode(), ggml.tensor_type(header, number)
                fresh = change(name, kind, stored[begin : begin + size])
                if fresh is not None:
                    out.seek(ggml.data_offset(header) + begin)
                    out.write(np.ascontiguousarray(fresh).data)
    finally:
        ggml.free(header)


class _Header(ctypes.Structure):
    """ggml's struct ``gguf_init_params``."""

    _fields_ = (("no_alloc", ctypes.c_bool), ("context", ctypes.c_void_p))


class _Ggml:
    """The functions of ggml, the library under llama.cpp, that read a file's header."""

    def __init__(self, library: Any) -> None:
        """Raises AdaptiveError if the library does not export one of them."""
        pointer, number, size, text = ctypes.c_void_p, ctypes.c_int64, ctypes.c_size_t, ctypes.c_char_p

        def function(name: str, result: Any, *arguments: Any) -> Any:
            try:
                found = library.llama_cpp._lib[name]
            except AttributeError as error:
                raise AdaptiveError(f"this llama.cpp has no {name} to be called") from error
            found.restype, found.argtypes = result, arguments
            return found

        init = function("gguf_init_from_file", pointer, text, _Header)
        self.open: Callable[[Path], int | None] = lambda path: init(str(path).encode(), _Header(True, None))
        self.free = function("gguf_free", None, pointer)
        self.data_offset = function("gguf_get_data_offset", size, pointer)
        self.count = function("gguf_get_n_tensors", number, pointer)
        self.tensor_name = function("gguf_get_tensor_name", text, pointer, number)
        self.tensor_offset = function("gguf_get_tensor_offset", size, pointer, number)
        self.tensor_type = function("gguf_get_tensor_type", ctypes.c_int, pointer, number)
        self.tensor_size = function("gguf_get_tensor_size", size, pointer, number)


def private_memory() -> set[tuple[int, int]]:
    """Begin and end address of each private, writable, anonymous memory range of this process; empty if the system is
    not Linux."""
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return set()
    found = set()
    for fields in (line.split() for line in lines):
        if fields[1].startswith("rw-p") and fields[4] == "0":
            begin, _, end = fields[0].partition("-")
            found.add((int(begin, 16), int(end, 16)))
    return found


def want_huge_pages(memory: set[tuple[int, int]]) -> None:
    """Request pages of 2 MB in ``memory``. A pass reads all weights, and looking up 4 kB pages takes 3 to 8% of it."""
    for begin, end in memory:
        if end - begin >= LEAST_HUGE:  # the result is ignored: a system without huge pages refuses
            ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), HUGE_PAGES)


class LlamaModel:
    """A GGUF file opened by llama.cpp. ``vocabulary_only``: the weights are not loaded.

    ``pointer`` and ``vocab`` are pointers of the library, valid as long as this object exists.
    """

    def __init__(
        self,
        path: Path,
        vocabulary_only: bool = False,
        gpu: bool = False,
        on_progress: Callable[[float], None] | None = None,
    ) -> None:
        """``on_progress`` is called with the share of the file that is loaded. Raises AdaptiveError, with the library's
        reason, if llama.cpp cannot load the file."""
        self.library = library = binding()
        self.path = path
        self.gpu = gpu
        if not is_gguf(path):
            raise AdaptiveError(f"{path} is not a GGUF file: it does not begin with the letters GGUF")
        params = library.llama_model_default_params()
        params.vocab_only = vocabulary_only
        # On a processor with AMX the library repacks quantised weights. On a virtual machine, its products with them
        # then end the process with a general protection fault (0.3.36, also with the binding alone).
        params.use_extra_bufts = b"AMX_INT8 = 1" not in library.llama_print_system_info()
        # -1 puts all layers on the accelerator; 0 keeps everything in main memory.
        offloaded = gpu and library.llama_supports_gpu_offload()
        params.n_gpu_layers = -1 if offloaded else 0
        own = not offloaded and gguf_bytes(path) < OWN_SHARE * memory().available
        if own:
            params.load_mode = library.LLAMA_LOAD_MODE_NONE
        before: set[tuple[int, int]] | None = None

        def told(share: float, data: object) -> bool:
            nonlocal before
            if before is not None:  # at the first call the weights' memory is allocated, but not filled yet
                want_huge_pages(private_memory() - before)
                before = None
            if on_progress is not None:
                on_progress(share)
            return True

        callback = library.llama_progress_callback(told)
        params.progress_callback = callback
        _complaints.clear()
        if own:  # as late as possible: memory freed after this and reused for the weights would not count as new
            before = private_memory()
        self.pointer = library.llama_model_load_from_file(str(path).encode(), params)
        if not self.pointer:
            raise AdaptiveError(f"{path} cannot be loaded by llama.cpp: {complaint()}")
        weakref.finalize(self, library.llama_model_free, self.pointer)
        self.vocab = library.llama_model_get_vocab(self.pointer)
        self.vocab_size: int = library.llama_vocab_n_tokens(self.vocab)

    def metadata(self, key: str) -> str | None:
        """The value of a metadata key as text, None if there is none. A leading ``{arch}.`` in ``key`` stands for the
        architecture."""
        if key.startswith("{arch}."):
            key = f"{self.architecture}.{key.removeprefix('{arch}.')}"
        buffer = ctypes.create_string_buffer(LONGEST_VALUE)
        length = self.library.llama_model_meta_val_str(self.pointer, key.encode(), buffer, LONGEST_VALUE)
        return buffer.value.decode("utf-8", "replace") if length >= 0 else None

    def number(self, key: str, default: int) -> int:
        """The value of a metadata key as a whole number, ``default`` if there is none."""
        value = self.metadata(key)
        return int(value) if value is not None and value.isdigit() else default

    @property
    def size(self) -> int:
        """Bytes of all weights."""
        return int(self.library.llama_model_size(self.pointer))

    @property
    def architecture(self) -> str:
        """llama.cpp's name of the model's architecture: ``llama``, ``qwen2``."""
        return self.metadata("general.architecture") or "unknown"

    @property
    def context_length(self) -> int:
        """Tokens of the context with which the model was trained."""
        return int(self.library.llama_model_n_ctx_train(self.pointer))

    @property
    def heads(self) -> tuple[int, int]:
        """The number of query heads and of key heads in a layer."""
        return self.library.llama_model_n_head(self.pointer), self.library.llama_model_n_head_kv(self.pointer)

    @property
    def shape(self) -> dict[str, int]:
        """The sizes that two files of the same model share: width, layers, heads, vocabulary."""
        queries, keys = self.heads
        return {
            "width": self.library.llama_model_n_embd(self.pointer),
            "layers": self.library.llama_model_n_layer(self.pointer),
            "query heads": queries,
            "key heads": keys,
            "tokens": self.vocab_size,
        }
