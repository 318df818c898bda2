"""Idle checks of the tree: what nodes say against what is counted over them and against the cell table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from sglang.srt.mem_cache.radix_cache import TreeNode

from kvzap_sglang.memory.head_token_sets import HeadTokenSets

if TYPE_CHECKING:
    from kvzap_sglang.radix_cache import KVPressRadixCache


def count_faults(tree: KVPressRadixCache) -> list[str]:
    """Violations among what is counted over nodes (nothing in flight). Reads no cell table: O(tree tokens)."""
    faults = []
    unlocked = 0
    for node in tree.nodes():
        sets = node.head_token_sets
        unlocked += sets.cells() if node.lock_ref == 0 else 0
        if (sets.settled & sets.healed).any():
            faults.append(f"node {node.id}: tokens are both settled and healed")
        if node.lock_ref < 0 or (node.lock_ref and not tree.rows):
            faults.append(f"node {node.id} has {node.lock_ref} locks, {len(tree.rows)} requests hold rows")
    if unlocked != tree.evictable_cells:
        faults.append(f"evictable_cells is {tree.evictable_cells}, unlocked nodes hold {unlocked}")
    if tree.dense_nodes != {node for node in tree.nodes() if node.head_token_sets.dense_tail().any()}:
        faults.append(f"dense_nodes ({len(tree.dense_nodes)}) are not the nodes that hold condemned cells")
    return faults + _total_faults(tree)


def _total_faults(tree: KVPressRadixCache) -> list[str]:
    """Violation of "what is not free is the tree's", which holds when no request runs."""
    pool = tree.token_to_kv_pool_allocator.cells
    free, held, total = pool.free_cells, tree.tree_cells(), pool.layout.cells_total
    if tree.rows or free + held == total:
        return []
    return [f"{total - free} cells are in use, the tree's sets say {held}, and no request runs"]


def scan_faults(tree: KVPressRadixCache) -> list[str]:
    """Violations of "the sets say what the cell table holds" (full scan; nothing in flight)."""
    pool = tree.token_to_kv_pool_allocator.cells
    return [fault for node in tree.nodes() for fault in _node_faults(pool, node, node.head_token_sets)]


def _node_faults(pool: Any, node: TreeNode, sets: HeadTokenSets) -> list[str]:
    """Violations for one node: length, kept bits against table entries, cells against counts."""
    if len(sets) != len(node.key):
        return [f"node {node.id}: sets of {len(sets)} tokens for a key of {len(node.key)}"]
    kept = pool.kept(node.value).reshape(len(sets), -1).cpu().numpy()
    packed = np.packbits(kept, axis=1)
    rank = sets.shape.rank
    faults = [f"node {node.id}: counts are not those of its kept bits"] if sets.miscounted() else []
    wrong = int((packed != sets.packed[:, rank])[sets.known].any(axis=1).sum()) if len(sets) else 0
    if wrong:
        faults.append(f"node {node.id}: kept bits of {wrong} tokens differ from the cell table")
    held = pool.held(node.value).cpu().numpy()
    expected = np.where(sets.settled, sets.counts[:, rank], sets.shape.cells_per_token)
    if (held != expected)[sets.known].any():
        faults.append(f"node {node.id}: holds {int(held.sum())} cells, its sets say {int(expected.sum())}")
    return faults
