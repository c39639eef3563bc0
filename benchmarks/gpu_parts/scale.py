"""All sizes of ``gpu.py``: those for a GPU, and tiny ones that run the same command on a machine without one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from inflate import Size
from inflate_hybrid import HybridSize


@dataclass(frozen=True)
class Scale:
    """Sizes of the models, and amounts of work.

    ``dtype``: of all models except the bundled pair. ``context``: tokens of the inflated pair's context.
    ``mixture``: fields of a Qwen 3 mixture's config; its draft has the first ``mixture_draft`` layers.
    ``prompts``: their number; answers have ``tokens`` tokens where they are compared, and ``race_tokens`` where they
    are timed. ``samples``: answers of four tokens that are drawn for the chi-square test. ``passes``: numbers of tokens
    of timed passes. ``lengths``: draft lengths. ``texts``: numbers of answers at once. ``first``: tokens of the
    prompt for the time to the first token. ``copied``: bytes copied to measure the bandwidth. ``examples``: answers to
    train on. ``repeats``: most timed repetitions of a call. ``types``: architectures whose small models are decoded
    with and without a draft.
    ``measured``: the controller measures a pair before it is timed, which takes some seconds.
    """

    name: str
    dtype: torch.dtype
    target: Size
    draft: Size
    context: int
    hybrid: HybridSize
    hybrid_draft: HybridSize
    mixture: Mapping[str, int]
    mixture_draft: int
    prompts: int
    tokens: int
    race_tokens: int
    samples: int
    passes: tuple[int, ...]
    lengths: tuple[int, ...]
    texts: tuple[int, ...]
    first: int
    copied: int
    examples: int
    repeats: int
    types: tuple[str, ...]
    measured: bool


FULL = Scale(
    name="full",
    dtype=torch.bfloat16,
    # The bundled pair's width times a power of four, so that bfloat16 weights stay exact: 7.8 and 0.46 billion weights.
    target=Size(width=4096, feed_forward=14336, heads=64, layers=32),
    draft=Size(width=1024, feed_forward=4864, heads=16, layers=24),
    context=16384,
    # 3.9 billion parameters, and the small model whose function it computes.
    hybrid=HybridSize(2560, 9216, 16, 4, 32, 32, 256, 128),
    hybrid_draft=HybridSize(256, 896, 4, 1, 4, 4, 256, 128),
    # 6.9 billion parameters, of which a token uses 1.3 billion.
    mixture={
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 128,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1024,
    },
    mixture_draft=1,
    prompts=10,
    tokens=128,
    race_tokens=128,
    samples=2000,
    passes=(1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64),
    lengths=(2, 4, 8),
    texts=(2, 4, 8),
    first=8192,
    copied=1 << 31,
    examples=24,
    repeats=30,
    types=("qwen3_moe", "qwen3_5_text", "gemma3_text", "gpt_oss", "gpt_neox", "mamba2"),
    measured=True,
)

TINY = Scale(
    name="tiny",
    dtype=torch.float32,
    target=Size(width=256, feed_forward=704, heads=4, layers=17),
    draft=Size(width=256, feed_forward=704, heads=4, layers=2),
    context=1024,
    hybrid=HybridSize(128, 128, 8, 4, 4, 5, 16, 16),
    hybrid_draft=HybridSize(64, 96, 4, 2, 2, 4, 16, 16),
    mixture={
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
    },
    mixture_draft=1,
    prompts=1,
    tokens=12,
    race_tokens=6,
    samples=100,
    passes=(1, 3),
    lengths=(2,),
    texts=(2,),
    first=80,
    copied=1 << 22,
    examples=2,
    repeats=1,
    types=("qwen3_moe",),
    measured=False,
)
