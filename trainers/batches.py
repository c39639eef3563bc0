"""One teacher-forced pass of a draft over several generations, and how generations are grouped for it.

In: examples. Out: the draft's logits at every output position of each, in order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from adaptive.engines.head.kinds import HeadModule
from trainers.dataset import Example

# Padded tokens of one pass. Fewer leave a CPU core or a GPU waiting between passes; more delay the
# request that a pass has to yield to, and take memory.
PASS_TOKENS = 2048

# Logits (positions x vocabulary) of one pass. Training holds about four float32 copies of them, so
# this is 0.5 GB at its limit, which a draft of 150,000 tokens vocabulary reaches with 220 positions.
PASS_LOGITS = 2**25
# Times as many that one answer may take by itself: 880 tokens of such a vocabulary.
LARGEST_PASS = 4


@dataclass(frozen=True)
class Batch:
    """Right-padded inputs of B examples and where their predictions stand.

    ``ids`` and ``mask`` (B, T); ``rows`` (B, T) bool marks the N positions that predict an output
    token, so that logits at ``rows`` are those of the first example's output, then the second's.
    """

    examples: tuple[Example, ...]
    ids: torch.Tensor
    mask: torch.Tensor
    rows: torch.Tensor


def longest_text(model: torch.nn.Module | HeadModule) -> int:
    """Tokens of a generation that are learned from, prompts being cut from the left: what the model was built for, and
    no more than a pass holds, whose memory does not depend on what was said."""
    config: Any = model.config
    return min(int(getattr(config.get_text_config(), "max_position_embeddings", None) or PASS_TOKENS), PASS_TOKENS)


def longest_output(model: torch.nn.Module | HeadModule) -> int:
    """Tokens of an answer that are learned from: half of ``longest_text``, or less where logits are large."""
    config: Any = model.config
    return max(2, min(longest_text(model) // 2, LARGEST_PASS * PASS_LOGITS // int(config.get_text_config().vocab_size)))


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
    return Batch(tuple(examples), ids.to(device), mask.to(device), rows.to(device))


def passes(examples: Sequence[Example], limit: int, vocab: int) -> Iterator[list[Example]]:
    """Groups of ``examples``, in the given order, that fit into one pass together; never an empty one."""
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
    """The model's logits (N, vocab) at the rows of ``batch``. The head is computed there only."""
    with _head_at(model, batch.rows) as picked:
        logits: torch.Tensor = model(input_ids=batch.ids, attention_mask=batch.mask, use_cache=False).logits
    return logits[0] if picked[0] else logits[batch.rows]


@contextmanager
def _head_at(model: Any, rows: torch.Tensor) -> Iterator[list[bool]]:
    """Let the output embedding see the hidden states at ``rows`` alone, as one row (1, N, hidden).

    Prompt positions are half of a batch and the head is most of a small draft, so this is most of
    the time saved; it also keeps logits of long prompts out of memory. ``logits_to_keep`` of
    transformers cannot do it: it keeps the same columns of every row.
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
