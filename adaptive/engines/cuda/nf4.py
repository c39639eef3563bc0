"""Products of a few tokens with a matrix in nf4 (arXiv 2305.14314), as bitsandbytes stores it, in one Triton kernel.

bitsandbytes multiplies several tokens by unpacking the whole matrix into memory and reading it again. That takes nine
times the bytes that a product with one token reads, so verifying drafted tokens would cost more than they save. Here
each program reads its rows of the matrix once and multiplies them with all tokens.

A thread reads eight weights in a word of 32 bits. Looking up sixteen values takes no memory: two bytes of each value
lie in registers, and the instruction ``prmt`` selects four bytes by four indices. These two bytes, once repeated, are a
float32 that is at most 0.3% from the value; bfloat16 rounds as much.
"""

from __future__ import annotations

import os
import struct

import torch
import triton
import triton.language as tl

# The values of nf4.
VALUES = (
    -1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.091050036, 0.0,
    0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0,
)  # fmt: skip
# Weights in a word.
WORD = 8
# Warps of a program: one reads rows alone, several share them. Which is faster depends on the matrix.
WAYS = (1, 4)
# Rows of a program, and fewer for more than ``MANY`` tokens: so many sums fit into a thread's registers. Words that a
# warp reads at once.
ROWS, MANY, ROWS_OF_MANY, LANES = 8, 8, 4, 32


def _repeated(value: float) -> int:
    """The 16 bits that, repeated, are the float32 nearest to ``value``."""
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    near = range(max(0, (bits >> 16) - 2), min(1 << 16, (bits >> 16) + 3))
    return 0 if not value else min(near, key=lambda half: abs(_float(half) - value))


def _float(half: int) -> float:
    found: float = struct.unpack("<f", struct.pack("<I", half << 16 | half))[0]
    return found


def _program() -> str:
    """PTX that unpacks the word $8 into eight float32, $0 to $7. In a byte, the first weight has the high bits."""
    halves = [_repeated(value) for value in VALUES]
    lines = ["{", ".reg .b32 word, low, index, upper, first, second, h, l, zero, choice;"]
    for name, shift in (("h", 8), ("l", 0)):
        for number in range(4):
            four = [halves[4 * number + at] >> shift & 255 for at in range(4)]
            lines += [f".reg .b32 {name}{number};", f"mov.b32 {name}{number}, {int.from_bytes(four, 'little'):#x};"]
    # Each byte of ``upper`` is 255 if the index is 8 or more: ``prmt`` itself selects among eight bytes.
    lines += ["mov.b32 choice, 0xff00;", "mov.b32 zero, 0;", "mov.b32 word, $8;"]
    for half in range(2):
        lines += [f"shr.u32 low, word, {16 * half};", "and.b32 index, low, 0x7777;"]
        lines += ["shr.u32 upper, low, 3;", "and.b32 upper, upper, 0x1111;", "prmt.b32 upper, choice, zero, upper;"]
        for name in "hl":
            lines += [f"prmt.b32 first, {name}0, {name}1, index;", f"prmt.b32 second, {name}2, {name}3, index;"]
            lines += [f"lop3.b32 {name}, first, second, upper, 0xd8;"]
        for at in range(4):
            both = (4 + at) << 4 | at
            lines += [f"prmt.b32 ${4 * half + (at ^ 1)}, l, h, {both << 8 | both:#x};"]
    return "\n".join([*lines, "}"])


_PTX, _OPERANDS = tl.constexpr(_program()), tl.constexpr("=r,=r,=r,=r,=r,=r,=r,=r,r")
_WORDS = tl.constexpr((tl.int32,) * 8)
_INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


def nf4(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    code: torch.Tensor,
    bias: torch.Tensor | None,
    warps: int = WAYS[0],
) -> torch.Tensor:
    """x (n, inputs) @ W.T + bias for a matrix in nf4: two indices into ``code`` (16,), which has ``VALUES``, in each
    byte of ``weight`` (outputs, inputs / 2), the first in the high bits, times ``scales`` (outputs, inputs / 64)."""
    count, inputs = x.shape
    y = torch.empty(count, len(weight), dtype=x.dtype, device=x.device)
    rows, step = ROWS if count <= MANY else ROWS_OF_MANY, LANES * warps
    even = inputs % (WORD * step) == 0 and len(weight) % rows == 0
    _nf4[(triton.cdiv(len(weight), rows),)](
        x.view(torch.int32), weight.view(torch.int32), scales, code, y if bias is None else bias, y, inputs,
        len(weight), bias is not None, count, rows, step, even, num_warps=warps,
    )  # fmt: skip
    return y


# A thread is to read one word of each row. If the compiler knew that the matrix is aligned, it would give it four.
@triton.jit(do_not_specialize_on_alignment=["weight"])
def _nf4(  # type: ignore[no-untyped-def]
    x, weight, scales, code, bias, y, inputs, outputs,
    BIAS: tl.constexpr, COUNT: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    rows, words = tl.program_id(0) * ROWS + tl.arange(0, ROWS), inputs // 8
    there = rows < outputs
    kind = y.dtype.element_ty
    first_word = weight + rows.to(tl.int64)[:, None] * words
    first_scale = scales + rows[:, None] * (words // 8)
    sums = ()
    for _ in tl.static_range(COUNT):
        sums = sums + (tl.zeros((ROWS, STEP), tl.float32),)  # type: ignore[assignment]  # noqa: RUF005 - for Triton
    for first in range(0, words, STEP):
        at, block = first + tl.arange(0, STEP), first // 8 + tl.arange(0, STEP // 8)
        if EVEN:
            word, scale = tl.load(first_word + at[None, :]), tl.load(first_scale + block[None, :])
        else:
            word = tl.load(first_word + at[None, :], mask=there[:, None] & (at < words)[None, :], other=0)
            known = there[:, None] & (block < words // 8)[None, :]
            scale = tl.load(first_scale + block[None, :], mask=known, other=0.0)
        scale = tl.reshape(tl.broadcast_to(scale[:, :, None], (ROWS, STEP // 8, 8)), (ROWS, STEP))
        a, b, c, d, e, f, g, h = _unpacked(word, code)
        added = ()
        for token in tl.static_range(COUNT):
            place = x + token * (inputs // 2) + 4 * at[:, None] + tl.arange(0, 4)[None, :]
            pairs = tl.load(place) if EVEN else tl.load(place, mask=(at < words)[:, None], other=0)
            even, odd = tl.split(tl.reshape(pairs, (STEP, 2, 2)))
            one, three = tl.split(even)
            two, four = tl.split(odd)
            total = a * _low(one, kind)[None] + b * _high(one, kind)[None]
            total += c * _low(two, kind)[None]
            total += d * _high(two, kind)[None]
            total += e * _low(three, kind)[None]
            total += f * _high(three, kind)[None]
            total += g * _low(four, kind)[None]
            total += h * _high(four, kind)[None]
            added = added + (sums[token] + total * scale,)  # type: ignore[assignment]  # noqa: RUF005
        sums = added
    for token in tl.static_range(COUNT):
        found = tl.sum(sums[token], 1)
        if BIAS:
            found += tl.load(bias + rows, mask=there, other=0.0).to(tl.float32)
        tl.store(y + token * outputs + rows, found.to(kind), mask=there)


@triton.jit
def _unpacked(word, code):  # type: ignore[no-untyped-def]
    if _INTERPRETED:
        return (
            tl.load(code + (word >> 4 & 15)), tl.load(code + (word & 15)),
            tl.load(code + (word >> 12 & 15)), tl.load(code + (word >> 8 & 15)),
            tl.load(code + (word >> 20 & 15)), tl.load(code + (word >> 16 & 15)),
            tl.load(code + (word >> 28 & 15)), tl.load(code + (word >> 24 & 15)),
        )  # fmt: skip
    else:  # noqa: RET505 - Triton compiles one of the two
        a, b, c, d, e, f, g, h = tl.inline_asm_elementwise(_PTX, _OPERANDS, [word], dtype=_WORDS, is_pure=True, pack=1)
        return (
            a.to(tl.float32, bitcast=True), b.to(tl.float32, bitcast=True),
            c.to(tl.float32, bitcast=True), d.to(tl.float32, bitcast=True),
            e.to(tl.float32, bitcast=True), f.to(tl.float32, bitcast=True),
            g.to(tl.float32, bitcast=True), h.to(tl.float32, bitcast=True),
        )  # fmt: skip


@triton.jit
def _low(pair, kind):  # type: ignore[no-untyped-def]
    return (pair & 0xFFFF).to(tl.int16).to(kind, bitcast=True).to(tl.float32)


@triton.jit
def _high(pair, kind):  # type: ignore[no-untyped-def]
    return (pair >> 16).to(tl.int16).to(kind, bitcast=True).to(tl.float32)
