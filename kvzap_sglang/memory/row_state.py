"""What the CPU knows about the tokens of one running request."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from kvzap_sglang.memory.head_token_sets import BitArray, HeadTokenSets, IndexArray, SetShape


class RowState:
    """One request's occupancy of its `req_to_token` row, from admission to release.

    Positions below the tree-owned length live in tree nodes; the sets here speak for the rest.

    Attributes:
        hit: cached prefix length at admission. prompt_end: positions below it are prompt tokens.
        threshold: the request's effective threshold.
        node: tree node the request holds, with all its parents (it may end beyond `hit`, see `reused`).
        reach: oldest position that a later query of the request can see whatever its score.
        launched: positions below it have cells (or will, once launched steps ran).
        cursor: positions below it have been considered for settling.
        reused: int64 slots of the tree's tokens that the request recomputes, positions `[hit, heal_end)`: their
            decisions, and the cells that are still there, are the tree's.
        heal_start, heal_end: positions whose recomputed cells go to the tree where it pruned its own.
        pending_node: tree node that ends with tokens whose decisions this request still owes.
        pending_end: position where `pending_node` ends.
    """

    def __init__(self, hit: int, prompt_end: int, shape: SetShape, threshold: float, window: int) -> None:
        self.hit = hit
        self.prompt_end = prompt_end
        self.threshold = threshold
        self.node: Any = None
        self.reach = hit - window
        self.launched = hit
        self.cursor = 0
        self.reused = torch.empty(0, dtype=torch.int64)
        self.heal_start = self.heal_end = hit
        self.pending_node: Any | None = None
        self.pending_end = 0
        self._sets = HeadTokenSets.unknown(0, shape, owner=self)

    def heal(self, slots: torch.Tensor, window: int) -> None:
        """The request recomputes positions from `hit` on whose tree slots are `slots`."""
        self.reused = slots
        self.heal_end = self.hit + len(slots)
        self.heal_start = max(self.hit, self.heal_end - window)

    def launch(self, end: int) -> None:
        """Positions up to `end` get cells in the step being launched."""
        self.launched = max(self.launched, end)
        if end - self.hit > len(self._sets):
            self._sets = self._sets.grown(max(end - self.hit, 2 * len(self._sets), 256))

    def fill(self, start: int, packed: BitArray) -> None:
        """Decisions of positions `[start, start + len(packed))`."""
        self._sets.fill(start - self.hit, packed)

    def settle(self, start: int, end: int) -> None:
        """Positions `[start, end)`, private ones, were ordered settled."""
        self._sets.settled[start - self.hit : end - self.hit] = True

    def sets(self, start: int, end: int) -> HeadTokenSets:
        """Copy of positions `[start, end)`. Raises `RuntimeError` below `hit`: the tree owns those."""
        if start < self.hit:
            raise RuntimeError(f"kv press: positions from {start} asked of a row that starts at {self.hit}")
        part = self._sets.cut(start - self.hit, end - self.hit)
        part.origin = self.origin(start, end)
        return part

    def origin(self, start: int, end: int) -> IndexArray:
        """int64 `[end - start]`: equal for two requests at a position where a dense prefill gives both the same cells.

        That takes the same cached prefix, since what is cached is seen pruned; generated tokens also see the prompt
        pruned.
        """
        positions = np.arange(start, end, dtype=np.int64)
        return np.where(positions < self.prompt_end, self.hit, self.hit + (self.prompt_end << 32))

    def cells(self, start: int, end: int) -> int:
        """Cells that positions `[start, end)` occupy (conservative, see `HeadTokenSets.cells`)."""
        end = min(end, self.launched)
        return self._sets.cells(start - self.hit, end - self.hit) if end > start else 0
