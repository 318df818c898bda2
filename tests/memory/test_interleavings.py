"""Allocator, tree, planner and cells under random orders of events."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvzap_sglang.memory.cell_pool import CellPool
from kvzap_sglang.memory.device_cell_pool import DeviceCellPool
from tests.interpreted import INTERPRETED
from tests.memory.simulator import Request, Simulator

EVENTS = (
    "admit",
    "chunk",
    "chunk",
    "chunk",
    "decode",
    "decode",
    "decode",
    "decode",
    "retract",
    "evict",
    "abort",
    "stop",
)


def run(
    seed: int,
    steps: int,
    lag: int,
    window: int,
    removed: float,
    sparse: bool,
    recompute: bool = True,
    keep_generated: bool = False,
    pool: type[CellPool] = CellPool,
) -> Simulator:
    """`steps` random events, everything checked after each."""
    rng = random.Random(seed)
    random.seed(seed)
    torch.manual_seed(seed)
    simulator = Simulator(
        physical=60, headroom=3, window=window, lag=lag, removed=removed, sparse=sparse, recompute=recompute, pool=pool,
        keep_generated=keep_generated,
    )  # fmt: skip
    waiting: list[Request] = []
    # Few different tokens, so that prefixes meet, branch and split in every way.
    stems = [[rng.randrange(3) for _ in range(40)] for _ in range(3)]
    for number in range(steps):
        event = rng.choice(EVENTS)
        if event == "admit":
            stem = rng.choice(stems)[: rng.randint(1, 40)]
            threshold = rng.choice([None, None, None, "off", {"threshold": 0.1}])
            request = waiting.pop(0) if waiting else Request(number, stem, rng.randint(1, 12), threshold)
            if not simulator.admit(request):
                waiting = [*waiting, request][:4]
        elif event == "chunk":
            simulator.prefill_chunk(rng.randint(1, 16))
        elif event == "decode":
            simulator.decode()
        elif event == "retract":
            if candidates := [r for r in simulator.running if r.output_ids]:
                waiting.append(simulator.retract(rng.choice(candidates)))
        elif event == "evict":
            simulator.evict(rng.randint(1, 30))
        elif event == "stop":
            if candidates := [r for r in simulator.running if r.output_ids]:
                simulator.finish(rng.choice(candidates))
        elif rng.random() < 0.3:
            simulator.abort_chunked()
        assert simulator.check() == [], f"after {event} number {number}"
    return simulator


def drain(simulator: Simulator) -> None:
    """End everything; nothing may be lost."""
    simulator.abort_chunked()
    simulator.settle_results()
    for request in list(simulator.running):
        simulator.finish(request)
    simulator.allocator.available_cells()
    assert simulator.check() == []
    total = simulator.pool.layout.cells_total
    assert simulator.pool.free_cells + simulator.tree.tree_cells() == total
    assert simulator.tree.evictable_cells == simulator.tree.tree_cells()
    simulator.evict(10_000)
    assert simulator.allocator.available_cells() == total
    assert simulator.allocator.available_size() == simulator.allocator.size
    assert simulator.tree.rows == {}


@pytest.mark.parametrize("recompute", [False, True], ids=["accept", "recompute"])
@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("lag", [0, 1])
@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    window=st.sampled_from([0, 1, 4, 16]),
    removed=st.sampled_from([0.0, 0.6, 1.0]),
    keep_generated=st.booleans(),
)
def test_nothing_is_lost(
    lag: int, sparse: bool, recompute: bool, seed: int, window: int, removed: float, keep_generated: bool
) -> None:
    drain(run(seed, 120, lag, window, removed, sparse, recompute, keep_generated))


@INTERPRETED
@pytest.mark.parametrize(("seed", "sparse"), [(1, False), (2, True)], ids=["dense", "sparse"])
def test_nothing_is_lost_on_a_device(seed: int, sparse: bool) -> None:
    """The same with cells that Triton kernels take and free, and decisions made by what stores keys and values."""
    simulator = run(seed, 100, 1, 4, 0.6, sparse, pool=DeviceCellPool)
    assert simulator.pool.pruned_cells > 0
    drain(simulator)


def test_the_simulation_exercises_what_it_should() -> None:
    """Pruning, eviction, retraction and sharing all happen, or the property above proves nothing."""
    done: Counter[str] = Counter()
    for seed in range(8):
        simulator = run(seed, 200, 1, 4, 0.6, sparse=seed % 2 == 0)
        tree = simulator.tree
        done.update(pruned=simulator.pool.pruned_cells, evicted=tree.evicted_cells, healed=tree.healed_cells)
        done.update(settled=tree.settler.settled_cells, reclaimed=tree.settler.reclaimed_cells)
        done.update(recomputed=tree.recomputed_tokens)
        drain(simulator)
    assert min(done.values()) > 20, done


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("window", [0, 1, 5, 16])
def test_a_finished_request_leaves_its_dense_tail(lag: int, window: int) -> None:
    """The last position's window, exactly: a step launched past the end must not have settled into it."""
    simulator = Simulator(physical=200, headroom=2, window=window, lag=lag, removed=0.6, sparse=False)
    request = Request(1, list(range(30)), 9)
    assert simulator.admit(request)
    while simulator.chunked is not None:
        assert simulator.prefill_chunk(8)
    while not request.output_ids:
        simulator._process()
    while not request.done:
        assert simulator.decode()
    simulator.settle_results()
    assert request.done and simulator.check() == []
    held = 30 + 9 - 1
    settled = simulator.tree.path_sets(request.last_node, held).settled.tolist()
    assert settled == [True] * (held - 1 - window) + [False] * (window + 1)


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
def test_generated_tokens_are_kept_when_asked(sparse: bool) -> None:
    """After a retraction too, and in the tree; the prompt is pruned as ever."""
    simulator = Simulator(physical=200, headroom=2, window=4, lag=1, removed=1.0, sparse=sparse, keep_generated=True)
    request = Request(1, list(range(30)), 20)
    for retracted in (True, False):
        assert simulator.admit(request)
        while simulator.chunked is not None:
            assert simulator.prefill_chunk(8)
        while len(request.output_ids) < 9 if retracted else not request.done:
            if not simulator.decode():
                simulator.settle_results()
        if retracted:
            request = simulator.retract(request)
            simulator.evict(15)
    simulator.settle_results()
    assert simulator.check() == []
    sets = simulator.tree.path_sets(request.last_node, 30 + 20 - 1)
    assert sets.counts[30:].tolist() == [[simulator.pool.layout.cells_per_token]] * 19
    assert not sets.counts[:30].any()
