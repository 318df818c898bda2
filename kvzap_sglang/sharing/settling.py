"""When the condemned cells of shared tokens go: as soon as no holder's window can reach them, or under pressure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from sglang.srt.mem_cache.radix_cache import TreeNode

from kvzap_sglang.memory.head_token_sets import BoolArray
from kvzap_sglang.memory.row_state import RowState

if TYPE_CHECKING:
    from kvzap_sglang.radix_cache import KVPressRadixCache


class Span(NamedTuple):
    """A node of a path and the positions `[start, end)` of its tokens."""

    node: TreeNode
    start: int
    end: int


class Reaches:
    """Oldest position that any holder of a node can still see, over running requests. Built when first asked."""

    def __init__(self, tree: KVPressRadixCache) -> None:
        self._tree = tree
        self._found: dict[TreeNode, tuple[int, int]] | None = None

    def of(self, node: TreeNode) -> int | None:
        """None when somebody holds the node who is not known to have a reach (admitted, not launched yet)."""
        if self._found is None:
            self._found = self._collect(self._tree.rows.values())
        holders, reach = self._found.get(node, (0, 0))
        return reach if holders == node.lock_ref else None

    def _collect(self, rows: Iterable[RowState]) -> dict[TreeNode, tuple[int, int]]:
        found: dict[TreeNode, tuple[int, int]] = {}
        for row in rows:
            for node in self._tree.path(row.node):
                holders, reach = found.get(node, (0, row.reach))
                found[node] = (holders + 1, min(reach, row.reach))
        return found


class Settler:
    """Orders tokens of tree nodes settled and counts what that gave back.

    Attributes:
        settled_cells: cells of tree nodes ordered free because every window had passed.
        reclaimed_cells: cells of dense tails ordered free because memory was short.
    """

    def __init__(self, tree: KVPressRadixCache) -> None:
        self._tree = tree
        self.settled_cells = self.reclaimed_cells = 0

    def pass_window(self, row: RowState, start: int, limit: int, reaches: Reaches) -> Iterator[tuple[int, int]]:
        """`row`'s window left tree-owned positions `[start, limit)`: order settled what nobody else can see.

        What another holder's window still reaches stays dense; the last to pass settles it. Yields the position
        ranges whose cells the step must free.
        """
        for node, begin, end in self._tree.spans(row.node):
            if end <= start:
                return
            bound = limit if node.lock_ref == 1 else reaches.of(node)
            sets = node.head_token_sets
            if bound is None or not (sets.owner is row or sets.known.all()):
                continue
            low, high = max(begin, start), min(end, limit, bound)
            if low < high:
                fresh = self._mark(node, _window(len(sets), low - begin, high - begin))
                yield from ((begin + first, begin + last) for first, last in _runs(fresh))

    def leave(self, row: RowState, held: int) -> None:
        """`row` was released, having held `held` tree-owned positions: settle what only it kept dense.

        The window of the last position held stays dense: the next turn continues there, a repetition one token before.
        """
        reaches = Reaches(self._tree)
        for node, begin, end in self._tree.spans(row.node):
            bound = held - 1 - self._tree.window if node.lock_ref == 0 else reaches.of(node)
            sets = node.head_token_sets
            if bound is None or bound <= begin or not sets.known.all():
                continue
            where = _window(len(sets), 0, min(end, bound) - begin)
            self._free(node, where & ~sets.settled & ~sets.healed)

    def reclaim(self, cells: int) -> None:
        """Free dense tails of unlocked nodes, least recently used first, until `cells` more are promised."""
        ledger = self._tree.token_to_kv_pool_allocator.ledger
        wanted = ledger.available + cells
        nodes = [node for node in self._tree.dense_nodes if node.lock_ref == 0]
        # Nodes of one path were used at one time: the id makes every tensor-parallel rank take the same one first.
        for node in sorted(nodes, key=lambda node: (node.last_access_time, node.id)):
            if ledger.available >= wanted:
                return
            self.reclaimed_cells += self._free(node, node.head_token_sets.dense_tail())

    def _mark(self, node: TreeNode, where: BoolArray) -> BoolArray:
        """Mark tokens settled whose cells the running step frees; returns which. Healed ones are not among them."""
        sets = node.head_token_sets
        fresh: BoolArray = where & ~sets.settled & ~sets.healed
        if fresh.any():
            self.settled_cells += sets.condemned(fresh)
            self._tree.change(node, lambda: sets.settled.__setitem__(fresh, True))
        return fresh

    def _free(self, node: TreeNode, where: BoolArray) -> int:
        """Order tokens settled at the next drain. Returns the cells that gives."""
        if not where.any():
            return 0
        sets = node.head_token_sets
        cells = sets.condemned(where)

        def settle() -> None:
            sets.settled[where] = True
            sets.healed[where] = False

        self._tree.change(node, settle)
        slots = node.value[torch.from_numpy(np.flatnonzero(where)).to(node.value.device)]
        self._tree.token_to_kv_pool_allocator.queue_settle(slots, cells)
        return cells


def _window(n: int, start: int, end: int) -> BoolArray:
    """bool `[n]`, True in `[start, end)`."""
    index = np.arange(n)
    return (index >= start) & (index < end)


def _runs(mask: BoolArray) -> Iterator[tuple[int, int]]:
    """Index ranges `[start, end)` in which a mask is True."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(np.int8), [0]])))
    yield from zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)
