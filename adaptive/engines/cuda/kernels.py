"""``operations.py`` as Triton kernels, for bfloat16, float16 and float32 on CUDA, and products with quantised weights.

Attention reads from the device's memory how long each text is and where its keys and values lie (``texts.py``). So a
recording (``hf/graphs.py``) serves every cache, and reads only the keys that are there. Products of several tokens with
16-bit weights are cuBLAS's, which reads large matrices at 60 to 95% of the memory's bandwidth. For one token there is a
kernel, which reads small matrices up to three times as fast.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import nn

from adaptive.engines.cuda.nf4 import WAYS, nf4
from adaptive.engines.cuda.texts import Held

__all__ = ["WAYS", "add_norm", "attend", "gate", "int8", "linear", "nf4", "rotate_and_store"]

# Numbers of a weight's row that a program of ``_vector`` reads at once, and its rows: more for large matrices.
STEP, ROWS, FEW_ROWS, LARGE = 1024, 4, 2, 2048
# Rows of a matrix in int8 that a program multiplies, and numbers of each row that it reads at once.
INT8_ROWS, INT8_STEP = 32, 256
# Most keys of a step of attention and rows of queries of a program (of all tokens and a key head's group), and the most
# bytes of either, which must fit several times into a multiprocessor.
BLOCK, MOST_ROWS, TILE_BYTES = 64, 64, 16384
# Programs into which attention is divided, over key heads and parts of the text: some four a multiprocessor.
PROGRAMS, MOST_PARTS = 512, 32


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """See ``operations.linear``."""
    if len(x) > 1:
        return nn.functional.linear(x, weight, bias)
    outputs, inputs = weight.shape
    y = torch.empty(1, outputs, dtype=x.dtype, device=x.device)
    rows = ROWS if outputs >= LARGE else FEW_ROWS
    step = min(STEP, triton.next_power_of_2(inputs))
    _vector[(triton.cdiv(outputs, rows),)](
        x, weight, y if bias is None else bias, y, inputs, outputs, bias is not None, rows, step
    )
    return y


def int8(x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x (n, inputs) @ W.T + bias for a matrix in int8: ``weight`` (outputs, inputs) * ``scales`` (outputs,) / 127."""
    count, inputs = x.shape
    y = torch.empty(count, len(weight), dtype=x.dtype, device=x.device)
    _int8[(triton.cdiv(len(weight), INT8_ROWS),)](
        x, weight, scales, y if bias is None else bias, y, count, inputs, len(weight), bias is not None,
        max(16, triton.next_power_of_2(count)), INT8_ROWS, INT8_STEP, num_warps=4,
    )  # fmt: skip
    return y


@triton.jit(do_not_specialize=["count"])
def _int8(  # type: ignore[no-untyped-def]
    x, weight, scales, bias, y, count, inputs, outputs,
    BIAS: tl.constexpr, COUNT: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there, token = rows < outputs, tl.arange(0, COUNT)
    kind = x.dtype.element_ty
    sums = tl.zeros((ROWS, COUNT), tl.float32)
    for first in range(0, inputs, STEP):
        column = first + tl.arange(0, STEP)
        inside = column < inputs
        place = weight + rows.to(tl.int64)[:, None] * inputs + column[None, :]
        read = tl.load(place, mask=there[:, None] & inside[None, :], other=0).to(kind)
        known = (token < count)[None, :] & inside[:, None]
        given = tl.load(x + token[None, :] * inputs + column[:, None], mask=known, other=0.0)
        sums = tl.dot(read, given, sums, input_precision="ieee")
    sums *= tl.load(scales + rows, mask=there, other=0.0).to(tl.float32)[:, None] / 127
    if BIAS:
        sums += tl.load(bias + rows, mask=there, other=0.0).to(tl.float32)[:, None]
    tl.store(
        y + token[None, :] * outputs + rows[:, None], sums.to(kind), mask=there[:, None] & (token < count)[None, :]
    )


@triton.jit
def _vector(x, weight, bias, y, inputs, outputs, BIAS: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr):  # type: ignore[no-untyped-def]
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = rows < outputs
    sums = tl.zeros((ROWS, STEP), tl.float32)
    for first in range(0, inputs, STEP):
        columns = first + tl.arange(0, STEP)
        inside = columns < inputs
        read = tl.load(
            weight + rows.to(tl.int64)[:, None] * inputs + columns[None, :],
            mask=there[:, None] & inside[None, :],
            other=0.0,
        )
        sums += read.to(tl.float32) * tl.load(x + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
    found = tl.sum(sums, 1)
    if BIAS:
        found += tl.load(bias + rows, mask=there, other=0.0).to(tl.float32)
    tl.store(y + rows, found.to(y.dtype.element_ty), mask=there)


def add_norm(x: torch.Tensor, added: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See ``operations.add_norm``."""
    y, width = torch.empty_like(x), x.shape[-1]
    block = triton.next_power_of_2(width)
    _add_norm[(x.numel() // width,)](
        x,
        x if added is None else added,
        weight,
        y,
        width,
        eps,
        added is not None,
        block,
        num_warps=8 if block > 2048 else 4,
    )
    return y


@triton.jit
def _add_norm(x, added, weight, y, width, eps, ADDS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    places = tl.program_id(0) * width + columns
    kind = x.dtype.element_ty
    row = tl.load(x + places, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        row = (row + tl.load(added + places, mask=inside, other=0.0).to(tl.float32)).to(kind)
        tl.store(x + places, row, mask=inside)
        row = row.to(tl.float32)
    row *= tl.rsqrt(tl.sum(row * row) / width + eps)
    factor = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + places, (row.to(kind).to(tl.float32) * factor).to(kind), mask=inside)


def rotate_and_store(
    projected: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    eps: float,
    held: Held,
) -> torch.Tensor:
    """See ``operations.rotate_and_store``."""
    total, texts, size = len(projected), len(held.start), held.size
    heads = projected.shape[1] // size - 2 * held.key_heads
    queries = torch.empty(total, heads, size, dtype=projected.dtype, device=projected.device)
    weights = (cos, cos) if norms is None else norms
    _rotate_and_store[(total, heads + 2 * held.key_heads)](
        projected, cos, sin, *weights, eps, queries, held.table, held.start, heads, held.key_heads, total // texts,
        texts, norms is not None, size, num_warps=1,
    )  # fmt: skip
    return queries


@triton.jit(do_not_specialize=["count", "texts"])
def _rotate_and_store(  # type: ignore[no-untyped-def]
    projected, cos, sin, query_weight, key_weight, eps, queries, table, start, heads, key_heads, count, texts,
    NORMS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    token, head = tl.program_id(0), tl.program_id(1)
    text = token // count
    half: tl.constexpr = SIZE // 2
    low = tl.arange(0, half)
    high = low + half
    source = projected + (token * (heads + 2 * key_heads) + head) * SIZE
    kind = projected.dtype.element_ty
    first, second = tl.load(source + low).to(tl.float32), tl.load(source + high).to(tl.float32)
    place = (tl.load(start + text) + token % count) * SIZE
    if head >= heads + key_heads:
        target = _lies(table + texts, text, kind) + _head(table, text, texts, head - heads - key_heads, SIZE) + place
        tl.store(target + low, first.to(kind))
        tl.store(target + high, second.to(kind))
    else:
        if NORMS:
            weight = query_weight if head < heads else key_weight
            share = tl.rsqrt((tl.sum(first * first) + tl.sum(second * second)) / SIZE + eps)
            first = (first * share).to(kind).to(tl.float32) * tl.load(weight + low).to(tl.float32)
            second = (second * share).to(kind).to(tl.float32) * tl.load(weight + high).to(tl.float32)
        turns = token * SIZE
        low_turned = first * tl.load(cos + turns + low).to(tl.float32)
        low_turned -= second * tl.load(sin + turns + low).to(tl.float32)
        high_turned = second * tl.load(cos + turns + high).to(tl.float32)
        high_turned += first * tl.load(sin + turns + high).to(tl.float32)
        if head < heads:
            target = queries + (token * heads + head) * SIZE
        else:
            target = _lies(table, text, kind) + _head(table, text, texts, head - heads, SIZE) + place
        tl.store(target + low, low_turned.to(kind))
        tl.store(target + high, high_turned.to(kind))


@triton.jit
def _lies(addresses, text, kind: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where the keys or values of a text lie, whose numbers are of a ``kind``."""
    return tl.multiple_of(tl.load(addresses + text).to(tl.pointer_type(kind)), 16)


@triton.jit
def _head(table, text, texts, key_head, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The place of a head's first number among the keys or values of a text."""
    return tl.load(table + 2 * texts + text) * key_head * SIZE


def tiles(rows: int, row_bytes: int) -> tuple[int, int]:
    """Rows of queries that a program of attention holds, and keys that it reads at once, each row of ``row_bytes``."""
    most = TILE_BYTES // row_bytes
    return max(16, min(MOST_ROWS, most, triton.next_power_of_2(rows))), max(16, min(BLOCK, most))


def attend(queries: torch.Tensor, held: Held, scale: float, window: int) -> torch.Tensor:
    """See ``operations.attend``. Each text is divided into parts, each attended by itself, and the results joined."""
    (total, heads, size), key_heads, texts = queries.shape, held.key_heads, len(held.start)
    parts = max(1, min(MOST_PARTS, triton.next_power_of_2(PROGRAMS // (key_heads * texts))))
    count = total // texts
    rows = count * heads // key_heads
    held_rows, block = tiles(rows, size * queries.itemsize)
    blocks = triton.cdiv(rows, held_rows)
    given: dict[str, Any] = {"dtype": torch.float32, "device": queries.device}
    sums, scores = torch.empty(parts, total * heads, size, **given), torch.empty(2, parts, total * heads, **given)
    _attend[(key_heads, parts, texts * blocks)](
        queries, held.table, sums, scores, held.start, scale, count, texts, blocks, heads, heads // key_heads,
        window, size, held_rows, block, parts,
    )  # fmt: skip
    attended = torch.empty(total, heads * size, dtype=queries.dtype, device=queries.device)
    _join[(total * heads,)](sums, scores, attended, total * heads, size, parts, num_warps=1)
    return attended


@triton.jit(do_not_specialize=["count", "texts", "blocks"])
def _attend(  # type: ignore[no-untyped-def]
    queries, table, sums, scores, start, scale, count, texts, blocks, heads, group,
    WINDOW: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    key_head, part = tl.program_id(0), tl.program_id(1)
    text = tl.program_id(2) // blocks
    kind = queries.dtype.element_ty
    keys, values = _lies(table, text, kind), _lies(table + texts, text, kind)
    here = _head(table, text, texts, key_head, SIZE)
    before = tl.load(start + text).to(tl.int32)
    length = before + count
    oldest = tl.maximum(before + 1 - WINDOW, 0) if WINDOW else 0  # that any query sees
    each = tl.cdiv(tl.cdiv(length - oldest, PARTS), BLOCK) * BLOCK
    first = oldest + part * each
    last = tl.minimum(first + each, length)
    row = tl.program_id(2) % blocks * ROWS + tl.arange(0, ROWS)
    token, head = row // group, key_head * group + row % group
    there = row < count * group
    numbers = tl.arange(0, SIZE)
    at = (text * count + token) * heads + head
    query = tl.load(queries + at[:, None] * SIZE + numbers[None, :], mask=there[:, None], other=0.0)
    most = tl.full((ROWS,), float("-inf"), tl.float32)
    mass = tl.zeros((ROWS,), tl.float32)
    total = tl.zeros((ROWS, SIZE), tl.float32)
    for begin in range(first, last, BLOCK):
        place = begin + tl.arange(0, BLOCK)
        inside = place < last
        key = tl.load(keys + here + place[None, :] * SIZE + numbers[:, None], mask=inside[None, :], other=0.0)
        score = tl.dot(query, key, input_precision="ieee") * scale
        behind = (before + token)[:, None] - place[None, :]
        seen = inside[None, :] & (behind >= 0)
        if WINDOW:
            seen = seen & (behind < WINDOW)
        score = tl.where(seen, score, float("-inf"))
        higher = tl.maximum(most, tl.max(score, 1))
        finite = tl.where(higher == float("-inf"), 0.0, higher)
        weight = tl.exp(score - finite[:, None])
        keep = tl.exp(most - finite)
        value = tl.load(values + here + place[:, None] * SIZE + numbers[None, :], mask=inside[:, None], other=0.0)
        mass = mass * keep + tl.sum(weight, 1)
        total = total * keep[:, None] + tl.dot(weight.to(value.dtype), value, input_precision="ieee")
        most = higher
    at += part * texts * count * heads
    tl.store(sums + at[:, None] * SIZE + numbers[None, :], total, mask=there[:, None])
    tl.store(scores + at, most, mask=there)
    tl.store(scores + PARTS * texts * count * heads + at, mass, mask=there)


@triton.jit
def _join(sums, scores, attended, rows, SIZE: tl.constexpr, PARTS: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0)
    part, numbers = tl.arange(0, PARTS), tl.arange(0, SIZE)
    most = tl.load(scores + part * rows + row)
    mass = tl.load(scores + (PARTS + part) * rows + row)
    share = tl.exp(most - tl.max(most, 0))
    total = tl.load(sums + (part * rows + row)[:, None] * SIZE + numbers[None, :])
    found = tl.sum(total * share[:, None], 0) / tl.sum(mass * share, 0)
    tl.store(attended + row * SIZE + numbers, found.to(attended.dtype.element_ty))


def gate(x: torch.Tensor) -> torch.Tensor:
    """See ``operations.gate``."""
    count, width = len(x), x.shape[1] // 2
    y = torch.empty(count, width, dtype=x.dtype, device=x.device)
    _gate[(count, triton.cdiv(width, 1024))](x, y, width, 1024)
    return y


@triton.jit
def _gate(x, y, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    kind = x.dtype.element_ty
    first = tl.load(x + row * 2 * width + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * width + width + columns, mask=inside, other=0.0).to(tl.float32)
    gated = (first / (1 + tl.exp(-first))).to(kind).to(tl.float32) * up
    tl.store(y + row * width + columns, gated.to(kind), mask=inside)
