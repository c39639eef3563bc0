"""Attention masks for our forward on torch's attention."""

from __future__ import annotations

import torch

from adaptive.engines.tree import TokenTree

# The most tokens of a pass whose buffers are kept, and in which the queries of one key head are rows of one product
# (that needs a mask row for each token and query of the head). A longer pass is a prompt's: its buffers are made for it
# and dropped.
FEW = 32


class MaskTable:
    """Masks of the keys that each query sees, by kind of layer: (its window or 0 for none, mask rows of a token). They
    are slices of one table for each kind.

    A table's rows are the new tokens in turn; column ``reach`` + j is the key j places after the first new
    one. The mask of any pass over at most ``FEW`` tokens is then a rectangle of the table.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device
        self._reach = -1
        self._tables: dict[tuple[int, int], torch.Tensor] = {}

    def of(self, start: int, count: int, kinds: set[tuple[int, int]]) -> dict[tuple[int, int], torch.Tensor | None]:
        """The additive masks of a pass, by kind; None if every key is seen."""
        masks: dict[tuple[int, int], torch.Tensor | None] = {}
        for window, repeats in kinds:
            kind = window, repeats
            if count == 1 and (not window or start < window):
                masks[kind] = None
            elif count <= FEW:
                table = self._table(start, kind)
                masks[kind] = table[: count * repeats, self._reach - start : self._reach + count]
            else:
                masks[kind] = self._rows(window, start, count, repeats)
        return masks

    def of_tree(
        self, start: int, count: int, tree: TokenTree, kinds: set[tuple[int, int]]
    ) -> dict[tuple[int, int], torch.Tensor]:
        """The additive masks for the last ``count`` nodes of a tree behind ``start`` tokens, by kind."""
        query, key, others = tree.view(start, count, self.device)
        return {(w, n): self._additive((others | (key <= query - w)) if w else others, n) for w, n in kinds}

    def _table(self, start: int, kind: tuple[int, int]) -> torch.Tensor:
        """The table of a kind, which reaches at least ``start`` tokens back."""
        if start > self._reach:
            self._reach, self._tables = max(2 * start, 2048), {}
        if kind not in self._tables:
            window, repeats = kind
            self._tables[kind] = self._rows(window, self._reach, FEW, repeats)
        return self._tables[kind]

    def _rows(self, window: int, start: int, count: int, repeats: int) -> torch.Tensor:
        """A mask (count * repeats, start + count): 0 where seen, else -inf; every token's row ``repeats`` times."""
        query = torch.arange(start, start + count, device=self.device)[:, None]
        key = torch.arange(start + count, device=self.device)[None]
        return self._additive((key > query) | (key <= query - window) if window else key > query, repeats)

    def _additive(self, hidden: torch.Tensor, repeats: int) -> torch.Tensor:
        mask = torch.zeros(hidden.shape, dtype=self.dtype, device=self.device)
        return mask.masked_fill_(hidden, -torch.inf).repeat_interleave(repeats, 0)
