"""A pool whose cells are counted on the device does what `CellPool` does, and flags what that one raises."""

from __future__ import annotations

import random

import pytest
import torch

from kvzap_sglang.kernels.encoding import CELL_MASK
from kvzap_sglang.memory.cell_pool import COMPACT_FROM_TOKENS, CellPool
from kvzap_sglang.memory.device_cell_pool import DeviceCellPool
from kvzap_sglang.memory.layout import CellLayout
from tests.interpreted import INTERPRETED

pytestmark = INTERPRETED

LAYERS, HEADS, PHYSICAL, VIRTUAL = 3, 2, 200, 600
LAYOUT = CellLayout(LAYERS, HEADS, 16, 16, 4, PHYSICAL, VIRTUAL)


def ids(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def pools() -> tuple[CellPool, DeviceCellPool]:
    return CellPool(LAYOUT, torch.float32, "cpu"), DeviceCellPool(LAYOUT, torch.float32, "cpu")


def assert_alike(host: CellPool, device: DeviceCellPool, live: list[int]) -> None:
    """The same pairs in memory and condemned, the same counts; which cell is whose may differ."""
    assert torch.equal(host.kept(ids(live)), device.kept(ids(live)))
    assert torch.equal(host.held(ids(live)), device.held(ids(live)))
    assert (host.free_cells, host.pruned_cells) == (device.free_cells, device.pruned_cells)
    assert device.check() == []


@pytest.mark.parametrize("seed", range(6))
def test_one_life_of_two_pools(seed: int) -> None:
    rng, coins = random.Random(seed), torch.Generator().manual_seed(seed)
    both, live = pools(), list[int]()
    rows = torch.zeros(4, 200, dtype=torch.int32)
    for _ in range(40):
        event = rng.choice(["pop", "pop", "condemn", "settle", "rows", "release", "heal"])
        some = rng.sample(live, min(len(live), rng.randint(0, 30)))
        if event == "pop":
            count = min(rng.randint(0, 90), both[0].free_cells // (LAYERS * HEADS))
            fresh = rng.sample([slot for slot in range(1, VIRTUAL + 1) if slot not in live], count)
            live += fresh
        layer, marks = rng.randrange(LAYERS), torch.rand(len(some), HEADS, generator=coins) < 0.6
        ranges = [(row, start, rng.randint(start, len(live))) for row, start in ((1, 0), (2, len(live) // 2))]
        rows[1:3, : len(live)] = torch.tensor(live, dtype=torch.int32)[:200]
        ranges = ranges[:1] if ranges[0][2] > ranges[1][1] else ranges  # a slot is in one range only
        for pool in both:
            if event == "pop":
                pool.pop(ids(fresh))
            elif event == "condemn":
                pool.condemn(layer, ids(some), marks & (pool.table[layer, ids(some)] >= 0))
            elif event == "settle":
                pool.settle(ids(some + some[: len(some) // 2]))
            elif event == "rows":
                pool.settle_rows(rows, ranges)
            elif event == "heal" and len(some) > 1:
                half = len(some) // 2
                pool.heal(ids(some[:half]), ids(some[half : 2 * half]))
            elif event == "release":
                pool.release(ids(some))
        if event == "release":
            live = [slot for slot in live if slot not in some]
        assert_alike(*both, live)
    assert both[0].pruned_cells > 0


def test_a_prompt_and_single_positions_settle_in_one_call() -> None:
    """Of ranges longer and shorter than what a CPU compacts, and of none."""
    both = pools()
    rows = torch.arange(400, dtype=torch.int32).view(2, 200)
    slots = torch.arange(1, COMPACT_FROM_TOKENS + 20)
    for pool in both:
        pool.pop(slots)
        pool.condemn(1, slots, torch.ones(len(slots), HEADS, dtype=torch.bool))
        pool.settle_rows(rows, [(0, 1, COMPACT_FROM_TOKENS + 5), (0, COMPACT_FROM_TOKENS + 7, COMPACT_FROM_TOKENS + 8)])
        pool.settle_rows(rows, [])
    assert_alike(*both, slots.tolist())
    assert both[1].pruned_cells == (COMPACT_FROM_TOKENS + 5) * HEADS


def test_an_underflow_is_flagged_and_stays_flagged() -> None:
    pool = DeviceCellPool(LAYOUT, torch.float32, "cpu")
    pool.pop(torch.arange(1, PHYSICAL + 2))
    assert pool.free_cells == 0
    assert "more cells were taken than were free" in pool.check()
    pool.reset()
    assert pool.check() == ["more cells were taken than were free"] and pool.free_cells == LAYOUT.cells_total


@pytest.mark.parametrize("fault", ["lost", "shared", "stale"])
def test_planted_faults_are_caught(fault: str) -> None:
    pool = DeviceCellPool(LAYOUT, torch.float32, "cpu")
    pool.pop(ids([1, 2, 3]))
    if fault == "lost":
        pool.table[0, 1, 0] = -1
    elif fault == "shared":
        pool.table[0, 1, 0] = pool.table[0, 2, 0]
    else:  # the cell went back, the entry stayed
        pool._stack[pool.free_cells] = pool.table[0, 1, 0] & CELL_MASK
        pool.counters[0] += 1
    assert pool.check()


def test_reset_keeps_the_buffers() -> None:
    """Recorded graphs know their addresses."""
    pool = DeviceCellPool(LAYOUT, torch.float32, "cpu")
    before = [tensor.data_ptr() for tensor in (pool.table, pool._stack, pool.counters, pool.k, pool.v)]
    pool.pop(ids([5]))
    pool.reset()
    assert before == [tensor.data_ptr() for tensor in (pool.table, pool._stack, pool.counters, pool.k, pool.v)]
    assert pool.free_cells == LAYOUT.cells_total and pool.check() == []
