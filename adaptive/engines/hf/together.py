"""Passes of a transformers engine over several sequences, or over a tree: by our own forward, or by the model's own.

In: calls for different sequences of the engine. Out: the logits or the proposal of each. Calls that cannot be part of
one pass are made one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence as Several
from typing import Any, Protocol

import torch

from adaptive.engines.cpu import joint as cpu_joint
from adaptive.engines.cpu.forward import CpuForward
from adaptive.engines.hf import joint as hf_joint
from adaptive.engines.hf.cache import RollbackCache
from adaptive.engines.hf.graphs import MOST_TEXTS, SHARED, RecordedPasses
from adaptive.engines.protocol import ExtendCall, ProposalCall, Proposed, Sequence, distinct, one_after_another
from adaptive.engines.state_checkpoints import REMEMBER_BEFORE
from adaptive.engines.tree import NO_TREE
from adaptive.tokens import Rows, as_tensor, moved


class Combines(hf_joint.Runs, Protocol):
    """An engine whose passes may be combined. ``recorded``: its recorded passes."""

    vocab_size: int
    cpu_forward: CpuForward | None
    recorded: RecordedPasses | None
    recurrent: bool

    @property
    def apart(self) -> bool:
        """Whether a pass of the model's own forward can extend only one sequence."""

    def forward(self, tokens: torch.Tensor, rows: int, cache: RollbackCache) -> torch.Tensor:
        """Append tokens (n,) to the cache in one pass. Returns logits (rows, vocab) of the last ones."""


class Together:
    """The passes of ``engine`` over several sequences. One of the model's own forward has at most ``most`` tokens of a
    sequence."""

    def __init__(self, engine: Combines, most: int) -> None:
        self.engine, self.most = engine, most
        self._logits = Rows(engine.vocab_size)
        self._proved: bool | None = None  # whether the model's own forward can make joint passes; None before the test

    @property
    def possible(self) -> bool:
        """Whether one pass can extend several sequences. Our own forward can if a pass is one native call. The model's
        own forward can if it caches only keys and values, in one cache per text, and a test, made once, gives the same
        results as text by text."""
        if self.engine.cpu_forward is not None:
            return self.engine.cpu_forward.fused
        if self._proved is None:
            self._proved = not self.engine.apart and hf_joint.proves(self.engine)
        return self._proved

    @property
    def trees(self) -> bool:
        """Whether passes over trees are supported: by our own forward, and by the model's own if it supports joint
        passes, which work in the same way. Never with recurrent states, because each path would need a separate one."""
        return not self.engine.recurrent and (self.engine.cpu_forward is not None or self.possible)

    def extend(self, calls: Several[ExtendCall]) -> list[torch.Tensor]:
        """Extend several sequences in one pass; see the protocol.

        With our own forward the logits are bit for bit those of separate passes; with transformers' they differ by
        rounding. A long piece of a prompt gets a separate pass, which reads the weights once for many tokens anyway.
        """
        distinct(calls)
        some = [call for call in calls if self._is_part(call)] if self.possible else []
        if len(some) < 2:
            return one_after_another(calls, self.engine.recorded is not None)
        found = dict(zip(map(id, some), self.one_pass(some), strict=True))
        return [found[id(c)] if id(c) in found else c.sequence.extend(c.tokens, c.rows, c.parents) for c in calls]

    def _is_part(self, call: ExtendCall) -> bool:
        """Whether these tokens of a sequence can be part of a joint pass."""
        forward, count = self.engine.cpu_forward, len(call.tokens)
        if call.parents is not None:
            return count > 0 and self.trees
        if forward is None:
            return 0 < count <= self.most
        if self.engine.recurrent and count > REMEMBER_BEFORE:  # a longer pass may keep a checkpoint
            return False
        return cpu_joint.is_part(forward, count)

    def one_pass(self, calls: Several[ExtendCall]) -> list[torch.Tensor]:
        """Extend sequences in one pass; the calls have at least one token each, and no long piece of a prompt. Returns
        logits (rows, vocab) of each."""
        sequences: list[Any] = [call.sequence for call in calls]
        caches, trees = [sequence.cache for sequence in sequences], [hf_joint.grown(call) for call in calls]
        rows, engine = [call.rows for call in calls], self.engine
        if engine.cpu_forward is None:
            given = [moved(as_tensor(call.tokens), engine.device) for call in calls]
            logits = self._by_parts(list(map(hf_joint.Part, given, rows, caches, trees)))
        else:
            listed = [c.tokens if isinstance(c.tokens, list) else c.tokens.tolist() for c in calls]
            own = list(map(cpu_joint.Part, listed, rows, caches, trees))
            logits = cpu_joint.extend_together(engine.cpu_forward, own, self._logits)
        for sequence, tree in zip(sequences, trees, strict=True):
            sequence.tree = tree or NO_TREE
        return logits

    @torch.inference_mode()
    def _by_parts(self, parts: list[hf_joint.Part]) -> list[torch.Tensor]:
        """The logits (rows, vocab) of each part: in one pass, or, where passes over several texts are recorded, in
        recorded passes over the short parts, and one over the rest (trees, pieces of prompts)."""
        recorded = self.engine.recorded
        if recorded is None or not recorded.shares:
            return hf_joint.extend_together(self.engine, parts)
        short: list[hf_joint.Part] = []
        rest: list[hf_joint.Part] = []
        for part in parts:
            (short if part.tree is None and len(part.tokens) <= SHARED[-1] else rest).append(part)
        found: dict[int, torch.Tensor] = {}
        for first in range(0, len(short), MOST_TEXTS):
            some = short[first : first + MOST_TEXTS]
            logits = recorded.together([part.tokens for part in some], [part.cache for part in some])
            if logits is None:
                rest += some
                continue
            rows = (one[len(one) - part.rows :] for one, part in zip(logits, some, strict=True))
            found |= {id(part): one.clone() for part, one in zip(some, rows, strict=True)}  # the next pass overwrites
        if len(rest) == 1 and rest[0].tree is None:
            found[id(rest[0])] = self.engine.forward(rest[0].tokens, rest[0].rows, rest[0].cache)
        elif rest:
            found |= dict(zip(map(id, rest), hf_joint.extend_together(self.engine, rest), strict=True))
        return [found[id(part)] for part in parts]

    def propose(self, calls: Several[tuple[Sequence, ProposalCall]]) -> list[Proposed]:
        """Make several proposals; see ``ProposesTogether``."""
        sequences: list[Any] = [sequence for sequence, _ in calls]
        forward = self.engine.cpu_forward
        if forward is None or not forward.fused or len(calls) < 2:
            return [sequence.propose(call) for sequence, (_, call) in zip(sequences, calls, strict=True)]
        drafts = [sequence.draft(call) for sequence, (_, call) in zip(sequences, calls, strict=True)]
        return cpu_joint.propose_together(forward, drafts)
