"""The lean pass as a graph that torch's compiler can fuse, and the process that compiles it.

In: a ``Blueprint`` (shapes, never weights). Out: a package, a file with machine code for a pass over a
fixed number of tokens. Weights are its constants, handed over when it is loaded, so that one file serves
every model of those shapes and an adapter needs no other. ``python -m adaptive.engines.cpu.compiled_graph`` takes
jobs on its standard input and compiles them one by one, apart from the process that is answering meanwhile:
tracing would hold that one's interpreter for seconds.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter
from torch import nn

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": nn.functional.silu,
    "gelu": nn.functional.gelu,
    "gelu_tanh": lambda x: nn.functional.gelu(x, approximate="tanh"),
    "relu": nn.functional.relu,
}


@dataclass(frozen=True)
class Norm:
    """A layer norm if ``centred``, else x / sqrt(sum(x ** 2) + eps) * weight, as ``lean_plan`` has RMS norms."""

    centred: bool
    eps: float


@dataclass(frozen=True)
class Block:
    """One decoder layer; fields as in ``lean_plan.Layer``. ``gated``: gate and up are the halves of one product."""

    attention_norm: Norm
    head_norm: Norm | None
    attention_post_norm: Norm | None
    mix_norm: Norm
    mix_post_norm: Norm | None
    gated: bool
    activation: str
    scale: float
    rope: int
    window: int
    score_cap: float | None
    parallel: bool


@dataclass(frozen=True)
class Constant:
    """A weight by its name in the graph. ``dtype`` as torch writes it, without ``torch.``."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Blueprint:
    """What a compiled pass computes, but for the weights: a pass over ``count`` tokens that gives logits of the
    last ``rows``. ``several``: made for more than one thread."""

    count: int
    rows: int
    blocks: tuple[Block, ...]
    final_norm: Norm
    constants: tuple[Constant, ...]
    heads: int
    key_heads: int
    head_size: int
    ropes: int
    embed_factor: float | None
    logit_cap: float | None
    context_length: int
    dtype: str
    several: bool


@dataclass(frozen=True)
class Job:
    """Compile this and put it there."""

    blueprint: Blueprint
    path: Path


JOBS = TypeAdapter(list[Job])
BLUEPRINT = TypeAdapter(Blueprint)


class Graph(nn.Module):
    """The pass of a blueprint, in operations that fuse: real numbers for the rotation, nothing in place but
    the cache. Constants are buffers, empty ones: only their shapes matter here."""

    def __init__(self, blueprint: Blueprint) -> None:
        super().__init__()
        self.plan = blueprint
        self.dtype: torch.dtype = getattr(torch, blueprint.dtype)
        self.names = frozenset(constant.name for constant in blueprint.constants)
        for constant in blueprint.constants:
            self.register_buffer(constant.name, torch.empty(constant.shape, dtype=getattr(torch, constant.dtype)))

    def forward(
        self, tokens: torch.Tensor, places: torch.Tensor, turns: torch.Tensor, caches: list[torch.Tensor]
    ) -> torch.Tensor:
        """tokens (count,); places (length,): 0, 1, ... up to the last token's place; turns (count, ropes, head
        size / 2, 2): cosine and sine; caches: of every layer keys and values (2, key heads, capacity, head
        size), which the new ones are written into. Logits (rows, vocab)."""
        p, count, length = self.plan, tokens.shape[0], places.shape[0]  # not len(): it would fix the length
        new = places[length - count :]
        x = nn.functional.embedding(tokens, self.get_buffer("embed"))
        if p.embed_factor is not None:
            x = x * p.embed_factor
        x = x.to(self.dtype)
        masks = {window: self._mask(window, places, new) for window in {block.window for block in p.blocks}}
        for number, (block, cache) in enumerate(zip(p.blocks, caches, strict=True)):
            x = self._layer(f"layer{number}_", block, x, new, length, turns, masks[block.window], cache)
        logits = self._product("head", self._norm("final_norm", p.final_norm, x[count - p.rows :]))
        if p.logit_cap is not None:
            logits = torch.tanh(logits / p.logit_cap) * p.logit_cap
        return logits

    def _layer(
        self,
        name: str,
        block: Block,
        x: torch.Tensor,
        new: torch.Tensor,
        length: int,
        turns: torch.Tensor,
        mask: torch.Tensor | None,
        cache: torch.Tensor,
    ) -> torch.Tensor:
        p, count = self.plan, new.shape[0]
        size, group = p.head_size, p.heads // p.key_heads
        mixed = self._product(name + "project", self._norm(name + "attention_norm", block.attention_norm, x))
        mixed = mixed.view(count, p.heads + 2 * p.key_heads, size)
        turned, values = mixed.split([p.heads + p.key_heads, p.key_heads], 1)
        turned = self._norm(name + "head_norm", block.head_norm, turned)
        first, second = turned.unflatten(2, (size // 2, 2)).unbind(3)
        cos, sin = turns[:, block.rope, None].unbind(3)
        turned = torch.stack([first * cos - second * sin, first * sin + second * cos], 3).flatten(2)
        queries, keys = turned.split([p.heads, p.key_heads], 1)
        cache.index_copy_(2, new, torch.stack([keys.transpose(0, 1), values.transpose(0, 1)]))
        # The queries of one key head are rows of one product.
        rows = queries.view(count, p.key_heads, group, size).transpose(0, 1).reshape(1, p.key_heads, -1, size)
        held = cache[:, :, :length]
        seen = _attention(rows, held[:1], held[1:], mask, block.scale, block.score_cap)
        seen = seen.view(p.key_heads, count, group, size).transpose(0, 1).reshape(count, -1)
        y = self._product(name + "output", seen)
        if block.parallel:
            return x + y + self._mix(name, block, self._norm(name + "mix_norm", block.mix_norm, x))
        x = x + self._norm(name + "attention_post_norm", block.attention_post_norm, y)
        y = self._mix(name, block, self._norm(name + "mix_norm", block.mix_norm, x))
        return x + self._norm(name + "mix_post_norm", block.mix_post_norm, y)

    def _mix(self, name: str, block: Block, x: torch.Tensor) -> torch.Tensor:
        act = ACTIVATIONS[block.activation]
        inner = self._product(name + "up", x)
        if not block.gated:
            return self._product(name + "down", act(inner))
        gate, up = inner.chunk(2, -1)
        return self._product(name + "down", act(gate) * up)

    def _mask(self, window: int, places: torch.Tensor, new: torch.Tensor) -> torch.Tensor | None:
        """(count * group, length): 0 where seen, -inf where not; None where every key is seen."""
        if new.shape[0] == 1 and not window:
            return None
        hidden = places > new[:, None]
        if window:
            hidden = hidden | (places <= new[:, None] - window)
        mask = torch.where(hidden, -math.inf, 0.0).to(self.dtype)
        return mask.repeat_interleave(self.plan.heads // self.plan.key_heads, 0)

    def _norm(self, name: str, norm: Norm | None, x: torch.Tensor) -> torch.Tensor:
        if norm is None:
            return x
        weight, bias = (
            self.get_buffer(f"{name}_{part}") if f"{name}_{part}" in self.names else None for part in ("weight", "bias")
        )
        if norm.centred:
            return nn.functional.layer_norm(x, x.shape[-1:], weight, bias, norm.eps)
        assert weight is not None
        return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + norm.eps) * weight

    def _product(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """x (rows, in) to (rows, out), the way the constants of that name say; see ``compiled.product_constants``."""
        bias = self.get_buffer(name + "_bias") if name + "_bias" in self.names else None
        if name + "_packed" in self.names:
            weight = self.get_buffer(name + "_packed")
            y = torch.ops.mkldnn._linear_pointwise(x.to(weight.dtype), weight, bias, "none", [], "")
            return y.to(self.dtype)  # type: ignore[no-any-return]
        parts = [name for name in (f"{name}_part{i}" for i in range(len(self.names))) if name in self.names]
        y = torch.cat([_written_out(x, self.get_buffer(part)) for part in parts], 1)
        if name + "_order" in self.names:
            y = y[:, self.get_buffer(name + "_order")]
        return y if bias is None else y + bias.to(self.dtype)


def _written_out(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x (rows, in) times weight (out, in), as sums that the compiler fuses with what is around: every weight is
    read and widened once for all rows."""
    wide = weight.to(x.dtype)
    return torch.stack([(wide * row).sum(-1) for row in x.unbind(0)])


def _attention(
    rows: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    cap: float | None,
) -> torch.Tensor:
    """Attention of rows (1, heads, n, size) over keys and values (1, heads, length, size)."""
    if cap is None:
        return nn.functional.scaled_dot_product_attention(rows, keys, values, attn_mask=mask, scale=scale)
    scores = torch.tanh(rows @ keys.transpose(-1, -2) * (scale / cap)) * cap
    return (scores if mask is None else scores + mask).softmax(-1) @ values


@torch.no_grad()
def build(blueprint: Blueprint, path: Path) -> None:
    """Compile a pass into ``path``. Raises whatever torch's compiler raises."""
    from torch._inductor import aoti_compile_and_package
    from torch.export import Dim, export

    p = blueprint
    length, capacity = 2 * p.count + 5, 4 * p.count + 11  # any will do: both are left open
    dtype = getattr(torch, p.dtype)
    cache = [torch.zeros(2, p.key_heads, capacity, p.head_size, dtype=dtype) for _ in p.blocks]
    turns = torch.zeros(p.count, p.ropes, p.head_size // 2, 2, dtype=dtype)
    tokens = torch.zeros(p.count, dtype=torch.long)
    # Beyond, say, a million tokens nobody has a cache.
    longest = min(max(p.context_length, capacity), 1 << 20) + 1
    shapes: tuple[Any, ...] = (
        {},
        {0: Dim("length", min=p.count + 1, max=longest)},
        {},
        [{2: Dim("capacity", min=p.count + 1, max=2 * longest)}] * len(cache),
    )
    program = export(Graph(p), (tokens, torch.arange(length), turns, cache), dynamic_shapes=shapes, strict=False)
    aoti_compile_and_package(
        program,
        package_path=str(path),
        inductor_configs={
            "always_keep_tensor_constants": True,
            "aot_inductor.package_constants_in_so": False,
            "cpp.dynamic_threads": p.several,
            # Multiply and add in one instruction: half the arithmetic of a product written out.
            "cpp.enable_floating_point_contract_flag": "fast",
        },
    )


def main() -> None:
    """Compile the jobs given as JSON on standard input; for each a line with the file's name and, if it failed, why."""
    # Who started this listens to standard output alone, and answers somebody meanwhile.
    done, sys.stdout = sys.stdout, sys.stderr
    if hasattr(os, "nice"):
        os.nice(19)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # leave no files behind
    warnings.simplefilter("ignore")
    jobs = JOBS.validate_json(sys.stdin.readline())
    with tempfile.TemporaryDirectory(prefix="adaptive-compile-") as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        for job in jobs:
            torch.set_num_threads(2 if job.blueprint.several else 1)  # one: code without any threads
            unfinished = job.path.with_name(f".{job.path.stem}-{os.getpid()}.pt2")
            try:
                build(job.blueprint, unfinished)
                unfinished.replace(job.path)
                print(job.path.name, file=done, flush=True)
            except Exception as error:  # whatever the compiler says; other passes may still compile
                reason = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
                print(f"{job.path.name} {type(error).__name__}: {reason}", file=done, flush=True)
            finally:
                unfinished.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
