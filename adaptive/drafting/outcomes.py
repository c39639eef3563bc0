"""Drafting chains ahead: behind every likely outcome of a verification, the likeliest first.

A verification of a chain accepts some of its tokens and adds another one: that is an outcome. Its probability follows
from the calibrated confidence of the tokens (``control/confidence.py``) and, for a rejected token, from the draft's
other likely tokens. Behind each outcome the draft makes the chain that it would propose there, several of them with one
pass per token: they form a tree in its cache, of which the path that came true is kept.

This does not change the text. A chain is drawn from the distributions that are handed over with it, before it is known
whether it will be used, and the choice of outcomes does not depend on the tokens drawn behind them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from adaptive.control.confidence import Calibration, bin_of
from adaptive.control.policy import Advice, Adviser
from adaptive.drafting.model import ModelDrafter
from adaptive.drafting.proposal import Proposal
from adaptive.sampling import Transform
from adaptive.tokens import as_array, as_list

# Outcomes that are drafted behind in one pass, and tokens considered at one place. More outcomes per pass take less
# time each, but the next proposal waits longer for the pass. With fewer tokens, more of the target's are missed.
WIDTH, SIBLINGS = 16, 128
# Total probability of the outcomes to draft behind, and most tokens drafted behind one verification. Too low: rarer
# outcomes are missed. Too high: it takes memory and processor time.
COVERED, NODES = 0.999, 1024
# Bytes of distributions from which on nothing more is drafted behind a verification. One over a whole vocabulary of
# 150,000 takes 0.6 MB, one of its 256 likeliest tokens 3 kB. Too low: where distributions are not cut, rarer outcomes
# are missed. Too high: memory that ``--memory`` does not count.
MOST_BYTES = 1 << 26
# Tokens of a text that one step reads. Too high: whoever stops the steps waits longer for the one that runs. Too low:
# the draft's weights are read more often.
SLICE = 128


@dataclass(slots=True, eq=False)
class Outcome:
    """The outcome that ``stood`` tokens of a chain are accepted and ``token`` follows, with its probability ``likely``.
    Of each of the ``tokens`` drafted behind it: the draft's confidence (``sure``) and its distribution (``rows``).
    ``first`` is the node of ``token`` in the draft's cache, -1 before it is there; ``last`` the node behind which the
    next token comes."""

    stood: int
    token: int
    likely: float
    last: int
    first: int = -1
    tokens: list[int] = field(default_factory=list)
    sure: list[float] = field(default_factory=list)
    rows: list[Any] = field(default_factory=list)


class ChainAhead(ModelDrafter):
    """A model that drafts chains, and ahead by ``step``. Its engine must make passes over trees."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._own = Transform(self.params)  # with its own buffer: the verifier reads that of ``transform``
        self._calibration = Calibration()
        self._text: list[int] = []  # the text before the last proposal, and the proposed tokens
        self._chain: list[int] = []
        self._most = 0  # tokens to draft ahead behind an outcome
        self._begun: int | None = None  # tokens of the text that stand, once outcomes are known
        self._bins: list[int] = []  # of the confidence of each token of the chain
        self._found: dict[tuple[int, int], Outcome] = {}
        self._ahead: list[Outcome] = []  # not drafted behind yet, the likeliest last
        self._group: list[Outcome] = []  # being drafted behind now
        self._nodes = 0
        self.memory = 0  # bytes of the distributions drafted ahead

    def expect(self, text: list[int], most: int) -> None:
        """Prepare drafting ahead while the target reads ``text``: ``most`` tokens behind each likely first token."""
        self._forget()
        self._text, self._chain, self._most = list(text), [], 0 if self._adjusts else most

    def propose(self, committed: list[int], length: int, advise: Adviser | None = None) -> Proposal | None:
        """See ``ModelDrafter``; the beginning may be drafted already. Nothing is drafted ahead if the logits processor
        is active, since the verifier uses that at the same time."""
        outcome = self._happened(committed)
        self._forget()
        if self._adjusts:
            self._most = 0
            return super().propose(committed, length, advise)
        tokens, rows, ended = list[int](), list[Any](), False
        if outcome is not None:
            tokens, rows, ended = advised(outcome.tokens, outcome.rows, outcome.sure, length, advise)
        if not ended and len(tokens) < length:
            behind = advise if advise is None or not tokens else Behind(advise, len(tokens))
            more = self.go_on(committed, tokens, length - len(tokens), behind)
            more = None if more is None else more.closed()
            if more is not None:
                tokens, rows = tokens + as_list(more.tokens), rows + rows_of(more)
        self._text, self._chain, self._most = list(committed), tokens, length
        return Proposal(self.name, tokens, stacked(rows)) if tokens else None

    def _happened(self, committed: list[int]) -> Outcome | None:
        """The last proposal's outcome, if it was drafted behind. The cache keeps the nodes that are in the text."""
        held = len(self._text)
        if self._begun is None or self.sequence.length != held or committed[:held] != self._text:
            return None
        said = committed[held:]
        pairs = enumerate(zip(said[:-1], self._chain, strict=False))
        stood = next((i for i, (a, b) in pairs if a != b), min(len(said) - 1, len(self._chain)))
        if stood < 0:
            return None
        self._calibration.observe(self._bins, len(self._chain), stood)
        self._calibration.calibrate()
        outcome = self._found.get((stood, said[stood])) if len(said) == stood + 1 else None
        if outcome is not None and not outcome.tokens:
            outcome = None
        path = [*range(stood), *([] if outcome is None else [outcome.first])]
        if path:
            self.sequence.keep(path)
        return outcome

    def _forget(self) -> None:
        self._begun, self.memory = None, 0
        self._found, self._ahead, self._group = {}, [], []

    def step(self) -> bool:
        """Read a part of the text, find the outcomes, or draft one token more behind some of them. Returns whether
        there is more to do."""
        if not self._most:
            return False
        begun, self._begun = self._begun, None  # so that nothing is used after a failure
        if begun is None:
            if not self._has_room():
                return False
            self.sequence.rollback(min(self.sequence.length, len(self._text) - 1))
            if self.unseen(len(self._text)) > SLICE:
                super().feed(self._text, SLICE)
                return True
            self._begin()
        else:
            self._grow()
        self._begun = len(self._text) if begun is None else begun
        if self.memory >= MOST_BYTES:
            return False
        if self._group and len(self._group[0].tokens) < self._most:
            return True
        room = self.engine.context_length - len(self._text)
        count = min(WIDTH, room, (NODES - self._nodes) // self._most, len(self._ahead))
        self._group = [self._ahead.pop() for _ in range(count)]
        return count > 0

    def _has_room(self) -> bool:
        """Whether anything can be drafted behind the text and the chain; limits the tokens to draft to the room."""
        room = self.engine.context_length - len(self._text) - len(self._chain) - 1
        self._most = max(0, min(self._most, room))
        return self._most > 0

    def _begin(self) -> None:
        """Let the draft read the remaining unseen tokens and find the outcomes."""
        text, chain = self._text, self._chain
        rows = [self._probabilities(self.sequence.extend(self._to_feed(text), 1))]
        if chain:
            known = self.engine.vocab_size - 1
            fed = [min(token, known) for token in chain]
            rows.append(self._probabilities(self.sequence.extend(fed, len(fed), list(range(-1, len(fed) - 1)))))
        self._nodes = len(chain)
        self._found = {(one.stood, one.token): one for one in self._outcomes(torch.cat(rows))}
        self._ahead = [*self._found.values()][::-1]

    def _probabilities(self, logits: torch.Tensor) -> torch.Tensor:
        """The distributions of logits (n, vocab), on the CPU."""
        logits = logits[:, : self.target_vocab]
        if self.params.greedy:
            return logits.float().softmax(-1).cpu()
        return self._own(logits).clone().cpu()

    def _outcomes(self, rows: torch.Tensor) -> list[Outcome]:
        """The likeliest outcomes, in order, from the distributions (chain + 1, vocab) of the chain's tokens and the
        token after it."""
        chain, table = self._chain, self._calibration.table
        self._bins = [bin_of(sure) for sure in rows[: len(chain)].amax(-1).tolist()]
        found, there = list[Outcome](), 1.0
        most = rows.topk(min(SIBLINGS, rows.shape[1]), -1)
        for stood, (shares, tokens) in enumerate(zip(most.values.tolist(), most.indices.tolist(), strict=True)):
            behind, stands, own = there, 0.0, -1
            if stood < len(chain):
                own, stands = chain[stood], table[self._bins[stood]]
                behind *= (1 - stands) / max(1 - float(rows[stood, own]), 1e-9)
            found += [
                Outcome(stood, token, behind * share, stood - 1)
                for share, token in zip(shares, tokens, strict=True)
                if token != own and share > 0
            ]
            there *= stands
        found.sort(key=lambda one: -one.likely)
        covered = 0.0
        for count, one in enumerate(found, 1):
            covered += one.likely
            if covered >= COVERED:
                return found[:count]
        return found

    def _grow(self) -> None:
        """Draft one token more behind each outcome of the group."""
        group, known = self._group, self.engine.vocab_size - 1
        if not group:
            return
        fed = [min(one.tokens[-1] if one.tokens else one.token, known) for one in group]
        logits = self.sequence.extend(fed, len(fed), [one.last for one in group])
        for one in group:
            one.last, self._nodes = self._nodes, self._nodes + 1
            if one.first < 0:
                one.first = one.last
        logits = logits[:, : self.target_vocab]
        if self.params.greedy:
            best = logits.float().softmax(-1).max(-1)
            for one, share, token in zip(group, best.values.tolist(), best.indices.tolist(), strict=True):
                one.tokens.append(token)
                one.sure.append(share)
            return
        probs = self._own(logits)
        arrays, sure = as_array(probs), probs.amax(-1).tolist()
        for index, one in enumerate(group):
            row = slice(index, index + 1)
            place = len(self._text) + one.stood + 1 + len(one.tokens)
            token = self._draw(probs[row], None if arrays is None else arrays[row], place)
            one.tokens += as_list(token)
            one.sure.append(sure[index])
            one.rows.append(None if self.params.seeded else compact(probs[index]))
            self.memory += size_of(one.rows[-1])

    def unseen(self, committed: int) -> int:
        """See ``ModelDrafter``. Tokens that the cache will hold at the next proposal count as held."""
        return committed - 1 - max(self.sequence.length, self._begun or 0)

    def feed(self, committed: list[int], most: int) -> None:
        """See ``ModelDrafter``."""
        self._forget()
        super().feed(committed, most)

    def rollback(self, length: int) -> None:
        """Keep the outcomes while the text before the chain stands: ``propose`` finds out which came true."""
        if self._begun is not None and length >= len(self._text):
            self._begun = length
            return
        self._forget()
        self._most = 0
        super().rollback(length)


class Behind:
    """An adviser for tokens that come after ``before`` others of the same draft."""

    def __init__(self, advise: Adviser, before: int) -> None:
        self.advise, self.before = advise, before

    def __call__(self, position: int, confidence: float) -> Advice:
        return self.advise(position + self.before, confidence)


def advised(
    tokens: list[int], rows: list[Any], sure: list[float], length: int, advise: Adviser | None
) -> tuple[list[int], list[Any], bool]:
    """Of tokens drafted ahead, with the distributions and the draft's confidence: at most ``length``, as far as the
    adviser accepts them, and whether the adviser ended the draft."""
    most = min(length, len(tokens))
    if advise is not None:
        for count in range(most):
            advice = advise(count + 1, sure[count])
            if advice is not Advice.MORE:
                kept = count + (advice is Advice.LAST)
                return tokens[:kept], rows[:kept], True
    return tokens[:most], rows[:most], False


def rows_of(proposal: Proposal) -> list[Any]:
    """A proposal's distributions, valid until the next proposal; None for each token if there are none."""
    if proposal.probs is None:
        return [None] * len(proposal.tokens)
    return [torch.as_tensor(row) for row in proposal.probs]


def compact(row: torch.Tensor) -> torch.Tensor:
    """A copy of a distribution (vocab,), sparse if that takes less memory."""
    sparse = int(row.count_nonzero()) * (torch.long.itemsize + row.itemsize)  # an index with each number
    return row.to_sparse() if sparse < row.nbytes else row.clone()


def size_of(row: torch.Tensor | None) -> int:
    """The bytes of a distribution, sparse or not; 0 for None."""
    if row is None or not row.is_sparse:
        return 0 if row is None else row.nbytes
    return row._indices().nbytes + row._values().nbytes


def stacked(rows: list[Any]) -> torch.Tensor | None:
    """The distributions of a chain as one tensor; None if nothing was drawn."""
    return None if not rows or rows[0] is None else torch.stack([row.to_dense() for row in rows])
