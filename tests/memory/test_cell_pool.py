"""Every cell is free exactly once or owned exactly once, whatever happens."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvzap_sglang.kernels.encoding import CELL_MASK, CONDEMNED, NONE
from kvzap_sglang.memory.cell_pool import CellPool, CellUnderflow
from kvzap_sglang.memory.layout import CellLayout, physical_tokens, virtual_tokens

LAYERS, HEADS, PHYSICAL, VIRTUAL = 3, 2, 40, 120


def make_pool() -> CellPool:
    return CellPool(CellLayout(LAYERS, HEADS, 16, 16, 4, PHYSICAL, VIRTUAL), torch.float32, "cpu")


def ids(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def test_pop_is_head_major() -> None:
    pool = make_pool()
    pool.pop(torch.arange(1, 6))
    for layer in range(LAYERS):
        for head in range(HEADS):
            cells = pool.table[layer, 1:6, head]
            assert (cells.diff().abs() == 1).all()
    assert pool.free_cells == (PHYSICAL - 5) * LAYERS * HEADS
    assert pool.check() == []


def test_long_pops_are_consecutive_after_fragmentation() -> None:
    pool = make_pool()
    slots = torch.arange(1, 39)
    pool.pop(slots)
    pool.release(slots[torch.randperm(38)])
    pool.pop(torch.arange(41, 41 + 36))
    for layer in range(LAYERS):
        for head in range(HEADS):
            assert (pool.table[layer, 41:77, head].diff().abs() == 1).all()
    assert pool.check() == []


def test_settle_frees_condemned_cells_only() -> None:
    pool = make_pool()
    slots = ids(3, 7, 9)
    pool.pop(slots)
    condemned = torch.tensor([[True, False], [False, False], [True, True]])
    pool.condemn(1, slots, condemned)
    free = pool.free_cells
    assert pool.held(slots).tolist() == [6, 6, 6]
    assert pool.settle(ids(3, 7)) == 1
    assert pool.free_cells == free + 1
    assert pool.table[1, 3].tolist()[0] == NONE
    assert pool.settle(slots) == 2
    assert pool.settle(slots) == 0
    kept = pool.kept(slots)
    assert kept[:, 1].tolist() == (~condemned).tolist()
    assert kept[:, [0, 2]].all()
    assert pool.check() == []


def test_compaction_moves_kept_rows_together() -> None:
    pool = make_pool()
    slots = torch.arange(1, 31)
    pool.pop(slots)
    pool.release(ids(4, 5, 22))
    pool.pop(ids(50, 51, 52))  # the run is no longer one piece
    pool.k.copy_(torch.arange(len(pool.k), dtype=torch.float32)[:, None].expand(-1, 16))
    pool.v.copy_(-pool.k)
    live = torch.tensor([s for s in slots.tolist() if s not in (4, 5, 22)])
    condemned = torch.rand(LAYERS, len(live), HEADS) < 0.6
    for layer in range(LAYERS):
        pool.condemn(layer, live, condemned[layer])
    before = pool.table.clone()
    free = pool.free_cells
    assert pool.settle_compact(live) == int(condemned.sum()) == pool.free_cells - free
    assert pool.check() == []
    for layer in range(LAYERS):
        for head in range(HEADS):
            kept = live[~condemned[layer, :, head]]
            old, new = before[layer, kept, head], pool.table[layer, kept, head]
            assert torch.equal(pool.k[new.long(), 0], old.float())
            assert torch.equal(pool.v[new.long(), 0], -old.float())
            owned = (before[layer, live, head] & CELL_MASK).sort().values
            assert torch.equal(new, owned[: len(kept)])
            assert (pool.table[layer, live[condemned[layer, :, head]], head] == NONE).all()
    assert torch.equal(pool.table[:, 50:53], before[:, 50:53])


@pytest.mark.parametrize("removed", [0.0, 1.0])
def test_compaction_of_all_or_nothing(removed: float) -> None:
    pool = make_pool()
    slots = torch.arange(1, 11)
    pool.pop(slots)
    before = pool.table.clone()
    for layer in range(LAYERS):
        pool.condemn(layer, slots, torch.full((10, HEADS), bool(removed)))
    assert pool.settle_compact(slots) == int(removed) * 10 * LAYERS * HEADS
    assert torch.equal(pool.table, before) == (not removed)
    assert pool.check() == []


def test_release_takes_condemned_cells_too() -> None:
    pool = make_pool()
    slots = ids(1, 2)
    pool.pop(slots)
    pool.condemn(0, slots, torch.ones(2, HEADS, dtype=torch.bool))
    assert pool.release(slots) == 2 * LAYERS * HEADS
    assert pool.free_cells == pool.layout.cells_total
    assert pool.check() == []


def test_underflow_is_loud_and_changes_nothing() -> None:
    pool = make_pool()
    pool.pop(torch.arange(1, PHYSICAL))
    with pytest.raises(CellUnderflow, match="wanted"):
        pool.pop(ids(100, 101))
    assert pool.free_cells == LAYERS * HEADS
    assert pool.check() == []


def test_freeing_twice_is_caught() -> None:
    pool = make_pool()
    with pytest.raises(RuntimeError, match="freed twice"):
        pool._push(ids(1).to(torch.int32))


def test_zero_tokens() -> None:
    pool = make_pool()
    none = torch.empty(0, dtype=torch.int64)
    pool.pop(none)
    assert pool.release(none) == pool.settle(none) == pool.settle_compact(none) == 0
    assert pool.kept(none).shape == (0, LAYERS, HEADS)
    assert pool.check() == []


def test_padding_slot_maps_to_the_sink() -> None:
    pool = make_pool()
    assert (pool.table[:, 0] == 0).all()
    assert int(pool._stack.min()) == 1


@pytest.mark.parametrize("fault", ["lost", "shared", "stale"])
def test_planted_faults_are_caught(fault: str) -> None:
    pool = make_pool()
    pool.pop(ids(1, 2, 3))
    if fault == "lost":
        pool.table[0, 1, 0] = NONE
    elif fault == "shared":
        pool.table[0, 1, 0] = pool.table[0, 2, 0]
    else:  # the cell went back, the entry stayed
        pool._push(pool.table[0, 1, :1] & CELL_MASK)
    assert pool.check()


def test_too_many_cells_are_refused() -> None:
    layout = CellLayout(64, 64, 1, 1, 1, CONDEMNED // 4096, 1)
    with pytest.raises(ValueError, match="--max-total-tokens"):
        CellPool(layout, torch.uint8, "meta")


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("prcsm"), st.integers(1, 12), st.randoms(use_true_random=False)), max_size=30)
)
def test_random_interleavings(steps: list[tuple[str, int, object]]) -> None:
    """Against a model that holds, per slot, the set of cells it must own."""
    pool = make_pool()
    owned: dict[int, np.ndarray] = {}  # slot -> bool [layers, heads] in memory
    condemned: dict[int, np.ndarray] = {}
    for action, count, rng in steps:
        empty = [s for s in range(1, VIRTUAL + 1) if s not in owned]
        live = sorted(owned)
        if action == "p":
            slots = rng.sample(empty, count)  # type: ignore[attr-defined]
            if pool.free_cells < count * LAYERS * HEADS:
                continue
            pool.pop(ids(*slots))
            for slot in slots:
                owned[slot] = np.ones((LAYERS, HEADS), bool)
                condemned[slot] = np.zeros((LAYERS, HEADS), bool)
            continue
        slots = rng.sample(live, min(count, len(live)))  # type: ignore[attr-defined]
        if action == "r":
            assert pool.release(ids(*slots)) == sum(int(owned.pop(s).sum()) for s in slots)
        elif action in "sm":
            gone = [owned[s] & condemned[s] for s in slots]
            settle = pool.settle if action == "s" else pool.settle_compact
            assert settle(ids(*slots)) == sum(int(g.sum()) for g in gone)
            for slot, g in zip(slots, gone, strict=True):
                owned[slot] &= ~g
        elif slots:
            layer = rng.randrange(LAYERS)  # type: ignore[attr-defined]
            fresh = [s for s in slots if owned[s][layer].all()]
            marks = np.array([[rng.random() < 0.6 for _ in range(HEADS)] for _ in fresh], bool).reshape(-1, HEADS)  # type: ignore[attr-defined]
            pool.condemn(layer, ids(*fresh), torch.from_numpy(marks))
            for slot, mark in zip(fresh, marks, strict=True):
                condemned[slot][layer] |= mark
        assert pool.check() == []
        assert pool.free_cells == pool.layout.cells_total - sum(int(o.sum()) for o in owned.values())
    for slot, cells in owned.items():
        entries = pool.table[:, slot, :]
        assert ((entries >= 0).numpy() == cells).all()
        assert (((entries >= 0) & (entries >= CONDEMNED)).numpy() == (cells & condemned[slot])).all()


@pytest.mark.parametrize("headroom", [1.0, 1.1, 2.0, 3.3, 4.0, 7.77])
@pytest.mark.parametrize("physical", [1, 7, 4096, 99991, 1234567])
def test_slot_count_carries_the_physical_room(headroom: float, physical: int) -> None:
    assert physical_tokens(virtual_tokens(physical, headroom), headroom) == physical
