"""The compiled kernels (``native/``): which of them this processor runs, and linear layers and attention on them.

Decoding reads every weight once for a token, so its time is the memory's; torch's GEMMs (oneDNN's) reached half
of the memory's speed where this was measured, these reach all of it, and a pass is one call instead of some
twenty operations a layer (``docs/performance.md``). Its threads are our own (``native/pool.h``).
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
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
from adaptive.errors import first_line
from adaptive.installation import build_advice, install_command

NATIVE = Path(__file__).parent / "native"
# By instruction set, the better first: the flags of a processor that runs it, as Linux names them.
AVX512BF16 = {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16", "avx512_vnni", "fma"}
LIBRARIES = {
    "amx": AVX512BF16 | {"amx_tile", "amx_bf16"},
    "avx512bf16": AVX512BF16,
    "avx512vnni": {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni", "fma"},
    "avx2": {"avx2", "fma"},
}


class Prologue(IntEnum):
    """What a linear layer does to a row of x before it multiplies; ``Prologue`` of ``native/linear.h``."""

    NONE = 0
    RMS_NORM = 1
    SILU_GATE = 2
    GELU_GATE = 3
    SQUARED_RELU = 4
    CLAMPED_GATE = 5


# ``DType`` of ``native/linear.h``.
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}


class UnusableError(Exception):
    """A library that cannot be used. Says why, and what to do."""


class NotBuiltError(UnusableError):
    """There is no such library."""


class Library:
    """One compiled library, by the name of its instruction set. ``panel``: outputs that lie side by side in its layout
    of weights; ``module`` has what ``native/module.h`` declares."""

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


def built(name: str) -> Path | None:
    """The file of a library, if there is one."""
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
    """What to do where the libraries are not those of the sources."""
    return f"torch's operations are used until you run: {install_command(again=True)}"


@cache
def library() -> Library | None:
    """The best of the libraries that were built and that this processor runs, or None."""
    for name in runnable():
        try:
            return Library(name)
        except UnusableError:
            continue
    return None


@cache
def problem() -> str | None:
    """Why ``library`` is None although this processor would run one, and what to do, in a line."""
    if library() is not None or not runnable():
        return None
    reasons: list[UnusableError] = []
    for name in runnable():
        try:
            Library(name)
        except UnusableError as error:
            reasons.append(error)
    reasons.sort(key=lambda error: isinstance(error, NotBuiltError))  # stable: the best library's before the others'
    return str(reasons[0]) if reasons else None


@cache
def runnable() -> tuple[str, ...]:
    """The libraries that this processor would run, the best first."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ()
    flags = next((set(line.split()) for line in lines if line.startswith("flags")), set())
    return tuple(name for name, needed in LIBRARIES.items() if needed <= flags)


def multiplies(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether there are kernels for weights of this dtype on this device."""
    return device.type == "cpu" and dtype in DTYPES and library() is not None


def packed(weight: torch.Tensor, library: Library) -> torch.Tensor:
    """Weight (out, in) as (panels, in, panel); bfloat16 as pairs of inputs, (panels, in / 2, panel, 2) seen as int32,
    int8 as groups of four; filled up with zeros."""
    step = library.module.filled_to(weight.itemsize)
    fill = (0, -weight.shape[1] % step, 0, -len(weight) % library.panel)
    words = (nn.functional.pad(weight, fill) if any(fill) else weight).contiguous().view(torch.int32)
    out = PAGES.words(len(words) // library.panel, words.shape[1], library.panel)
    library.module.pack(words.data_ptr(), out.data_ptr(), *words.shape, torch.get_num_threads())
    return out


def native_tree(tree: TokenTree) -> Any:
    """A tree as the kernels take it."""
    found = library()
    assert found is not None
    return found.module.Tree(list(tree.parents))


class NativeLinear:
    """x (rows, in) to (x @ weight.T + bias) * factor (rows, out), float32 both; the weight's dtype ``multiplies``.

    With bfloat16 weights x may be rounded to bfloat16 (as torch's GEMMs would have it), sums not. int8 weights
    are multiples of ``scales`` (out,); x is rounded to 127 steps up to the largest of its row. ``parts`` are the packed
    weight, bias, scales and sums of an output's int8 weights, None for what it has not. ``native`` is the same for the
    kernels, and stands as long as this does.
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
        """The same of a weight (out, in) that was packed before: its ``parts`` lie at these addresses, 0 for none, in
        memory of the caller's."""
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
        """Into ``out``, contiguous, or added to it, of what ``prologue`` makes of x: a row divided by
        sqrt(sum(x ** 2) + ``eps``) and multiplied by ``norm`` (in,) float32; or of a row twice as long
        silu(first half) * second. ``norm`` is also what else a gate has to be told."""
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
    """How a layer attends to new tokens: ``Heads`` and ``Layer`` of the plan say what the parameters mean. A token's
    rotations are ``stride`` numbers, among which those of this layer's keys and queries begin at ``key_rope`` and
    ``query_rope``; 0 is no ``window`` and no ``softcap``. ``native`` as of a ``NativeLinear``."""

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
        window: int = 0,
        scale: float,
        softcap: float = 0.0,
        query_weight: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        found = library()
        assert found is not None
        self._read = query_weight, sinks  # by their addresses
        places = (0 if part is None else part.data_ptr() for part in self._read)
        self.native = found.module.Attention(
            queries, keys, size, gated, reused, stride, key_rope, query_rope, window, scale, softcap, *places
        )

    @staticmethod
    def supports(size: int, dtype: torch.dtype, device: torch.device) -> bool:
        """Whether heads of so many numbers of this dtype on this device are attended."""
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
        """qkv (n, numbers): queries, keys and values of tokens ``start`` on (and gates), numbers to rotate in pairs.
        Writes the keys and values into ``cache`` (2, keys, capacity, size), the keys in panels (of which the capacity
        is a multiple), and what the queries see of it into out (n, queries * size). ``cos_sin`` (n, stride) and the
        cache are addresses. ``tree`` is the module's, where the tokens are its last n nodes. All float32 and
        contiguous."""
        threads = torch.get_num_threads()
        self.native(qkv.data_ptr(), cos_sin, cache, out.data_ptr(), capacity, start, len(qkv), tree, threads)
