"""A radix tree whose nodes know which (layer, head) pairs of their tokens are kept."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from sglang.srt.mem_cache.base_prefix_cache import DecLockRefParams, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey, TreeNode

from kvzap_sglang.memory.allocator import KVPressAllocator
from kvzap_sglang.memory.head_token_sets import BitArray, HeadTokenSets, concatenate
from kvzap_sglang.memory.row_state import RowState
from kvzap_sglang.observe.output_streamer import STATS_ATTRIBUTE
from kvzap_sglang.observe.request_stats import request_stats
from kvzap_sglang.request_options import parse_options


class SettledRange(NamedTuple):
    """Positions `[start, end)` of a path were ordered settled, which will free `cells` (those known)."""

    start: int
    end: int
    cells: int


class KVPressRadixCache(RadixCache):
    """`RadixCache` plus one `HeadTokenSets` per node (attribute `head_token_sets`).

    Node values stay token slots, so matching, splitting, locking and SGLang's leak equation are
    stock; the sets say how many cells a node gives back when it goes.

    Attributes:
        rows: running requests' `RowState` by `req_to_token` row.
        window: positions that are never pruned. sparse_prefill: whether prompts are pruned chunk by chunk.
        evictable_cells: cells that evicting every unlocked node would free (conservative).
        evicted_cells: cells given back by eviction so far.
    """

    token_to_kv_pool_allocator: KVPressAllocator

    def __init__(self, params: Any, window: int, sparse_prefill: bool) -> None:
        self.window = window
        self.sparse_prefill = sparse_prefill
        self.rows: dict[int, RowState] = {}
        self.evicted_cells = 0
        self._inserting: RowState | None = None
        super().__init__(params)
        self.token_to_kv_pool_allocator.watch(self.check_sets)

    @property
    def cells_per_token(self) -> int:
        return self.token_to_kv_pool_allocator.cells.layout.cells_per_token

    def reset(self) -> None:
        super().reset()
        self.evictable_cells = 0
        self.rows.clear()
        self.root_node.head_token_sets = HeadTokenSets.unknown(0, self.cells_per_token)

    # -- walking ----------------------------------------------------------------------------

    def path(self, node: TreeNode) -> list[TreeNode]:
        """Nodes from the root's child down to `node`."""
        nodes = []
        while node is not self.root_node and node is not None:
            nodes.append(node)
            node = node.parent
        nodes.reverse()
        return nodes

    def path_sets(self, node: TreeNode, end: int) -> HeadTokenSets:
        """Sets of the first `end` tokens on the path to `node`."""
        sets = concatenate([n.head_token_sets for n in self.path(node)], self.cells_per_token)
        return sets.slice(0, end)

    def path_cells(self, node: TreeNode) -> int:
        """Cells held by the nodes on the path to `node`."""
        return sum(n.head_token_sets.cells() for n in self.path(node))

    def nodes(self) -> Iterator[TreeNode]:
        """Every node but the root."""
        stack = list(self.root_node.children.values())
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            yield node

    def tree_cells(self) -> int:
        """Cells held by all nodes."""
        return sum(node.head_token_sets.cells() for node in self.nodes())

    # -- keeping the sets beside the values ---------------------------------------------------

    def _insert_cache(self, req: Any, token_ids: Any, **kwargs: Any) -> Any:
        row = self.rows[req.kv.req_pool_idx]
        protected = req.kv.cache_protected_len
        self._inserting = row
        try:
            result = super()._insert_cache(req, token_ids, **kwargs)
        finally:
            self._inserting = None
        # The request's own copies of tokens that the tree already had were just freed.
        self.token_to_kv_pool_allocator.ledger.credit(row.cells(protected, result[2]))
        return result

    def _insert_helper(
        self, node: TreeNode, key: Any, value: Any, priority: int = 0, inserted_len: int = 0
    ) -> tuple[int, TreeNode]:
        length = len(key)
        matched, last = super()._insert_helper(node, key, value, priority, inserted_len)
        if matched < length:
            if self._inserting is None:
                raise RuntimeError("kv press: tokens inserted outside a request's checkpoint")
            last.head_token_sets = self._inserting.sets(matched, length)
            if last.lock_ref == 0:
                self.evictable_cells += last.head_token_sets.cells()
        return matched, last

    def _split_node(self, key: Any, child: TreeNode, split_len: int) -> TreeNode:
        sets = child.head_token_sets
        parent = super()._split_node(key, child, split_len)
        parent.head_token_sets = sets.slice(0, split_len)
        child.head_token_sets = sets.slice(split_len, len(sets))
        return parent

    def checkpoint(self, req: Any, *, up_to: int) -> None:
        if self.disable or (not req.finished() and self._would_lose(req, up_to)):
            return
        super().checkpoint(req, up_to=up_to)
        row = self.rows[req.kv.req_pool_idx]
        if req.finished():
            self._settle_finished(req, row)
        if not req.last_node.head_token_sets.known.all():
            row.pending_node, row.pending_end = req.last_node, req.kv.cache_protected_len

    def _would_lose(self, req: Any, up_to: int) -> bool:
        """Whether the tree already has tokens that `req` computed itself and still needs whole, but pruned.

        A checkpoint swaps a request's own tokens for the tree's. It waits for a later one, at the latest that of
        the request's end, where it would take away what the rest of a dense prompt, or the window, has to see.
        """
        row = self.rows[req.kv.req_pool_idx]
        in_dense_prompt = not self.sparse_prefill and up_to < len(req.origin_input_ids)
        needed = row.hit if in_dense_prompt else up_to - self.window
        start = max(req.kv.cache_protected_len, needed)
        key = RadixKey(req.full_untruncated_fill_ids[:up_to], req.extra_key, cache_salt=req.cache_salt)
        begin = 0
        for node in self.path(self.match_prefix(MatchPrefixParams(key=key)).last_device_node):
            sets = node.head_token_sets
            part = slice(max(start - begin, 0), None)
            if (sets.settled[part] & (sets.counts[part] < sets.cells_per_token)).any():
                return True
            begin += len(sets)
        return False

    def fill_pending(self, row: RowState, start: int, packed: BitArray) -> None:
        """Decisions of `row`'s positions `[start, start + len(packed))` arrived after their checkpoint."""
        node, end = row.pending_node, row.pending_end
        stop = start + len(packed)
        while node is not None and node is not self.root_node and end > start:
            sets = node.head_token_sets
            begin = end - len(sets)
            low, high = max(begin, start), min(end, stop)
            if sets.owner is row and low < high and not sets.known[low - begin : high - begin].all():
                self._change(node, lambda s=sets: s.fill(low - begin, packed[low - start : high - start]))  # noqa: B023
            node, end = node.parent, begin

    # -- settling ---------------------------------------------------------------------------

    def settle_path(self, row: RowState, node: TreeNode, end: int, start: int, limit: int) -> list[SettledRange]:
        """Order tree-owned positions `[start, limit)` settled where nobody else may see them.

        `node` ends at position `end`. A node that another request holds is left dense: that request's
        window may still reach those tokens. Returns the position ranges whose cells the step must free.
        """
        ranges: list[SettledRange] = []
        while node is not self.root_node and end > start:
            sets = node.head_token_sets
            begin = end - len(sets)
            low, high = max(begin, start), min(end, limit)
            if low < high and node.lock_ref == 1 and (sets.owner is row or sets.known.all()):
                part = slice(low - begin, high - begin)
                fresh = ~sets.settled[part]
                if fresh.any():
                    condemned = self.cells_per_token - sets.counts[part]
                    ranges.append(SettledRange(low, high, int(condemned[fresh & sets.known[part]].sum())))
                    sets.settled[part] = True
            node, end = node.parent, begin
        return ranges

    def _settle_finished(self, req: Any, row: RowState) -> None:
        """Settle what a finished request leaves outside its last window: the tail it could not know to
        be final while it ran, and what it had left dense for others that are gone by now."""
        held = req.kv.cache_protected_len
        ranges = self.settle_path(row, req.last_node, held, 0, held - self.window)
        if not ranges:
            return
        slots = self.path_device_indices(req.last_node)
        for start, end, cells in ranges:
            self.token_to_kv_pool_allocator.queue_settle(slots[start:end], cells)

    # -- giving cells back --------------------------------------------------------------------

    def free_kv_row(self, kv: Any, ranges: list[tuple[int, int]]) -> None:
        row = self.rows[kv.req_pool_idx]
        credit = sum(row.cells(start, end) for start, end in ranges)
        super().free_kv_row(kv, ranges)
        self.token_to_kv_pool_allocator.ledger.credit(credit)

    def _delete_leaf(self, node: TreeNode) -> None:
        cells = node.head_token_sets.cells()
        super()._delete_leaf(node)
        # Decisions that arrive for it later must not be counted into the tree.
        node.head_token_sets.owner = None
        self.evictable_cells -= cells
        self.evicted_cells += cells
        self.token_to_kv_pool_allocator.ledger.credit(cells)

    def on_release(self, req: Any, *, checkpointed: bool) -> None:
        super().on_release(req, checkpointed=checkpointed)
        row = self.rows.pop(req.kv.req_pool_idx, None)
        if row is not None and req.finished():
            self._keep_stats(req, row)

    def _keep_stats(self, req: Any, row: RowState) -> None:
        """Statistics of a finished request over all positions it held, for its last output."""
        protected = req.kv.cache_protected_len
        sets = self.path_sets(req.last_node, protected) if protected else None
        held = max(protected, min(req.owned_kv_len(), row.launched))
        parts = [sets] if sets is not None else []
        if held > protected:
            parts.append(row.sets(protected, held))
        options = parse_options(req.sampling_params.custom_params)
        layout = self.token_to_kv_pool_allocator.cells.layout
        whole = concatenate(parts, self.cells_per_token)
        stats = request_stats(whole, layout, self.window, return_kept=options.return_kept)
        setattr(req, STATS_ATTRIBUTE, stats)

    def inc_lock_ref(self, node: TreeNode) -> Any:
        if not self.disable:
            self.evictable_cells -= sum(n.head_token_sets.cells() for n in self.path(node) if n.lock_ref == 0)
        return super().inc_lock_ref(node)

    def dec_lock_ref(self, node: TreeNode, params: DecLockRefParams | None = None) -> Any:
        if not self.disable:
            freed = [n for n in self.path(node) if n.lock_ref == 1]
            self.evictable_cells += sum(n.head_token_sets.cells() for n in freed)
        return super().dec_lock_ref(node, params)

    def _change(self, node: TreeNode, change: Any) -> None:
        """Apply `change` to a node's sets, keeping `evictable_cells` right."""
        before = node.head_token_sets.cells()
        change()
        if node.lock_ref == 0:
            self.evictable_cells += node.head_token_sets.cells() - before

    # -- checks -----------------------------------------------------------------------------

    def check_sets(self) -> list[str]:
        """Violations of "the sets say what the cell table holds" (full scan; nothing in flight)."""
        pool = self.token_to_kv_pool_allocator.cells
        faults = []
        unlocked = 0
        for node in self.nodes():
            sets = node.head_token_sets
            faults += compare_with_table(pool, node, sets)
            unlocked += sets.cells() if node.lock_ref == 0 else 0
        if unlocked != self.evictable_cells:
            faults.append(f"evictable_cells is {self.evictable_cells}, unlocked nodes hold {unlocked}")
        return faults


def compare_with_table(pool: Any, node: TreeNode, sets: HeadTokenSets) -> list[str]:
    """Violations for one node: length, kept bits against table entries, cells against counts."""
    if len(sets) != len(node.key):
        return [f"node {node.id}: sets of {len(sets)} tokens for a key of {len(node.key)}"]
    kept = pool.kept(node.value).reshape(len(sets), -1).cpu().numpy()
    packed = np.packbits(kept, axis=1)
    faults = []
    wrong = int((packed != sets.packed)[sets.known].any(axis=1).sum()) if len(sets) else 0
    if wrong:
        faults.append(f"node {node.id}: kept bits of {wrong} tokens differ from the cell table")
    held = pool.held(node.value).cpu().numpy()
    expected = np.where(sets.settled, sets.counts, sets.cells_per_token)
    if (held != expected)[sets.known].any():
        faults.append(f"node {node.id}: holds {int(held.sum())} cells, its sets say {int(expected.sum())}")
    return faults
