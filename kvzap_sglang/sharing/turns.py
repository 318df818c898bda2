"""Who goes first when several requests branch at once where a window is pruned.

In a sparse prefill each would recompute up to L windows, the same ones, side by side. The first one's recomputed cells heal the
tree as soon as its prompt is computed, so the others do better to stay in the queue for these steps. (In a dense prefill a branch
recomputes one window, which is less than a step's wait is worth.)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.radix_cache import TreeNode

if TYPE_CHECKING:
    from kvzap_sglang.radix_cache import KVPressRadixCache


def waits_for_its_branch(tree: KVPressRadixCache, req: Any, admitted: Iterable[Any]) -> bool:
    """Whether a matched request stays in the queue for one that computes at least half of what it would recompute.

    admitted: requests of the batch that is being put together. The wait ends with the other's prompt, or when it leaves.
    """
    if not tree.sparse_prefill or not tree.recompute_depth:
        return False
    start, end = req.prefix_len, _depth(tree, req.last_node)
    if start >= end:
        return False
    path = tree.path(req.last_node)
    return any(2 * healed >= start + end and node in path for node, healed in _healing(tree, admitted))


def _healing(tree: KVPressRadixCache, admitted: Iterable[Any]) -> Iterator[tuple[TreeNode, int]]:
    """Nodes whose last window is being recomputed for the tree, and the position where they end."""
    for row in tree.rows.values():
        if row.heal_start < row.heal_end and row.launched <= row.prompt_end:
            yield row.node, row.heal_end
    for req in admitted:
        end = _depth(tree, req.last_node)
        if req.prefix_len < end:
            yield req.last_node, end


def _depth(tree: KVPressRadixCache, node: TreeNode) -> int:
    return sum(len(part.key) for part in tree.path(node))
