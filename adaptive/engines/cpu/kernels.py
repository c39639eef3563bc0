"""The compiled kernels (``native/``): which of them this processor runs, and linear layers and attention on them.

Decoding reads every weight once for a token, so memory speed limits it. Torch's GEMMs (oneDNN's) reached half of the
memory's speed where this was measured; these kernels reach all of it, and a pass is one call instead of some twenty
operations a layer (``docs/performance.md``). The kernels have their own threads (``native/pool.h``).
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import platform
import sys
from collections.abc import Sequence
from enum import IntEnum
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from adaptive.compiled import fingerprint
from adaptive.engines.cpu.memory import PAGES
from adaptive.engines.tree import TokenTree
from adaptive.errors import AdaptiveError, first_line
from adaptive.installation import build_advice, install_command

NATIVE = Path(__file__).parent / "native"
# By instruction set, best first: the processor flags that it needs, as Linux names them.
AVX512BF16 = {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16", "avx512_vnni", "fma"}
X86 = {
    "amx": AVX512BF16 | {"amx_tile", "amx_bf16"},
    "avx512bf16": AVX512BF16,
    "avx512vnni": {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni", "fma"},
    "avx2": {"avx2", "fma"},
}
ARM = {"neondot": {"asimd", "asimddp"}, "neon": {"asimd"}}
LIBRARIES = ARM if platform.machine() in ("aarch64", "arm64") else X86


class Prologue(IntEnum):
    """The operation of a linear layer on a row of x before the product; ``Prologue`` of ``native/linear.h``."""

    NONE = 0
    RMS_NORM = 1
    SILU_GATE = 2
    GELU_GATE = 3
    SQUARED_RELU = 4
    CLAMPED_GATE = 5


# ``DType`` of ``native/linear.h``.
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}


class UnusableError(Exception):
    """A library cannot be used. The message gives the reason and the remedy."""


class NotBuiltError(UnusableError):
    """The library does not exist."""


class Library:
    """One compiled library, named after its instruction set. ``panel``: outputs side by side in its layout of weights.
    ``module``: the Python module that ``native/module.h`` declares."""

    def __init__(self, name: str) -> None:
        """Raises UnusableError."""
        file = built(name)
        if file is None:
            raise NotBuiltError(
                "this installation was built without a C++ compiler, and decoding on this processor is more than twice "
                f"as fast with what is compiled then; {build_advice()}"
            )
        try:
            module: Any = _loaded(name, file)
        except ImportError as error:
            raise UnusableError(f"the compiled kernels cannot be loaded ({first_line(error)}); {rebuild()}") from error
        expected = fingerprint(NATIVE)
        if expected not in (None, getattr(module, "sources", "")):
            raise UnusableError(f"the compiled kernels are those of another version of this program; {rebuild()}")
        if not module.usable:
            raise UnusableError(f"the system does not let this program use the processor's {name} instructions")
        self.name, self.module = name, module
        self.panel: int = module.panel
        self.chunk: int = module.chunk


def built(name: str) -> Path | None:
    """The file of a library, or None."""
    files = (NATIVE / (name + suffix) for suffix in importlib.machinery.EXTENSION_SUFFIXES)
    return next((file for file in files if file.is_file()), None)


@cache  # a module's types can be registered once
def _loaded(name: str, file: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"adaptive.engines.cpu.native.{name}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rebuild() -> str:
    """The advice to rebuild, for libraries that do not match the sources."""
    return f"torch's operations are used until you run: {install_command(again=True)}"


@cache
def library() -> Library | None:
    """The best usable library for this processor, or None."""
    for name in runnable():
        try:
            return Library(name)
        except UnusableError:
            continue
    return None


@cache
def problem() -> str | None:
    """Why ``library`` is None although this processor could run one, and the remedy, in one line; None if neither."""
    if library() is not None or not runnable():
        return None
    reasons: list[UnusableError] = []
    for name in runnable():
        try:
            Library(name)
        except UnusableError as error:
            reasons.append(error)
    reasons.sort(key=lambda error: isinstance(error, NotBuiltError))  # stable: keeps the best library's first
    return str(reasons[0]) if reasons else None


@cache
def runnable() -> tuple[str, ...]:
    """The names of the libraries that this processor could run, best first."""
    if sys.platform == "darwin" and LIBRARIES is ARM:
        return tuple(ARM)  # all of Apple's ARM processors have both
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ()
    flags = next((set(line.split()) for line in lines if line.startswith(("flags", "Features"))), set())
    return tuple(name for name, needed in LIBRARIES.items() if needed <= flags)


def between_passes(error: BaseException) -> bool:
    """Whether a native call that raised ``error`` has certainly ended between two passes. After some layers of a pass
    memory may run out, or the weights of a streamed layer cannot be read (an AdaptiveError)."""
    return not isinstance(error, (MemoryError, AdaptiveError))


def multiplies(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether there are kernels for weights of this dtype on this device."""
    return device.type == "cpu" and dtype in DTYPES and library() is not None


def packed(weight: torch.Tensor, library: Library) -> torch.Tensor:
    """A weight (out, in) in the kernels' order, padded with zeros: (panels, words, panel), int32. A word is one float32
    input, a pair of bfloat16 inputs or four int8 inputs of an output."""
    step = library.module.filled_to(weight.itemsize)
    fill = (0, -weight.shape[1] % step, 0, -len(weight) % library.panel)
    words = (nn.functional.pad(weight, fill) if any(fill) else weight).contiguous().view(torch.int32)
    out = PAGES.words(len(words) // library.panel, words.shape[1], library.panel)
    library.module.pack(words.data_ptr(), out.data_ptr(), *words.shape, torch.get_num_threads())
    return out


def native_tree(tree: TokenTree) -> Any:
    """A tree for the kernels."""
    found = library()
    assert found is not None
    return found.module.Tree(list(tree.parents))


class NativeLinear:
    """Maps x (rows, in) to (x @ weight.T + bias) * factor (rows, out), both float32; the weight's dtype ``multiplies``.

    With bfloat16 weights x may be rounded to bfloat16 (as for torch's GEMMs), but sums are not. int8 weights are
    multiples of ``scales`` (out,); x is then rounded to 127 steps up to the largest magnitude of its row. ``parts`` are
    the packed weight, the bias, the scales and the sums of each output's int8 weights, None for a missing one.
    ``native`` is the same layer for the kernels, valid as long as this object lives.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        scales: torch.Tensor | None = None,
        factor: float = 1.0,
    ) -> None:
        found = library()
        assert found is not None
        parts: list[torch.Tensor | None] = [packed(weight, found), None, None, None]
        if bias is not None:
            parts[1] = bias.float().contiguous()
        if scales is not None:
            parts[2], parts[3] = scales.float().contiguous(), weight.sum(1, dtype=torch.int32)
        self.parts = parts
        addresses = [0 if part is None else part.data_ptr() for part in parts]
        self._lies(addresses, tuple(weight.shape), weight.dtype, factor)

    @classmethod
    def at(
        cls, addresses: Sequence[int], shape: tuple[int, int], dtype: torch.dtype, factor: float = 1.0
    ) -> NativeLinear:
        """The layer of a weight (out, in) that was packed before: its ``parts`` lie at these addresses (0 for none) in
        the caller's memory."""
        self = cls.__new__(cls)
        self.parts = []
        self._lies(addresses, shape, dtype, factor)
        return self

    def _lies(self, addresses: Sequence[int], shape: tuple[int, ...], dtype: torch.dtype, factor: float) -> None:
        found = library()
        assert found is not None
        self.outputs, inputs = shape
        self.native = found.module.Linear(*addresses, inputs, self.outputs, DTYPES[dtype], factor)

    def __call__(
        self,
        x: torch.Tensor,
        out: torch.Tensor | None = None,
        add: bool = False,
        prologue: Prologue = Prologue.NONE,
        norm: torch.Tensor | None = None,
        eps: float = 0.0,
    ) -> torch.Tensor:
        """Compute the layer of ``prologue(x)`` into ``out``, contiguous, or ``add`` it to ``out``. RMS_NORM divides a
        row by sqrt(sum(x ** 2) + ``eps``) and multiplies it by ``norm`` (in,) float32. A gate takes rows twice as long
        and computes, for example, silu(first half) * second. For CLAMPED_GATE ``norm`` has its parameters."""
        x = x.contiguous()
        if out is None:
            out = torch.empty(len(x), self.outputs)
        self.native(
            x.data_ptr(),
            out.data_ptr(),
            len(x),
            add,
            torch.get_num_threads(),
            prologue,
            0 if norm is None else norm.data_ptr(),
            eps,
        )
        return out


class Attention:
    """The attention of a layer over new tokens; parameters as in ``Heads`` and ``Layer`` of the plan. A token's
    rotations are ``stride`` numbers: those for this layer's keys begin at ``key_rope``, those for its queries at
    ``query_rope``. 0 means no ``window``, or no ``softcap``. ``native`` as in ``NativeLinear``."""

    def __init__(
        self,
        queries: int,
        keys: int,
        size: int,
        gated: bool = False,
        reused: bool = False,
        *,
        stride: int,
        key_rope: int = 0,
        query_rope: int = 0,
        half: bool = False,
        window: int = 0,
        scale: float,
        softcap: float = 0.0,
        query_weight: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        found = library()
        assert found is not None
        self._read = query_weight, sinks  # kept: the kernels read them by address
        places = (0 if part is None else part.data_ptr() for part in self._read)
        self.native = found.module.Attention(
            queries, keys, size, half, gated, reused, stride, key_rope, query_rope, window, scale, softcap, *places
        )

    @staticmethod
    def supports(size: int, dtype: torch.dtype, device: torch.device) -> bool:
        """Whether there is native attention for heads of ``size`` numbers of this dtype on this device."""
        found = library()
        if found is None or dtype != torch.float32 or device.type != "cpu":
            return False
        return bool(found.module.attends(size))

    def __call__(
        self,
        qkv: torch.Tensor,
        cos_sin: int,
        cache: int,
        capacity: int,
        start: int,
        out: torch.Tensor,
        tree: Any = None,
    ) -> None:
        """Write the tokens' keys and values into ``cache`` and the attention of their queries into ``out``.

        qkv (n, numbers) has the queries, keys and values (and gates) of tokens ``start`` on; numbers to rotate lie in
        pairs. ``cache`` is (2, keys, capacity, size), its keys in panels (the capacity is a multiple of a panel);
        ``out`` is (n, queries * size). ``cos_sin`` (n, stride) and the cache are addresses. With a ``tree``, made by
        ``native_tree``, the tokens are its last n nodes. All numbers are contiguous, and float32 but for the cache's,
        which are bfloat16 with ``half``."""
        threads = torch.get_num_threads()
        self.native(qkv.data_ptr(), cos_sin, cache, out.data_ptr(), capacity, start, len(qkv), tree, threads)
