"""Products of index and stride beyond 2^31: pools and tables of which only the touched pages take memory."""

from __future__ import annotations

import mmap
from typing import Any

import pytest
import torch

from kvzap_sglang.kernels import reference
from kvzap_sglang.kernels.cpu import extend_dense, native
from kvzap_sglang.kernels.encoding import CONDEMNED, NONE, VisibleCells
from kvzap_sglang.memory.cell_pool import CellPool
from kvzap_sglang.memory.layout import CellLayout

BOTH = pytest.mark.parametrize("kernels", [native, reference], ids=["native", "reference"])
PAST = 1 << 31


def sparse(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros that take no memory until they are written to, however many they are."""
    size = torch.Size(shape).numel() * dtype.itemsize
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0))
    except OSError as error:
        pytest.skip(f"this machine gives no {size >> 30} GiB of address space: {error}")
    return torch.frombuffer(memory, dtype=dtype).view(shape)


@BOTH
def test_writes_and_reads_far_into_a_pool(kernels: Any) -> None:
    """Rows around element 2^31 and at the end, each written through the table and attended to."""
    dim = 256
    rows = PAST // dim + 64
    k_pool, v_pool = sparse((rows, dim), torch.bfloat16), sparse((rows, dim), torch.bfloat16)
    cells = [1, PAST // dim - 1, PAST // dim, PAST // dim + 1, rows - 1]
    table = torch.tensor(cells, dtype=torch.int32)[:, None].contiguous()
    slots = torch.arange(len(cells))
    values = (torch.arange(len(cells), dtype=torch.bfloat16) + 1)[:, None, None].expand(-1, 1, dim).contiguous()
    kernels.write_cells(table, slots, values, values, k_pool, v_pool)
    for number, cell in enumerate(cells, 1):
        assert (k_pool[cell] == number).all() and (v_pool[cell] == number).all()
        one = VisibleCells(torch.tensor([0, 1]), torch.tensor([cell], dtype=torch.int32))
        out, _ = kernels.ragged_decode(torch.zeros(1, 1, dim, dtype=torch.bfloat16), k_pool, v_pool, one, 1.0)
        assert (out == number).all()


def test_extend_reads_far_into_a_pool() -> None:
    dim = 256
    rows = PAST // dim + 64
    pool = sparse((rows, dim), torch.bfloat16)
    pool[rows - 2 :] = 3.0
    visible = VisibleCells(torch.tensor([0, 2]), torch.tensor([rows - 2, rows - 1], dtype=torch.int32))
    chunk = torch.zeros(2, 1, dim, dtype=torch.bfloat16)
    out = extend_dense(chunk, chunk, chunk + 3.0, pool, pool, visible, 1.0)
    torch.testing.assert_close(out, torch.full_like(out, 3.0))


@BOTH
def test_lists_from_far_into_a_table(kernels: Any) -> None:
    """Entries around index 2^31 of one layer's table of 128 heads."""
    heads = 128
    slots_total = PAST // heads + 64
    table = sparse((slots_total, heads), torch.int32)
    slots = torch.tensor([3, PAST // heads - 1, PAST // heads, slots_total - 1])
    table[slots] = torch.arange(1, 5, dtype=torch.int32)[:, None]
    table[slots[2]] |= CONDEMNED
    got = kernels.visible_cells(table, slots, torch.tensor([0, 4]), torch.tensor([3]))
    assert got.indptr.tolist() == [3 * head for head in range(heads + 1)]
    assert got.cells.view(heads, 3).unique(dim=0).tolist() == [[1, 2, 4]]


def test_pool_changes_far_into_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pop, condemn, settle, compact, heal and release for slots whose entries lie beyond 2^31 of the whole table."""
    layout = CellLayout(4, 64, 1, 1, 1, 40, PAST // 256 + 2000)
    # The table as the pool makes it, without touching all of its 8 GiB: 0 stands for "none" where nobody looks.
    monkeypatch.setattr(CellPool, "reset", lambda self: None)
    monkeypatch.setattr(torch, "empty", lambda *shape, dtype, device: sparse(shape, dtype))
    pool = CellPool(layout, torch.uint8, "cpu")
    monkeypatch.undo()
    pool._stack.copy_(torch.arange(layout.cells_total, 0, -1, dtype=torch.int32))
    pool._free, pool._sorted = layout.cells_total, True
    slots = torch.tensor([5, layout.virtual_tokens - 1200, layout.virtual_tokens - 1, layout.virtual_tokens])
    pool.table[:, slots] = -1
    pool.pop(slots[:3])
    assert torch.equal(pool.held(slots), torch.tensor([256, 256, 256, 0]))
    pool.condemn(3, slots[:3], torch.ones(3, 64, dtype=torch.bool))
    assert pool.settle(slots[:1]) == 64 and pool.settle_compact(slots[1:3]) == 128
    pool.pop(slots[3:])
    pool.heal(slots[1:2], slots[3:])
    assert (pool.table[3, slots[1]] >= CONDEMNED).all() and (pool.table[3, slots[3]] == NONE).all()
    assert pool.kept(slots)[:3, :3].all() and not pool.kept(slots)[:3, 3].any()
    assert pool.release(slots) == sum([192, 256, 192, 192])
    assert pool.free_cells == layout.cells_total
