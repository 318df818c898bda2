"""Who settles shared tokens, when, and what a request that branches inside them recomputes: by hand, exactly."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from sglang.srt.mem_cache.radix_cache import TreeNode

from kvzap_sglang.memory.head_token_sets import HeadTokenSets, SetShape
from kvzap_sglang.sharing.recompute import usable_prefix
from kvzap_sglang.sharing.settling import Reaches, Settler, Span
from tests.memory.simulator import HEADS, LAYERS, Request, Simulator
from tests.sharing.simulated import make, start

PAIRS = LAYERS * HEADS
PREFIX = list(range(30))


@pytest.mark.parametrize(
    ("lost", "length", "window", "depth", "expected"),
    [
        pytest.param([], 20, 4, 4, 20, id="nothing-pruned"),
        pytest.param(range(16), 20, 4, 4, 20, id="window-whole"),
        pytest.param(range(20), 20, 4, 4, 16, id="all-pruned"),
        pytest.param([17], 20, 4, 4, 17, id="pruned-tail-leaves-a-whole-window-below"),
        pytest.param([16, 19], 20, 4, 4, 16, id="at-the-window's-first"),
        pytest.param([15, 19], 20, 4, 4, 16, id="in-every-window-within-depth"),
        pytest.param([14, 19], 20, 4, 4, 19, id="one-older-than-the-window"),
        pytest.param([*range(10), *range(14, 20)], 20, 4, 8, 14, id="healed-inside-reach"),
        pytest.param([*range(9), *range(13, 20)], 20, 4, 4, 16, id="healed-beyond-reach"),
        pytest.param(range(3), 3, 4, 4, 0, id="shorter-than-depth"),
        pytest.param(range(5), 5, 4, 4, 1, id="one-longer-than-depth"),
        pytest.param(range(6), 6, 4, 40, 0, id="depth-beyond-the-start"),
        pytest.param([5], 6, 4, 40, 5, id="depth-beyond-the-start-but-whole-below"),
        pytest.param(range(20), 20, 0, 0, 20, id="window-0"),
        pytest.param(range(20), 20, 1, 1, 19, id="window-1"),
    ],
)
def test_usable_prefix(lost: list[int], length: int, window: int, depth: int, expected: int) -> None:
    pruned = np.zeros(length, np.bool_)
    pruned[list(lost)] = True
    assert usable_prefix(pruned, length, window, depth) == expected
    assert usable_prefix(pruned[-(depth + window) :] if depth + window else pruned, length, window, depth) == expected


def dense(simulator: Simulator, tokens: int = len(PREFIX)) -> list[int]:
    """Positions below `tokens` of the shared prefix that still have all their cells."""
    node, slots = simulator.tree.root_node, []
    while len(slots) < tokens:
        node = next(child for child in node.children.values() if child.key.token_ids[0] == PREFIX[len(slots)])
        slots += node.value.tolist()
    simulator.allocator.available_cells()  # drains
    held = (simulator.pool.table[:, slots[:tokens]] >= 0).sum(dim=(0, 2))
    assert set(held.tolist()) <= {0, PAIRS}
    return np.flatnonzero(held.numpy()).tolist()


def holders() -> tuple[Simulator, Request]:
    """The first holder of a prefix: the last position's window holds it and four before; nothing is recomputed here."""
    simulator = make(recompute=False)
    first = start(simulator, PREFIX)
    assert dense(simulator) == [25, 26, 27, 28, 29]
    return simulator, first


def decode(simulator: Simulator, request: Request, steps: int) -> None:
    """One request goes on, the others wait."""
    running, simulator.running = simulator.running, [request]
    for _ in range(steps):
        assert simulator.decode()
    simulator.running = running
    assert simulator.check() == []


def test_the_last_to_pass_settles() -> None:
    simulator, first = holders()
    second = start(simulator, [*PREFIX, 90])
    assert second.prefix_len == 30
    decode(simulator, first, 6)
    assert dense(simulator) == [26, 27, 28, 29]  # the second holds 31 tokens
    settled = simulator.tree.settler.settled_cells
    for passed in range(1, 5):
        decode(simulator, second, 1)
        assert dense(simulator) == [26, 27, 28, 29][passed:]
        assert simulator.tree.settler.settled_cells == settled + passed * PAIRS


def test_a_holder_that_is_aborted_settles_what_only_it_kept() -> None:
    simulator, first = holders()
    assert simulator.admit(Request(2, [*PREFIX, *range(50, 80)], 5))
    assert simulator.prefill_chunk(8)  # its prompt sees the window as it stood at the hit
    decode(simulator, first, 8)
    assert dense(simulator) == [26, 27, 28, 29]
    simulator.abort_chunked()
    assert dense(simulator) == [] and simulator.check() == []
    assert first.last_node.lock_ref == 1


def test_nothing_is_settled_under_a_request_that_was_admitted_and_not_launched() -> None:
    simulator, first = holders()
    assert simulator.admit(Request(2, [*PREFIX, *range(50, 80)], 5))
    decode(simulator, first, 8)
    assert dense(simulator) == [25, 26, 27, 28, 29]
    simulator.abort_chunked()  # it knows of nothing to settle
    assert dense(simulator) == [25, 26, 27, 28, 29]
    simulator.finish(first)
    assert dense(simulator) == [] and simulator.check() == []


def test_what_any_holder_sees_stays() -> None:
    """Two holders of different reaches, the second of a part of what the first holds."""
    simulator, first = holders()
    second = Request(2, [*PREFIX[:28], *range(50, 80)], 5)
    assert simulator.admit(second)
    decode(simulator, first, 8)
    assert dense(simulator) == [25, 26, 27]  # what follows is held by the first alone
    assert simulator.prefill_chunk(8) and simulator.tree.rows[second.kv.req_pool_idx].reach == 24
    decode(simulator, first, 1)
    assert dense(simulator) == [25, 26, 27]
    assert simulator.prefill_chunk(64)  # the whole prompt is computed: its window moves on
    assert dense(simulator) == [] and simulator.check() == []


# -- memory pressure -------------------------------------------------------------------------------


def conversations(removed: float) -> Simulator:
    """Two finished conversations, the older one first, on 40 dense tokens of room."""
    simulator = make(physical=40, removed=removed)
    for first in (100, 200):
        simulator.finish(start(simulator, list(range(first, first + 12)), max_new=2))
    simulator.allocator.available_cells()
    return simulator


def tails(simulator: Simulator) -> dict[int, int]:
    """Condemned cells still in memory by the first token of their conversation."""
    children = simulator.tree.root_node.children.values()
    return {
        child.key.token_ids[0]: child.head_token_sets.condemned(child.head_token_sets.dense_tail())
        for child in children
    }


@pytest.mark.parametrize("touched", [None, 100])
def test_dense_tails_go_least_recently_used_first(touched: int | None) -> None:
    simulator = conversations(removed=1.0)
    if touched is not None:
        simulator.admit(Request(3, [*range(touched, touched + 12), 7], 1))
        simulator.abort_chunked()
    assert tails(simulator) == {100: 5 * PAIRS, 200: 5 * PAIRS}
    free = simulator.allocator.available_cells()
    simulator.allocator.evict_to_free_tokens(simulator.tree, free // PAIRS + 1)
    older, newer = (100, 200) if touched is None else (200, 100)
    assert tails(simulator) == {older: 0, newer: 5 * PAIRS}
    assert simulator.tree.settler.reclaimed_cells == 5 * PAIRS and simulator.check() == []


def test_all_dense_tails_go_before_any_leaf_does() -> None:
    simulator = conversations(removed=0.6)
    held, tail = simulator.tree.tree_cells(), sum(tails(simulator).values())
    free = simulator.allocator.available_cells()
    simulator.allocator.evict_to_free_tokens(simulator.tree, (free + tail) // PAIRS)
    assert simulator.tree.settler.reclaimed_cells == tail > 0
    assert simulator.tree.evicted_cells == 0 and simulator.tree.evictable_size() == 24
    simulator.allocator.evict_to_free_tokens(simulator.tree, (free + tail) // PAIRS + 1)
    assert list(tails(simulator)) == [200] and simulator.tree.evictable_size() == 12
    simulator.allocator.evict_to_free_tokens(simulator.tree, 40)
    assert simulator.tree.evicted_cells == held - tail and simulator.check() == []


class InOrder(list[TreeNode]):
    """A "set" of nodes with an order of its own, as real sets have on different ranks."""

    add = list.append
    discard = list.remove


@pytest.mark.parametrize("backwards", [False, True])
def test_every_rank_reclaims_nodes_of_one_path_in_one_order(backwards: bool) -> None:
    simulator = make(recompute=False, window=16)
    simulator.finish(start(simulator, PREFIX))
    simulator.admit(Request(2, [*PREFIX[:22], 7], 1))  # splits the dense tail
    simulator.abort_chunked()
    simulator.admit(Request(3, [*PREFIX, 7], 1))  # touches both halves at one time
    simulator.abort_chunked()
    lower, upper = sorted(simulator.tree.dense_nodes, key=lambda node: len(simulator.tree.path(node)), reverse=True)
    assert lower.last_access_time == upper.last_access_time
    simulator.tree.dense_nodes = InOrder([upper, lower] if backwards else [lower, upper])  # type: ignore[assignment]
    simulator.reclaim(1)
    assert lower.head_token_sets.settled.all() and not upper.head_token_sets.settled.all()


# -- healing ---------------------------------------------------------------------------------------

BRANCH = 20


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("recompute", [False, True], ids=["accept", "recompute"])
@pytest.mark.parametrize("chunk", [3, 4, 8, 64])  # 4 and 8 end exactly at the branch
def test_three_requests_branch_where_the_tail_is_settled(sparse: bool, recompute: bool, chunk: int) -> None:
    simulator = make(sparse=sparse, recompute=recompute)
    tree = simulator.tree
    simulator.finish(start(simulator, PREFIX))
    assert dense(simulator) == [25, 26, 27, 28, 29]
    depth = (LAYERS if sparse else 1) * 4 if recompute else 0
    for number, hit in enumerate([BRANCH - depth, BRANCH, BRANCH]):
        request = start(simulator, [*PREFIX[:BRANCH], *range(60 + number * 10, 66 + number * 10)], chunk=chunk)
        assert request.prefix_len <= request.extend_end and tree.rows[request.kv.req_pool_idx].hit == hit
        assert tree.recomputed_tokens == depth
        assert tree.healed_cells == (4 * PAIRS if recompute else 0)
        assert dense(simulator, BRANCH) == ([16, 17, 18, 19] if recompute else [])
        simulator.finish(request)
    assert dense(simulator, BRANCH) == ([16, 17, 18, 19] if recompute else [])
    assert simulator.pool.free_cells + tree.tree_cells() == simulator.pool.layout.cells_total
    simulator.reclaim(1000)
    assert dense(simulator, BRANCH) == [] and simulator.check() == []


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("recompute", [False, True], ids=["accept", "recompute"])
def test_two_requests_that_compute_one_prefix_at_a_time_keep_their_windows(sparse: bool, recompute: bool) -> None:
    """The longer one publishes it first, settled further than the shorter one's window allows."""
    simulator = make(sparse=sparse, recompute=recompute, lag=1)
    longer, shorter = Request(1, PREFIX, 50), Request(2, PREFIX[:20], 50)
    assert simulator.admit(longer) and simulator.prefill_chunk(30)
    assert simulator.admit(shorter) and shorter.prefix_len == 0 and simulator.prefill_chunk(20)
    simulator.settle_results()
    assert shorter.kv.cache_protected_len == 20 and simulator.check() == []
    assert dense(simulator, 20) == [15, 16, 17, 18, 19]
    decode(simulator, shorter, 4)
    simulator.settle_results()
    assert dense(simulator, 20) == [18, 19]
    simulator.finish(shorter)
    simulator.finish(longer)
    assert simulator.check() == [] and simulator.tree.tree_cells() + simulator.pool.free_cells == 200 * PAIRS


def test_a_window_passes_over_healed_tokens() -> None:
    """What a step frees is what the sets say: healed tokens amid others keep their condemned cells."""
    sets = HeadTokenSets.unknown(10, SetShape(PAIRS))
    sets.fill(0, np.zeros((10, 1, sets.shape.rank_bytes), np.uint8))
    sets.healed[4:6] = True
    node: Any = SimpleNamespace(head_token_sets=sets, lock_ref=1)
    tree: Any = SimpleNamespace(spans=lambda _: [Span(node, 0, 10)], change=lambda _, change: change())
    settler = Settler(tree)
    row: Any = SimpleNamespace(node=node)
    assert list(settler.pass_window(row, 0, 9, Reaches(tree))) == [(0, 4), (6, 9)]
    assert sets.settled.tolist() == [True] * 4 + [False] * 2 + [True] * 3 + [False]
    assert settler.settled_cells == 7 * PAIRS
    assert list(settler.pass_window(row, 0, 10, Reaches(tree))) == [(9, 10)]
