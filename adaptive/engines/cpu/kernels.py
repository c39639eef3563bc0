"""Products, attention and draws of our own for a few tokens (``native/``), at the speed of the memory they read.

Decoding reads every weight once for a token, so its time is the memory's; torch's products (oneDNN's) reached half
of the memory's speed where this was measured, these reach all of it, and a pass is one call instead of some
twenty operations a layer (``docs/performance.md``). The threads are those of torch.
"""

from __future__ import annotations

import ctypes
import importlib.machinery
from enum import IntEnum
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from adaptive.tokens import address

NATIVE = Path(__file__).parent / "native"
# By instruction set, the better first: the flags of a processor that runs it, as Linux names them.
LIBRARIES = {
    "avx512bf16": {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16", "avx512_vnni", "fma"},
    "avx512vnni": {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni", "fma"},
    "avx2": {"avx2", "fma"},
}
# The OpenMP libraries that torch may have brought; all know GNU's names.
OPENMP = ("libgomp", "libiomp5", "libomp")

Floats: TypeAlias = npt.NDArray[np.float32]
POINTER, INT, LONG, FLOAT = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float


class First(IntEnum):
    """What a product first does to a row of x; ``First`` of ``native/products.h``."""

    NOTHING = 0
    RMS_NORM = 1
    SILU_GATE = 2
    GELU_GATE = 3


# ``Kind`` of ``native/products.h``.
KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}


class _Product(ctypes.Structure):
    """``Product`` of ``native/products.h``."""

    _fields_ = (
        *((name, POINTER) for name in ("weight", "bias", "scales", "sums")),
        *((name, INT) for name in ("inputs", "outputs", "kind")),
    )


class _Attention(ctypes.Structure):
    """``Attention`` of ``native/attention.h``."""

    _fields_ = (("heads", INT), ("key_heads", INT), ("size", INT), ("turn_stride", INT))


class Cuts(ctypes.Structure):
    """How logits become probabilities (``native/sampling.h``): times ``factor``, then only the ``top_k`` largest (0:
    all), the likeliest with ``top_p`` of the mass (1: all), those ``min_p`` times as likely as the likeliest."""

    _fields_ = (*((name, FLOAT) for name in ("factor", "top_p", "min_p")), ("top_k", INT))


class Library:
    """The functions of one compiled library, by the name of its instruction set. ``panel``: outputs that lie side by
    side in its layout of weights."""

    def __init__(self, path: Path) -> None:
        """Raises OSError where it cannot be loaded."""
        loaded = ctypes.CDLL(str(path))
        self.name = path.name.partition(".")[0]
        self.panel: int = loaded.panel()
        self.attends = loaded.attends
        self.product, self.attend = loaded.product, loaded.attend
        self.product.argtypes = [POINTER, POINTER, POINTER, INT, INT, INT, INT, POINTER, FLOAT]
        self.attend.argtypes = [*[POINTER] * 5, LONG, INT, INT, INT, FLOAT, INT]
        self.decode = loaded.decode
        self.decode.argtypes = [POINTER, POINTER, INT, INT, POINTER, POINTER, LONG, INT, POINTER, INT]
        self.decode.restype = INT
        self.pack = loaded.pack
        self.pack.argtypes = [POINTER, POINTER, LONG, LONG, INT]
        self.draft = loaded.draft
        self.draft.argtypes = [*[POINTER] * 3, INT, POINTER, POINTER, LONG, INT, POINTER, POINTER, INT]
        self.draft.restype = INT
        self.judge, self.verify = loaded.judge, loaded.verify
        self.judge.argtypes = [*[POINTER] * 2, LONG, POINTER]
        self.verify.argtypes = [*[POINTER] * 3, INT, *[POINTER] * 2, LONG, INT, POINTER, INT]
        self.judge.restype = self.verify.restype = INT
        self._probabilities, self._draw = loaded.probabilities, loaded.draw
        self._probabilities.argtypes = [POINTER, POINTER, POINTER, INT, LONG]
        self._draw.argtypes = [POINTER, POINTER, LONG, LONG, ctypes.c_double]
        self.product.restype = self.attend.restype = self.pack.restype = self._probabilities.restype = None
        self._draw.restype = LONG
        openmp = _openmp()
        if openmp is not None:  # else everything runs on one thread
            functions = (openmp.GOMP_parallel, openmp.omp_get_thread_num, openmp.omp_get_num_threads)
            loaded.share_by(*(ctypes.cast(function, POINTER) for function in functions))

    def probabilities(self, logits: torch.Tensor, cuts: Cuts, out: torch.Tensor) -> torch.Tensor:
        """Probabilities, into ``out`` (n, vocab) float32, of logits (n, vocab). A row in which a logit is no number
        has none."""
        logits = _plain(logits)
        self._probabilities(ctypes.addressof(cuts), address(logits), address(out), *logits.shape)
        return out

    def draw(self, probs: Floats, share: float, less: Floats | None = None) -> int | None:
        """The first token at which the mass of probs (vocab,), or of what they have more than ``less`` (at most
        vocab,), exceeds that share of it; None where there is no mass."""
        probs = np.ascontiguousarray(probs, np.float32)
        place, count = None, 0
        if less is not None:
            less = np.ascontiguousarray(less, np.float32)
            place, count = less.ctypes.data, len(less)
        token: int = self._draw(probs.ctypes.data, place, len(probs), count, share)
        return None if token < 0 else token


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """As the kernels read it: float32, row after row. Those made for them are known to be."""
    return tensor if hasattr(tensor, "address") else tensor.float().contiguous()


@cache
def library() -> Library | None:
    """The best of the libraries that were built and that this processor runs, or None."""
    for name in runnable():
        for suffix in importlib.machinery.EXTENSION_SUFFIXES:
            try:
                return Library(NATIVE / (name + suffix))
            except (OSError, AttributeError):  # not built, or for another machine
                continue
    return None


@cache
def runnable() -> tuple[str, ...]:
    """The libraries that this processor would run, the best first."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ()
    flags = next((set(line.split()) for line in lines if line.startswith("flags")), set())
    return tuple(name for name, needed in LIBRARIES.items() if needed <= flags)


def _openmp() -> Any:
    """The OpenMP library that torch runs on, which has to be the same: two would each keep threads that spin."""
    try:
        loaded = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/" in line}
    except OSError:
        return None
    for name in OPENMP:
        found = [path for path in loaded if Path(path).name.startswith(name)]
        # torch's own before one of the system's, which something else may have loaded.
        for path in sorted(found, key=lambda path: ("torch" not in path, path)):
            return ctypes.CDLL(path)
    return None


def multiplies(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether there are products for weights of this dtype on this device."""
    return device.type == "cpu" and dtype in KINDS and library() is not None


def packed(weight: torch.Tensor, library: Library) -> torch.Tensor:
    """Weight (out, in) as (panels, in, panel); bfloat16 as pairs of inputs, (panels, in / 2, panel, 2) seen as int32,
    int8 as groups of four; filled up with zeros."""
    step = 4 // weight.itemsize
    fill = (0, -weight.shape[1] % step, 0, -len(weight) % library.panel)
    words = (nn.functional.pad(weight, fill) if any(fill) else weight).contiguous().view(torch.int32)
    out = torch.empty(len(words) // library.panel, words.shape[1], library.panel, dtype=torch.int32)
    library.pack(words.data_ptr(), out.data_ptr(), *words.shape, torch.get_num_threads())
    return out


class Product:
    """x (rows, in) to x @ weight.T + bias (rows, out), float32 both, for a weight whose dtype ``multiplies``.

    With bfloat16 weights x may be rounded to bfloat16 (as torch's products would have it), sums not. int8 weights
    are multiples of ``scales`` (out,); x is rounded to 127 steps up to the largest of its row.
    """

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, scales: torch.Tensor | None = None
    ) -> None:
        found = library()
        assert found is not None
        self.outputs, inputs = weight.shape
        parts: list[torch.Tensor | None] = [packed(weight, found), None, None, None]
        if bias is not None:
            parts[1] = bias.float().contiguous()
        if scales is not None:
            parts[2], parts[3] = scales.float().contiguous(), weight.sum(1, dtype=torch.int32)
        self._parts = parts
        addresses = [None if part is None else part.data_ptr() for part in parts]
        self._given = _Product(*addresses, inputs, self.outputs, KINDS[weight.dtype])
        self.address = ctypes.addressof(self._given)
        self._run = found.product

    def __call__(
        self,
        x: torch.Tensor,
        out: torch.Tensor | None = None,
        add: bool = False,
        first: First = First.NOTHING,
        norm: torch.Tensor | None = None,
        side: float = 0.0,
    ) -> torch.Tensor:
        """Into ``out``, contiguous, or added to it, of what ``first`` makes of x: a row divided by sqrt(sum(x ** 2) +
        ``side``) and multiplied by ``norm`` (in,) float32; or of a row twice as long silu(first half) * second."""
        x = x.contiguous()
        if out is None:
            out = torch.empty(len(x), self.outputs)
        self._run(
            self.address,
            x.data_ptr(),
            out.data_ptr(),
            len(x),
            add,
            torch.get_num_threads(),
            first,
            None if norm is None else norm.data_ptr(),
            side,
        )
        return out


class Attention:
    """Rotation, cache and attention of new tokens, for heads of these sizes."""

    def __init__(self, heads: int, key_heads: int, size: int, ropes: int) -> None:
        found = library()
        assert found is not None
        self._given = _Attention(heads, key_heads, size, ropes * size)
        self.address = ctypes.addressof(self._given)
        self._run = found.attend

    @staticmethod
    def supports(size: int, dtype: torch.dtype, device: torch.device) -> bool:
        """Whether heads of so many numbers of this dtype on this device are attended."""
        found = library()
        return found is not None and dtype == torch.float32 and device.type == "cpu" and bool(found.attends(size))

    def __call__(
        self,
        mixed: torch.Tensor,
        turns: int,
        cache: int,
        capacity: int,
        start: int,
        window: int,
        scale: float,
        out: torch.Tensor,
    ) -> None:
        """mixed (n, (heads + 2 * key heads) * size): queries, keys and values of tokens ``start`` on, numbers to rotate
        in pairs. Writes the keys and values into ``cache`` (2, key heads, capacity, size), the keys in panels (of which
        the capacity is a multiple), and what the queries see of it, of the last ``window`` tokens or (0) all, into out
        (n, heads * size). ``turns`` (n, ropes, size / 2, 2), cosine and sine, from this layer's on; it and the cache
        are addresses. All float32 and contiguous."""
        self._run(
            self.address,
            mixed.data_ptr(),
            turns,
            cache,
            out.data_ptr(),
            capacity,
            start,
            len(mixed),
            window,
            scale,
            torch.get_num_threads(),
        )


class _Rule(ctypes.Structure):
    """``Rule`` of ``native/verify.h``."""

    _fields_ = (
        *((name, POINTER) for name in ("cuts", "q", "shares", "chosen")),
        *((name, LONG) for name in ("fewer", "extra")),
        *((name, INT) for name in ("count", "used")),
    )


class Rule:
    """The acceptance rule: drafted tokens stand under these ``cuts``, or with none while they are the likeliest.

    After a call, ``given.extra`` is the token that the target adds (-1 where its probabilities are no numbers),
    ``given.used`` says how many random numbers that took, and ``chosen``, where there are cuts, begins with the
    log-probabilities of the tokens that are committed.
    """

    def __init__(self, cuts: Cuts | None) -> None:
        found = library()
        assert found is not None
        self.cuts = cuts
        self.given = _Rule(None if cuts is None else ctypes.addressof(cuts))
        self.address = ctypes.addressof(self.given)
        self.count = 0
        self.chosen: Any = ()
        self._q: torch.Tensor | None = None
        self._run = found.judge

    def prepare(self, count: int, q: torch.Tensor | None, shares: int | None) -> None:
        """For K = ``count`` drafted tokens. ``q`` (K, at most vocab), that they were drawn from, is float32 and
        contiguous, and ``shares`` the address of K + 2 uniform random numbers below 1, float64; neither counts without
        cuts."""
        given = self.given
        self.count = given.count = count
        given.shares = shares
        if q is not None:
            self._q, given.q, given.fewer = q, address(q), q.shape[1]
        if count >= len(self.chosen):
            self.chosen = (ctypes.c_double * max(16, count + 1))()
            given.chosen = ctypes.addressof(self.chosen)

    def __call__(self, logits: torch.Tensor, drafted: list[int]) -> int:
        """How many of the K drafted tokens that it is prepared for stand, given logits (K + 1, vocab). Raises
        IndexError for an id beyond the vocabulary."""
        logits = _plain(logits)
        tokens = (ctypes.c_int64 * len(drafted))(*drafted)
        accepted: int = self._run(self.address, address(logits), logits.shape[1], tokens)
        if accepted < 0:
            raise IndexError("a token is not of the model's vocabulary")
        return accepted
