"""A draft model that drafts a tree: the texts that it finds likeliest, best first, to be verified in one pass.

The nodes are the texts of highest probability under the draft; none is drawn. So if the target samples, each is
verified as a point mass: a token that the target draws after a node is followed if it is a node too. Verification goes
as deep as the target's own choices stay within the tree, and is exact with all sampling parameters (as in SpecExec:
Svirschevski et al. 2024).
"""

from __future__ import annotations

import torch

from adaptive.control.policy import Adviser
from adaptive.drafting.model import ModelDrafter
from adaptive.drafting.proposal import Proposal
from adaptive.drafting.protocol import Making
from adaptive.sampling import transform_logits
from adaptive.types import TREE

# Nodes of one depth that one pass of the draft extends, and the greatest depth that is extended. Higher: large trees
# become likelier, and take longer.
WIDTH, DEPTH = 16, 16


class TreeDrafter(ModelDrafter):
    """Drafts trees of the requested number of nodes. Its engine must make passes over trees."""

    width, depth = WIDTH, DEPTH

    def propose(self, committed: list[int], length: int, advise: Adviser | None = None) -> Proposal | None:
        """A tree of ``length`` (at least 1) nodes: one pass of the draft per level, the first also over the tokens
        committed since the last proposal. A chain, as of ``ModelDrafter``, if the logits processor is active."""
        if self._adjusts:
            return super().propose(committed, length, advise)
        return self._grown(committed, length).proposal()

    def making(self, committed: list[int], length: int, advise: Adviser | None = None) -> Making:
        """As ``propose``; several answers' trees are made one after the other."""
        if self._adjusts:
            return (yield from super().making(committed, length, advise))
        return self.propose(committed, length, advise)

    def _grown(self, committed: list[int], length: int, known: Tree | None = None) -> Tree:
        """The tree of the best nodes after the text, part of which may be ``known``."""
        tree, unseen = known or Tree(length), self._unseen(committed)
        if known is None:
            logits = self.sequence.extend(unseen, 1)
            tree.add(torch.tensor([-1]), *self._likeliest(logits, length), torch.zeros(1))
        elif unseen:
            self.sequence.extend(unseen, 0)
        room = self.engine.context_length - len(committed)
        for level in range(1, min(self.depth, room) + 1):
            nodes = tree.to_expand(level, self.width)
            if len(nodes):
                self._ask(tree, nodes, length)
        return tree

    def _ask(self, tree: Tree, nodes: torch.Tensor, most: int) -> None:
        """Let the draft compute what follows these nodes, in one pass."""
        fed, parents = tree.asked(nodes)
        logits = self.sequence.extend(tree.tokens[fed].tolist(), len(nodes), parents)
        tree.add(nodes, *self._likeliest(logits, most), tree.scores[nodes])

    def _likeliest(self, logits: torch.Tensor, most: int) -> tuple[torch.Tensor, torch.Tensor]:
        """For each row the log-probabilities (rows, k) and ids of the ``most`` likeliest tokens, likeliest first."""
        logits = logits[:, : self.target_vocab].float()
        if not self.params.greedy:
            logits = transform_logits(logits, self.params)
        top = logits.log_softmax(-1).topk(min(most, logits.shape[1]), dim=-1)
        return top.values.cpu(), top.indices.cpu()


class Tree:
    """The best ``most`` texts found so far, as nodes: a token, its parent (an index over all found nodes), its depth
    from 1, and the log-probability of its path. Nodes that are no longer among the best keep their index."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.tokens = self.parents = self.depths = torch.empty(0, dtype=torch.long)
        self.scores = torch.empty(0)
        self.known = torch.empty(0, dtype=torch.bool)  # whether the draft has computed what follows
        self.best = torch.empty(0, dtype=torch.long)  # nodes, likeliest first
        self.number: dict[int, int] = {-1: -1}  # the number in the draft's cache, by node

    def add(self, parents: torch.Tensor, scores: torch.Tensor, tokens: torch.Tensor, before: torch.Tensor) -> None:
        """Add the likeliest tokens (rows, k) after each of ``parents`` (rows,), whose paths have the log-probability
        ``before``."""
        first, count = len(self.tokens), tokens.shape[1]
        own = parents.repeat_interleave(count)
        depths = torch.ones_like(own) if first == 0 else self.depths[own] + 1
        scores = (scores + before[:, None]).flatten()
        possible = scores > -torch.inf
        self.tokens = torch.cat([self.tokens, tokens.flatten()[possible]])
        self.parents = torch.cat([self.parents, own[possible]])
        self.depths = torch.cat([self.depths, depths[possible]])
        self.scores = torch.cat([self.scores, scores[possible]])
        self.known[parents[parents >= 0]] = True
        self.known = torch.cat([self.known, torch.zeros(len(self.tokens) - first, dtype=torch.bool)])
        found = torch.cat([self.best, torch.arange(first, len(self.tokens))])
        ranked = self.scores[found].sort(descending=True, stable=True).indices[: self.most]
        self.best = found[ranked]

    def widen(self, most: int) -> None:
        """Increase the number of best nodes to ``most``, from all that were found."""
        if self.most < most:
            self.most = most
            self.best = self.scores.sort(descending=True, stable=True).indices[:most]

    def unasked(self, deepest: int, width: int) -> torch.Tensor:
        """The likeliest best nodes that the draft has not extended, up to a depth, in order of index."""
        return self.best[~self.known[self.best] & (self.depths[self.best] <= deepest)][:width].sort().values

    def path(self, tokens: list[int]) -> list[int]:
        """The nodes along these tokens, as far as they exist."""
        found, at = list[int](), -1
        for token in tokens:
            nodes = ((self.parents == at) & (self.tokens == token)).nonzero()
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
        inside, root = torch.zeros(len(self.tokens) + 1, dtype=torch.bool), node
        inside[node] = True  # the last place stands for the parent of the first nodes, -1
        for depth in range(int(self.depths[node]) + 1, int(self.depths.max()) + 1):
            here = (self.depths == depth).nonzero()[:, 0]
            inside[here] = inside[self.parents[here]]
        inside[node] = False
        kept = inside[:-1].nonzero()[:, 0]
        place = torch.full((len(self.tokens),), -1)
        place[kept] = torch.arange(len(kept))
        tree = Tree(most)
        tree.tokens, tree.known = self.tokens[kept], self.known[kept]
        tree.parents = place[self.parents[kept]]
        tree.depths, tree.scores = self.depths[kept] - self.depths[root], self.scores[kept] - self.scores[root]
        tree.best = tree.scores.sort(descending=True, stable=True).indices[:most]
        return tree

    def to_expand(self, level: int, width: int) -> torch.Tensor:
        """The likeliest best nodes of a depth that may have children among the best, in order of index."""
        least = self.scores[self.best[-1]] if len(self.best) == self.most else -torch.inf
        here = (self.depths[self.best] == level) & (self.scores[self.best] > least) & ~self.known[self.best]
        return self.best[here][:width].sort().values

    def asked(self, nodes: torch.Tensor) -> tuple[list[int], list[int]]:
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

    def proposal(self) -> Proposal | None:
        """The best nodes, parents first: a parent is at least as likely as its child and was found before it."""
        kept = self.best.sort().values.tolist()
        if not kept:
            return None
        place = {-1: -1, **{node: index for index, node in enumerate(kept)}}
        parents = [place[parent] for parent in self.parents[kept].tolist()]
        return Proposal(TREE, self.tokens[kept].tolist(), None, parents)
