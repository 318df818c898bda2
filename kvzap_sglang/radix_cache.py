"""A radix tree whose nodes know which (layer, head) pairs of their tokens are kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.base_prefix_cache import DecLockRefParams, MatchPrefixParams, MatchResult
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey, TreeNode

from kvzap_sglang.config import KVPressConfig
from kvzap_sglang.memory.allocator import KVPressAllocator
from kvzap_sglang.memory.head_token_sets import (
    MIXED,
    BitArray,
    BoolArray,
    HeadTokenSets,
    IndexArray,
    SetShape,
    concatenate,
)
from kvzap_sglang.memory.row_state import RowState
from kvzap_sglang.observe.output_streamer import STATS_ATTRIBUTE
from kvzap_sglang.observe.request_stats import request_stats
from kvzap_sglang.request_options import parse_options
from kvzap_sglang.sharing.checks import count_faults, scan_faults
from kvzap_sglang.sharing.recompute import usable_prefix
from kvzap_sglang.sharing.settling import Settler, Span


class KVPressRadixCache(RadixCache):
    """`RadixCache` plus one `HeadTokenSets` per node (attribute `head_token_sets`).

    Node values stay token slots, so matching, splitting, locking and SGLang's leak equation are
    stock; the sets say how many cells a node gives back when it goes. A match may end before the node that
    it locks: the request then recomputes the rest (`sharing.recompute`).

    Attributes:
        rows: running requests' `RowState` by `req_to_token` row.
        window: positions that are never pruned. sparse_prefill: whether prompts are pruned chunk by chunk.
        prunes_generated: whether generated tokens are pruned at all.
        settler: orders the cells of shared tokens free.
        dense_nodes: nodes that hold condemned cells.
        evictable_cells: cells that evicting every unlocked node would free (conservative).
        evicted_cells: cells given back by eviction so far. healed_cells: cells that requests gave to the tree in place of
            pruned ones.
        recomputed_tokens: matched tokens that requests computed again for the sake of their window.
    """

    token_to_kv_pool_allocator: KVPressAllocator

    def __init__(self, params: Any, config: KVPressConfig, shape: SetShape, layers: int) -> None:
        """`layers`: of the model; a sparse prefill's hit is exact from that many windows on."""
        self.config = config
        self.shape = shape
        self.window = config.kv_press_window
        self.sparse_prefill = config.kv_press_prefill == "sparse"
        self.prunes_generated = config.kv_press_decode == "prune"
        self.recompute_depth = 0
        if config.kv_press_hit_window == "recompute":
            self.recompute_depth = self.window * (layers if self.sparse_prefill else 1)
        self.rows: dict[int, RowState] = {}
        self.dense_nodes: set[TreeNode] = set()
        self.evicted_cells = self.healed_cells = self.recomputed_tokens = 0
        self.settler = Settler(self)
        self._inserting: RowState | None = None
        super().__init__(params)
        allocator = self.token_to_kv_pool_allocator
        allocator.watch(partial(count_faults, self), partial(scan_faults, self))
        allocator.exact = shape.ranks == 1
        allocator.nothing_held = lambda: not self.rows and not self.root_node.children

    def reset(self) -> None:
        super().reset()
        self.evictable_cells = 0
        self.rows.clear()
        self.dense_nodes.clear()
        self.root_node.head_token_sets = HeadTokenSets.unknown(0, self.shape)

    # -- walking ----------------------------------------------------------------------------

    def path(self, node: TreeNode) -> list[TreeNode]:
        """Nodes from the root's child down to `node`."""
        nodes = []
        while node is not self.root_node and node is not None:
            nodes.append(node)
            node = node.parent
        nodes.reverse()
        return nodes

    def spans(self, node: TreeNode) -> Iterator[Span]:
        """Nodes and positions on the path to `node`, from its end up to the root."""
        path = self.path(node)
        end = sum(len(n.key) for n in path)
        for part in reversed(path):
            begin = end - len(part.key)
            yield Span(part, begin, end)
            end = begin

    def path_sets(self, node: TreeNode, end: int) -> HeadTokenSets:
        """Sets of the first `end` tokens on the path to `node`."""
        sets = concatenate([n.head_token_sets for n in self.path(node)], self.shape)
        return sets.cut(0, end)

    def path_cells(self, node: TreeNode) -> int:
        """Cells that the nodes on the path to `node` hold at most."""
        return sum(n.head_token_sets.cells_at_most() for n in self.path(node))

    def nodes(self) -> Iterator[TreeNode]:
        """Every node but the root."""
        stack = list(self.root_node.children.values())
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            yield node

    def tree_cells(self) -> int:
        """Cells that all nodes hold on this rank."""
        return sum(node.head_token_sets.rank_cells() for node in self.nodes())

    # -- matching ---------------------------------------------------------------------------

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        """SGLang's match; a request gets less of it where its window is already pruned."""
        result = super().match_prefix(params)
        length = result.device_prefix_len
        if params.req is None or not self.recompute_depth or not length:
            return result
        tail = []
        for node, _, end in self.spans(result.last_device_node):
            if end <= length - self.recompute_depth - self.window:
                break
            tail.append(node.head_token_sets.pruned())
        pruned = np.concatenate(tail[::-1])
        return result._replace(device_prefix_len=usable_prefix(pruned, length, self.window, self.recompute_depth))

    # -- keeping the sets beside the values ---------------------------------------------------

    def _insert_cache(self, req: Any, token_ids: Any, **kwargs: Any) -> Any:
        row = self.rows[req.kv.req_pool_idx]
        protected = req.kv.cache_protected_len
        healed = self._heal(req, row, token_ids)
        self._inserting = row
        try:
            result = super()._insert_cache(req, token_ids, **kwargs)
        finally:
            self._inserting = None
        # The request's own copies of tokens that the tree already had were just freed.
        self.token_to_kv_pool_allocator.ledger.credit(row.cells(protected, result[2]) - healed)
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
            self._note(last)
        return matched, last

    def _split_node(self, key: Any, child: TreeNode, split_len: int) -> TreeNode:
        sets = child.head_token_sets
        parent = super()._split_node(key, child, split_len)
        parent.head_token_sets = sets.cut(0, split_len)
        child.head_token_sets = sets.cut(split_len, len(sets))
        for node in (parent, child):
            self._note(node)
        return parent

    def checkpoint(self, req: Any, *, up_to: int) -> None:
        row = None if self.disable else self.rows[req.kv.req_pool_idx]
        if row is not None and self._stays_private(req, row, up_to):
            return
        super().checkpoint(req, up_to=up_to)
        if row is None:
            return
        row.node = req.last_node
        if not req.last_node.head_token_sets.known.all():
            row.pending_node, row.pending_end = req.last_node, req.kv.cache_protected_len

    def _stays_private(self, req: Any, row: RowState, up_to: int) -> bool:
        """Whether the request goes on with its own copies of what the tree has, and publishes nothing yet.

        It does until what it recomputes is complete, for then the tree can be healed with it. And in a dense prefill,
        or where generated tokens are all kept, a running request does while the tree's tokens were computed from
        another cached prefix or prompt: their cells are not quite its own, and its answer would depend on who else
        runs, and on where its chunks end.
        """
        if row.heal_start < row.heal_end and up_to < row.heal_end:
            return True
        pure = self.sparse_prefill and self.prunes_generated  # cells are a function of the tokens alone
        if pure or req.finished() or not req.last_node.children:
            return False
        first = max(req.kv.cache_protected_len, row.heal_end)
        for node, begin, end in self.spans(self._published(req, req.full_untruncated_fill_ids[:up_to])):
            if end <= first:
                break
            low = max(begin, first)
            if (node.head_token_sets.origin[low - begin :] != row.origin(low, end)).any():
                return True
        return False

    def _published(self, req: Any, token_ids: Any) -> TreeNode:
        """The node where the tree's match of a request's tokens ends."""
        key = RadixKey(token_ids, req.extra_key, cache_salt=req.cache_salt)
        return super().match_prefix(MatchPrefixParams(key=key)).last_device_node

    def fill_pending(self, row: RowState, start: int, packed: BitArray) -> None:
        """Decisions of `row`'s positions `[start, start + len(packed))` arrived after their checkpoint."""
        node, end = row.pending_node, row.pending_end
        stop = start + len(packed)
        while node is not None and node is not self.root_node and end > start:
            sets = node.head_token_sets
            begin = end - len(sets)
            low, high = max(begin, start), min(end, stop)
            if sets.owner is row and low < high and not sets.known[low - begin : high - begin].all():
                self.change(node, partial(sets.fill, low - begin, packed[low - start : high - start]))
            node, end = node.parent, begin

    def _heal(self, req: Any, row: RowState, token_ids: Any) -> int:
        """Give the tree the request's own cells of tokens that the tree has and pruned, before they are freed as copies.

        That is what was recomputed for the branch, and what another request published and settled while this one
        computed the same tokens, as far back as its window reaches. What it recomputed below `heal_start` saw a pruned
        window and is not what the tree had: it must not come back. Returns the cells that the tree takes over (on the
        rank that takes most).
        """
        if row.heal_start == row.heal_end and not req.last_node.children:
            return 0  # nobody has more of this prefix than the request holds
        start = req.kv.cache_protected_len
        last = self._published(req, token_ids)
        slots = self.path_device_indices(last)[start:]
        mine = self.req_to_token_pool.req_to_token[req.kv.req_pool_idx, start : start + len(slots)]
        taken, own_from = 0, max(row.reach, row.heal_start)
        for node, begin, end in self.spans(last):
            if end <= start:
                break
            position = np.arange(begin, end)
            branch = (position >= row.heal_start) & (position < row.heal_end)
            where = (position >= start) & (branch | (position >= own_from)) & node.head_token_sets.settled
            taken += self._unsettle(node, where, branch, row.origin(begin, end))
            chosen = torch.from_numpy(position[where] - start).to(slots.device)
            if len(chosen):
                self.token_to_kv_pool_allocator.queue_heal(slots[chosen], mine[chosen])
        row.heal_end = row.heal_start
        self.healed_cells += taken
        return taken

    def _unsettle(self, node: TreeNode, where: BoolArray, branch: BoolArray, origin: IndexArray) -> int:
        """Tokens of the mask `where` are dense again, those of `branch` to stay. Returns the cells that takes.

        origin: of the cells that they get.
        """
        sets = node.head_token_sets
        before = sets.cells()

        def heal() -> None:
            sets.settled[where] = False
            sets.healed[branch] = True
            sets.origin[where & (sets.origin != origin)] = MIXED

        self.change(node, heal)
        return sets.cells() - before

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
        self.dense_nodes.discard(node)
        self.evictable_cells -= cells
        self.evicted_cells += cells
        self.token_to_kv_pool_allocator.ledger.credit(cells)

    def on_release(self, req: Any, *, checkpointed: bool) -> None:
        super().on_release(req, checkpointed=checkpointed)
        row = self.rows.pop(req.kv.req_pool_idx, None)
        if row is None:
            return
        if not self.disable:
            self.settler.leave(row, req.kv.cache_protected_len)
        if req.finished():
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
        whole = concatenate(parts, self.shape)
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

    def change(self, node: TreeNode, change: Callable[[], None]) -> None:
        """Apply `change` to a node's sets, keeping what is counted over nodes right."""
        before = node.head_token_sets.cells()
        change()
        if node.lock_ref == 0:
            self.evictable_cells += node.head_token_sets.cells() - before
        self._note(node)

    def _note(self, node: TreeNode) -> None:
        if node.head_token_sets.dense_tail().any():
            self.dense_nodes.add(node)
        else:
            self.dense_nodes.discard(node)
