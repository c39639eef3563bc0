"""One teacher-forced pass of a draft over several generations, and the grouping of generations into passes.

In: examples. Out: the draft's logits at every output position of each, in order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from adaptive.engines.head.kinds import HeadModule
from adaptive.engines.hf.generation import context_of
from trainers.dataset import Example

# Padded tokens of one pass. Too low: a CPU core or a GPU is idle between passes. Too high: memory, and a
# request waits longer for the pass to end.
PASS_TOKENS = 2048

# Logits (positions x vocabulary) of one pass. Training holds them and their gradient, so the limit is 0.27 GB in
# float32; a draft with a vocabulary of 150,000 tokens reaches it with 220 positions.
PASS_LOGITS = 2**25
# A single answer may have this many times PASS_LOGITS: some 890 tokens with such a vocabulary.
LARGEST_PASS = 4


@dataclass(frozen=True)
class Batch:
    """Right-padded inputs of B examples and the positions of their predictions.

    ``ids`` and ``mask`` (B, T); ``rows`` (B, T) bool marks the N positions that predict an output
    token, so the logits at ``rows`` are those of the first example's output, then the second's.
    """

    ids: torch.Tensor
    mask: torch.Tensor
    rows: torch.Tensor


def longest_text(model: torch.nn.Module | HeadModule) -> int:
    """Tokens of a generation that are used; prompts are cut from the left. The smaller of the model's context and of
    PASS_TOKENS, so that the memory of a pass is bounded."""
    return text_limit(model.config)


def text_limit(config: Any) -> int:
    """``longest_text`` of a model with this ``config``."""
    return min(context_of(config.get_text_config()), PASS_TOKENS)


def longest_output(model: torch.nn.Module | HeadModule) -> int:
    """Tokens of an answer that are used: half of ``longest_text``, or less if the vocabulary is large."""
    return output_limit(model.config)


def output_limit(config: Any) -> int:
    """``longest_output`` of a model with this ``config``."""
    return max(2, min(text_limit(config) // 2, LARGEST_PASS * PASS_LOGITS // int(config.get_text_config().vocab_size)))


def collate(examples: Sequence[Example], limit: int, device: torch.device) -> Batch:
    """A batch of ``examples``, their prompts cut from the left so that none is longer than ``limit`` tokens.

    No output may be longer than ``limit``.
    """
    width = min(limit, max(len(e.prompt) + len(e.output) - 1 for e in examples))
    ids = torch.zeros(len(examples), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    rows = torch.zeros_like(ids, dtype=torch.bool)
    for index, example in enumerate(examples):
        text = torch.cat([torch.from_numpy(example.prompt), torch.from_numpy(example.output[:-1])])[-width:]
        ids[index, : len(text)] = text
        mask[index, : len(text)] = 1
        rows[index, len(text) - len(example.output) : len(text)] = True
    return Batch(ids.to(device), mask.to(device), rows.to(device))


def passes(examples: Sequence[Example], limit: int, vocab: int) -> Iterator[list[Example]]:
    """Non-empty groups of ``examples``, in the given order, that fit into one pass each."""
    group: list[Example] = []
    width = rows = 0
    for example in examples:
        length = min(limit, len(example.prompt) + len(example.output) - 1)
        wider = max(width, length)
        crowded = wider * (len(group) + 1) > PASS_TOKENS or (rows + len(example.output)) * vocab > PASS_LOGITS
        if group and crowded:
            yield group
            group, wider, rows = [], length, 0
        group.append(example)
        width, rows = wider, rows + len(example.output)
    if group:
        yield group


def supervised_logits(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """The model's logits (N, vocab) at the rows of ``batch``. The output embedding is applied only there. The model
    reads another token in place of one that it lacks, as in decoding."""
    config: Any = model.config
    ids = batch.ids.clamp(max=int(config.get_text_config().vocab_size) - 1)
    with _head_at(model, batch.rows) as picked:
        logits: torch.Tensor = model(input_ids=ids, attention_mask=batch.mask, use_cache=False).logits
    return logits[0] if picked[0] else logits[batch.rows]


def token_count(examples: Sequence[Example]) -> int:
    """The least number of tokens that a target can have that said ``examples``: a draft may lack some of them."""
    parts = [part for e in examples for part in (e.prompt, e.output, e.supervision.ids if e.supervision else ())]
    return max(int(np.max(part, initial=0)) for part in parts) + 1


def over_all_tokens(logits: torch.Tensor, examples: Sequence[Example]) -> torch.Tensor:
    """``logits`` (N, vocab) of a draft, widened with -inf to all tokens of ``examples``: it never proposes those that
    it lacks."""
    lacking = token_count(examples) - logits.shape[-1]
    return torch.nn.functional.pad(logits, (0, lacking), value=-torch.inf) if lacking > 0 else logits


@contextmanager
def _head_at(model: Any, rows: torch.Tensor) -> Iterator[list[bool]]:
    """Pass only the hidden states at ``rows`` to the output embedding, as one row (1, N, hidden).

    Half of a batch are prompt positions and the output embedding is most of a small draft, so this saves much
    time; it also keeps logits of long prompts out of memory. ``logits_to_keep`` of
    transformers cannot do this: it keeps the same columns of every row.
    """
    picked = [False]

    def pick(module: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if args and args[0].shape[:2] == rows.shape:
            picked[0] = True
            return (args[0][rows][None], *args[1:])
        return None

    head = model.get_output_embeddings()
    handle = head.register_forward_pre_hook(pick) if head is not None else None
    try:
        yield picked
    finally:
        if handle is not None:
            handle.remove()
