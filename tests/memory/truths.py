"""What must hold between any two events, checked against the cell book instead of the product's own checks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from sglang.srt.mem_cache.radix_cache import TreeNode

from kvzap_sglang.kernels.encoding import NONE
from kvzap_sglang.step_plan import StepPlan
from tests.memory.book import BookedPool
from tests.memory.simulator import Request, Simulator

COUNTERS = ("evicted_cells", "healed_cells", "recomputed_tokens")


class Seen(NamedTuple):
    """A request's prefix as it was matched. lost: bool `[layers, prefix, heads]`, pairs that were pruned by then."""

    prefix: int
    lost: np.ndarray


def settled_copy(simulator: Simulator) -> BookedPool:
    """The pool as the next drain will leave it."""
    return simulator.pool.after(simulator.allocator.queue)


def seen_by(simulator: Simulator, request: Request) -> Seen:
    """What a request that was just admitted finds."""
    slots = simulator.tree.path_device_indices(request.last_node)[: request.prefix_len]
    return Seen(request.prefix_len, (settled_copy(simulator).table[:, slots] == NONE).numpy())


def holders(simulator: Simulator) -> list[Request]:
    chunked = [] if simulator.chunked is None else [simulator.chunked]
    return [*chunked, *simulator.running]


def faults(simulator: Simulator, seen: dict[Request, Seen]) -> list[str]:
    """Everything that is wrong now. seen: what each holder found when it was admitted."""
    after = settled_copy(simulator)
    found = [*after.compare(), *_slots(simulator, after), *_locks(simulator)]
    for node in simulator.tree.nodes():
        found += _sets(simulator, after, node)
    for request in holders(simulator):
        found += _window(simulator, after, request, seen[request])
    return [*found, *_counters(simulator, after)]


def _slots(simulator: Simulator, after: BookedPool) -> Iterator[str]:
    """Every slot with a cell belongs to one node or to one request, and SGLang's leak equation holds."""
    tree, allocator = simulator.tree, simulator.allocator
    owned = Counter(slot for node in tree.nodes() for slot in node.value.tolist())
    private = 0
    for request in holders(simulator):
        kv = request.kv
        if kv.req_pool_idx is not None:
            part = simulator.rows.req_to_token[kv.req_pool_idx, kv.cache_protected_len : kv.kv_allocated_len]
            owned.update(part.tolist())
            private += len(part)
    if max(owned.values(), default=1) > 1:
        yield "a slot has two owners"
    # A slot may be left without a cell, never a cell without an owner.
    if astray := {slot for _, _, slot in after.book.cells} - owned.keys():
        yield f"slots {astray} hold cells and belong to nobody"
    if owned.keys() & set(allocator.free_pages.tolist()):
        yield "a slot is free and owned"
    if allocator.available_size() + tree.evictable_size() + tree.protected_size() + private != allocator.size:
        yield "SGLang's leak equation does not hold"


def _locks(simulator: Simulator) -> Iterator[str]:
    tree = simulator.tree
    locks = Counter(node for request in holders(simulator) for node in tree.path(request.lock.node))
    for node in tree.nodes():
        if node.lock_ref != locks[node]:
            yield f"node {node.id} has {node.lock_ref} locks and {locks[node]} holders"
    stray = locks.keys() - set(tree.nodes())
    if stray:
        yield f"locked nodes {[node.id for node in stray]} were evicted"


def _sets(simulator: Simulator, after: BookedPool, node: TreeNode) -> Iterator[str]:
    """A node's bits are the decisions that its slots got once, and its flags say what the table holds."""
    sets = node.head_token_sets
    kept = after.decided_kept(node.value).flatten(1).numpy()
    pairs = kept.shape[1]
    bits = np.unpackbits(sets.packed[:, sets.shape.rank], axis=1)[:, :pairs].astype(bool)
    if (bits != kept)[sets.known].any():
        yield f"node {node.id}: a decision changed"
    if not (sets.counts[:, sets.shape.rank] == kept.sum(axis=1))[sets.known].all():
        yield f"node {node.id}: counts are not those of the decisions"
    held = (after.table[:, node.value] >= 0).permute(1, 0, 2).flatten(1).numpy()
    if (held != (kept | ~sets.settled[:, None])).any():
        yield f"node {node.id}: settled flags do not say what is in memory"
    if (sets.healed & sets.settled).any():
        yield f"node {node.id}: a healed token is settled"
    if (node in simulator.tree.dense_nodes) != bool((sets.known & ~sets.settled & ~_full_everywhere(node)).any()):
        yield f"node {node.id}: wrongly {'in' if node in simulator.tree.dense_nodes else 'missing from'} dense_nodes"


def _full_everywhere(node: TreeNode) -> np.ndarray:
    """bool `[n]`: tokens of which every rank keeps everything."""
    sets = node.head_token_sets
    return np.asarray((sets.counts == sets.shape.cells_per_token).all(axis=1))


def _window(simulator: Simulator, after: BookedPool, request: Request, seen: Seen) -> Iterator[str]:
    """A request's window, and whatever was kept before it, is in memory unless it was gone when it was admitted."""
    index = request.kv.req_pool_idx
    if index is None:
        slots = simulator.tree.path_device_indices(request.last_node)[: seen.prefix]
        reach = seen.prefix - simulator.window
    else:
        row = simulator.tree.rows[index]
        slots = simulator.rows.req_to_token[index, : row.launched].to(torch.int64)
        reach = row.reach
    if lost := _lost(after, slots, reach, seen):
        yield f"request {request.rid} of reach {reach} and hit {seen.prefix} lost cells at {lost}"


def attention_faults(simulator: Simulator, plan: StepPlan, seen: dict[Request, Seen]) -> list[str]:
    """The visibility rule, where a step's attention reads: every row finds all that its oldest query may see."""
    found = []
    requests = {request.kv.req_pool_idx: request for request in holders(simulator)}
    for row in plan.rows:
        request = requests[row.row]
        # A dense prompt's tokens see all of each other, and the window as it stood at the hit.
        oldest = min(row.start, seen[request].prefix) if row.start < row.dense_end else row.start
        slots = simulator.rows.req_to_token[row.row, : row.end].to(torch.int64)
        lost = _lost(simulator.pool, slots, oldest - simulator.window, seen[request])
        if lost:
            found.append(f"request {request.rid} computes [{row.start}, {row.end}) without its cells at {lost}")
    return found


def _lost(pool: BookedPool, slots: torch.Tensor, dense_from: int, seen: Seen) -> list[int]:
    """Positions of `slots` that miss a pair which is kept, or from `dense_from` on, and which was there at the hit."""
    missing = (pool.table[:, slots] == NONE).numpy()
    kept = pool.decided_kept(slots).permute(1, 0, 2).numpy()
    missing &= kept | (np.arange(len(slots)) >= dense_from)[None, :, None]
    missing[:, : seen.prefix] &= ~seen.lost
    return np.flatnonzero(missing.any(axis=(0, 2))).tolist()


def _counters(simulator: Simulator, after: BookedPool) -> Iterator[str]:
    tree, allocator = simulator.tree, simulator.allocator
    if not 0 <= allocator.ledger.available <= after.free_cells:
        yield f"the ledger promises {allocator.ledger.available} of {after.free_cells} cells"
    held = Counter(slot for _, _, slot in after.book.cells)
    unlocked = [node for node in tree.nodes() if node.lock_ref == 0]
    truth = sum(held[slot] for node in unlocked for slot in node.value.tolist())
    exact = tree.shape.ranks == 1 and all(node.head_token_sets.known.all() for node in unlocked)
    if not 0 <= tree.evictable_cells <= truth or (exact and tree.evictable_cells != truth):
        yield f"evictable_cells is {tree.evictable_cells}, unlocked nodes hold {truth}"
    if tree.dense_nodes - set(tree.nodes()):
        yield "dense_nodes names nodes that are gone"
    if all(node.head_token_sets.known.all() for node in tree.nodes()):
        truth = sum(held[slot] for node in tree.nodes() for slot in node.value.tolist())
        if tree.tree_cells() != truth:
            yield f"tree_cells is {tree.tree_cells()}, nodes hold {truth}"


def totals(simulator: Simulator) -> list[int]:
    """Counters that may only grow."""
    settler = simulator.tree.settler
    counters = [getattr(simulator.tree, name) for name in COUNTERS]
    return [*counters, settler.settled_cells, settler.reclaimed_cells, simulator.pool.pruned_cells]
