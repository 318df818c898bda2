"""What waits in the allocator's queues is freed once, however often it was queued."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from kvzap_sglang.memory.allocator import KVPressAllocator
from kvzap_sglang.memory.cell_pool import CellPool
from kvzap_sglang.memory.layout import CellLayout

LAYERS, HEADS, PHYSICAL = 2, 3, 16
CONDEMNED_CELLS = 4 * HEADS  # layer 1 of all four slots


def four_slots() -> tuple[KVPressAllocator, torch.Tensor]:
    """An allocator and its four slots in use, whose cells in layer 1 are condemned."""
    pool = CellPool(CellLayout(LAYERS, HEADS, 4, 4, 4, PHYSICAL, 2 * PHYSICAL), torch.float32, "cpu")
    cache = SimpleNamespace(cells=pool)
    allocator = KVPressAllocator(2 * PHYSICAL, torch.float32, "cpu", cache, False)  # type: ignore[arg-type]
    slots = allocator.alloc(4)
    pool.pop(slots)
    pool.condemn(1, slots, torch.ones(4, HEADS, dtype=torch.bool))
    allocator.ledger.resync(pool.free_cells)
    return allocator, slots


@pytest.mark.parametrize("again", [[0, 1, 2, 3], [3, 1], [2, 2]], ids=["all", "some", "within one call"])
def test_a_slot_queued_twice_is_settled_once(again: list[int]) -> None:
    allocator, slots = four_slots()
    free = allocator.cells.free_cells
    allocator.queue_settle(slots, CONDEMNED_CELLS)
    allocator.queue_settle(slots[again], 0)
    allocator.drain()
    assert allocator.cells.check() == []
    assert allocator.cells.free_cells == free + CONDEMNED_CELLS == allocator.available_cells()
    assert allocator.cells.pruned_cells == CONDEMNED_CELLS
    assert allocator.cells.held(slots).tolist() == [(LAYERS - 1) * HEADS] * 4


def test_a_slot_settled_by_an_earlier_drain_settles_to_nothing() -> None:
    allocator, slots = four_slots()
    for credit in (CONDEMNED_CELLS, 0):
        allocator.queue_settle(slots, credit)
        allocator.drain()
    assert allocator.cells.pruned_cells == CONDEMNED_CELLS
    assert allocator.cells.check() == []


def test_a_slot_that_is_freed_while_it_waits_is_freed_once() -> None:
    allocator, slots = four_slots()
    allocator.queue_settle(slots, CONDEMNED_CELLS)
    allocator.free(slots[:2])
    allocator.drain()
    assert allocator.cells.check() == []
    assert allocator.cells.held(slots).tolist() == [0, 0, HEADS, HEADS]
    assert allocator.cells.pruned_cells == CONDEMNED_CELLS  # settled first, in the order of the queue
