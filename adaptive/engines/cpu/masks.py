"""The masks of our forward where attention is torch's."""

from __future__ import annotations

import torch

from adaptive.engines.cpu.plan import Plan
from adaptive.engines.tree import TokenTree

# Tokens in one pass up to which buffers are kept and queries of one key head are stacked as rows of one
# product (which needs a mask of tokens times queries a head). Beyond, a pass is a prompt's: its buffers
# are made anew and forgotten.
FEW = 32


class MaskTable:
    """Which keys a query may see, as slices of one table.

    Row i of a table is the i-th new token; column ``reach`` + j the key j places after the first new
    one. The mask of any pass over at most ``FEW`` tokens is then a rectangle of it.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.windows = sorted({layer.window for layer in plan.layers})
        self._group = plan.heads // plan.key_heads
        self._reach = -1
        self._tables: dict[int, torch.Tensor] = {}

    def of(self, start: int, count: int, grouped: bool) -> dict[int, torch.Tensor | None]:
        """By window (0 for none): the additive mask of a pass, or None where every key is seen."""
        masks: dict[int, torch.Tensor | None] = {}
        for window in self.windows:
            if count == 1 and (not window or start < window):
                masks[window] = None
            elif count <= FEW:
                if start > self._reach:
                    self._extend(start)
                table = self._tables[window]
                masks[window] = table[: count * self._group, self._reach - start : self._reach + count]
            else:
                masks[window] = self._rows(window, start, count, self._group if grouped else 1)
        return masks

    def of_tree(self, start: int, count: int, tree: TokenTree, grouped: bool) -> dict[int, torch.Tensor]:
        """The same of the last ``count`` nodes of a tree behind ``start`` tokens."""
        query, key, others = tree.view(start, count, self.plan.device)
        repeats = self._group if grouped else 1
        return {w: self._additive((others | (key <= query - w)) if w else others, repeats) for w in self.windows}

    def _extend(self, start: int) -> None:
        self._reach = max(2 * start, 2048)
        self._tables = {window: self._rows(window, self._reach, FEW, self._group) for window in self.windows}

    def _rows(self, window: int, start: int, count: int, repeats: int) -> torch.Tensor:
        """(count * repeats, start + count): 0 where seen, -inf where not; every token's row ``repeats`` times."""
        query = torch.arange(start, start + count, device=self.plan.device)[:, None]
        key = torch.arange(start + count, device=self.plan.device)[None]
        return self._additive((key > query) | (key <= query - window) if window else key > query, repeats)

    def _additive(self, hidden: torch.Tensor, repeats: int) -> torch.Tensor:
        mask = torch.zeros(hidden.shape, dtype=self.plan.dtype, device=self.plan.device)
        return mask.masked_fill_(hidden, -torch.inf).repeat_interleave(repeats, 0)
