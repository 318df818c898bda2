"""What the CPU knows about the tokens of one running request."""

from __future__ import annotations

from typing import Any

from kvzap_sglang.memory.head_token_sets import BitArray, HeadTokenSets


class RowState:
    """One request's occupancy of its `req_to_token` row, from admission to release.

    Positions below the tree-owned length live in tree nodes; the sets here speak for the rest.

    Attributes:
        hit: cached prefix length at admission.
        prompt_end: positions below it are prompt tokens.
        launched: positions below it have cells (or will, once launched steps ran).
        cursor: positions below it have been considered for settling.
        pending_node: tree node that ends with tokens whose decisions this request still owes.
        pending_end: position where `pending_node` ends.
    """

    def __init__(self, hit: int, prompt_end: int, cells_per_token: int) -> None:
        self.hit = hit
        self.prompt_end = prompt_end
        self.launched = hit
        self.cursor = 0
        self.pending_node: Any | None = None
        self.pending_end = 0
        self._cells_per_token = cells_per_token
        self._sets = HeadTokenSets.unknown(0, cells_per_token, owner=self)

    def launch(self, end: int) -> None:
        """Positions up to `end` get cells in the step being launched."""
        self.launched = max(self.launched, end)
        if end - self.hit > len(self._sets):
            self._grow(max(end - self.hit, 2 * len(self._sets), 256))

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
        return self._sets.slice(start - self.hit, end - self.hit)

    def cells(self, start: int, end: int) -> int:
        """Cells that positions `[start, end)` occupy (conservative, see `HeadTokenSets.cells`)."""
        end = min(end, self.launched)
        return self._sets.cells(start - self.hit, end - self.hit) if end > start else 0

    def _grow(self, capacity: int) -> None:
        old = self._sets
        self._sets = HeadTokenSets.unknown(capacity, self._cells_per_token, owner=self)
        n = len(old)
        for name in ("packed", "counts", "known", "settled"):
            getattr(self._sets, name)[:n] = getattr(old, name)
