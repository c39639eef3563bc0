"""Drafting ahead: while the target verifies a proposal, the draft continues behind its likely outcomes.

In: a proposal that was made, and time for steps of one pass of the draft each. Out: the next proposal, or its
beginning, if the outcome was one of those; otherwise only the time of these passes is lost.

For chains, the draft makes a chain behind each likely outcome (``outcomes.py``). If its engine makes no passes over
trees, it makes one chain, behind all proposed tokens and a guess of the token that the target adds. A tree is extended
best first: the token that the target adds behind one of its nodes is probably among the next likeliest nodes of the
same tree. The result is as exact as a draft that is made later: chains are drawn from the distributions that are handed
over with them, whatever the target draws before, and nodes of a tree are not drawn at all. While the target reads a
prompt, the draft continues behind the likely first tokens in the same way.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from adaptive.control.costs import LONGEST
from adaptive.control.policy import Advice, Adviser
from adaptive.drafting.model import ModelDrafter, PreparesProposals
from adaptive.drafting.outcomes import SLICE, Behind, ChainAhead, advised, compact, rows_of, size_of, stacked
from adaptive.drafting.proposal import Proposal
from adaptive.drafting.tree import Tree, TreeDrafter
from adaptive.engines.protocol import Engine
from adaptive.tokens import as_list

logger = logging.getLogger("adaptive.drafting")

# Most nodes of a tree that grows while it is verified. Too low: rarer outcomes are missed. Too high: it takes memory
# and, if target and draft share processors, time of the target.
NODES = 512
# Most tokens considered behind each of these nodes. Too low: more of the target's tokens are missed. Too high: slower.
SIBLINGS = 64


class GuessAhead(ModelDrafter):
    """A model that drafts chains, and ahead by ``step`` behind one guess. It works with any engine."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._given: list[int] = []  # the committed text: the caller's list, which grows
        self._text: list[int] = []  # the committed text at the last proposal, and the proposed tokens
        self._ahead: list[int] = []  # the guessed next token, and the tokens drafted behind it
        self._rows: list[Any] = []  # the distributions that these were drawn from
        self._sure: list[float] = []  # the draft's confidence in each
        self._most = 0

    def propose(self, committed: list[int], length: int, advise: Adviser | None = None) -> Proposal | None:
        """See ``ModelDrafter``; the beginning may be drafted already. Nothing is drafted ahead if the logits processor
        is active, since the verifier uses that at the same time."""
        if self._adjusts:
            self._forget_guess()
            return self._proposed(committed, super().propose(committed, length, advise), 0)
        tokens, rows, ended = list[int](), list[Any](), False
        if self._guessed(committed):
            tokens, rows, ended = advised(self._ahead[1:], self._rows[1:], self._sure[1:], length, advise)
            # More may be ready than are asked for.
            self.sequence.rollback(min(self.sequence.length, len(committed) + len(tokens) - 1))
        else:
            self._forget_guess()
        if not ended and len(tokens) < length:
            behind = advise if advise is None or not tokens else Behind(advise, len(tokens))
            more = self.go_on(committed, tokens, length - len(tokens), behind)
            more = None if more is None else more.closed()
            if more is not None:
                tokens, rows = tokens + as_list(more.tokens), rows + rows_of(more)
        return self._proposed(committed, Proposal(self.name, tokens, stacked(rows)) if tokens else None, length)

    def feed(self, committed: list[int], most: int) -> None:
        """See ``ModelDrafter``."""
        self._forget_guess()
        super().feed(committed, most)

    def _forget_guess(self) -> None:
        """Drop what was drafted ahead and is not used. A guess that came true is still in the cache if others drafted
        the rounds since then."""
        if self._ahead:
            self._drop_guess()
            self.sequence.rollback(min(self.sequence.length, len(self._text)))

    def _drop_guess(self) -> None:
        self._ahead, self._rows, self._sure = [], [], []

    def _guessed(self, committed: list[int]) -> bool:
        """Whether the committed text is the one that was guessed."""
        held = len(self._text)
        near = len(self._ahead) > 1 and len(committed) == held + 1 and committed[held] == self._ahead[0]
        return near and committed[:held] == self._text

    def _proposed(self, committed: list[int], proposal: Proposal | None, length: int) -> Proposal | None:
        self._drop_guess()
        self._given, self._most = committed, 0 if proposal is None else length
        self._text = list(committed) if proposal is None else [*committed, *as_list(proposal.tokens)]
        return proposal

    def step(self) -> bool:
        """Draft one token ahead. Returns whether there are more to draft."""
        behind = [*self._text, *self._ahead]
        if len(self._ahead) > self._most or not self._most or self.limit(len(behind)) < 1:
            return False
        drafted = super().propose(behind, 1, self._note)
        if drafted is None:
            return False
        self._ahead += as_list(drafted.tokens)
        self._rows += [None if row is None else compact(row) for row in rows_of(drafted)]
        return len(self._ahead) <= self._most

    def _note(self, position: int, confidence: float) -> Advice:
        """An adviser that keeps the confidence."""
        self._sure.append(confidence)
        return Advice.MORE

    @property
    def memory(self) -> int:
        """Bytes of the distributions drafted ahead."""
        return sum(map(size_of, self._rows))

    def rollback(self, length: int) -> None:
        """Drop rejected tokens and everything drafted behind them. If the guess has come true, everything stays until
        others have drafted: then the text behind the guess is not the one in the cache."""
        if not (length >= len(self._text) and self._guessed(self._given)):
            stands = min(length, len(self._text)) if self._ahead else length
            self._drop_guess()
            super().rollback(stands)


class TreeAhead(TreeDrafter):
    """A model that drafts trees, and ahead by ``step``."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._tree: Tree | None = None  # of the last proposal, extended since then
        self._text: list[int] = []  # the text before the tree
        self._expects = False  # the target is reading that text, and the tree is still to be made

    def expect(self, text: list[int], most: int) -> None:
        """Prepare drafting ahead behind ``text``, which the target is about to read."""
        fits = len(text) < self.engine.context_length
        self._tree, self._text, self._expects = None, list(text), fits and not self._adjusts

    def propose(self, committed: list[int], length: int, advise: Adviser | None = None) -> Proposal | None:
        """See ``TreeDrafter``; part of the tree may be drafted already."""
        known = self._continued(committed, length)
        self._tree, self._expects = None, False
        if self._adjusts:  # nothing is drafted ahead: the verifier uses the logits processor at the same time
            return super().propose(committed, length, advise)
        tree = self._grown(committed, length, advise, known)
        self._tree, self._text = tree, list(committed)
        return self._chosen(tree, advise)

    def feed(self, committed: list[int], most: int) -> None:
        """See ``ModelDrafter``. What is fed drops the tree from the cache, and is not to be kept as the text before
        it."""
        self._tree, self._expects = None, False
        super().feed(committed, most)

    def _continued(self, committed: list[int], length: int) -> Tree | None:
        """The part of the last tree behind the committed text; the cache keeps the tree's tokens that are in the text.
        None if the draft has not computed what follows the text's last token."""
        tree, held = self._tree, len(self._text)
        if tree is None or committed[:held] != self._text or self.sequence.length != held:
            return None
        path = tree.path(committed[held:])
        kept = [tree.number[node] for node in path if node in tree.number]
        if kept:
            self.sequence.keep(kept)
        if len(path) < len(committed) - held or not path:
            return None
        return tree.behind(path[-1], length)

    def step(self) -> bool:
        """Read a part of the expected text, or extend the likeliest nodes that were not extended yet. Returns whether
        there is more to do."""
        tree, self._tree = self._tree, None  # so that a failed tree is not used
        if self._expects:
            self._expects = False
            self.sequence.rollback(min(self.sequence.length, len(self._text) - 1))
            if self.unseen(len(self._text)) > SLICE:
                self.feed(self._text, SLICE)
                self._expects = True
                return True
            tree = self._rooted(self._text, SIBLINGS)
            self._tree = tree
            return True
        if tree is None:
            return False
        tree.widen(NODES)
        room = self.engine.context_length - len(self._text)
        nodes = tree.unasked(min(self.depth, room), max(0, min(self.width, NODES - len(tree.number))))
        if len(nodes):
            self._ask(tree, nodes, len(self._text), SIBLINGS)
        self._tree = tree
        return len(nodes) > 0

    def rollback(self, length: int) -> None:
        """Keep the tree while the text before it stands: ``propose`` finds out which of its nodes were accepted."""
        if self._tree is None or length < len(self._text):
            self._tree, self._expects = None, False
            super().rollback(length)


DraftsAhead = ChainAhead | GuessAhead | TreeAhead


def drafts_ahead(engine: Engine, tree: bool) -> type[DraftsAhead]:
    """The drafter class that drafts ahead with this engine, trees or chains."""
    if tree:
        return TreeAhead
    return ChainAhead if engine.trees else GuessAhead


class Worker:
    """A thread that runs steps while the caller does something else."""

    def __init__(self) -> None:
        self._step: Callable[[], bool] | None = None
        self._wake, self._stepping = threading.Condition(), threading.Lock()
        self._thread: threading.Thread | None = None

    def go_on(self, step: Callable[[], bool]) -> None:
        """Repeat ``step`` until ``stop`` is called or it returns False. Does nothing while there can be no more
        threads."""
        with self._wake:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="drafts ahead", daemon=True)
                try:
                    thread.start()
                except RuntimeError:
                    return
                self._thread = thread
            self._step = step
            self._wake.notify()

    def stop(self) -> bool:
        """Stop the steps. When this returns, no step is running and none will start. Returns whether some were left."""
        going, self._step = self._step is not None, None
        with self._stepping:
            pass
        return going

    def _run(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._step is not None)
            with self._stepping:
                step = self._step
                if step is None or self._goes_on(step):
                    continue
                if self._step is step:
                    self._step = None

    def _goes_on(self, step: Callable[[], bool]) -> bool:
        try:
            with torch.inference_mode():
                return step()
        except Exception:  # of any kind: nothing waits for what is drafted ahead
            logger.exception("drafting ahead failed")
            return False


class AheadDrafter:
    """A drafter that drafts ahead, on the thread of a ``worker``, while the target verifies its proposal.

    ``waited_s`` are the seconds that the caller waited for proposals, ``ahead_s`` those spent drafting ahead.
    """

    def __init__(self, drafter: DraftsAhead, worker: Worker) -> None:
        self.drafter, self.worker, self.name = drafter, worker, drafter.name
        self.waited_s = self.ahead_s = 0.0

    @property
    def sentence(self) -> str:
        """The seconds spent drafting, and their share while the target verified, in words."""
        spent = self.waited_s + self.ahead_s
        share = f", {self.ahead_s / spent:.0%} of it while the target verified" if spent else ""
        return f"drafting took {spent:.1f} s{share}"

    def prepare(self, length: int, advise: Adviser | None) -> None:
        """See ``PreparesProposals``."""
        if isinstance(self.drafter, PreparesProposals):
            going = self.worker.stop()
            self.drafter.prepare(length, advise)
            if going:
                self.worker.go_on(self._step)

    def begin(self, prompt: list[int]) -> None:
        """Draft ahead while the target reads the prompt."""
        if not isinstance(self.drafter, GuessAhead):
            self.worker.stop()
            self.drafter.expect(prompt, LONGEST)
            self.worker.go_on(self._step)

    def limit(self, committed: int) -> int:
        """See ``Drafter``."""
        return self.drafter.limit(committed)

    def unseen(self, committed: int) -> int:
        """See ``Drafter``."""
        return self.drafter.unseen(committed)

    def feed(self, committed: list[int], most: int) -> None:
        """See ``Drafter``."""
        self.worker.stop()
        self.drafter.feed(committed, most)

    def propose(self, committed: list[int], length: int, advise: Adviser | None = None) -> Proposal | None:
        """See ``Drafter``. The drafter then drafts ahead."""
        began = time.perf_counter()
        self.worker.stop()
        proposal = self.drafter.propose(committed, length, advise)
        self.waited_s += time.perf_counter() - began
        if proposal is not None:
            self.worker.go_on(self._step)
        return proposal

    def _step(self) -> bool:
        began, threads = time.perf_counter(), self.drafter.engine.threads
        if threads is not None:
            threads.held = 1  # the other cores are the target's
        try:
            return self.drafter.step()
        finally:
            if threads is not None:
                threads.held = None
            self.ahead_s += time.perf_counter() - began

    def reserve(self, length: int) -> None:
        """See ``Drafter``."""
        self.worker.stop()
        self.drafter.reserve(length)

    def rollback(self, length: int) -> None:
        """See ``Drafter``. The target has verified, so drafting ahead stops: the caller may use the draft now."""
        self.worker.stop()
        self.drafter.rollback(length)
