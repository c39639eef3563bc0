"""Our forward over tokens of several texts in one native call, which reads every weight once for all of them.

Linear layers take the rows of all texts together; rotation and attention are each text's own, over its own cache. No
row's result depends on how many others it is computed with (``native/linear.h``, ``native/attention.h``), so that each
text has the logits of a lone pass, bit for bit, whatever the dtype of the weights.

What is appended to a text may be a tree. Its nodes lie one after the other behind what the cache holds, rotated by
depth, and see only what they follow. A softmax adds up vectors of neighbours, so that a node has the logits of a text
with its path to rounding; bit for bit where its path are the first nodes, if no window reaches into the tree.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import torch

from adaptive.engines.cpu.cache import CpuCache
from adaptive.engines.cpu.forward import MANY, CpuForward
from adaptive.engines.cpu.kernels import library, native_tree
from adaptive.engines.protocol import ProposalCall, Proposed
from adaptive.engines.tree import TokenTree
from adaptive.tokens import Rows, address


class Part(NamedTuple):
    """Tokens to append to a text, and of how many of the last the logits are wanted. With a ``tree`` they are its last
    nodes, and not counted in the cache's length."""

    tokens: list[int]
    rows: int
    cache: CpuCache
    tree: TokenTree | None

    @property
    def begin(self) -> int:
        """Where they lie."""
        return self.cache.length + (0 if self.tree is None else len(self.tree) - len(self.tokens))


def is_part(forward: CpuForward, count: int) -> bool:
    """Whether so many tokens of a text can be part of a joint pass: those whose lone pass is one call of its own."""
    return 0 < count <= MANY and forward.fused


def extend_together(forward: CpuForward, parts: Sequence[Part], logits: Rows) -> list[torch.Tensor]:
    """Append to each text its tokens, in native calls over at most ``MANY`` tokens or one tree; the logits (rows,
    vocab) of each, written into ``logits``. Every part is a tree, or one by ``is_part``. Raises IndexError for a token
    beyond the vocabulary."""
    logits(0, sum(part.rows for part in parts))  # so that no view is of a buffer that is given up
    found: list[torch.Tensor] = []
    begin = first = 0
    while begin < len(parts):
        end, count = begin + 1, len(parts[begin].tokens)
        while end < len(parts) and count + len(parts[end].tokens) <= MANY:
            count += len(parts[end].tokens)
            end += 1
        some = parts[begin:end]
        rows = sum(part.rows for part in some)
        _pass(forward, some, count, address(logits(first, rows)))
        for part in some:
            found.append(logits(first, part.rows))
            first += part.rows
        begin = end
    return found


class Draft(NamedTuple):
    """A proposal for a text, and where what its tokens are drawn from is left."""

    call: ProposalCall
    probs: Rows
    cache: CpuCache


def propose_together(forward: CpuForward, drafts: Sequence[Draft]) -> list[Proposed]:
    """The proposals that ``CpuForward.propose`` makes for one text after the other, bit for bit, in one native call
    that reads the weights once for a token of each."""
    kernels = library()
    assert kernels is not None
    fed = [forward.few(draft.call, draft.cache) for draft in drafts]
    each = zip(drafts, fed, strict=True)
    wanted = [kernels.module.Wanted(*forward.wanted(draft.call, tokens, *draft[1:])) for draft, tokens in each]
    threads, decoder = forward.threads_for(len(drafts)), forward.native_pass()
    began = time.perf_counter()
    try:
        found = decoder.propose_together(wanted, threads)
    except BaseException:
        for draft in drafts:
            draft.cache.undo(whole=True)
        raise
    steps = max(passed - len(tokens) + 1 for (_, passed), tokens in zip(found, fed, strict=True))
    forward.took(len(drafts), (time.perf_counter() - began) / steps)
    proposed = []
    for draft, (tokens, passed) in zip(drafts, found, strict=True):
        draft.cache.end(passed)
        proposed.append(Proposed(tokens, draft.probs(0, len(tokens)) if draft.call.uniform else None))
    return proposed


def _pass(forward: CpuForward, parts: Sequence[Part], count: int, logits: int) -> None:
    """One native call over ``count`` tokens in all; ``logits`` is the address of the rows."""
    kernels = library()
    assert kernels is not None
    tokens = [token for part in parts for token in part.tokens]
    forward.check(tokens)
    for part in parts:  # before any is asked where it lies: the tables of cos and sin may move
        forward.prepare(part.begin + len(part.tokens), part.cache)
    texts = []
    for part in parts:
        count_here, rows, cache, tree, start = len(part.tokens), part.rows, part.cache, part.tree, part.cache.length
        if tree is not None and tree.is_chain:
            tree, start = None, part.begin
        rope = forward.rope_at(start)
        place = cache.table, cache.capacity, start, cache.hidden_address
        nodes = None if tree is None else native_tree(tree)
        texts.append(kernels.module.Text(count_here, rows, rope, *place, nodes, cache.begin(count_here)))
    threads, decoder = forward.threads_for(count), forward.native_pass()
    began = time.perf_counter()
    try:
        decoder.together(tokens, texts, logits, threads)
    except BaseException:
        for part in parts:
            part.cache.undo(whole=True)
        raise
    forward.took(count, time.perf_counter() - began)
    for part in parts:
        if part.tree is None:
            part.cache.end(len(part.tokens))
