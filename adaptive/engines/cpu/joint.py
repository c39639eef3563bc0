"""Our forward over tokens of several texts in one native call, which reads every weight once for all of them.

Linear layers take the rows of all texts together; rotation and attention run for each text over its own cache. The
result of a row does not depend on the number of rows (``native/linear.h``, ``native/attention.h``), so each text gets
the logits of a pass of its own, bit for bit, whatever the dtype of the weights.

The tokens appended to a text may be a tree. Its nodes lie one after the other behind the held tokens, are rotated by
their depth, and see only the held tokens and their ancestors. A softmax adds vectors of neighbouring keys, so a node's
logits equal those of a text with its path only up to rounding. They are equal bit for bit if the path consists of the
first nodes and no window reaches into the tree.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import torch

from adaptive.engines.cpu.cache import CpuCache
from adaptive.engines.cpu.forward import CpuForward
from adaptive.engines.cpu.kernels import between_passes, library, native_tree
from adaptive.engines.protocol import ProposalCall, Proposed
from adaptive.engines.tree import TokenTree
from adaptive.tokens import Rows, address


class Part(NamedTuple):
    """Tokens to append to a text; logits are wanted of the last ``rows``. With a ``tree`` the tokens are its last
    nodes, which are not counted in the cache's length."""

    tokens: list[int]
    rows: int
    cache: CpuCache
    tree: TokenTree | None

    @property
    def begin(self) -> int:
        """Where the first of the tokens lies in the cache."""
        return self.cache.length + (0 if self.tree is None else len(self.tree) - len(self.tokens))


def is_part(forward: CpuForward, count: int) -> bool:
    """Whether ``count`` tokens of a text can be part of a joint pass: a pass over them alone is one native call."""
    return 0 < count <= forward.most and forward.fused


def extend_together(forward: CpuForward, parts: Sequence[Part], logits: Rows) -> list[torch.Tensor]:
    """Append its tokens to each text, in native calls over at most ``forward.most`` tokens or one tree. Returns the
    logits (rows, vocab) of each, written into ``logits``. Every part must be a tree or satisfy ``is_part``. Raises
    IndexError for a token beyond the vocabulary."""
    logits(0, sum(part.rows for part in parts))  # grow the buffer now: growing later would orphan earlier views
    found: list[torch.Tensor] = []
    begin = first = 0
    while begin < len(parts):
        end, count = begin + 1, len(parts[begin].tokens)
        while end < len(parts) and count + len(parts[end].tokens) <= forward.most:
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
    """A proposal for a text; the distributions that its tokens are drawn from are written into ``probs``."""

    call: ProposalCall
    probs: Rows
    cache: CpuCache


def propose_together(forward: CpuForward, drafts: Sequence[Draft]) -> list[Proposed]:
    """The same proposals, bit for bit, as ``CpuForward.propose`` for one text after the other, in one native call that
    reads the weights once for one token of each text."""
    kernels = library()
    assert kernels is not None
    fed = [forward.few(draft.call, draft.cache) for draft in drafts]
    each = zip(drafts, fed, strict=True)
    wanted = [kernels.module.Wanted(*forward.wanted(draft.call, tokens, *draft[1:])) for draft, tokens in each]
    threads, decoder = forward.threads_for(len(drafts)), forward.native_pass()
    began = time.perf_counter()
    try:
        found = decoder.propose_together(wanted, threads)
    except BaseException as error:
        for draft in drafts:
            draft.cache.undo(whole=between_passes(error))
        raise
    steps = max(passed - len(tokens) + 1 for (_, passed), tokens in zip(found, fed, strict=True))
    forward.took(len(drafts), (time.perf_counter() - began) / steps)
    proposed = []
    for draft, (tokens, passed) in zip(drafts, found, strict=True):
        draft.cache.end(passed)
        proposed.append(Proposed(tokens, draft.probs(0, len(tokens)) if draft.call.uniform else None))
    return proposed


def _pass(forward: CpuForward, parts: Sequence[Part], count: int, logits: int) -> None:
    """Make one native call over ``count`` tokens in all; ``logits`` is the address of the rows."""
    kernels = library()
    assert kernels is not None
    tokens = [token for part in parts for token in part.tokens]
    forward.check(tokens)
    for part in parts:  # before taking any address: the tables of cos and sin may move
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
    except BaseException as error:
        for part in parts:
            part.cache.undo(whole=between_passes(error))
        raise
    forward.took(count, time.perf_counter() - began)
    for part in parts:
        if part.tree is None:
            part.cache.end(len(part.tokens))
