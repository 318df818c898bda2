"""The free stack on the device: Triton against the torch reference, and both against counting cells in sets."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from kvzap_sglang.kernels import triton as kernels
from kvzap_sglang.kernels.counters import COUNTERS, FAULT, FREE, OVERFLOW, PRUNED, TICKET, UNDERFLOW, faults
from kvzap_sglang.kernels.encoding import CELL_MASK, CONDEMNED, NONE
from kvzap_sglang.kernels.triton import reference
from kvzap_sglang.kernels.triton.cells import PAIRS

from .problems import DEVICE

LAYERS = 3
TAKE = pytest.mark.parametrize("take", [kernels.take_cells, reference.take_cells], ids=["triton", "reference"])
GIVE = pytest.mark.parametrize("give", [kernels.free_cells, reference.free_cells], ids=["triton", "reference"])
HEADS = pytest.mark.parametrize("heads", [1, 3, 8])


class Pool(NamedTuple):
    table: torch.Tensor
    stack: torch.Tensor
    counters: torch.Tensor

    @property
    def owned(self) -> list[int]:
        return (self.table[self.table >= 0] & CELL_MASK).tolist()

    @property
    def free(self) -> list[int]:
        return self.stack[: int(self.counters[FREE])].tolist()


def pool_of(cells: int, slots: int, heads: int, rng: torch.Generator) -> Pool:
    """All cells free, in any order; slots `1 .. slots`."""
    table = torch.full((LAYERS, slots + 1, heads), NONE, dtype=torch.int32)
    stack = (1 + torch.randperm(cells, generator=rng)).to(torch.int32)
    counters = torch.zeros(COUNTERS, dtype=torch.int64)
    counters[FREE] = cells
    return Pool(table.to(DEVICE), stack.to(DEVICE), counters.to(DEVICE))


def some_slots(n: int, of: int, rng: torch.Generator) -> torch.Tensor:
    return (1 + torch.randperm(of, generator=rng)[:n]).to(DEVICE)


@TAKE
@HEADS
@pytest.mark.parametrize("tokens", [0, 1, PAIRS - 1, PAIRS, PAIRS + 1])
def test_cells_are_taken_head_major_off_the_top(take, heads: int, tokens: int, rng: torch.Generator) -> None:
    pool = pool_of(tokens * LAYERS * heads + 5, tokens + 3, heads, rng)
    slots, before = some_slots(tokens, tokens + 3, rng), pool.free
    take(pool.table, slots, pool.stack, pool.counters)
    assert pool.table[:, slots].permute(0, 2, 1).flatten().tolist() == before[5:][::-1]
    assert pool.free == before[:5] and len(pool.owned) == tokens * LAYERS * heads
    assert pool.counters[FAULT] == pool.counters[TICKET] == 0


@TAKE
def test_more_than_there_is_is_flagged(take, rng: torch.Generator) -> None:
    pool = pool_of(10, 4, 2, rng)
    take(pool.table, some_slots(2, 4, rng), pool.stack, pool.counters)
    assert pool.counters.tolist() == [0, 0, UNDERFLOW, 0]
    assert sorted(pool.owned) == list(range(1, 11)) and faults(UNDERFLOW) == ["more cells were taken than were free"]


@GIVE
@HEADS
@pytest.mark.parametrize("settle", [False, True], ids=["release", "settle"])
@pytest.mark.parametrize("tokens", [0, 1, PAIRS // 8, PAIRS + 1])
def test_freed_cells_are_free_once(give, heads: int, settle: bool, tokens: int, rng: torch.Generator) -> None:
    """Slots given twice, slots without cells, other slots untouched."""
    pool = pool_of((tokens + 4) * LAYERS * heads, tokens + 6, heads, rng)
    slots = some_slots(tokens + 4, tokens + 6, rng)
    reference.take_cells(pool.table, slots, pool.stack, pool.counters)
    marked = torch.rand(pool.table.shape, generator=rng).to(DEVICE) < 0.4
    pool.table[(pool.table >= 0) & marked] |= CONDEMNED
    before, own = pool.table.clone(), slots[:tokens]
    twice = torch.cat([own, own[: tokens // 2]])[torch.randperm(tokens + tokens // 2, generator=rng).to(DEVICE)]
    give(pool.table, twice, pool.stack, pool.counters, settle=settle)
    going = before[:, own] >= (CONDEMNED if settle else 0)
    freed = (before[:, own][going] & CELL_MASK).tolist()
    assert sorted(pool.free) == sorted(freed)
    before[:, own] = before[:, own].masked_fill(going, NONE)
    assert torch.equal(pool.table, before)
    assert pool.counters.tolist() == [len(freed), len(freed) if settle else 0, 0, 0]


@GIVE
@pytest.mark.parametrize("tokens", [1, PAIRS + 3])
def test_slots_named_by_row_and_position(give, tokens: int, rng: torch.Generator) -> None:
    pool = pool_of(tokens * LAYERS * 3, tokens, 3, rng)
    slots = some_slots(tokens, tokens, rng)
    reference.take_cells(pool.table, slots, pool.stack, pool.counters)
    pool.table[1, slots] |= CONDEMNED
    rows = torch.zeros(5, 2 * tokens, dtype=torch.int32, device=DEVICE)
    row = torch.randint(0, 5, (tokens,), generator=rng).to(DEVICE)
    position = torch.randperm(2 * tokens, generator=rng)[:tokens].to(DEVICE)
    rows[row, position] = slots.to(torch.int32)
    give(pool.table, torch.stack([row, position]), pool.stack, pool.counters, settle=True, req_to_token=rows)
    assert (pool.table[1, slots] == NONE).all() and (pool.table[[0, 2]][:, slots] >= 0).all()
    assert pool.counters.tolist() == [tokens * 3, tokens * 3, 0, 0]


@GIVE
def test_more_than_the_stack_holds_is_flagged_and_not_stored(give, rng: torch.Generator) -> None:
    pool = pool_of(6, 3, 2, rng)
    room = pool.stack.clone()
    pool.table[:, 1] = 5
    pool.counters[FREE] = 2
    wide = torch.full((8,), 77, dtype=torch.int32, device=DEVICE)
    wide[:6] = room
    give(pool.table, torch.tensor([1], device=DEVICE), wide[:6], pool.counters, settle=False)
    assert pool.counters[FAULT] == OVERFLOW and wide[6:].tolist() == [77, 77]


def test_a_stack_higher_than_it_can_be_is_not_read_past_its_end(rng: torch.Generator) -> None:
    """As after an overflow."""
    pool = pool_of(4 * LAYERS, 5, 1, rng)
    wide = torch.full((4 * LAYERS + 9,), 99, dtype=torch.int32, device=DEVICE)
    wide[: 4 * LAYERS] = pool.stack
    pool.counters[FREE] += 5
    kernels.take_cells(pool.table, some_slots(4, 5, rng), wide[: 4 * LAYERS], pool.counters)
    assert 99 not in pool.owned


def test_a_long_life_conserves_cells(rng: torch.Generator) -> None:
    """Rounds of taking, condemning, settling and releasing: every cell is free once or owned once."""
    cells, slots_of = 40 * LAYERS * 3, 60
    pool = pool_of(cells, slots_of, 3, rng)
    live: list[int] = []
    for _ in range(60):
        room = (int(pool.counters[FREE]) // (LAYERS * 3)) // 2
        empty = [slot for slot in range(1, slots_of + 1) if slot not in live][:room]
        kernels.take_cells(pool.table, torch.tensor(empty, dtype=torch.int64, device=DEVICE), pool.stack, pool.counters)
        live += empty
        pool.table[(pool.table >= 0) & (torch.rand(pool.table.shape, generator=rng).to(DEVICE) < 0.2)] |= CONDEMNED
        chosen = torch.tensor(live, device=DEVICE)[torch.rand(len(live), generator=rng).to(DEVICE) < 0.3]
        settle = bool(torch.rand(1, generator=rng) < 0.7)
        kernels.free_cells(pool.table, chosen, pool.stack, pool.counters, settle=settle)
        live = [slot for slot in live if settle or slot not in chosen.tolist()]
        assert sorted(pool.owned + pool.free) == list(range(1, cells + 1))
    assert pool.counters[PRUNED] > 0 and pool.counters[FAULT] == 0
