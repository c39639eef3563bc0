"""A sequence's tokens that form a tree: the parent of each node, its depth, and the tokens that it attends to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class TokenTree:
    """Numbered nodes, each after its parent. Parent -1 is the text that the sequence holds; nodes that follow it have
    depth 0."""

    parents: tuple[int, ...] = ()
    depths: tuple[int, ...] = ()

    def grown(self, parents: Sequence[int]) -> TokenTree:
        """The tree with one more node for each of ``parents``. Raises ValueError if a parent does not exist yet."""
        depths = list(self.depths)
        for parent in parents:
            if not -1 <= parent < len(depths):
                raise ValueError(f"node {len(depths)} of a tree of tokens cannot follow node {parent}")
            depths.append(0 if parent < 0 else depths[parent] + 1)
        return TokenTree((*self.parents, *parents), tuple(depths))

    def __len__(self) -> int:
        return len(self.parents)

    @property
    def is_chain(self) -> bool:
        """Whether every node follows the one before it."""
        return all(parent == node - 1 for node, parent in enumerate(self.parents))

    def check(self, path: Sequence[int]) -> None:
        """Raises ValueError unless each node of ``path`` follows the one before it, and the first follows the
        sequence's text."""
        before = -1
        for node in path:
            if not 0 <= node < len(self) or self.parents[node] != before:
                raise ValueError(f"{list(path)} is no path of a tree with parents {list(self.parents)}")
            before = node

    def view(self, start: int, count: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Positions and mask for a pass over the last ``count`` nodes after ``start`` tokens: the positions (count, 1)
        of these nodes, the positions (1, start + nodes) of all tokens and nodes, and a mask (count, start + nodes),
        True for nodes that are not ancestors of a row's node, nor the node itself."""
        first = len(self) - count
        hidden = torch.ones(count, start + len(self), dtype=torch.bool)
        hidden[:, :start] = False
        for row in range(count):
            node = first + row
            while node >= 0:
                hidden[row, start + node] = False
                node = self.parents[node]
        depths = torch.tensor(self.depths, dtype=torch.long) + start
        keys = torch.cat([torch.arange(start), depths]).to(device)[None]
        return keys[0, start + first :, None], keys, hidden.to(device)


NO_TREE = TokenTree()
