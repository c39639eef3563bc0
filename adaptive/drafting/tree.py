"""A draft model that drafts a tree: the texts that it finds likeliest, best first, to be verified in one pass.

The nodes are the texts that the target will most probably produce, as far as the draft can tell; none is drawn. A token
that the target chooses after a node is followed if it is a node too. Verification goes as deep as the target's own
choices stay within the tree, and is exact with all sampling parameters (as in SpecExec: Svirschevski et al. 2024).

**Sampled answers are decoded under a seed**, a secret one if the user gave none (``Assistant.begin``). The noise that
decides the target's choices (``adaptive/noise.py``) is then known to the draft before they are made: the token of
largest log q + Gumbel noise is its guess, the next largest its second guess (below a temperature of 1, log q counts a
little more: ``LIKELY``). If log q differs from the target's log p by independent Gumbel errors, the softmax of these
sums is the probability of each guess; by it the texts are ordered.
Without the noise a likely token is a guess as good as its probability, however good the draft is: at temperature 0.7
the first four are chosen in 54 of 100 places of role play, and in 74 with it; at 1.0 in 38 and in 78
(docs/notes/2026-11-streamed.md).
"""

from __future__ import annotations

import math
import time
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from adaptive.control.policy import Advice, Adviser, TreeAdviser
from adaptive.drafting.model import ModelDrafter
from adaptive.drafting.proposal import Proposal
from adaptive.drafting.protocol import Proposing
from adaptive.noise import noise
from adaptive.sampling import alone_if_few
from adaptive.tokens import floats
from adaptive.types import TREE

Ints: TypeAlias = npt.NDArray[np.int64]
LogProbs: TypeAlias = npt.NDArray[np.float32]

# Nodes of one depth that one pass of the draft extends, and the greatest depth that is extended, also where an adviser
# says of each pass whether it is worth its time. Higher: large trees become likelier, and take longer.
WIDTH, DEPTH, ADVISED_DEPTH = 16, 16, 32
# Most tokens after a node that are looked at. Too low: nodes are missed after a node at which the draft is unsure. Too
# high: ordering them takes as long as a pass of the draft.
CHILDREN = 32
# Factor on log q beside the noise at temperatures below 1. With it, trees brought up to 2% more tokens at 0.7, and
# up to 1.3% fewer at 1.0 (docs/notes/2026-11-streamed.md). Too low: the noise leads to tokens that the target would not
# choose. Too high: what the noise tells is lost.
LIKELY = 1.1


class TreeDrafter(ModelDrafter):
    """Drafts trees of the requested number of nodes. Its engine must make passes over trees."""

    width, depth, advised_depth = WIDTH, DEPTH, ADVISED_DEPTH

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._gumbel: dict[int, torch.Tensor] = {}  # the seed's Gumbel noise (1, vocab) by place in the text
        self._sharpness = 1.0

    def propose(self, committed: list[int], length: int, advise: Adviser | None = None) -> Proposal | None:
        """A tree of ``length`` (at least 1) nodes, or of those that ``advise`` wants: one pass of the draft per level,
        the first also over the tokens committed since the last proposal."""
        return self._chosen(self._grown(committed, length, advise), advise)

    def proposing(self, committed: list[int], length: int, advise: Adviser | None = None) -> Proposing:
        """As ``propose``; several answers' trees are made one after the other."""
        yield from ()
        return self.propose(committed, length, advise)

    @staticmethod
    def _chosen(tree: Tree, advise: Adviser | None) -> Proposal | None:
        if advise is None:
            return tree.proposal()
        asked = enumerate(np.exp(tree.scores[tree.best]).tolist(), 1)
        dropped = next((place for place, p in asked if advise(place, p) is Advice.DROP), None)
        return tree.proposal(None if dropped is None else dropped - 1)

    def _grown(self, committed: list[int], length: int, advise: Adviser | None, known: Tree | None = None) -> Tree:
        """The tree of the best nodes after the text, part of which may be ``known``."""
        self._gumbel = {place: row for place, row in self._gumbel.items() if place >= len(committed)}
        asks = advise if isinstance(advise, TreeAdviser) else None
        if asks is not None:
            self._sharpness = asks.sharpness
        tree = known or self._rooted(committed, length)
        tree.least = np.log(np.array([] if asks is None else asks.least, np.float32))
        if unseen := self._to_feed(committed):
            self.sequence.extend(unseen, 0)
        room = self.engine.context_length - len(committed)
        for level in range(1, min(self.depth if asks is None else self.advised_depth, room) + 1):
            if level > tree.deepest:
                break
            nodes = tree.to_expand(level, self.width)
            if not len(nodes) or (asks is not None and not asks.deeper(float(np.exp(tree.scores[nodes]).sum()))):
                continue
            began = time.perf_counter()
            self._ask(tree, nodes, len(committed), length)
            if asks is not None:
                asks.passed(time.perf_counter() - began)
        return tree

    def _rooted(self, committed: list[int], most: int) -> Tree:
        """A tree of at most ``most`` nodes, so far with the first tokens after the text."""
        tree, root = Tree(most), np.array([-1])
        logits = self._adjusted(self.sequence.extend(self._to_feed(committed), 1), tree, root)
        tree.add(root, *self._likeliest(logits, [len(committed)], most), np.zeros(1, np.float32))
        return tree

    def _ask(self, tree: Tree, nodes: Ints, text: int, most: int) -> None:
        """Let the draft compute what follows these nodes of a tree behind a text of ``text`` tokens, in one pass."""
        fed, parents = tree.asked(nodes)
        logits = self._adjusted(self.sequence.extend(tree.tokens[fed].tolist(), len(nodes), parents), tree, nodes)
        places = [text + depth for depth in tree.depths[nodes].tolist()]
        tree.add(nodes, *self._likeliest(logits, places, min(most, CHILDREN)), tree.scores[nodes])

    def _adjusted(self, logits: torch.Tensor, tree: Tree, nodes: Ints) -> torch.Tensor:
        """The logits (rows, vocab) behind ``nodes``, with the logits processor's changes; those of a grammar are by the
        path to each node."""
        logits = logits[:, : self.target_vocab].float()
        if not self._adjusts:
            return logits
        if self.processor.constraint is None:  # penalties for the tree's own tokens change little, and take long
            return self.processor.apply(logits, torch.empty(0, dtype=torch.long))
        paths = (torch.tensor(tree.text(node), dtype=torch.long) for node in nodes.tolist())
        rows = zip(logits.split(1), paths, strict=True)
        return torch.cat([self.processor.apply(row, path) for row, path in rows])

    def _likeliest(self, logits: torch.Tensor, places: list[int], most: int) -> tuple[LogProbs, Ints]:
        """For each row of logits, for a token at one of ``places`` in the text, the ``most`` tokens that the target
        will most probably choose: the logarithms of these probabilities (rows, k) and the ids, likeliest first."""
        most = min(most, logits.shape[1])
        factor, params = self._sharpness, self.params
        with alone_if_few(logits):
            if params.cuts:
                logits = self.transform(logits).log()
            elif not params.greedy:
                factor /= params.temperature
            if params.seeded:
                factor *= LIKELY if params.temperature < 1.0 else 1.0
                different = places[:1] if len(set(places)) == 1 else places
                noises = self._sharpness * torch.cat([self._noise(place, logits) for place in different])
                logits = torch.add(noises, logits, alpha=factor)
            else:
                logits = factor * logits
            kernels = self.transform.kernels
            if kernels is None or floats(logits) is None:
                top = logits.log_softmax(-1).topk(most, dim=-1)
                return top.values.cpu().numpy(), top.indices.cpu().numpy()
            rows = len(logits)
            ids, scores = np.empty((rows, most), np.int32), np.empty((rows, most), np.float32)
            rest = np.empty(rows, np.float32)
            kernels.likeliest_of(logits, rows, most, (ids.ctypes.data, scores.ctypes.data, rest.ctypes.data))
            return scores, ids.astype(np.int64)

    @property
    def memory(self) -> int:
        """Bytes of the noise that is kept for the next tree."""
        return sum(row.nbytes for row in self._gumbel.values())

    def _noise(self, place: int, like: torch.Tensor) -> torch.Tensor:
        """The seed's Gumbel noise (1, vocab) for the token at ``place``, computed once."""
        if place not in self._gumbel:
            assert self.params.seed is not None
            drawn = noise(self.params.seed, place, 1, like.shape[1], like.device)
            self._gumbel[place] = -drawn.log().to(like.dtype)
        return self._gumbel[place]


class Tree:
    """The best ``most`` texts found so far, as nodes: a token, its parent (an index over all found nodes), its depth
    from 1, and the log-probability of its path. Nodes that are no longer among the best keep their index.

    Everything is in arrays: a level takes some twenty operations on few numbers, which torch needs longer for."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.tokens: Ints = np.empty(0, np.int64)
        self.parents, self.depths = self.tokens, self.tokens
        self.scores: LogProbs = np.empty(0, np.float32)
        self.known = np.empty(0, np.bool_)  # whether the draft has computed what follows
        self.best = self.tokens  # nodes, likeliest first
        # By place among the best nodes: the log-probability of a path below which the proposal ends; of a place behind
        # the last one, the last. Empty: it never ends.
        self.least: LogProbs = np.empty(0, np.float32)
        self.number: dict[int, int] = {-1: -1}  # the number in the draft's cache, by node

    @property
    def deepest(self) -> int:
        """The greatest depth of a node; 0 if there is none."""
        return int(self.depths.max(initial=0))

    def add(self, parents: Ints, scores: LogProbs, tokens: Ints, before: LogProbs) -> None:
        """Add the likeliest tokens (rows, k) after each of ``parents`` (rows,), whose paths have the log-probability
        ``before``."""
        first, count = len(self.tokens), tokens.shape[1]
        depths = self.depths[parents] + 1 if first else np.ones_like(parents)
        scores = (scores + before[:, None]).ravel()
        possible = scores > -np.inf
        own, depths, tokens = parents.repeat(count)[possible], depths.repeat(count)[possible], tokens.ravel()[possible]
        self.known[parents[parents >= 0]] = True
        least = self._least_best()
        self.tokens = np.concatenate([self.tokens, tokens])
        self.parents = np.concatenate([self.parents, own])
        self.depths = np.concatenate([self.depths, depths])
        self.scores = np.concatenate([self.scores, scores[possible]])
        self.known = np.concatenate([self.known, np.zeros(len(tokens), np.bool_)])
        found = np.concatenate([self.best, first + (self.scores[first:] > least).nonzero()[0]])
        self.best = found[self._ranked(found)]

    def _least_best(self) -> float:
        """What the log-probability of another node must exceed for it to be one of the best."""
        return float(self.scores[self.best[-1]]) if len(self.best) == self.most else -math.inf

    def _ranked(self, nodes: Ints) -> Ints:
        """The places in ``nodes`` of the best ones, likeliest first and of equal ones the first."""
        return (-self.scores[nodes]).argsort(kind="stable")[: self.most]

    def widen(self, most: int) -> None:
        """Increase the number of best nodes to ``most``, from all that were found."""
        if self.most < most:
            self.most = most
            self.best = self._ranked(np.arange(len(self.tokens)))

    def unasked(self, deepest: int, width: int) -> Ints:
        """The likeliest best nodes that the draft has not extended, up to a depth, in order of index."""
        return np.sort(self.best[~self.known[self.best] & (self.depths[self.best] <= deepest)][:width])

    def text(self, node: int) -> list[int]:
        """The tokens from the first node to ``node``; none for -1."""
        tokens = list[int]()
        while node >= 0:
            tokens.append(int(self.tokens[node]))
            node = int(self.parents[node])
        return tokens[::-1]

    def path(self, tokens: list[int]) -> list[int]:
        """The nodes along these tokens, as far as they exist."""
        found, at = list[int](), -1
        for token in tokens:
            nodes = ((self.parents == at) & (self.tokens == token)).nonzero()[0]
            if not len(nodes):
                break
            at = int(nodes[0])
            found.append(at)
        return found

    def behind(self, node: int, most: int) -> Tree | None:
        """The nodes after a node as a tree of its own, none of which is in the cache; None if the node was not
        extended."""
        if not self.known[node]:
            return None
        inside = np.zeros(len(self.tokens) + 1, np.bool_)
        inside[node] = True  # the last place stands for the parent of the first nodes, -1
        for depth in range(int(self.depths[node]) + 1, self.deepest + 1):
            here = (self.depths == depth).nonzero()[0]
            inside[here] = inside[self.parents[here]]
        inside[node] = False
        kept = inside[:-1].nonzero()[0]
        place = np.full(len(self.tokens), -1)
        place[kept] = np.arange(len(kept))
        tree = Tree(most)
        tree.tokens, tree.known = self.tokens[kept], self.known[kept]
        tree.parents = place[self.parents[kept]]
        tree.depths, tree.scores = self.depths[kept] - self.depths[node], self.scores[kept] - self.scores[node]
        tree.best = tree._ranked(np.arange(len(kept)))
        return tree

    def to_expand(self, level: int, width: int) -> Ints:
        """The likeliest best nodes of a depth that may have children in the proposal, in order of index. Where it ends
        now, it will not go on: the nodes behind that place can only come to later ones."""
        best = self.best[: self._ends()]
        here = (self.depths[best] == level) & (self.scores[best] > self._least_best()) & ~self.known[best]
        return np.sort(best[here][:width])

    def _ends(self) -> int:
        """The number of best nodes before the first one that is too unlikely for its place."""
        count = len(self.best)
        if not len(self.least):
            return count
        least = self.least[np.minimum(np.arange(count), len(self.least) - 1)]
        unlikely = (self.scores[self.best] < least).nonzero()[0]
        return int(unlikely[0]) if len(unlikely) else count

    def asked(self, nodes: Ints) -> tuple[list[int], list[int]]:
        """The nodes to feed so that the cache holds these ``nodes``, which come last and in order, and the numbers of
        their parents in the cache. The fed nodes get their numbers here."""
        missing = set[int]()
        for node in nodes.tolist():
            above = int(self.parents[node])
            while above not in self.number and above not in missing:
                missing.add(above)
                above = int(self.parents[above])
        fed = [*sorted(missing), *nodes.tolist()]
        parents = list[int]()
        for node in fed:
            parents.append(self.number[int(self.parents[node])])
            self.number[node] = len(self.number) - 1
        return fed, parents

    def proposal(self, count: int | None = None) -> Proposal | None:
        """The best nodes, at most ``count``, parents first: a parent is at least as likely as its child and was found
        before it."""
        kept = np.sort(self.best[:count])
        if not len(kept):
            return None
        place = {-1: -1, **{node: index for index, node in enumerate(kept.tolist())}}
        parents = [place[parent] for parent in self.parents[kept].tolist()]
        return Proposal(TREE, self.tokens[kept].tolist(), None, parents)
