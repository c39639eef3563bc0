"""Drafting ahead: while the target verifies a proposal, the draft goes on behind what is likely to come of it.

In: a proposal that was made, and time, in steps of a pass of the draft each. Out: the next proposal, as far as it is
there when what was guessed has happened; else nothing is lost but that time.

Behind a chain chains are drafted, behind each of its likely outcomes (``outcomes.py``); where the draft makes no passes
over trees, behind all of its tokens and a guess of the one that the target adds. A tree goes on growing, best
first: what may come next is a token that the target adds behind one of its nodes, and such tokens are the next
likeliest nodes of the same tree. What is kept is as exact as what is drafted later: chains are drawn from the
distributions that go with them, whatever the target draws before, and nodes of a tree are not drawn at all. While the
target reads a prompt, what is likely to come first is drafted behind in the same way.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from adaptive.control.costs import LONGEST
from adaptive.control.policy import Adviser
from adaptive.drafting.model import ModelDrafter
from adaptive.drafting.outcomes import ChainAhead, rows_of, stacked
from adaptive.drafting.proposal import Proposal
from adaptive.drafting.tree import Tree, TreeDrafter
from adaptive.engines.protocol import Engine
from adaptive.tokens import as_list

logger = logging.getLogger("adaptive.drafting")

# Nodes up to which a tree grows while it is verified. More find the rarer outcomes, and take memory and, where target
# and draft share processors, time of the target's.
NODES = 512
# Tokens that are looked at behind each of these nodes. Fewer miss more of what the target says, more take longer.
SIBLINGS = 64


class GuessAhead(ModelDrafter):
    """A model that drafts chains, and ahead in ``step``s behind one guess, of any engine."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._given: list[int] = []  # the committed text, as the caller goes on with it
        self._text: list[int] = []  # that and the proposal behind it
        self._ahead: list[int] = []  # the guess of the next token, and what follows it
        self._rows: list[Any] = []  # distributions that these were drawn from
        self._most = 0

    def propose(self, committed: list[int], length: int, advise: Adviser | None = None) -> Proposal | None:
        """As of a model, of which the beginning may be there. Nothing is drafted ahead where ``advise`` is asked, or
        logits change with the text: the verifier needs what changes them at the same time."""
        if advise is not None or self._adjusts:
            self._ahead, self._rows = [], []
            return self._proposed(committed, super().propose(committed, length, advise), 0)
        ready, rows = (self._ahead[1:], self._rows[1:]) if self._guessed(committed) else ([], [])
        tokens, rows = ready[:length], rows[:length]
        if len(tokens) < length:
            more = super().propose([*committed, *tokens], length - len(tokens))
            more = None if more is None else more.closed()
            if more is not None:
                tokens, rows = tokens + as_list(more.tokens), rows + rows_of(more)
        return self._proposed(committed, Proposal(self.name, tokens, stacked(rows)) if tokens else None, length)

    def _guessed(self, committed: list[int]) -> bool:
        """Whether the text is what was guessed."""
        held = len(self._text)
        near = len(self._ahead) > 1 and len(committed) == held + 1 and committed[held] == self._ahead[0]
        return near and committed[:held] == self._text

    def _proposed(self, committed: list[int], proposal: Proposal | None, length: int) -> Proposal | None:
        self._ahead, self._rows = [], []
        self._given, self._most = committed, 0 if proposal is None else length
        self._text = list(committed) if proposal is None else [*committed, *as_list(proposal.tokens)]
        return proposal

    def step(self) -> bool:
        """Draft one token ahead; whether there are more."""
        behind = [*self._text, *self._ahead]
        if len(self._ahead) > self._most or not self._most or self.limit(len(behind)) < 1:
            return False
        drafted = super().propose(behind, 1)
        if drafted is None:
            return False
        self._ahead += as_list(drafted.tokens)
        self._rows += rows_of(drafted)
        return len(self._ahead) <= self._most

    def rollback(self, length: int) -> None:
        """What did not stand is forgotten; all stands where what was guessed has happened."""
        if not (length >= len(self._text) and self._guessed(self._given)):
            self._ahead, self._rows = [], []
            super().rollback(length)


class TreeAhead(TreeDrafter):
    """A model that drafts trees, and ahead in ``step``s."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._tree: Tree | None = None  # of the last proposal, grown since
        self._text: list[int] = []  # behind which it stands
        self._expects = False  # the target reads that text, and nothing is known of what follows

    def expect(self, text: list[int], most: int) -> None:
        """The target reads ``text``: what comes next can be drafted meanwhile."""
        fits = len(text) < self.engine.context_length
        self._tree, self._text, self._expects = None, list(text), fits and not self._adjusts

    def propose(self, committed: list[int], length: int, advise: Adviser | None = None) -> Proposal | None:
        """As of a model that drafts trees, of which a part may be there."""
        known = self._continued(committed, length)
        self._tree, self._expects = None, False
        if self._adjusts:
            return super().propose(committed, length, advise)
        tree = self._grown(committed, length, known)
        self._tree, self._text = tree, list(committed)
        return tree.proposal()

    def _continued(self, committed: list[int], length: int) -> Tree | None:
        """Of the last tree what stands behind the text, whose tokens of that tree are kept in the cache; None where the
        draft was not asked about its last one."""
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
        """Ask the draft about the likeliest nodes that it was not asked about; whether there are more."""
        tree, self._tree = self._tree, None  # where this fails, nobody goes on with it
        if self._expects:
            self._expects, tree = False, Tree(NODES)
            self.sequence.rollback(min(self.sequence.length, len(self._text) - 1))
            logits = self.sequence.extend(self._unseen(self._text), 1)
            tree.add(torch.tensor([-1]), *self._likeliest(logits, SIBLINGS), torch.zeros(1))
            self._tree = tree
            return True
        if tree is None:
            return False
        tree.widen(NODES)
        room = self.engine.context_length - len(self._text)
        nodes = tree.unasked(min(self.depth, room), min(self.width, NODES - len(tree.number)))
        if len(nodes):
            self._ask(tree, nodes, SIBLINGS)
        self._tree = tree
        return len(nodes) > 0

    def rollback(self, length: int) -> None:
        """What stands of the tree is seen when the next proposal is asked for."""
        if self._tree is None or length < len(self._text):
            self._tree, self._expects = None, False
            super().rollback(length)


DraftsAhead = ChainAhead | GuessAhead | TreeAhead


def drafts_ahead(engine: Engine, tree: bool) -> type[DraftsAhead]:
    """The drafter that drafts ahead with this engine, trees or chains."""
    if tree:
        return TreeAhead
    return ChainAhead if engine.trees else GuessAhead


class Worker:
    """A thread that goes on in steps, while whoever gives them does something else."""

    def __init__(self) -> None:
        self._step: Callable[[], bool] | None = None
        self._wake, self._stepping = threading.Condition(), threading.Lock()
        self._thread: threading.Thread | None = None

    def go_on(self, step: Callable[[], bool]) -> None:
        """Step, until it is stopped, or there are no more."""
        with self._wake:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="drafts ahead", daemon=True)
                self._thread.start()
            self._step = step
            self._wake.notify()

    def stop(self) -> None:
        """No step is under way when this returns, and none begins."""
        self._step = None
        with self._stepping:
            pass

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
        except Exception:  # whatever it is: what is drafted ahead is nothing that anybody waits for
            logger.exception("drafting ahead failed")
            return False


class Beside:
    """A drafter that goes on, on a ``worker``'s thread, while the target verifies what it proposed.

    ``waited_s`` and ``ahead_s`` are seconds that proposals were waited for, and that was drafted meanwhile.
    """

    def __init__(self, drafter: DraftsAhead, worker: Worker) -> None:
        self.drafter, self.worker, self.name = drafter, worker, drafter.name
        self.waited_s = self.ahead_s = 0.0

    @property
    def sentence(self) -> str:
        """How much of the draft's time the target did not wait for, in words."""
        spent = self.waited_s + self.ahead_s
        share = f", {self.ahead_s / spent:.0%} of it while the target verified" if spent else ""
        return f"drafting took {spent:.1f} s{share}"

    def begin(self, prompt: list[int]) -> None:
        """Draft while the target reads the prompt."""
        if not isinstance(self.drafter, GuessAhead):
            self.worker.stop()
            self.drafter.expect(prompt, LONGEST)
            self.worker.go_on(self._step)

    def limit(self, committed: int) -> int:
        """As of the drafter."""
        return self.drafter.limit(committed)

    def catch_up(self, committed: int) -> int:
        """As of the drafter."""
        return self.drafter.catch_up(committed)

    def feed(self, committed: list[int], most: int) -> None:
        """As of the drafter."""
        self.worker.stop()
        self.drafter.feed(committed, most)

    def propose(self, committed: list[int], length: int, advise: Adviser | None = None) -> Proposal | None:
        """As of the drafter, which then goes on."""
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
            threads.held = 1  # the others are the target's
        try:
            return self.drafter.step()
        finally:
            if threads is not None:
                threads.held = None
            self.ahead_s += time.perf_counter() - began

    def reserve(self, length: int) -> None:
        """As of the drafter."""
        self.worker.stop()
        self.drafter.reserve(length)

    def rollback(self, length: int) -> None:
        """The target has verified: from here on whoever decodes may use the draft."""
        self.worker.stop()
        self.drafter.rollback(length)
