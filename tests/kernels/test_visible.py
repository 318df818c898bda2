"""From cell tables to ragged lists of visible cells, and the writes through the table."""

from __future__ import annotations

import pytest
import torch

from kvzap_sglang.kernels import reference
from kvzap_sglang.kernels.cpu import native
from kvzap_sglang.kernels.encoding import CONDEMNED, NONE, VisibleCells

from . import oracle

BOTH = pytest.mark.parametrize("kernels", [native, reference], ids=["native", "reference"])


def random_table(slots: int, heads: int, rng: torch.Generator) -> torch.Tensor:
    """Distinct cells; a third are holes, and half of the others condemned."""
    table = torch.randperm(slots * heads, generator=rng).to(torch.int32).view(slots, heads)
    condemned = torch.rand(slots, heads, generator=rng) < 0.5
    table = torch.where(condemned, table | CONDEMNED, table)
    return torch.where(torch.rand(slots, heads, generator=rng) < 1 / 3, NONE, table).to(torch.int32).contiguous()


def compare(got: VisibleCells, lists: list[list[tuple[int, int, bool]]]) -> None:
    assert got.indptr.dtype == torch.int64 and got.cells.dtype == torch.int32
    assert got.indptr.tolist() == [0, *torch.tensor([len(x) for x in lists]).cumsum(0).tolist()]
    flat = [entry for entries in lists for entry in entries]
    assert got.cells.tolist() == [cell for cell, _, _ in flat]
    if got.positions is not None and got.condemned is not None:
        assert got.positions.dtype == torch.int32 and got.condemned.dtype == torch.uint8
        assert got.positions.tolist() == [position for _, position, _ in flat]
        assert got.condemned.tolist() == [int(condemned) for _, _, condemned in flat]


@BOTH
@pytest.mark.parametrize("detail", [False, True])
@pytest.mark.parametrize("heads", [1, 2, 3, 4, 5, 7, 8, 9, 16, 19])
def test_visible_cells(kernels, heads: int, detail: bool, rng: torch.Generator) -> None:
    lengths = [0, 1, 63, 64, 65, 511, 512, 513, 0, 2047, 2048, 2049, 4097, 0]
    table = random_table(5000, heads, rng)
    slots = [torch.randperm(5000, generator=rng)[:n] for n in lengths]
    dense_from = [int(torch.randint(-10, n + 10, (), generator=rng)) for n in lengths]
    indptr = torch.tensor([0, *lengths]).cumsum(0)
    got = kernels.visible_cells(table, torch.cat(slots), indptr, torch.tensor(dense_from), detail=detail)
    assert (got.positions is None) == (not detail)
    compare(got, oracle.visible_lists(table, [s.tolist() for s in slots], dense_from))


@BOTH
def test_window_edge_and_extreme_entries(kernels) -> None:
    largest = CONDEMNED - 1
    table = torch.tensor([[0], [CONDEMNED], [NONE], [largest], [largest | CONDEMNED], [5 | CONDEMNED]]).int()
    slots = torch.arange(6)
    for dense_from, expected in (
        (-5, [0, 0, largest, largest, 5]),
        (4, [0, largest, largest, 5]),
        (5, [0, largest, 5]),
    ):
        got = kernels.visible_cells(table, slots, torch.tensor([0, 6]), torch.tensor([dense_from]))
        assert got.cells.tolist() == expected
    assert kernels.visible_cells(table, slots, torch.tensor([0, 6]), torch.tensor([6])).cells.tolist() == [0, largest]


@BOTH
def test_no_request_and_no_token(kernels) -> None:
    table = torch.zeros(4, 3, dtype=torch.int32)
    empty = torch.empty(0, dtype=torch.int64)
    got = kernels.visible_cells(table, empty, torch.tensor([0]), empty)
    assert got.indptr.tolist() == [0] and got.cells.numel() == 0
    got = kernels.visible_cells(table, empty, torch.tensor([0, 0, 0]), torch.tensor([0, 0]), detail=True)
    assert got.indptr.tolist() == [0] * 7 and got.positions.numel() == 0


@BOTH
@pytest.mark.parametrize("slot", [-1, 10, 1 << 40])
def test_slot_outside_the_table_is_named(kernels, slot: int) -> None:
    table = torch.zeros(10, 3, dtype=torch.int32)
    slots = torch.arange(9000) % 10
    slots[[4500, 8000]] = torch.tensor([slot, 77])
    with pytest.raises(IndexError, match=f"token slot {slot} is outside"):
        kernels.visible_cells(table, slots, torch.tensor([0, 9000]), torch.tensor([0]))
    rows = torch.zeros(9000, 3, 16)
    pool = torch.zeros(30, 16)
    with pytest.raises(IndexError, match=f"token slot {slot} is outside"):
        kernels.write_cells(table, slots, rows, rows, pool, pool.clone())


@pytest.mark.parametrize("threads", [1, 2])
def test_threads_agree(threads: int, rng: torch.Generator, set_threads) -> None:
    table = random_table(9000, 3, rng)
    slots = torch.randperm(9000, generator=rng)
    arguments = (table, slots, torch.tensor([0, 100, 9000]), torch.tensor([50, 4000]))
    expected = reference.visible_cells(*arguments, detail=True)
    set_threads(threads)
    got = native.visible_cells(*arguments, detail=True)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_wrong_arguments_are_refused() -> None:
    table, slots = torch.zeros(10, 4, dtype=torch.int32), torch.arange(10)
    indptr, start = torch.tensor([0, 10]), torch.tensor([0])
    with pytest.raises(ValueError, match="table must be a contiguous"):
        native.visible_cells(table[:, ::2], slots, indptr, start)
    with pytest.raises(ValueError, match=r"slots must be a contiguous torch\.int64"):
        native.visible_cells(table, slots.int(), indptr, start)
    with pytest.raises(ValueError, match="does not cut 10 slots"):
        native.visible_cells(table, slots, torch.tensor([0, 11]), start)
    with pytest.raises(ValueError, match="does not cut 10 slots for 2 requests"):
        native.visible_cells(table, slots, indptr, torch.tensor([0, 0]))


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [0, 1, 65, 300])
def test_write_cells(kernels, dtype: torch.dtype, tokens: int, rng: torch.Generator) -> None:
    table = torch.randperm(1200, generator=rng).to(torch.int32).view(400, 3)
    table = torch.where(torch.rand(400, 3, generator=rng) < 0.5, table | CONDEMNED, table)
    slots = torch.randperm(400, generator=rng)[:tokens]
    qkv = torch.randn(tokens, 5, 3, 32, generator=rng)  # k and v are views with foreign strides, as after a split
    k, v = qkv[:, 1], qkv[:, 3]
    pools = torch.full((2, 1200, 2, 32), float("nan"), dtype=dtype)
    k_pool, v_pool = pools[0, :, 0], pools[1, :, 1]
    kernels.write_cells(table, slots, k, v, k_pool, v_pool)
    expected = torch.full_like(pools, float("nan"))
    for t, slot in enumerate(slots.tolist()):
        for h in range(3):
            cell = int(table[slot, h]) % CONDEMNED
            expected[0, cell, 0], expected[1, cell, 1] = k[t, h].to(dtype), v[t, h].to(dtype)
    assert torch.equal(pools.nan_to_num(nan=1e9), expected.nan_to_num(nan=1e9))


@BOTH
@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (NONE, "token slot 7 has no cell for KV head 1"),
        (50, "token slot 7, KV head 1: cell 50 is outside the pool of 50"),
    ],
)
def test_write_without_a_cell_writes_nothing(kernels, entry: int, message: str, rng: torch.Generator) -> None:
    table = torch.arange(20, dtype=torch.int32).view(10, 2)
    table[7, 1] = entry
    rows = torch.randn(10, 2, 16, generator=rng)
    k_pool, v_pool = torch.zeros(50, 16), torch.zeros(50, 16)
    with pytest.raises(RuntimeError, match=message):
        kernels.write_cells(table, torch.arange(10), rows, rows, k_pool, v_pool)
    assert not k_pool.any() and not v_pool.any()


def test_write_of_wrong_shapes_is_refused() -> None:
    table, slots, pool = torch.zeros(4, 2, dtype=torch.int32), torch.arange(3), torch.zeros(8, 16)
    rows = torch.zeros(3, 2, 16)
    with pytest.raises(ValueError, match=r"must be \(3, 2, 16\)"):
        native.write_cells(table, slots, rows[:, :, :8], rows, pool, pool)
    with pytest.raises(ValueError, match="pools differ"):
        native.write_cells(table, slots, rows, rows, pool, pool[:4])
    with pytest.raises(TypeError, match="float32 or bfloat16"):
        native.write_cells(table, slots, rows, rows, pool.half(), pool.half())
